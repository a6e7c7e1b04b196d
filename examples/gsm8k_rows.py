"""GSM8K's own files as rows for `qerl train gsm8k-7b`: a system prompt that asks for the form which `accuracy` reads.

    python examples/gsm8k_rows.py train.jsonl gsm8k_train.jsonl
    python examples/gsm8k_rows.py test.jsonl gsm8k_test.jsonl

train.jsonl and test.jsonl have a `question` and an `answer` that ends in `#### 72`, as in OpenAI's repository
grade-school-math; with the package datasets `load_dataset("openai/gsm8k", "main")["train"].to_json("train.jsonl")`
writes the hub's.
"""

import argparse
import json
import re
from pathlib import Path

SYSTEM = "Solve the problem step by step. End with a line of its own: #### and then the answer as a plain number."

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source", type=Path)
parser.add_argument("target", type=Path)
arguments = parser.parse_args()
source, target, rows = arguments.source, arguments.target, []
if target.exists() and source.exists() and target.samefile(source):
    parser.exit(2, f"{target} is the file that is read; choose another name\n")
try:
    for number, line in enumerate(source.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            parser.exit(2, f"{source}, line {number}: not JSON: {error}\n")
        match found:
            case {"question": str(question), "answer": str(answer)}:
                if not re.search(r"####.*\d", answer):
                    expected = "expected an answer that ends in such as `#### 72`"
                    parser.exit(2, f"{source}, line {number}: {expected}, found {answer[-60:]!r}\n")
                messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
                rows.append(json.dumps({"prompt": messages, "answer": answer}) + "\n")
            case _:
                parser.exit(2, f"{source}, line {number}: expected an object with the texts `question` and `answer`\n")
    if not rows:
        parser.exit(2, f"{source}: has no rows; expected one object with the texts `question` and `answer` a line\n")
    target.write_text("".join(rows), encoding="utf-8")
except OSError as error:
    parser.exit(2, f"{error.filename or target}: {error.strerror}\n")
print(f"{target}: {len(rows)} problems")
