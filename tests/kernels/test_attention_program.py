"""The attention kernel's program run in NumPy (see emulator.py) against the plain path."""

import dataclasses

import emulator
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.attention import HeadNorms, OwnKV, PromptKV, decode_attention_reference
from pallas_kernels.attention_plan import AttentionConfig, AttentionPlan
from pallas_kernels.hidden import hidden_parts

EPS, BF16, E4M3 = 1e-6, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


class Case:
    """Operands for samples of these (prompt's, prompt tokens, own tokens); -1 own tokens where one has ended."""

    def __init__(self, samples, H, K, E, C, normed=False, kept=(BF16, BF16), seed=0, dtype=BF16):
        self.rng, self.dtype = np.random.default_rng(seed), dtype
        of, lengths, own = (np.array(column, np.int32) for column in zip(*samples, strict=True))
        B, N, P = len(samples), of.max() + 1, lengths.max()
        angles = self.rng.uniform(0, 9, (B, E // 2)).astype(np.float32)
        q, k, v = (self.normal(B, heads * E) for heads in (H, K, K))
        prompt = [self.normal(N, P, K, E).astype(dtype) for dtype in kept]
        norms = list(self.rng.uniform(0.5, 2, (2, E)).astype(np.float32)) if normed else []
        caches = [self.normal(B, C, K, E).astype(dtype) for dtype in kept]
        self.operands = [q, k, v, np.cos(angles), np.sin(angles), *prompt, of, lengths, own, *norms, *caches]
        self.shape, self.sizes = (H, K, E, N, P, C, normed), [np.dtype(dtype).itemsize for dtype in kept]
        self.a = None

    def normal(self, *shape):
        return self.rng.standard_normal(shape).astype(self.dtype)

    def of(self, samples):
        """The operands of some of the samples."""
        per_prompt = (5, 6, *((10, 11) if self.shape[-1] else ()))
        return [v if i in per_prompt else v[samples] for i, v in enumerate(self.operands)]

    def run(self, config, samples=slice(None), seed=0):
        operands = self.of(samples)
        plan = AttentionPlan(len(operands[0]), *self.shape, config, *self.sizes)
        if self.a is not None:
            plan = dataclasses.replace(plan, ranks=len(self.a))
            operands.insert(-2, self.a)
        return emulator.run_attention(plan, EPS, *operands, seed=seed)

    def expected(self):
        q, k, v, cos, sin, prompt_k, prompt_v, of, lengths, own, *norms, own_k, own_v = map(jnp.asarray, self.operands)
        wide = [x.astype(jnp.float32) for x in (q, k, v)]
        caches = PromptKV(prompt_k, prompt_v, of, lengths), OwnKV(own_k, own_v, own)
        head_norms = HeadNorms(*norms, EPS) if norms else None
        return [np.asarray(x, np.float64) for x in decode_attention_reference(*wide, cos, sin, *caches, head_norms)]


PAIRS = [(0, 37, 0), (0, 37, 30), (1, 16, -1), (1, 16, 17)]


@pytest.mark.parametrize("config, H, K, E, normed, kept", [
    (AttentionConfig(1, 1, 4, 3), 5, 1, 128, False, (BF16, BF16)),
    (AttentionConfig(2, 1, 4, 2), 8, 1, 64, True, (BF16, BF16)),
    (AttentionConfig(2, 2, 4, 3), 6, 2, 64, False, (BF16, BF16)),
    (AttentionConfig(2, 1, 4, 4), 5, 1, 128, False, (BF16, E4M3)),
    (AttentionConfig(1, 2, 4, 6), 4, 2, 64, True, (E4M3, E4M3)),
])  # fmt: skip
def test_against_the_plain_path(config, H, K, E, normed, kept):
    case = Case(PAIRS, H, K, E, 33, normed, kept)
    out, own_k, own_v = case.run(config)
    expected, expected_k, expected_v = case.expected()
    np.testing.assert_array_equal(own_v.astype(np.float64), expected_v)
    coarse = 2.0**-3 if kept[0] is E4M3 else 2.0**-7  # a rounding of a key that was rounded before may differ by one
    np.testing.assert_allclose(own_k.astype(np.float64), expected_k, rtol=coarse, atol=0.01)
    limit = 0.05 if kept[0] is E4M3 else 0.02
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=limit, rtol=limit)


@pytest.mark.parametrize("kept", [(np.float16, np.float16), (np.float16, E4M3)])
def test_float16(kept):
    case = Case(PAIRS, 5, 1, 64, 33, True, kept, dtype=np.float16)
    out, own_k, own_v = case.run(AttentionConfig(2, 1, 4, 3))
    expected, expected_k, expected_v = case.expected()
    np.testing.assert_array_equal(own_v.astype(np.float64), expected_v)
    np.testing.assert_allclose(own_k.astype(np.float64), expected_k, rtol=2.0**-10, atol=0.002)
    assert out.dtype == np.float16
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=0.003, rtol=0.003)


