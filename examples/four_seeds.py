"""Four seeds at once: `vmap` over a whole RL step, the frozen base shared. Each seed ends where it ends alone.

    python examples/four_seeds.py

Each seed has its own adapter, optimizer state and randomness; the reward counts the equations of an answer, in JAX, so
that the step is one compiled program.
"""

import functools

import jax
import jax.numpy as jnp
import optax

import qerl_jax as qerl

SEEDS, STEPS = 4, 3

model = qerl.load_model("builtin:quickstart", weight_format="nvfp4", dtype=jnp.float32)
tokenizer = qerl.load_tokenizer("builtin:quickstart", model.config.vocab_size)
ends = qerl.load_generation_config("builtin:quickstart")
equals = tokenizer.convert_tokens_to_ids("=")
problems = qerl.load_dataset("arithmetic", split="train")
tokens, lengths = qerl.encode_prompts(tokenizer, [problems[i]["prompt"] for i in range(4)], max_prompt_length=48)
prompts = qerl.Prompts(tokens, lengths, jnp.arange(4))


def equations(prompts: qerl.Prompts, completions: qerl.Rollout) -> jax.Array:
    return jnp.sum(completions.tokens == equals, axis=1).astype(jnp.float32)


optimizer = optax.sgd(0.1)
settings = qerl.StepSettings(
    sampling=qerl.SamplingSettings(40, ends.eos_token_ids, ends.pad_token_id),
    update=qerl.UpdateSettings(num_generations=4, temperature=1.0, micro_batch_size=16),
    noise=qerl.NoiseSchedule(num_stages=2, sigma_start=1e-2, sigma_end=1e-2, total_steps=STEPS),
)
step = functools.partial(qerl.grpo_step, reward_fn=equations, optimizer=optimizer, settings=settings)


def begin(root: jax.Array) -> qerl.TrainState:
    return qerl.init_state(qerl.init_adapter(root, model, lora_r=8, lora_alpha=16), optimizer)


def of(seed: int, states: qerl.TrainState) -> qerl.TrainState:
    return jax.tree.map(lambda leaf: leaf[seed], states)


roots = jax.vmap(jax.random.key)(jnp.arange(SEEDS))
start = four = jax.jit(jax.vmap(begin))(roots)
four_steps = jax.jit(jax.vmap(step, in_axes=(0, None, None, 0)))
for i in range(STEPS):
    four, metrics = four_steps(four, model, prompts, jax.vmap(jax.random.fold_in, (0, None))(roots, i))
    print(f"step {i + 1}  equations by seed {[round(float(r), 2) for r in metrics['reward']]}")

one_step = jax.jit(step)
for seed in range(SEEDS):
    alone = of(seed, start)
    for i in range(STEPS):
        alone, _ = one_step(alone, model, prompts, jax.random.fold_in(roots[seed], i))
    moved, gap = (
        optax.tree.norm(jax.tree.map(jnp.subtract, alone.adapter, other.adapter))
        for other in (of(seed, start), of(seed, four))
    )
    print(f"seed {seed}  the adapter moved by {moved:.1e}; alone and among four it differs by {gap:.1e}")
