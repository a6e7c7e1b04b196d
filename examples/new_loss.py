"""A loss of one's own: the function below replaces the configured loss, everything else stays.

    python examples/new_loss.py

A loss sees the whole optimizer batch, [B, C] arrays, however many micro-batches the network runs in. This one learns
from the winners of each group alone. The reward, in JAX, counts the equations of an answer, so working answers out
becomes the habit.
"""

import functools

import jax
import jax.numpy as jnp
import optax

import qerl_jax as qerl


def winners_only(logp, old_logp, ref_logp, advantages, mask):
    """Raises the probability of completions that beat their group's mean, clipped as in PPO, and leaves the others be.

    All arguments are [B, C], or broadcast to it: log-probabilities under the policy as it is, as it was at the rollout,
    and under the base (None here: `grpo_step(reference=True)` gives it). Returns the loss and metrics, all scalars.
    """
    kept = mask & (advantages > 0)
    ratio = jnp.exp(jnp.where(kept, logp - old_logp, 0.0))
    gain = jnp.minimum(ratio, 1.2) * advantages
    loss = -jnp.sum(jnp.where(kept, gain, 0.0)) / jnp.maximum(kept.sum(), 1)
    return loss, {"winners": kept.sum() / mask.sum()}


model = qerl.load_model("builtin:quickstart", weight_format="nvfp4", dtype=jnp.float32)
tokenizer = qerl.load_tokenizer("builtin:quickstart", model.config.vocab_size)
ends = qerl.load_generation_config("builtin:quickstart")
equals = tokenizer.convert_tokens_to_ids("=")
problems = qerl.load_dataset("arithmetic", split="train")
tokens, lengths = qerl.encode_prompts(tokenizer, [problems[i]["prompt"] for i in range(8)], max_prompt_length=48)
prompts = qerl.Prompts(tokens, lengths, jnp.arange(8))


def equations(prompts: qerl.Prompts, completions: qerl.Rollout) -> jax.Array:
    return jnp.sum(completions.tokens == equals, axis=1).astype(jnp.float32)


optimizer = optax.adam(3e-3)
settings = qerl.StepSettings(
    sampling=qerl.SamplingSettings(48, ends.eos_token_ids, ends.pad_token_id),
    update=qerl.UpdateSettings(num_generations=4, temperature=1.0, micro_batch_size=8),
)
step = functools.partial(
    qerl.grpo_step, reward_fn=equations, optimizer=optimizer, settings=settings, loss_fn=winners_only
)
step = jax.jit(step, donate_argnums=0)
state = qerl.init_state(qerl.init_adapter(jax.random.key(0), model, lora_r=8, lora_alpha=16), optimizer)
for i in range(8):
    state, metrics = step(state, model, prompts, jax.random.key(i))
    print(f"step {i + 1}  equations {metrics['reward']:.2f}  share of winners' tokens {metrics['winners']:.0%}")
