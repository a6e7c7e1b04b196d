"""The decode loop against the plain forward pass, and what a completion may and may not depend on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_adapter, tiny_model

from qerl_jax.errors import UserError
from qerl_jax.models.init import for_kernels, init_adapter
from qerl_jax.models.params import norms_of
from qerl_jax.models.transformer import logits
from qerl_jax.rl.logprobs import completion_logps
from qerl_jax.rollout import Prompts, SamplingSettings, generate
from qerl_jax.rollout.prepared import made, prepared

MODEL = tiny_model()
ADAPTER = tiny_adapter(MODEL)
PROMPTS = Prompts(
    tokens=jnp.array([[5, 9, 11, 0, 0], [7, 0, 0, 0, 0], [20, 21, 22, 23, 24]], jnp.int32),
    lengths=jnp.array([3, 1, 5], jnp.int32),
    places=jnp.array([40, 41, 42], jnp.int32),
)
SETTINGS = SamplingSettings(8, (3, 4, 10, 12, 50), 0)
RUN = jax.jit(generate, static_argnames=("settings", "num_generations"))


def run(prompts=PROMPTS, settings=SETTINGS, key=0, num_generations=4):
    return RUN(MODEL, ADAPTER, prompts, jax.random.key(key), settings=settings, num_generations=num_generations)


@functools.cache
def default_run():
    return run()


def test_recorded_logps_equal_the_learners():
    out = default_run()
    prompt, lengths = jnp.repeat(PROMPTS.tokens, 4, 0), jnp.repeat(PROMPTS.lengths, 4)
    logps, _ = jax.jit(completion_logps)(MODEL, ADAPTER, prompt, lengths, out.tokens, out.lengths, 1.0)
    mask = np.arange(8) < np.asarray(out.lengths)[:, None]
    np.testing.assert_allclose(np.asarray(out.logps)[mask], np.asarray(logps)[mask], atol=1e-4)
    assert np.all(np.asarray(out.logps)[~mask] == 0)


def test_completions_end_at_any_eos_and_are_padded():
    out = default_run()
    tokens, lengths = np.asarray(out.tokens), np.asarray(out.lengths)
    assert 0 < np.asarray(out.terminated).sum() < 12, "the example should hold both kinds"
    for row, length, terminated in zip(tokens, lengths, np.asarray(out.terminated), strict=True):
        ends = [i for i, token in enumerate(row) if token in SETTINGS.eos_token_ids]
        assert (ends[0] == length - 1) if terminated else (not ends and length == 8)
        assert np.all(row[length:] == 0)


def test_an_eos_in_the_last_slot_counts_as_terminated():
    out = default_run()
    lengths = np.asarray(out.lengths)
    row = int(np.flatnonzero(np.asarray(out.terminated) & (lengths > 1))[0])
    cut = run(settings=SamplingSettings(int(lengths[row]), SETTINGS.eos_token_ids, 0))
    np.testing.assert_array_equal(cut.tokens[row], out.tokens[row, : lengths[row]])
    assert bool(cut.terminated[row])


def test_greedy_equals_argmax_of_the_forward_pass():
    settings = SamplingSettings(6, (3,), 0, temperature=0.0)
    out = run(settings=settings, num_generations=1)
    forward = jax.jit(lambda tokens: logits(MODEL, tokens[None], adapter=ADAPTER)[0])
    for n, length in enumerate(np.asarray(PROMPTS.lengths)):
        tokens = np.zeros(PROMPTS.tokens.shape[1] + 6, np.int32)
        tokens[:length] = PROMPTS.tokens[n, :length]
        for t in range(int(out.lengths[n])):
            best = int(jnp.argmax(forward(tokens)[length + t - 1]))  # which sees nothing of what comes after
            assert best == int(out.tokens[n, t])
            tokens[length + t] = best


def test_a_completion_depends_on_its_own_key_prompt_and_index_alone():
    out = default_run()
    order = np.array([2, 0, 1])
    other = run(jax.tree.map(lambda leaf: leaf[order], PROMPTS))
    np.testing.assert_array_equal(other.tokens.reshape(3, 4, 8), out.tokens.reshape(3, 4, 8)[order])
    alone = run(jax.tree.map(lambda leaf: leaf[1:2], PROMPTS), num_generations=2)
    np.testing.assert_array_equal(alone.tokens, out.tokens[4:6])
    np.testing.assert_allclose(alone.logps, out.logps[4:6], atol=1e-5)


def test_completions_are_constants_to_a_gradient():
    """So a loss may sample for itself: of an adapter that draws and is scored it gets the score's gradient."""

    def score(adapter, tokens):
        return jnp.mean(jax.nn.log_softmax(logits(MODEL, tokens, adapter=adapter))[..., 0])

    def sampled(adapter, scale):
        norms = jax.tree.map(lambda scales: scale * scales, norms_of(MODEL, adapter))
        out = generate(MODEL, adapter, PROMPTS, jax.random.key(0), SETTINGS, 2, norms)
        return jnp.sum(out.logps) + score(adapter, out.tokens), out.tokens

    (grads, of_scale), tokens = jax.jit(jax.grad(sampled, argnums=(0, 1), has_aux=True))(ADAPTER, 1.0)
    expected = jax.jit(jax.grad(score))(ADAPTER, tokens)
    assert float(of_scale) == 0.0
    for found, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)
        assert jnp.any(wanted != 0)


