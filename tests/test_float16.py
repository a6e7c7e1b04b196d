"""float16 as compute dtype: three bits more than bfloat16 in log-probabilities and gradients, in a smaller range."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import CONFIG, tiny_adapter, tiny_model

from qerl_jax.models import packed_rows
from qerl_jax.models.init import for_kernels
from qerl_jax.models.params import norms_of
from qerl_jax.models.transformer import logits, run_layer
from qerl_jax.rl import update as update_module
from qerl_jax.rl.state import Batch, UpdateSettings, init_state
from qerl_jax.rl.step import StepSettings, grpo_step, make_batch, sample_rollout
from qerl_jax.rl.update import update_step
from qerl_jax.rollout import Engine, Prompts, Request, SamplingSettings
from qerl_jax.rollout.attention import empty_kv
from qerl_jax.rollout.decode import prefill

N, G, P, C = 20, 8, 8, 64
PROMPTS = Prompts(jax.random.randint(jax.random.key(3), (N, P), 0, CONFIG.vocab_size), jnp.full(N, P), jnp.arange(N))
SETTINGS = StepSettings(SamplingSettings(C, (), 0), UpdateSettings(G, 1.0, micro_batch_size=N * G))
# Gives the gradient as its state.
KEPT = optax.GradientTransformation(
    lambda adapter: jax.tree.map(jnp.zeros_like, adapter),
    lambda grads, _, adapter: (jax.tree.map(jnp.zeros_like, adapter), grads),
)


@functools.cache
def model(dtype):
    """The same weights in each dtype: packed ones, and what bfloat16 holds."""
    made = tiny_model(dtype=jnp.bfloat16, std=0.1)
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.dtype == jnp.bfloat16 else leaf, made)


@functools.cache
def adapter():
    return tiny_adapter(model("float32"), scale=0.03)


@functools.cache
def rollout(dtype):
    sample = jax.jit(sample_rollout, static_argnames="settings")
    return sample(model(dtype), adapter(), PROMPTS, jax.random.key(2), jnp.int32(0), settings=SETTINGS)[0]


@jax.jit
def step(state, model, batch):
    return update_step(state, model, batch, optimizer=KEPT, settings=SETTINGS.update)


def stepped(dtype, sampled_in, scale=1.0):
    """The gradient and the metrics of an update with 10,240 tokens."""
    rewards = scale * jax.random.normal(jax.random.key(4), (N * G,))
    batch = make_batch(PROMPTS, rollout(sampled_in), rewards, jnp.int32(0), SETTINGS, lambda rewards: rewards)
    state, metrics = step(init_state(adapter(), KEPT), model(dtype), batch)
    assert metrics["nonfinite"] == 0
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(state.opt_state)], metrics


def error(found, expected):
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def exact():
    return stepped("float32", "float32")[0]


def test_gradients_are_nearer_to_float32s_than_bfloat16s_are(exact):
    half, brain = (error(stepped(dtype, "float32")[0], exact) for dtype in ("float16", "bfloat16"))
    print(f"float16 {half:.1e}, bfloat16 {brain:.1e}")
    assert half < brain / 4


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_gradients_do_not_depend_on_the_size_of_the_loss(exact, scale):
    found = stepped("float16", "float32", scale)[0]
    assert error([leaf / scale for leaf in found], exact) < 3e-3


def test_without_a_power_of_two_they_underflow(exact, monkeypatch):
    monkeypatch.setattr(update_module, "_carried_back", lambda backward, dlogp, _: backward(dlogp)[0])
    step.clear_cache()
    assert error(stepped("float16", "float32", 1e-3)[0], [1e-3 * leaf for leaf in exact]) > 3e-2
    step.clear_cache()


def as_float16(dlogp):
    return (dlogp.astype(jnp.float16).astype(jnp.float32),)


@pytest.mark.parametrize("size", [1e-38, 1e-9, 0.7, 3e4, 1e30])
def test_the_power_of_two_is_exact(size):
    dlogp = size * jnp.array([[1.0, -0.5, 0.0]])
    found = update_module._carried_back(as_float16, dlogp, jnp.float16)
    np.testing.assert_allclose(found, dlogp, rtol=2**-11, atol=0)
    assert np.array_equal(update_module._carried_back(lambda d: (d,), dlogp, jnp.float16), dlogp)


def test_nothing_gives_nothing_and_what_is_not_finite_stays_so():
    assert not update_module._carried_back(as_float16, jnp.zeros((2, 3)), jnp.float16).any()
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        found = update_module._carried_back(as_float16, jnp.array([[1.0, bad]]), jnp.float16)
        assert not np.isfinite(found[0, 1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes_are_left_alone(dtype):
    dlogp = jnp.array([[1e-9, 3.0]])
    assert update_module._carried_back(lambda given: (given,), dlogp, jnp.dtype(dtype)) is dlogp


@pytest.fixture(scope="module")
def whole_step():
    """A rollout and an update in float16: the states before and after, and the metrics."""

    def small_ids(prompts, completions):
        return jnp.mean(completions.tokens < 30, 1, dtype=jnp.float32)

    optimizer = optax.adamw(1e-3)
    step = jax.jit(functools.partial(grpo_step, reward_fn=small_ids, optimizer=optimizer, settings=SETTINGS))
    before = init_state(adapter(), optimizer)
    return before, *step(before, model("float16"), PROMPTS, jax.random.key(0))


def test_recorded_log_probabilities_are_nearer_to_the_learners(whole_step):
    name = "sampling/sampling_logp_difference/mean"
    half, brain = (float(metrics[name]) for metrics in (whole_step[2], stepped("bfloat16", "bfloat16")[1]))
    print(f"float16 {half:.1e}, bfloat16 {brain:.1e}")
    assert 0 < half < brain / 5


def test_a_whole_step_moves_the_adapter(whole_step):
    before, after, metrics = whole_step
    assert all(np.isfinite(value) for value in metrics.values()) and metrics["nonfinite"] == 0
    floats = [leaf for leaf in jax.tree.leaves(after) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}
    for old, new in zip(jax.tree.leaves(before.adapter), jax.tree.leaves(after.adapter), strict=True):
        assert not np.array_equal(old, new)


@functools.partial(jax.jit, static_argnames="tokens_at_once")
def prefilled(model, tokens, lengths, tokens_at_once=100):
    """What prompts leave in a pool of their own."""
    (prompts, positions), base = tokens.shape, model.base
    pool = jnp.zeros((prompts, base.embed.shape[1]), base.embed.dtype), empty_kv(model, prompts, positions)
    return prefill(model, None, tokens, lengths, norms_of(model, None), pool, jnp.arange(prompts), tokens_at_once)


def test_a_prompt_in_chunks_and_the_cache():
    half = model("float16")
    given = half, PROMPTS.tokens, PROMPTS.lengths
    (whole, caches), (parts, _) = prefilled(*given), prefilled(*given, tokens_at_once=3)
    assert whole.dtype == parts.dtype == caches[0][0].dtype == jnp.float16
    np.testing.assert_allclose(*(np.asarray(hidden, np.float32) for hidden in (whole, parts)), atol=1e-2)


def test_weights_for_the_kernels_are_in_their_dtype():
    for dtype, expected in (("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")):
        assert for_kernels(model(dtype)).base.layers[0].q_proj.tiles.dtype == expected


def overflowing(token, layers, size=300):
    """A network in which this token, and no other, leaves float16's range, in the first layer's MLP; with a `size` of
    100 not its widened range (`pallas_kernels.range_scale`)."""
    plain = tiny_model(dtype=jnp.float32, weight_format="bf16", std=0.1, layers=layers)
    first, embed = plain.base.layers[0], plain.base.embed
    large = {name: getattr(first, name).at[5].set(0).at[5, 0].set(size) for name in ("gate_proj", "up_proj")}
    base = plain.base.replace(
        embed=embed.at[:, 0].set(0).at[token].set(0).at[token, 0].set(100),
        lm_head=embed.at[token].set(0),
        layers=(first.replace(**large), *plain.base.layers[1:]),
    )
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float16) if leaf.ndim > 1 else leaf, plain.replace(base=base))


def test_an_outlier_before_down_is_no_overflow():
    half = overflowing(0, 2, 100)
    full = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half)
    tokens, inputs = jnp.array([[7, 0, 9, 8]]), []
    layer, x = full.base.layers[0], full.base.embed[tokens]
    run_layer(full.config, layer, x, lambda name, x: inputs.append((name, float(jnp.abs(x).max()))))
    assert 65504 < dict(inputs)["down_proj"] < 1e6
    found, true = (np.asarray(logits(model, tokens)) for model in (half, full))
    np.testing.assert_allclose(found, true, atol=5e-3 * np.abs(true).max())


@functools.cache
def update_by(size):
    return jax.jit(functools.partial(update_step, optimizer=KEPT, settings=UpdateSettings(4, 1.0, size)))


@pytest.mark.parametrize("size, lengths", [(4, [6, 3, 1, 5]), (1, [6, 3, 2, 2]), (1, [28, 28, 2, 1])])
def test_a_token_that_nobody_sampled_overflows_in_vain(monkeypatch, size, lengths):
    """Packs, and frames of several widths, are filled up with tokens of their rows, not with token 0."""
    monkeypatch.setattr(packed_rows, "NARROWEST", 16)
    model = overflowing(0, 2)
    ones = jnp.ones((4, 28), jnp.int32)
    lengths, state = jnp.array(lengths), init_state(tiny_adapter(model, scale=0.02), KEPT)
    batch = Batch(
        prompt=7 * ones[:, :4], prompt_lengths=jnp.array([2, 4, 3, 1]), completion=9 * ones,
        completion_lengths=lengths, mask=jnp.arange(28) < lengths[:, None], rewards=jnp.arange(4.0),
        sampled_logps=jnp.zeros((4, 28)), rollout_step=jnp.int32(0),
    )  # fmt: skip
    for tokens, nonfinite in ((batch.completion, 0), (jnp.where(jnp.arange(28) == 0, 0, batch.completion), 1)):
        _, metrics = update_by(size)(state, model, batch.replace(completion=tokens))
        assert metrics["nonfinite"] == nonfinite
        assert (float(metrics["grad_norm"]) > 1e-3) == (not nonfinite)


def test_padding_of_prompts_overflows_in_vain():
    model = overflowing(0, 2)
    tokens, lengths = jnp.array([[7, 9, 0, 0], [7, 0, 9, 0], [7, 9, 8, 5]]), jnp.array([2, 3, 4])
    for at_once in (64, 2, 3):
        last, layers = prefilled(model, tokens, lengths, tokens_at_once=at_once)
        finite = [np.isfinite(np.asarray(kv, np.float32)).all((1, 2, 3)).tolist() for kv in jax.tree.leaves(layers)]
        assert np.isfinite(last).all(-1).tolist() == [True, False, True]
        assert all(rows[0] and rows[2] for rows in finite)
        assert all(map(all, finite[1::2])), "0 times a value of the cache is 0"


@pytest.mark.parametrize("overflows", [[40, 9, 11], [9, 11, 40]], ids=["at once", "where later prompts have ended"])
def test_what_overflows_spoils_no_later_sample_in_its_slot(overflows):
    """Nor what comes into its prompt's row of the pool."""
    model = overflowing(40, 4)
    settings = SamplingSettings(12, (3, 4, 5, 6), 1, top_k=5)
    others = 2 if overflows[-1] == 40 else 3
    requests = [Request(overflows if i == 3 else [7 + i % 5, 9, 11][:others], 1, i) for i in range(30)]

    def sampled(slots):
        engine = Engine(model, settings, max_prompt_length=3, max_slots=slots, tail_sizes=())
        found = {done.request: done for done in engine.generate(None, requests, jax.random.key(1))}
        return [found[i] for i in range(30)]

    apart = sampled(30)
    spoilt = [not np.isfinite(done.logps).all() for done in apart]
    assert spoilt[3] and sum(spoilt) < 15
    for together in map(sampled, (1, 4)):
        assert [not np.isfinite(done.logps).all() for done in together] == spoilt
        for one, other, bad in zip(apart, together, spoilt, strict=True):
            assert bad or one.ids == other.ids
