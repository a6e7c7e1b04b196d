"""The decode attention kernel on a CUDA device, fresh seeds each run: `python -m pytest -m gpu tests/kernels`."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead import ahead

from pallas_kernels.attention import (
    HeadNorms,
    OwnKV,
    PromptKV,
    decode_attention,
    decode_attention_reference,
    stored,
)
from pallas_kernels.attention_plan import AttentionConfig
from pallas_kernels.fragment_order import in_unit_order
from pallas_kernels.hidden import sum_hidden

pytestmark = pytest.mark.gpu


def _case(rng, B, H, K, E, N, P, C, dtype, lengths=None, spread=1.0, kept=(jnp.bfloat16, jnp.bfloat16)):
    def normal(*shape):
        return jnp.asarray(spread * rng.normal(size=shape), jnp.float32).astype(jnp.bfloat16).astype(dtype)

    def caches(*shape):
        return [stored(normal(*shape, K, E), dtype) for dtype in kept]

    angles = jnp.asarray(rng.uniform(0, 500, (B, E // 2)), jnp.float32)
    of = jnp.asarray(np.arange(B) * N // B, jnp.int32)
    prompt_lengths = jnp.asarray(rng.integers(1, P + 1, N), jnp.int32)[of]
    own = rng.integers(-1, C, B) if lengths is None else lengths
    return (
        *(normal(B, heads * E) for heads in (H, K, K)), jnp.cos(angles), jnp.sin(angles),
        PromptKV(*caches(N, P), of, prompt_lengths),
        OwnKV(*caches(B, C), jnp.asarray(own, jnp.int32)),
    )  # fmt: skip


def _expected(*case):
    """The reference on the CPU, where nothing has to be compiled for the GPU."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        return jax.jit(decode_attention_reference)(*jax.device_put(case, cpu))


def _wide(case):
    """The same case in float64 (integers stay); within `jax.enable_x64`."""
    case = jax.tree.map(np.asarray, case)
    return jax.tree.map(lambda x: x.astype(np.float64) if x.dtype.kind not in "iu" else x, case)


CONFIGS = [
    AttentionConfig(1, 1), AttentionConfig(1, 4), AttentionConfig(2, 1), AttentionConfig(2, 2, 4, 4),
    AttentionConfig(1, 8, 8, 2),
]  # fmt: skip
TOGETHER = [AttentionConfig(2, 1, 8, 3, 2), AttentionConfig(2, 2, 8, 2, 4), AttentionConfig(1, 1, 4, 2, 4)]
SHAPES = [(8, 28, 4, 128, 2, 256, 96), (4, 14, 2, 64, 2, 37, 50), (6, 16, 2, 128, 3, 1, 1), (2, 8, 8, 64, 1, 100, 300)]
GROUPS = (16, 28, 4, 128, 2, 300, 96)  # two groups of 8 samples, for CTAs of 4 and of all of a group's
CASES = [*itertools.product(SHAPES, CONFIGS), *((GROUPS, config) for config in TOGETHER)]
NARROW = [  # keys and values of the cache
    (jnp.bfloat16, jnp.float8_e4m3fn), (jnp.float8_e4m3fn, jnp.float8_e4m3fn), (jnp.float8_e4m3fn, jnp.bfloat16),
]  # fmt: skip
NORMED, SHARP = (4, 16, 8, 128, 2, 64, 40), (4, 28, 4, 128, 2, 64, 40)
EPSILON = 1e-6


def _attention(config, normed, in_units, *arrays):
    *case, norm_q, norm_k = arrays if normed else (*arrays, None, None)
    norms = HeadNorms(norm_q, norm_k, EPSILON) if normed else None
    return decode_attention(*case, norms, in_units=in_units, config=config)


def _start(programs, sizes, config, normed=False, kept=(jnp.bfloat16, jnp.bfloat16), in_units=False):
    key = ("attention", sizes, config, normed, kept, in_units)
    case = jax.eval_shape(lambda: _case(np.random.default_rng(0), *sizes, jnp.bfloat16, kept=kept))
    norms = [jax.ShapeDtypeStruct(sizes[3:4], jnp.float32)] * 2 if normed else []
    programs.start(key, functools.partial(_attention, config, normed, in_units), *case, *norms)
    return key


@pytest.fixture(scope="module")
def cases(rng):
    """Of sizes: a case, and what the reference makes of it in float64, once for all configurations."""

    @functools.cache
    def of(*sizes):
        case = _case(rng, *sizes, jnp.bfloat16)
        with jax.enable_x64(True):
            return case, *map(np.asarray, _expected(*_wide(case)))

    return of