def test_places_and_keys_change_the_draw():
    out = default_run()
    assert not np.array_equal(out.tokens, run(key=1).tokens)
    assert not np.array_equal(out.tokens, run(PROMPTS.replace(places=PROMPTS.places + 1)).tokens)
    np.testing.assert_array_equal(out.tokens, run().tokens)


def test_truncated_sampling_records_both_values():
    settings = SamplingSettings(8, (3,), 0, top_p=0.6)
    out = run(settings=settings)
    mask = np.arange(8) < np.asarray(out.lengths)[:, None]
    full, renormalised = np.asarray(out.logps)[mask], np.asarray(out.truncated_logps)[mask]
    assert np.all(renormalised >= full - 1e-6) and (renormalised - full).max() > 0.05
    assert default_run().truncated_logps is None


def test_a_sample_of_a_key_of_another_kind_depends_on_its_own_prompt_alone():
    """JAX draws a batch's numbers of `rbg` from the batch's first key."""
    key = jax.random.key(0, impl="rbg")

    def tokens(prompts, key=key):
        return np.asarray(RUN(MODEL, ADAPTER, prompts, key, settings=SETTINGS, num_generations=4).tokens)

    together = tokens(PROMPTS)
    last = PROMPTS.replace(**{name: getattr(PROMPTS, name)[2:] for name in ("tokens", "lengths", "places")})
    np.testing.assert_array_equal(tokens(last), together[8:])
    np.testing.assert_array_equal(tokens(PROMPTS, jax.random.key_data(key)), together)
    assert (
        len(np.unique(together[8:], axis=0)) == 4 and (tokens(PROMPTS, jax.random.key(1, impl="rbg")) != together).any()
    )
    wrong_keys = ((0, "0"), ("a", "'a'"), (jnp.float32(0), r"Array\(0"), (jax.random.split(key), r"Array\("))
    for wrong, named in wrong_keys:
        with pytest.raises(
            ValueError, match=rf"the key is {named}.*; expected one PRNG key, as jax\.random\.key\(seed\)"
        ):
            generate(MODEL, ADAPTER, PROMPTS, wrong, SETTINGS)