@pytest.mark.parametrize("kept", [(np.float16, np.float16), (np.float16, E4M3), (E4M3, E4M3)])
@pytest.mark.parametrize("E, number", [(64, np.inf), (64, np.nan), (128, -np.inf)])
def test_a_sample_that_overflows_spoils_no_other(kept, E, number):
    """Neither its partner in a tile, nor, in later steps, whoever takes its slot."""
    case = Case([(0, 37, 5), (0, 37, 30), (1, 16, 7), (1, 16, 17)], 5, 1, E, 33, True, kept, dtype=np.float16)
    config = AttentionConfig(2, 1, 4, 3)
    whole, whole_k, whole_v = case.run(config)
    for sample, place in ((1, 0), (2, E - 1), (3, E // 2 + 5)):
        case.operands[2][sample, place] = number
    out, own_k, own_v = case.run(config)
    assert np.isfinite(whole).all() and np.isnan(out[1:].astype(np.float32)).all()
    np.testing.assert_array_equal(out[0], whole[0])
    for sample, length in ((1, 30), (2, 7), (3, 17)):
        assert np.isnan(own_k[sample, length].astype(np.float32)).all()
        np.testing.assert_array_equal(own_v[sample, length].astype(np.float32), 0)
        whole_k[sample, length], whole_v[sample, length] = own_k[sample, length], own_v[sample, length]
    np.testing.assert_array_equal(own_k.astype(np.float32), whole_k.astype(np.float32))
    np.testing.assert_array_equal(own_v.astype(np.float32), whole_v.astype(np.float32))
    # Later: sample 1's slot has a sample of 3 tokens; sample 0 goes on beside it.
    case.operands[-2], case.operands[-1] = own_k, own_v
    case.operands[2][1, 0], case.operands[9][1] = 1, 2
    out, *_ = case.run(config)
    expected, *_ = case.expected()
    np.testing.assert_allclose(out[:2].astype(np.float64), expected[:2], atol=0.05, rtol=0.05)


def test_a_sample_does_not_depend_on_its_partner():
    """In a pair a sample's numbers are those that it has alone, whatever the other one's length."""
    case = Case([(0, 37, 20), (0, 37, 70), (0, 37, -1), (0, 37, 90)], 4, 1, 64, 96)
    alone, *_ = case.run(AttentionConfig(1, 1, 4, 3))
    for samples in ([0, 1], [1, 0], [1, 2], [2, 1], [3, 1], [1, 3]):
        pair, *_ = case.run(AttentionConfig(2, 1, 4, 3), samples, seed=samples[0])
        np.testing.assert_array_equal(pair, alone[samples])


# two groups of four; in the first all but one see other parts of the prompt's last turn
GROUPS = [(0, 70, 0), (0, 70, 30), (0, 70, -1), (0, 70, 17), (1, 49, 5), (1, 49, -1), (1, 49, 32), (1, 49, 1)]


@pytest.mark.parametrize("config, E, kept", [
    (AttentionConfig(2, 1, 4, 2, 2), 128, (BF16, BF16)),
    (AttentionConfig(2, 1, 8, 3, 2), 64, (BF16, E4M3)),
    (AttentionConfig(1, 1, 4, 3, 4), 64, (BF16, BF16)),
    (AttentionConfig(2, 2, 4, 2, 2), 64, (E4M3, E4M3)),
])  # fmt: skip
def test_a_prompt_read_together(config, E, kept):
    case = Case(GROUPS, 4, 1, E, 33, kept=kept)
    expected, *_ = case.expected()
    limit = 0.05 if kept[0] is E4M3 else 0.02
    for seed in range(3):
        out, *_ = case.run(config, seed=seed)
        np.testing.assert_allclose(out.astype(np.float64), expected, atol=limit, rtol=limit)
        alone, *_ = Case([*GROUPS[:3], (0, 70, -1), *GROUPS[4:]], 4, 1, E, 33, kept=kept).run(config, seed=seed)
        np.testing.assert_array_equal(alone[:3], out[:3])


def test_a_group_that_has_ended_reads_nothing():
    case = Case([(0, 70, -1)] * 4 + GROUPS[4:], 4, 1, 64, 33)
    case.operands[5][0] = case.operands[6][0] = np.nan
    out, *_ = case.run(AttentionConfig(2, 1, 4, 2, 2))
    np.testing.assert_array_equal(out[:4].astype(np.float32), 0)


@pytest.mark.parametrize("forgotten, maker", [("named_sync", "make_ptx"), ("copy_wait", "make_memory")])
def test_the_emulator_sees_a_turn_that_nobody_waits_for(monkeypatch, forgotten, maker):
    emulator.without(monkeypatch, forgotten, maker)
    case = Case(GROUPS, 4, 1, 64, 33)
    for seed in range(4):
        out, *_ = case.run(AttentionConfig(2, 1, 4, 2, 2), seed=seed)
        if not np.abs(out.astype(np.float64) - case.expected()[0]).max() < 0.1:
            return
    raise AssertionError("four orders of the warps gave the right result")


def test_the_emulator_sees_what_nobody_waits_for(monkeypatch):
    emulator.without(monkeypatch, "copy_wait")
    case = Case(PAIRS[:2], 5, 1, 64, 33)
    out, *_ = case.run(AttentionConfig(1, 1, 4, 3))
    assert not np.abs(out.astype(np.float64) - case.expected()[0]).max() < 0.1


@pytest.mark.parametrize("config, H, K, E, ranks, kept", [
    (AttentionConfig(1, 1, 4, 3), 5, 1, 128, 48, (BF16, BF16)),
    (AttentionConfig(1, 4, 4, 3), 7, 1, 64, 16, (BF16, BF16)),
    (AttentionConfig(1, 1, 8, 4), 7, 1, 128, 32, (BF16, E4M3)),
    (AttentionConfig(2, 1, 4, 4), 6, 2, 64, 32, (E4M3, E4M3)),
    (AttentionConfig(2, 2, 8, 3), 8, 1, 64, 32, (BF16, BF16)),
])  # fmt: skip
def test_the_product_with_a(config, H, K, E, ranks, kept):
    """A part for each head of what it has stored, whoever computed the head; zeros for a sample that has ended."""
    check_product(Case(PAIRS, H, K, E, 33, kept=kept), config, H, ranks)


@pytest.mark.parametrize("prompt", [100, 129, 200])
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_comes_into_a_ring_whose_tiles_are_done(depth, prompt):
    """Of 2 to 4 turns of each warp: in each place of the ring the last one may have had."""
    check_product(Case([(0, prompt, 5)], 4, 1, 64, 33), AttentionConfig(1, 1, 4, depth), 4, 32)


def check_product(case, config, H, ranks):
    E = case.shape[2]
    plain, *caches = case.run(config)
    case.a = case.normal(ranks, H * E)
    out, own_k, own_v, hidden = case.run(config)
    for a, b in zip((out, own_k, own_v), (plain, *caches), strict=True):
        np.testing.assert_array_equal(a, b)
    expected = np.asarray(hidden_parts(jnp.asarray(out), jnp.asarray(case.a), H))
    samples = len(out)
    here = np.swapaxes(expected.reshape(H, ranks // 16, -1, 8, 4, 2, 2), -1, -2)  # head tile panel g t row half
    made = np.swapaxes(hidden.reshape(H, ranks // 16, -1, 8, 4, 2, 2), -1, -2)
    rows = np.arange(8).reshape(4, 2) < samples - 8 * np.arange(expected.shape[2])[:, None, None]
    exist = np.broadcast_to(rows[:, None, :, :, None], made.shape[2:])
    np.testing.assert_allclose(made[:, :, exist], here[:, :, exist], rtol=1e-5, atol=1e-4)
    assert np.isnan(made[:, :, ~exist]).all()  # of no sample
