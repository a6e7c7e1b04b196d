"""A loss of one's own: the function below replaces the configured loss, everything else stays.

    python examples/new_loss.py

A loss sees the whole optimizer batch, [B, C] arrays, however many micro-batches the network runs in. This one is a
soft-clipped policy gradient: the ratio is squashed by a sigmoid around 1 instead of being cut (in the manner of SAPO).
"""

import functools

import jax
import jax.numpy as jnp
import optax

import qerl_jax as qerl
from qerl_jax.data.dataset import load_dataset
from qerl_jax.data.prompts import encode_prompts


def soft_clipped(logp, old_logp, ref_logp, advantages, mask, steepness=4.0):
    ratio = jnp.exp(jnp.where(mask, logp - old_logp, 0.0))
    gate = jax.nn.sigmoid(steepness * (ratio - 1.0)) * 4.0 / steepness
    loss = -jnp.sum(jnp.where(mask, gate * advantages, 0.0)) / jnp.maximum(mask.sum(), 1)
    return loss, {"gate/mean": jnp.sum(jnp.where(mask, gate, 0.0)) / jnp.maximum(mask.sum(), 1)}


model = qerl.load_model("builtin:quickstart", weight_format="nvfp4", dtype=jnp.float32)
tokenizer = qerl.load_tokenizer("builtin:quickstart", model.config.vocab_size)
ends = qerl.load_generation_config("builtin:quickstart")
problems = load_dataset("arithmetic", split="train")
tokens, lengths = encode_prompts(tokenizer, [problems[i]["prompt"] for i in range(8)], max_prompt_length=48)
prompts = qerl.Prompts(jnp.asarray(tokens), jnp.asarray(lengths), jnp.arange(8))
optimizer = optax.adam(3e-3)
settings = qerl.StepSettings(
    sampling=qerl.SamplingSettings(32, ends.eos_token_ids, ends.pad_token_id),
    update=qerl.UpdateSettings(num_generations=4, temperature=1.0, micro_batch_size=8),
)
step = jax.jit(
    functools.partial(
        qerl.grpo_step,
        reward_fn=lambda prompts, completions: -completions.lengths.astype(jnp.float32),
        optimizer=optimizer,
        settings=settings,
        loss_fn=soft_clipped,
    ),
    donate_argnums=0,
)
state = qerl.init_state(qerl.init_adapter(jax.random.key(0), model, lora_r=8, lora_alpha=16), optimizer)
for i in range(8):
    state, metrics = step(state, model, prompts, jax.random.key(i))
    print(f"step {i + 1}  mean length {-float(metrics['reward']):.1f}  gate {float(metrics['gate/mean']):.3f}")