@pytest.mark.parametrize(("change", "message"), [
    ({"places": jnp.array([40])}, r"tokens \[3, 5\], lengths \[3\], places \[1\]; expected tokens \[N, P\], lengths"),
    ({"lengths": jnp.array([3])}, r"prompts have tokens \[3, 5\], lengths \[1\], places \[3\]; expected"),
    ({"tokens": jnp.ones(5, jnp.int32)}, r"prompts have tokens \[5\], .*expected tokens \[N, P\]"),
    ({"tokens": jnp.ones((0, 5), jnp.int32)}, "of one or more"),
    ({"lengths": jnp.array([3, 0, 5])}, r"5 token slots, and lengths \[3, 0, 5\]; allowed: 1 to 5"),
    ({"lengths": jnp.array([3, 1, 6])}, r"5 token slots, and lengths \[3, 1, 6\]"),
    ({"tokens": PROMPTS.tokens.at[0, 2].set(61)}, "prompts have the token id 61; allowed: 0 to 60"),
    ({"tokens": PROMPTS.tokens.at[2, 0].set(-1)}, "prompts have the token id -1"),
])  # fmt: skip
def test_prompts_that_cannot_be_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        jax.eval_shape(lambda: generate(MODEL, ADAPTER, PROMPTS.replace(**change), jax.random.key(0), SETTINGS))
    if "places" in change:  # shapes are known under jit too
        with pytest.raises(UserError, match=message):
            run(PROMPTS.replace(**change))


def test_prompts_may_be_lists_and_ranges():
    lists = Prompts(PROMPTS.tokens.tolist(), PROMPTS.lengths.tolist(), range(40, 43))
    found = jax.jit(lambda key: generate(MODEL, ADAPTER, lists, key, SETTINGS, 4))(jax.random.key(0))
    np.testing.assert_array_equal(found.tokens, default_run().tokens)
    traced = lists.replace(places=[40, 41, 42])  # each of its numbers
    jax.eval_shape(lambda prompts: generate(MODEL, ADAPTER, prompts, jax.random.key(0), SETTINGS), traced)
    ragged = "prompts have tokens .*, with rows filled up to one length"
    for change, message in (
        ({"places": [40, 2**31, 42]}, "prompt 1 has the place 2147483648; allowed: an int32"),
        ({"places": np.array([40, 41, -(2**31) - 1])}, "prompt 2 has the place -2147483649; allowed"),
        ({"places": [40, 41, 2.5]}, "prompts have places of float64; expected whole numbers"),
        ({"tokens": [[5, 9, 11], [7], [20]]}, ragged),
    ):
        with pytest.raises(UserError, match=message):
            generate(MODEL, ADAPTER, lists.replace(**change), jax.random.key(0), SETTINGS)


def test_ids_behind_a_prompt_may_be_any_and_of_no_samples_there_are_none():
    jax.eval_shape(
        lambda: generate(
            MODEL, ADAPTER, PROMPTS.replace(tokens=PROMPTS.tokens.at[1, 1].set(99)), jax.random.key(0), SETTINGS
        )
    )
    with pytest.raises(UserError, match="num_generations is 0; allowed: a whole number, 1 or more"):
        run(num_generations=0)


def test_more_tokens_than_the_network_has_positions_are_refused():
    positions = MODEL.config.max_position_embeddings
    room = positions - 5  # behind the longest prompt, which fills its slots
    short = PROMPTS.replace(lengths=jnp.array([3, 1, 4]))

    def drawn(prompts, most, limits=None):
        settings = SamplingSettings(most, (), 0)
        return generate(MODEL, ADAPTER, prompts, jax.random.key(0), settings, limits_N=limits)

    def known(*of):
        jax.eval_shape(lambda: drawn(*of))  # runs nothing

    def traced(prompts, *of):
        jax.eval_shape(lambda prompts: drawn(prompts, *of), prompts)

    limits = jnp.array([positions - 3, positions - 1, room])
    known(PROMPTS, room)
    known(short, room + 1)
    known(PROMPTS, positions, limits)
    traced(PROMPTS, room)
    traced(PROMPTS, positions, jnp.full(3, room))
    with pytest.raises(UserError, match=f"a prompt and .* may be {positions + 1} tokens; .* has {positions} positions"):
        known(PROMPTS, room + 1)
    with pytest.raises(UserError, match=f"up to 5 tokens, their slots, and .* may be {positions + 1} tokens"):
        traced(short, room + 1)
    for i in range(3):
        with pytest.raises(UserError, match=f"may be {positions + 1} tokens"):
            known(PROMPTS, positions, limits.at[i].add(1))
    for wrong in (0, 7, 2.5):
        with pytest.raises(UserError, match=f"limits are .*{wrong}.*; expected 3 numbers from 1 to 6"):
            known(PROMPTS, 6, jnp.array([1, wrong, 2]))


