"""GRPO losses of TRL's own GRPOTrainer._compute_loss on a CPU: ratios of tokens and of sequences, cispo, delta, and
tokens of high entropy alone.

Run where trl 1.16.0 and torch 2.13.0 are installed:
    python tests/oracles/grpo_loss_levels.py -> grpo_loss_levels_trl1.16.0.npz beside this file

The log-probabilities and entropies are handed to TRL in the place of a network's. Saved, B = 12 rows and C = 9 slots:
new, old, ref [B, C] log-probabilities; mask [B, C]; advantages [B]; weights [B, C], a sampler correction; entropies
[B, C], with ties; epsilon, epsilon_high, epsilon_high_cispo, delta and top_entropy_quantile; for each of quantiles [Q],
chosen [Q, B, C], the tokens of TRL's get_high_entropy_mask; and in the order of `variants`, with NaN for metrics that
TRL does not log for one,
    loss [V]; dlogps [V, B, C], d loss / d new; metrics [V, M], named by `metric_names`
A variant is LOSS_TYPE/LEVEL/BETA/POLICY/EXTRA. POLICY `on` has no old log-probabilities, so TRL takes the new ones;
EXTRA is `delta`, `weights` (TRL's correction of vLLM's log-probabilities), `top` (with top_entropy_quantile) or
`plain`. use_bias_correction_kl is false: with TRL's default of true the KL penalty is multiplied by the ratio, which
this library's is not.
"""

import itertools
import os
import tempfile
from pathlib import Path

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

import numpy as np
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

B, C, G = 12, 9, 4
EPSILON, EPSILON_HIGH, EPSILON_HIGH_CISPO, DELTA = 0.2, 0.28, 5.0, 2.5
TOP, QUANTILES = 0.2, [1e-9, 0.01, 0.05, 0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 0.8, 0.9, 0.99, 0.9999]
LENGTHS = [9, 4, 7, 1, 9, 6, 0, 8, 3, 9, 5, 2]  # 0: a truncated completion that is masked
ADVANTAGES = [1.2, -0.8, 0.5, -0.9, -1.1, 0.7, 1.4, -1.0, 0.9, -0.6, 0.4, -0.1]
# Of each row, the mean of its log-ratios up to a little noise: both sides of every bound, with both signs.
SHIFTS = [0.45, -0.5, -0.4, 1.3, 1.1, 1.9, 0.0, 0.02, 0.05, 0.4, 0.0, 2.0]
METRICS = [
    "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio"
]  # fmt: skip
CLIPPED_TYPES = ["grpo", "bnpo", "dapo", "dr_grpo"]


def trainer(**options):
    """A trainer of a network that is never run."""
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(8)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t0")
    shape = Qwen2Config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    folder = tempfile.mkdtemp()
    Qwen2ForCausalLM(shape).save_pretrained(folder)  # with beta the reference is read from there
    settings = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, report_to=[], bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=B, num_generations=G, max_completion_length=C, **options,
    )  # fmt: skip
    made = trl.GRPOTrainer(
        model=Qwen2ForCausalLM.from_pretrained(folder),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["t2"] * B}),
        processing_class=tokenizer,
    )
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    return made


