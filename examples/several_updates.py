"""Several optimizer updates of one rollout: its completions in minibatches, several times over, in plain sight.

    python examples/several_updates.py

From the second update on the policy is no longer the one that sampled, and the loss is of the ratio between the two.
`with_policies` records the sampling policy's log-probabilities before the first; without them `update_step` refuses.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import qerl_jax as qerl

PROMPTS, GROUP, EPOCHS, MINIBATCHES = 8, 8, 2, 2

model = qerl.load_model("builtin:quickstart", weight_format="nvfp4", dtype=jnp.float32)
tokenizer = qerl.load_tokenizer("builtin:quickstart", model.config.vocab_size)
ends = qerl.load_generation_config("builtin:quickstart")
equals = tokenizer.convert_tokens_to_ids("=")
problems = qerl.load_dataset("arithmetic", split="train")

optimizer = optax.adam(3e-3)
settings = qerl.StepSettings(
    sampling=qerl.SamplingSettings(48, ends.eos_token_ids, ends.pad_token_id),
    update=qerl.UpdateSettings(num_generations=GROUP, temperature=1.0, micro_batch_size=16),
)
sample = jax.jit(functools.partial(qerl.sample_rollout, settings=settings))
recorded = jax.jit(functools.partial(qerl.with_policies, settings=settings.update, several_updates=True))
update = jax.jit(functools.partial(qerl.update_step, optimizer=optimizer, settings=settings.update), donate_argnums=0)
state = qerl.init_state(qerl.init_adapter(jax.random.key(0), model, lora_r=8, lora_alpha=16), optimizer)


def minibatch(batch: qerl.Batch, number: int) -> qerl.Batch:
    """Whole groups, for they lie one behind the other; rollout_step, the one scalar, is every minibatch's."""
    rows = PROMPTS * GROUP // MINIBATCHES
    return jax.tree.map(lambda leaf: leaf[number * rows : (number + 1) * rows] if leaf.ndim else leaf, batch)


for rollout in range(3):
    places = np.arange(PROMPTS * rollout, PROMPTS * (rollout + 1))
    tokens, lengths = qerl.encode_prompts(tokenizer, [problems[i]["prompt"] for i in places], max_prompt_length=48)
    prompts = qerl.Prompts(tokens, lengths, places)
    completions, _ = sample(model, state.adapter, prompts, jax.random.key(rollout), state.step)
    rewards = jnp.sum(completions.tokens == equals, axis=1)
    batch = qerl.make_batch(prompts, completions, rewards, state.step, settings)
    batch = recorded(model, state.adapter, batch)
    for i in range(EPOCHS * MINIBATCHES):
        state, metrics = update(state, model, minibatch(batch, i % MINIBATCHES))
        clipped, refused = metrics["clip_ratio/region_mean"], int(metrics["nonfinite"])
        print(f"step {state.step:2}  equations {rewards.mean():.2f}  clipped {clipped:.1%}  refused {refused}")