def test_limits_may_be_a_list_or_numpys_and_traced_ones_stay_in_range():
    settings = SamplingSettings(6, (), 0)

    def lengths(limits):
        return generate(MODEL, ADAPTER, PROMPTS, jax.random.key(0), settings, 2, limits_N=limits).lengths

    for known in ([1, 2, 6], np.array([1, 2, 6])):
        assert jax.jit(lambda known=known: lengths(known))().tolist() == [1, 1, 2, 2, 6, 6]
    assert jax.jit(lengths)(jnp.array([0, 3, 100])).tolist() == [1, 1, 3, 3, 6, 6]


@pytest.mark.parametrize("pad", [0, 7, 13])
def test_what_stands_in_prompt_padding_does_not_matter(pad):
    tokens = jnp.where(jnp.arange(5) < PROMPTS.lengths[:, None], PROMPTS.tokens, pad)
    np.testing.assert_array_equal(run(PROMPTS.replace(tokens=tokens)).tokens, default_run().tokens)


def test_kernel_weights_are_made_ready_before_the_loop_and_stay_packed():
    model = for_kernels(tiny_model(dtype=jnp.bfloat16))
    layers = [
        layer.replace(q_proj=layer.q_proj.replace(global_scale=jnp.float32(3.0), scale_multiplies=True))
        for layer in model.base.layers
    ]
    model = model.replace(base=model.base.replace(layers=tuple(layers)))
    ready, adapter = prepared(model, None, made(model, None))
    assert adapter is None
    for layer, clean in zip(ready.base.layers, layers, strict=True):
        assert layer.q_proj.tiles is clean.q_proj.tiles and not layer.q_proj.scale_multiplies
        assert layer.q_proj.global_scale == jnp.float32(1) / jnp.float32(3)
        assert layer.k_proj == clean.k_proj
        assert clean.q_bias.dtype == jnp.bfloat16 and layer.q_bias.dtype == jnp.float32
        np.testing.assert_array_equal(layer.q_bias, clean.q_bias)


def test_ranks_are_padded_for_the_kernels_before_the_loop():
    plain = tiny_model(dtype=jnp.bfloat16)
    adapter = tiny_adapter(plain)  # of rank 4
    for model, rank in ((plain, 4), (for_kernels(plain), 16)):
        _, ready = prepared(model, adapter, made(model, adapter))
        for before, after in zip(adapter.lora, ready.lora, strict=True):
            for name, pair in before.items():
                a, b = (np.asarray(part, np.float32) for part in (after[name].a, after[name].b))
                assert after[name].scaling == pair.scaling and a.shape[0] == b.shape[1] == rank
                np.testing.assert_array_equal(a[:4], pair.a.astype(jnp.bfloat16).astype(jnp.float32))
                np.testing.assert_array_equal(b[:, :4], pair.b.astype(jnp.bfloat16).astype(jnp.float32))
                assert not a[4:].any() and not b[:, 4:].any()


def test_only_new_arrays_are_made():
    """What goes through a jitted function unchanged comes out as a copy."""
    model = tiny_model(dtype=jnp.bfloat16)
    of = model, init_adapter(jax.random.key(0), model, 4, 8.0)
    assert len(jax.tree.leaves(made(*of))) == 2 * 7 * 3  # weights, A and B of two layers
    assert jax.tree.leaves(made(*prepared(*of, made(*of)))) == []
    packed = for_kernels(tiny_model(dtype=jnp.bfloat16))
    biases = sum(layer.q_bias.size + layer.k_bias.size + layer.v_bias.size for layer in packed.base.layers)
    assert sum(leaf.size for leaf in jax.tree.leaves(made(packed, None))) == biases