def batch():
    generator = torch.Generator().manual_seed(0)

    def normal():
        return torch.randn(B, C, generator=generator)

    mask = (torch.arange(C) < torch.tensor(LENGTHS)[:, None]).long()
    new = -1.5 + 0.5 * normal()
    noise = 0.4 * normal()
    noise -= (noise * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    old = new - torch.tensor(SHIFTS)[:, None] - noise
    weights = torch.exp(0.3 * normal()).clamp(max=1.3)
    ref = new + 0.3 * normal()
    entropies = torch.where(mask.bool(), (10 * normal().abs()).round() / 10, 9.0)
    return new, old, ref, mask, torch.tensor(ADVANTAGES), weights, entropies


def check_that_every_bound_acts(new, old, mask, advantages):
    """Tokens and rows lie on both sides of every bound, with gains and with losses."""
    active = mask.bool()
    log_ratio = torch.where(active, new - old, 0.0)
    rows = active.any(1)
    tokens = log_ratio.exp()[active], advantages[:, None].expand(B, C)[active]
    sequences = (log_ratio.sum(1) / mask.sum(1).clamp(min=1)).exp()[rows], advantages[rows]
    for ratio, sign in (tokens, sequences):
        assert (sign != 0).all()
        for bound in (1 - EPSILON, 1 + EPSILON_HIGH, DELTA, EPSILON_HIGH_CISPO):
            for beyond, gains in itertools.product((ratio < bound, ratio > bound), (sign > 0, sign < 0)):
                assert (beyond & gains).any(), (bound, ratio)
            assert ((ratio / bound).log().abs() > 1e-3).all(), "a ratio on a bound is a matter of rounding"


def check_that_thresholds_differ(entropies, mask, chosen):
    """They lie on an entropy that several tokens have, and between two."""
    ordered = entropies[mask.bool()].sort().values
    thresholds = [float(torch.quantile(ordered, 1 - quantile)) for quantile in QUANTILES]
    tied = [int((ordered == threshold).sum()) for threshold in thresholds]
    assert max(tied) > 1 and 0 in tied, tied
    counts = chosen.sum((1, 2)).tolist()
    assert counts == sorted(counts) and counts[0] == 1 and len(set(counts)) > 9, counts
    assert not (chosen & ~mask.bool()).any()


def variants():
    levels, policies = ("token", "sequence"), ("on", "off")
    for kind, level, beta, policy in itertools.product(CLIPPED_TYPES, levels, (0.0, 0.04), policies):
        yield kind, level, beta, policy, "plain"
    for level, beta, policy in itertools.product(levels, (0.0, 0.04), policies):
        yield "cispo", level, beta, policy, "plain"
    for kind, level in itertools.product(CLIPPED_TYPES, levels):
        yield kind, level, 0.0, "off", "delta"
    for kind, level, policy in itertools.product(("grpo", "dapo", "cispo"), levels, policies):
        yield kind, level, 0.0, policy, "weights"
    for kind, level, beta in itertools.product([*CLIPPED_TYPES, "cispo"], levels, (0.0, 0.04)):
        yield kind, level, beta, "off", "top"
    for kind, level in itertools.product(("dapo", "cispo"), levels):
        yield kind, level, 0.0, "on", "top"


def main():
    new, old, ref, mask, advantages, weights, entropies = batch()
    check_that_every_bound_acts(new, old, mask, advantages)
    choosing = trainer(loss_type="dapo").get_high_entropy_mask
    chosen = torch.stack([choosing(entropies, mask, 1 - quantile) for quantile in QUANTILES])
    check_that_thresholds_differ(entropies, mask, chosen)
    names, losses, gradients, metrics = [], [], [], []
    for kind, level, beta, policy, extra in variants():
        used = trainer(
            loss_type=kind,
            importance_sampling_level=level,
            beta=beta,
            use_bias_correction_kl=False,
            epsilon=EPSILON,
            epsilon_high=EPSILON_HIGH_CISPO if kind == "cispo" else EPSILON_HIGH,
            delta=DELTA if extra == "delta" else None,
            top_entropy_quantile=TOP if extra == "top" else 1.0,
        )
        leaf = new.clone().requires_grad_(True)
        used._get_per_token_logps_and_entropies = lambda *a, leaf=leaf, **k: (leaf, entropies, None)
        inputs = {
            "prompt_ids": torch.ones(B, 1, dtype=torch.long),
            "prompt_mask": torch.ones(B, 1, dtype=torch.long),
            "completion_ids": torch.ones(B, C, dtype=torch.long),
            "completion_mask": mask,
            "advantages": advantages,
            "ref_per_token_logps": ref,
            "num_items_in_batch": mask.sum(),
        }
        if policy == "off":
            inputs["old_per_token_logps"] = old
        if extra == "weights":
            used.use_vllm = used.vllm_importance_sampling_correction = True
            inputs["importance_sampling_ratio"] = weights
        loss = used._compute_loss(used.model, inputs)
        loss.backward()
        names.append(f"{kind}/{level}/{beta:g}/{policy}/{extra}")
        losses.append(loss.detach().numpy())
        gradients.append(leaf.grad.numpy())
        logged = used._metrics["train"]
        metrics.append([logged[name][0] if name in logged else np.nan for name in METRICS])
        print(names[-1], losses[-1], metrics[-1])
    by_name = dict(zip(names, losses, strict=True))
    for kind, level in itertools.product(CLIPPED_TYPES, ("token", "sequence")):
        assert by_name[f"{kind}/{level}/0/off/delta"] < by_name[f"{kind}/{level}/0/off/plain"] - 1e-3
    np.savez_compressed(
        Path(__file__).parent / f"grpo_loss_levels_trl{trl.__version__}.npz",
        new=new, old=old, ref=ref, mask=mask.bool(), advantages=advantages, weights=weights, entropies=entropies,
        epsilon=EPSILON, epsilon_high=EPSILON_HIGH, epsilon_high_cispo=EPSILON_HIGH_CISPO, delta=DELTA,
        top_entropy_quantile=TOP, quantiles=QUANTILES, chosen=chosen,
        variants=names, metric_names=METRICS, loss=np.array(losses), dlogps=np.array(gradients),
        metrics=np.array(metrics, np.float32),
    )  # fmt: skip


if __name__ == "__main__":
    main()
