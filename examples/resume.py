"""Resuming from an orbax checkpoint in a script: stop after 3 steps, start again, end where an unbroken run ends.

    python examples/resume.py FOLDER
"""

import functools
import sys

import jax
import jax.numpy as jnp
import optax

import qerl_jax as qerl
from qerl_jax.data.dataset import load_dataset
from qerl_jax.data.prompts import encode_prompts

folder = sys.argv[1]
model = qerl.load_model("builtin:quickstart", weight_format="nvfp4", dtype=jnp.float32)
tokenizer = qerl.load_tokenizer("builtin:quickstart", model.config.vocab_size)
ends = qerl.load_generation_config("builtin:quickstart")
problems = load_dataset("arithmetic", split="train")
tokens, lengths = encode_prompts(tokenizer, [problems[i]["prompt"] for i in range(4)], max_prompt_length=48)
prompts = qerl.Prompts(jnp.asarray(tokens), jnp.asarray(lengths), jnp.arange(4))
optimizer = optax.adam(3e-3)
settings = qerl.StepSettings(
    sampling=qerl.SamplingSettings(24, ends.eos_token_ids, ends.pad_token_id),
    update=qerl.UpdateSettings(num_generations=4, temperature=1.0, micro_batch_size=16),
)
step = jax.jit(
    functools.partial(
        qerl.grpo_step,
        reward_fn=lambda prompts, completions: -completions.lengths.astype(jnp.float32),
        optimizer=optimizer,
        settings=settings,
    ),
    donate_argnums=0,
)


def fresh() -> qerl.TrainState:
    return qerl.init_state(qerl.init_adapter(jax.random.key(0), model, lora_r=8, lora_alpha=16), optimizer)


def train(until: int) -> qerl.TrainState:
    """Goes on from the newest undamaged checkpoint in the folder, or from the start."""
    found = qerl.restore_checkpoint(folder, fresh())
    state = fresh() if found is None else found[0]
    while int(state.step) < until:
        state, _ = step(state, model, prompts, jax.random.fold_in(jax.random.key(1), state.step))
    qerl.save_checkpoint(folder, int(state.step), state, progress={})
    return state


train(until=3)
resumed = train(until=6)
unbroken = fresh()
for i in range(6):
    unbroken, _ = step(unbroken, model, prompts, jax.random.fold_in(jax.random.key(1), i))
same = all(bool(jnp.array_equal(a, b)) for a, b in zip(*map(jax.tree.leaves, (resumed, unbroken)), strict=True))
print(f"step {int(resumed.step)}, bitwise the same as an unbroken run: {same}")
