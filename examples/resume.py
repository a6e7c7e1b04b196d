"""Resuming from an orbax checkpoint in a script: three steps, then a new start from what is on disk and three more. The
same six steps without a break end bitwise the same, optimizer state included.

    python examples/resume.py
"""

import functools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import qerl_jax as qerl

model = qerl.load_model("builtin:quickstart", weight_format="nvfp4", dtype=jnp.float32)
tokenizer = qerl.load_tokenizer("builtin:quickstart", model.config.vocab_size)
ends = qerl.load_generation_config("builtin:quickstart")
equals = tokenizer.convert_tokens_to_ids("=")
problems = qerl.load_dataset("arithmetic", split="train")


def equations(prompts: qerl.Prompts, completions: qerl.Rollout) -> jax.Array:
    return jnp.sum(completions.tokens == equals, axis=1).astype(jnp.float32)


optimizer = optax.adam(3e-3)
settings = qerl.StepSettings(
    sampling=qerl.SamplingSettings(24, ends.eos_token_ids, ends.pad_token_id),
    update=qerl.UpdateSettings(num_generations=4, temperature=1.0, micro_batch_size=16),
    noise=qerl.NoiseSchedule(num_stages=3, sigma_start=1e-2, sigma_end=5e-4, total_steps=6),
)
rl_step = functools.partial(qerl.grpo_step, reward_fn=equations, optimizer=optimizer, settings=settings)
rl_step = jax.jit(rl_step, donate_argnums=0)


def fresh() -> qerl.TrainState:
    return qerl.init_state(qerl.init_adapter(jax.random.key(0), model, lora_r=8, lora_alpha=16), optimizer)


def train(folder: str, until: int) -> qerl.TrainState:
    """Goes on from the newest undamaged checkpoint in the folder, or from the start."""
    state, progress, _ = qerl.restore_checkpoint(folder, fresh()) or (fresh(), {"cursor": 0}, 0)
    print(f"from step {state.step} to {until}")
    for step in range(int(state.step), until):
        places = np.arange(progress["cursor"], progress["cursor"] + 4)
        tokens, lengths = qerl.encode_prompts(tokenizer, [problems[i]["prompt"] for i in places], max_prompt_length=48)
        state, _ = rl_step(state, model, qerl.Prompts(tokens, lengths, places), jax.random.key(step))
        progress["cursor"] += 4
    qerl.save_checkpoint(folder, until, state, progress)
    return state


with tempfile.TemporaryDirectory() as folder:
    train(f"{folder}/stopped", until=3)
    resumed = train(f"{folder}/stopped", until=6)
    unbroken = train(f"{folder}/unbroken", until=6)
same = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(unbroken), strict=True))
print(f"bitwise the same as the unbroken run: {same}")
