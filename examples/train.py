import functools

import jax
import jax.numpy as jnp
import numpy as np

import qerl_jax as qerl

path, steps = "builtin:quickstart", 12
model = qerl.load_model(path, weight_format="nvfp4", dtype=jnp.float32)
tokenizer = qerl.load_tokenizer(path, model.config.vocab_size)
ends = qerl.load_generation_config(path)
problems = qerl.load_dataset("arithmetic", split="train")
optimizer = qerl.make_optimizer(qerl.OptimizerSpec(learning_rate=3e-3, total_steps=steps, max_grad_norm=1.0))
settings = qerl.StepSettings(
    sampling=qerl.SamplingSettings(48, ends.eos_token_ids, ends.pad_token_id),
    update=qerl.UpdateSettings(num_generations=8, temperature=1.0, micro_batch_size=64),
    noise=qerl.NoiseSchedule(num_stages=4, sigma_start=1e-2, sigma_end=5e-4, total_steps=steps),
)
sample = jax.jit(functools.partial(qerl.sample_rollout, settings=settings))
update = jax.jit(functools.partial(qerl.update_step, optimizer=optimizer, settings=settings.update), donate_argnums=0)
state = qerl.init_state(qerl.init_adapter(jax.random.key(0), model, lora_r=16, lora_alpha=32), optimizer)

for step in range(steps):
    rows = [problems[i] for i in range(8 * step, 8 * step + 8)]
    tokens, lengths = qerl.encode_prompts(tokenizer, [row["prompt"] for row in rows], max_prompt_length=48)
    prompts = qerl.Prompts(tokens, lengths, np.arange(8 * step, 8 * step + 8))
    completions, sigma = sample(model, state.adapter, prompts, jax.random.key(step), step)
    texts = tokenizer.batch_decode(np.asarray(completions.tokens), skip_special_tokens=True)
    rewards = [float(text.endswith(f"#### {rows[i // 8]['answer']}")) for i, text in enumerate(texts)]
    batch = qerl.make_batch(prompts, completions, rewards, state.step, settings)
    state, metrics = update(state, model, batch)
    print(f"step {step + 1:2}  reward {np.mean(rewards):.2f}  entropy {metrics['entropy']:.3f}  sigma {sigma:.1e}")