@ahead(lambda programs, sizes, config: _start(programs, sizes, config))
@pytest.mark.parametrize("sizes, config", CASES)
def test_against_float64(programs, cases, sizes, config):
    case, expected, expected_k, expected_v = cases(*sizes)
    program = programs.get(_start(programs, sizes, config))
    out, own_k, own_v = program(*case)
    np.testing.assert_array_equal(np.asarray(own_v, np.float32), expected_v)
    np.testing.assert_allclose(np.asarray(own_k, np.float32), expected_k, rtol=0.01, atol=1e-6)  # rounded to bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=0.02, rtol=0.02)
    again, _, _ = program(*case)
    assert np.array_equal(np.asarray(out), np.asarray(again))


@ahead(lambda programs, sizes, config, kept: _start(programs, sizes, config, kept=kept))
@pytest.mark.parametrize("sizes, config", [(sizes, config) for sizes, config in CASES if sizes != SHAPES[3]])
@pytest.mark.parametrize("kept", NARROW, ids=lambda pair: "-".join(dtype.__name__ for dtype in pair))
def test_narrow_caches(rng, programs, sizes, kept, config):
    case = _case(rng, *sizes, jnp.bfloat16, kept=kept)
    program = programs.get(_start(programs, sizes, config, kept=kept))
    out, own_k, own_v = program(*case)
    expected, expected_k, expected_v = (np.asarray(x, np.float32) for x in _expected(*case))
    assert (own_k.dtype, own_v.dtype) == kept
    np.testing.assert_array_equal(np.asarray(own_v, np.float32), expected_v)
    step = 0.01 if kept[0] == jnp.bfloat16 else 0.13  # where a rotated number lies between two, either may be taken
    np.testing.assert_allclose(np.asarray(own_k, np.float32), expected_k, rtol=step, atol=0.002)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.03, rtol=0.03)
    again, _, _ = program(*case)
    assert np.array_equal(np.asarray(out), np.asarray(again))


def test_what_is_too_large_for_8_bits(rng):
    kept = (jnp.float8_e4m3fn, jnp.float8_e4m3fn)
    q, k, v, cos, sin, prompt, own = _case(rng, *NORMED, jnp.bfloat16, lengths=[0, 3, 17, 39], kept=kept)
    out, own_k, own_v = decode_attention(
        q, 1000 * k, v.at[:, 5].set(-600.0), cos, sin, prompt, own, config=AttentionConfig(2, 2)
    )
    newest = jnp.arange(4), own.lengths
    np.testing.assert_array_equal(np.asarray(own_v[newest], np.float32)[:, 0, 5], -448.0)
    assert np.abs(np.asarray(own_k[newest], np.float32)).max() == 448.0
    assert np.isfinite(np.asarray(out, np.float32)).all()


@ahead(lambda programs, config: _start(programs, NORMED, config, normed=True))
@pytest.mark.parametrize("config", CONFIGS[:3])
def test_head_norms(rng, programs, config):
    case = _case(rng, *NORMED, jnp.bfloat16)
    norms = [jnp.asarray(rng.uniform(0.5, 2, NORMED[3]), jnp.float32) for _ in range(2)]
    out, own_k, _ = programs.get(_start(programs, NORMED, config, normed=True))(*case, *norms)
    expected, expected_k, _ = _expected(*case, HeadNorms(*norms, EPSILON))
    np.testing.assert_allclose(np.asarray(own_k, np.float32), np.asarray(expected_k, np.float32), rtol=0.02, atol=1e-2)
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), atol=0.03, rtol=0.03)


@ahead(lambda programs, config: [_start(programs, SHAPES[0], config, in_units=order) for order in (False, True)])
@pytest.mark.parametrize("config", CONFIGS[:3])
def test_results_in_unit_order_are_the_same_numbers(programs, cases, config):
    case = cases(*SHAPES[0])[0]
    plain, ordered = (programs.get(_start(programs, SHAPES[0], config, in_units=order)) for order in (False, True))
    expected = [in_unit_order(plain(*case)[0]), *plain(*case)[1:]]
    assert all(np.array_equal(*map(np.asarray, pair)) for pair in zip(ordered(*case), expected, strict=True))


A_CASES = [(SHAPES[0], config) for config in CONFIGS[:3]] + [(SHAPES[1], CONFIGS[0]), (SHAPES[2], CONFIGS[2])]


