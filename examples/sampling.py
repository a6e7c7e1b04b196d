"""Sampling in a script: two answers to each of four problems, printed as they are done, with log-probabilities, by the
shipped policy or with a run's adapter.

    python examples/sampling.py [runs/quickstart/adapter]
"""

import sys

import jax
import jax.numpy as jnp

import qerl_jax as qerl

path, most = "builtin:quickstart", 48  # tokens of a prompt, and of a completion
model = qerl.load_model(path, weight_format="nvfp4", dtype=jnp.float32)
tokenizer = qerl.load_tokenizer(path, model.config.vocab_size)
ends = qerl.load_generation_config(path)
adapter = qerl.load_adapter(sys.argv[1], model) if len(sys.argv) > 1 else None  # None: the base alone

problems = qerl.load_dataset("arithmetic", split="train")
tokens, lengths = qerl.encode_prompts(tokenizer, [problems[i]["prompt"] for i in range(4)], max_prompt_length=most)
requests = [qerl.Request(row[:length].tolist(), n=2) for row, length in zip(tokens, lengths, strict=True)]

engine = qerl.Engine(model, qerl.SamplingSettings(most, ends.eos_token_ids, ends.pad_token_id), max_prompt_length=most)
for done in engine.generate(adapter, requests, jax.random.key(0)):
    text = tokenizer.decode(done.ids, skip_special_tokens=True)
    print(f"problem {done.request}, sample {done.sample}, {done.finish_reason}, logp {sum(done.logps):.2f}: {text!r}")
