"""Four seeds at once: `vmap` over a whole RL step, the frozen base shared.

    python examples/four_seeds.py

Each seed has its own adapter, optimizer state and randomness; the reward asks for short answers, in JAX, so that the
step is one compiled program.
"""

import functools

import jax
import jax.numpy as jnp
import optax

import qerl_jax as qerl
from qerl_jax.data.dataset import load_dataset
from qerl_jax.data.prompts import encode_prompts

SEEDS, STEPS = 4, 8

model = qerl.load_model("builtin:quickstart", weight_format="nvfp4", dtype=jnp.float32)
tokenizer = qerl.load_tokenizer("builtin:quickstart", model.config.vocab_size)
ends = qerl.load_generation_config("builtin:quickstart")
problems = load_dataset("arithmetic", split="train")
tokens, lengths = encode_prompts(tokenizer, [problems[i]["prompt"] for i in range(8)], max_prompt_length=48)
prompts = qerl.Prompts(jnp.asarray(tokens), jnp.asarray(lengths), jnp.arange(8))


def brevity(prompts: qerl.Prompts, completions: qerl.Rollout) -> jax.Array:
    return -completions.lengths.astype(jnp.float32)


optimizer = optax.adam(3e-3)
settings = qerl.StepSettings(
    sampling=qerl.SamplingSettings(32, ends.eos_token_ids, ends.pad_token_id),
    update=qerl.UpdateSettings(num_generations=4, temperature=1.0, micro_batch_size=32),
    noise=qerl.NoiseSchedule(num_stages=2, sigma_start=1e-2, sigma_end=1e-2, total_steps=STEPS),
)
step = functools.partial(qerl.grpo_step, reward_fn=brevity, optimizer=optimizer, settings=settings)
many_steps = jax.jit(jax.vmap(step, in_axes=(0, None, None, 0)), donate_argnums=0)


def one_state(key: jax.Array) -> qerl.TrainState:
    return qerl.init_state(qerl.init_adapter(key, model, lora_r=8, lora_alpha=16), optimizer)


roots = jax.vmap(jax.random.key)(jnp.arange(SEEDS))
states = jax.vmap(one_state)(roots)
for i in range(STEPS):
    states, metrics = many_steps(states, model, prompts, jax.vmap(jax.random.fold_in, (0, None))(roots, i))
    print(f"step {i + 1}  mean length by seed", [round(-float(r), 1) for r in metrics["reward"]])