def _with_a(config, a, *case):
    return decode_attention(*case, a=a, config=config)


def _start_with_a(programs, sizes, config, ranks):
    case = jax.eval_shape(lambda: _case(np.random.default_rng(0), *sizes, jnp.bfloat16))
    a = jax.ShapeDtypeStruct((ranks, sizes[1] * sizes[3]), jnp.bfloat16)
    key = ("with a", sizes, config, ranks)
    programs.start(key, functools.partial(_with_a, config), a, *case)
    return key


@ahead(lambda programs, sizes, config, ranks: _start_with_a(programs, sizes, config, ranks))
@pytest.mark.parametrize("ranks", [16, 24, 128])
@pytest.mark.parametrize("sizes, config", A_CASES)
def test_the_product_with_a(rng, programs, cases, sizes, config, ranks):
    case = cases(*sizes)[0]
    heads = sizes[1]
    a = jnp.asarray(rng.standard_normal((ranks, heads * sizes[3])), jnp.bfloat16)
    plain = programs.get(_start(programs, sizes, config))(*case)
    *made, hidden = programs.get(_start_with_a(programs, sizes, config, ranks))(a, *case)
    for one, other in zip(made, plain, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    found = np.asarray(sum_hidden(hidden, sizes[0]))[:, :ranks]
    wide = [np.asarray(v, np.float64) for v in (made[0], a)]
    np.testing.assert_allclose(found, wide[0] @ wide[1].T, atol=1e-5 * float(np.abs(wide[0]).sum(1).max()) * 4)


@ahead(lambda programs: [_start(programs, SHARP, config) for config in CONFIGS])
def test_sharp_scores_and_what_lies_past_the_end(rng, programs):
    """Scores of hundreds do not overflow, and NaN past the lengths is never read into a result."""
    case = list(_case(rng, *SHARP, jnp.bfloat16, lengths=[0, 15, 16, -1], spread=6.0))
    prompt, own = case[5], case[6]

    def poisoned(x, lengths):
        past = jnp.arange(x.shape[1]) >= lengths[:, None]
        return jnp.where(past[:, :, None, None], jnp.nan, x)

    lengths_N = jnp.zeros(2, jnp.int32).at[prompt.of].max(prompt.lengths)
    bad = list(case)
    bad[5] = prompt._replace(k=poisoned(prompt.k, lengths_N), v=poisoned(prompt.v, lengths_N))
    bad[6] = own._replace(k=poisoned(own.k, own.lengths), v=poisoned(own.v, own.lengths))
    expected, _, _ = _expected(*case)
    for config in CONFIGS:
        out, _, _ = programs.get(_start(programs, SHARP, config))(*bad)
        np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), atol=0.1, rtol=0.03)
        assert not np.asarray(out, np.float32)[3].any()


def test_result_does_not_depend_on_neighbours(rng):
    """Nor on the other sample of a pair, nor on whether there is one."""
    case = _case(rng, 6, 28, 4, 128, 1, 128, 64, jnp.bfloat16, lengths=[3, 40, 17, 63, 50, 33])
    whole, alone = (np.asarray(decode_attention(*case, config=AttentionConfig(slots, 2))[0]) for slots in (2, 1))
    np.testing.assert_array_equal(whole, alone)
    q, k, v, cos, sin, prompt, own = case
    own = own._replace(lengths=own.lengths.at[:5].set(-1))
    part, _, _ = decode_attention(q, k, v, cos, sin, prompt, own, config=AttentionConfig(2, 2))
    np.testing.assert_array_equal(np.asarray(part)[5:], whole[5:])


@ahead(lambda programs: [_start(programs, GROUPS, config) for config in TOGETHER])
def test_result_does_not_depend_on_those_that_read_the_prompt_together(rng, programs):
    case = _case(rng, *GROUPS, jnp.bfloat16, lengths=[3, 40, 17, 63, 50, 33, 95, 0, *[20] * 8])
    for config in TOGETHER:
        program = programs.get(_start(programs, GROUPS, config))
        whole, *_ = program(*case)
        for kept in ([0], [3, 6], range(8)):
            ended = jnp.full(16, -1).at[jnp.asarray(kept)].set(case[6].lengths[jnp.asarray(kept)])
            part, *_ = program(*case[:6], case[6]._replace(lengths=ended))
            np.testing.assert_array_equal(np.asarray(part)[list(kept)], np.asarray(whole)[list(kept)])
            assert not np.asarray(part, np.float32)[8:].any()
