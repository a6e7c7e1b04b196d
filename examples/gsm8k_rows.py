"""GSM8K's own files as rows for `qerl train gsm8k-7b`: a system prompt that asks for the form which `accuracy` reads.

    python examples/gsm8k_rows.py train.jsonl gsm8k_train.jsonl
    python examples/gsm8k_rows.py test.jsonl gsm8k_test.jsonl

train.jsonl and test.jsonl have a `question` and an `answer` that ends in `#### 72`, as in OpenAI's repository
grade-school-math; `datasets.load_dataset("openai/gsm8k", "main")["train"].to_json("train.jsonl")` writes the hub's.
"""

import json
import sys
from pathlib import Path

SYSTEM = "Solve the problem step by step. End with a line of its own: #### and then the answer as a plain number."

if len(sys.argv) != 3:
    sys.exit(__doc__)
source, target = map(Path, sys.argv[1:])
rows = [json.loads(line) for line in source.read_text("utf-8").split("\n") if line]
with target.open("w", encoding="utf-8") as file:
    for row in rows:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
        file.write(json.dumps({"prompt": messages, "answer": row["answer"]}) + "\n")
print(f"{target}: {len(rows)} problems")
