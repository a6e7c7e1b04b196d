"""The engine: what a sample may and may not depend on, and how full the slots are."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chi_squared import BOUND, exactly, pvalue
from tiny import CONFIG
from tiny_engine import ADAPTER, KEY, MODEL, SETTINGS, C, G, N, P, engine, finished, requests, same, with_slots

from qerl_jax.errors import UserError
from qerl_jax.models.loading import load_model
from qerl_jax.models.transformer import logits
from qerl_jax.rl.logprobs import completion_logps
from qerl_jax.rollout import Engine, Prompts, Request, SamplingSettings
from qerl_jax.rollout.decode import prefill

pytestmark = pytest.mark.usefixtures("compiled_for_users")

ORACLES = Path(__file__).parent / "oracles"
ENDLESS = ()  # no EOS


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name, done in found.items() if not same(done, expected[name])] == []


def test_all_samples_come_once_and_end_as_they_say():
    found = with_slots(3)
    assert found.keys() == {(n, g) for n in range(N) for g in range(G)}
    assert {done.finish_reason for done in found.values()} == {"eos", "length"}
    for (n, _), done in found.items():
        limit = requests()[n].max_completion_length or C
        ends = [i for i, token in enumerate(done.ids) if token in SETTINGS.eos_token_ids]
        assert len(done.logps) == len(done.ids) <= limit
        assert ends == [len(done.ids) - 1] if done.finish_reason == "eos" else (not ends and len(done.ids) == limit)


@pytest.mark.parametrize("slots", [1, 8])
def test_the_number_of_slots_changes_no_bit(slots):
    assert_same(with_slots(slots), with_slots(3))


def test_nor_with_top_p():
    """Which adds as many logarithms as there are slots."""

    def found(slots):
        nucleus = engine(dataclasses.replace(SETTINGS, top_p=0.8), max_slots=slots)
        return finished(nucleus.generate(ADAPTER, requests(), KEY))

    expected = found(8)
    for slots in (3, 6):
        assert_same(found(slots), expected)


def test_a_request_alone_changes_no_bit():
    alone = {
        (n, g): done
        for n, request in enumerate(requests())
        for (_, g), done in finished(engine(max_slots=3).generate(ADAPTER, [request], KEY)).items()
    }
    assert_same(alone, with_slots(3))


def test_doubles_that_are_enabled_change_no_bit():
    with jax.enable_x64(True):
        found = finished(engine(max_slots=3).generate(ADAPTER, requests(), KEY))
    assert_same(found, with_slots(3))


def test_order_of_requests_and_chunks_change_no_bit():
    order = [3, 0, 4, 2, 1]
    shuffled = [requests()[i] for i in order]
    found = finished(engine(max_slots=3).generate(ADAPTER, shuffled, KEY, every=2))
    assert_same({(order[n], g): done for (n, g), done in found.items()}, with_slots(3))


@functools.cache
def batch():
    """The requests' prompts as arrays."""
    tokens = np.zeros((N, P), np.int32)
    for row, request in zip(tokens, requests(), strict=True):
        row[: len(request.prompt)] = request.prompt
    lengths = np.array([len(request.prompt) for request in requests()], np.int32)
    return Prompts(jnp.asarray(tokens), jnp.asarray(lengths), jnp.arange(40, 40 + N))


@functools.cache
def rolled_out(slots=None):
    return engine(max_slots=slots).rollout(ADAPTER, batch(), KEY, G)


@functools.cache
def learned():
    """The learner's log-probabilities of the rollout's tokens."""
    out, rows = rolled_out(), (jnp.repeat(batch().tokens, G, 0), jnp.repeat(batch().lengths, G))
    return np.asarray(jax.jit(completion_logps)(MODEL, ADAPTER, *rows, out.tokens, out.lengths, 1.0)[0])


def drawn(out):
    """[N * G, C], where a token is a sampled one."""
    return np.arange(C) < np.asarray(out.lengths)[:, None]


@pytest.mark.parametrize("slots", [None, 3])
def test_all_at_once_in_one_program_and_slots_that_are_refilled_agree_with_the_learner(slots):
    out = rolled_out(slots)
    for a, b in zip(jax.tree.leaves(rolled_out()), jax.tree.leaves(out), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    for name in ("tokens", "lengths", "terminated"):
        np.testing.assert_array_equal(getattr(rolled_out(), name), getattr(out, name))
    np.testing.assert_allclose(np.asarray(out.logps)[drawn(out)], learned()[drawn(out)], atol=1e-4)
    assert not np.any(np.asarray(out.logps)[~drawn(out)])


def test_a_cache_of_8_bits_draws_nearly_the_learners_distribution_whatever_runs_beside():
    """In a network whose keys have no biases."""
    model = load_model(ORACLES / "qwen3_sharded", dtype="float32")
    settings = dataclasses.replace(SETTINGS, eos_token_ids=(3, 4, 10, 12, 50), kv_cache_dtype="fp8")
    at_once, refilled = (
        Engine(model, settings, max_prompt_length=P, max_slots=slots).rollout(None, batch(), KEY, G)
        for slots in (None, 3)
    )
    rows = jnp.repeat(batch().tokens, G, 0), jnp.repeat(batch().lengths, G)
    learners = jax.jit(completion_logps)(model, None, *rows, at_once.tokens, at_once.lengths, 1.0)[0]
    apart = np.abs(np.asarray(at_once.logps - learners))[drawn(at_once)]
    assert 1e-3 < apart.mean() < 0.1, "8 bits should be felt, and little"
    for name in ("tokens", "lengths", "terminated"):
        np.testing.assert_array_equal(getattr(refilled, name), getattr(at_once, name))
    np.testing.assert_allclose(refilled.logps, at_once.logps, atol=1e-5)


def test_8_bit_keys_are_refused_where_keys_have_biases():
    for use in (
        lambda runner: runner.plan(1, 1),
        lambda runner: runner.rollout(ADAPTER, batch(), KEY, G),
        lambda runner: list(runner.generate(ADAPTER, requests(), KEY)),
    ):
        with pytest.raises(UserError, match=r"kv_cache_dtype is fp8, and the keys of qwen2 have biases.* fp8_values"):
            use(engine(dataclasses.replace(SETTINGS, kv_cache_dtype="fp8")))


def test_log_probabilities_behind_prompts_prefilled_in_chunks_are_the_learners(monkeypatch):
    """Of four tokens, into slots that are refilled; in a pool of a width of its own, so that it is traced anew."""
    chunks = functools.partial(prefill, tokens_at_once=4)
    monkeypatch.setattr("qerl_jax.rollout.queued.prefill", chunks)
    wider = Engine(MODEL, SETTINGS, max_prompt_length=P + 1, max_slots=3)
    found = finished(wider.generate(ADAPTER, requests(), KEY))
    assert found.keys() == with_slots(3).keys()
    for name, done in found.items():
        assert done.ids == with_slots(3)[name].ids
        row = name[0] * G + name[1]
        np.testing.assert_allclose(done.logps, learned()[row, : len(done.ids)], atol=1e-4)


def test_prompts_in_a_pack_change_no_bit_of_each_other(monkeypatch):
    """Of which one as long as the pool is wide fills it, or several shorter ones."""
    width = P + 2  # as above
    monkeypatch.setattr("qerl_jax.rollout.queued.prefill", functools.partial(prefill, tokens_at_once=width))
    wider = Engine(MODEL, SETTINGS, max_prompt_length=width, max_slots=3)
    together = finished(wider.generate(ADAPTER, requests(), KEY))
    for n, request in enumerate(requests()):
        found = finished(wider.generate(ADAPTER, [request], KEY))
        assert_same({(n, g): done for (_, g), done in found.items()}, {(n, g): together[n, g] for g in range(G)})
    assert {name: done.ids for name, done in together.items()} == {k: done.ids for k, done in with_slots(3).items()}


@pytest.mark.parametrize("slots", [None, 3])
def test_a_rollouts_limits_are_those_of_its_prompts(slots):
    limits = [1, 7, C, 2, 3]
    whole, out = rolled_out(slots), engine(max_slots=slots).rollout(ADAPTER, batch(), KEY, G, limits=limits)
    expected = np.minimum(whole.lengths, np.repeat(limits, G))
    np.testing.assert_array_equal(out.lengths, expected)
    np.testing.assert_array_equal(out.tokens, np.where(drawn(out), whole.tokens, SETTINGS.pad_token_id))
    np.testing.assert_array_equal(out.terminated, np.asarray(whole.terminated) & (expected == whole.lengths))
    for limits in ([1], [0] * N, [C + 1] * N):
        with pytest.raises(ValueError, match=f"expected {N} numbers from 1 to {C}"):
            engine(max_slots=slots).rollout(ADAPTER, batch(), KEY, G, limits=limits)


@pytest.mark.parametrize("slots", [None, 3])
def test_a_rollouts_prompts_may_be_lists(slots):
    lists = Prompts(batch().tokens.tolist(), batch().lengths.tolist(), range(40, 40 + N))
    out = engine(max_slots=slots).rollout(ADAPTER, lists, KEY, G)
    np.testing.assert_array_equal(out.tokens, rolled_out(slots).tokens)


@pytest.mark.parametrize("slots", [None, 3])
def test_a_rollout_leaves_no_cache_behind(slots):
    """So that an update has the memory it took."""
    rolled_out(slots)
    before = {id(array) for array in jax.live_arrays()}
    engine(max_slots=slots).rollout(ADAPTER, batch(), KEY, G)
    assert not [array.shape for array in jax.live_arrays() if id(array) not in before and array.ndim > 2]


def test_a_completion_that_is_kept_keeps_no_array_as_long_as_its_limit():
    settings = dataclasses.replace(SETTINGS, top_p=0.9)
    for done in engine(settings, max_slots=3).generate(ADAPTER, requests(), KEY):
        assert done.logps.base is None and done.truncated_logps.base is None


def test_progress_shows_beginnings_of_what_comes():
    last = {}
    for done in engine(max_slots=3).generate(ADAPTER, requests(), KEY, every=2):
        name = done.request, done.sample
        before = last.get(name, [])
        assert done.ids[: len(before)] == before
        last[name] = done.ids
    assert all(last[name] == done.ids for name, done in with_slots(3).items())


def test_until_ends_a_sample_early_and_changes_no_other():
    target = next(name for name, done in with_slots(3).items() if len(done.ids) > 4)
    beginning = with_slots(3)[target].ids[:3]

    def until(ids):
        return 3 if ids[:3] == beginning else None

    found = finished(engine(max_slots=3).generate(ADAPTER, requests(), KEY, until=until, every=5))
    assert found[target].ids == beginning and found[target].finish_reason == "stop"
    np.testing.assert_array_equal(found[target].logps, with_slots(3)[target].logps[:3])
    for name, done in with_slots(3).items():
        if done.ids[:3] != beginning:
            assert same(found[name], done)


def test_progress_comes_only_where_it_is_asked_for():
    found = list(engine(max_slots=3).generate(ADAPTER, requests(), KEY, until=lambda ids: None))
    assert all(done.finish_reason is not None for done in found)
    assert_same(finished(found), with_slots(3))


def test_a_place_of_0_is_one_wherever_the_request_stands():
    request = Request([20, 21, 22], 1, 0)
    (alone,) = engine(max_slots=3).generate(ADAPTER, [request], KEY)
    behind = finished(engine(max_slots=3).generate(ADAPTER, [Request([20], 1, 7), request], KEY))
    assert same(behind[1, 0], alone)


def test_until_may_end_a_sample_with_its_last_token_or_with_none():
    """A stop string that the last allowed token completes."""
    (done,) = engine(max_slots=3).generate(ADAPTER, [Request([5, 9], 1, 0, 3)], KEY, until=lambda ids: 3)
    assert len(done.ids) == 3 and done.finish_reason == "stop"
    (done,) = engine(max_slots=3).generate(ADAPTER, [Request([5, 9], 1, 0, 3)], KEY, until=lambda ids: 0)
    assert done.ids == done.logps.tolist() == [] and done.finish_reason == "stop"


@pytest.mark.parametrize("told", [-1, True, 2.0, "3"])
def test_until_says_a_number_of_tokens(told):
    match = rf"until says {told!r} of the first \d+ tokens of sample \d of request \d; allowed: .* >= 0, or None"
    with pytest.raises(ValueError, match=match):
        list(engine(max_slots=3).generate(ADAPTER, requests(), KEY, until=lambda ids: told, every=5))


def test_what_comes_out_is_distributed_as_the_network_says():
    """First tokens, and pairs of the first two: from slots that are refilled, with an adapter, under three rules."""
    rules = {"temperature": 1.3, "top_p": 0.9, "min_p": 0.05}
    prompt, draws = [20, 21, 22], 4000
    many = engine(SamplingSettings(2, ENDLESS, 0, **rules), max_slots=500)
    pairs = np.array([done.ids for done in many.generate(ADAPTER, [Request(prompt, draws)], jax.random.key(0))])
    assert pairs.shape == (draws, 2) and many.statistics.steps == 2 * draws / 500
    V = CONFIG.vocab_size
    rows = jnp.concatenate([jnp.tile(jnp.array(prompt), (V, 1)), jnp.arange(V)[:, None]], axis=1)
    scores = np.asarray(jax.jit(logits)(MODEL, rows, adapter=ADAPTER), np.float64)
    first = exactly(scores[0, 2], **rules)
    both = first[:, None] * np.stack([exactly(row, **rules) for row in scores[:, 3]])
    assert pvalue(pairs[:, 0], first) > BOUND
    assert pvalue(pairs[:, 0] * V + pairs[:, 1], both.reshape(-1)) > BOUND
    hotter = {**rules, "temperature": 1.3 * 1.1}
    wrong = first[:, None] * np.stack([exactly(row, **hotter) for row in scores[:, 3]])
    assert pvalue(pairs[:, 0] * V + pairs[:, 1], wrong.reshape(-1)) < BOUND


@pytest.mark.parametrize("name", ["qwen2_untied", "qwen3_yarn", "llama3"])
def test_greedy_continuations_are_those_of_transformers(name):
    """By `oracles/transformers_logits.py`; three prompts in two slots."""
    stored = np.load(ORACLES / "transformers_logits.npz")
    ids, mask = (stored[f"{name}/right_{part}"] for part in ("ids", "mask"))
    network = load_model(ORACLES / name, dtype="float32")
    settings = SamplingSettings(16, ENDLESS, 0, temperature=0.0)
    greedy = Engine(network, settings, max_prompt_length=ids.shape[1], max_slots=2)
    prompts = [Request(row[: live.sum()].tolist()) for row, live in zip(ids, mask, strict=True)]
    found = finished(greedy.generate(None, prompts, KEY))
    assert [found[n, 0].ids for n in range(3)] == stored[f"{name}/greedy"].tolist()


def test_slots_stay_full_when_lengths_have_a_long_tail():
    """Lengths of 64 to 4096 by an eighth, most of them short, in 8 slots, as long as there are some that wait."""
    random = np.random.default_rng(1)
    lengths = np.clip(8 * (1 - random.random(120)) ** -1.0, 8, 512).astype(int)
    assert np.median(lengths) < 20 and (lengths > 100).sum() >= 5
    model = MODEL.replace(config=dataclasses.replace(CONFIG, max_position_embeddings=1024))
    many = Engine(model, SamplingSettings(512, ENDLESS, 0), max_prompt_length=P, max_slots=8)
    waiting = [Request([20, 21], 1, i, int(length)) for i, length in enumerate(lengths)]
    found = {}
    for done in many.generate(ADAPTER, waiting, KEY):
        found[done.request] = len(done.ids)
        if many.statistics.started < len(waiting):
            busy = dataclasses.replace(many.statistics)
    assert [found[i] for i in range(len(waiting))] == lengths.tolist()
    counts = many.statistics
    assert counts.drawn == counts.tokens == lengths.sum() and counts.samples == counts.started == len(waiting)
    assert busy.occupancy >= 0.97 and busy.started > 100, busy
    # In waves of 8, each as long as its longest, it would be this much less.
    waves = sum(lengths[low : low + 8].max() for low in range(0, len(lengths), 8))
    assert lengths.sum() / (8 * waves) < 0.5


def test_slots_are_filled_again_between_two_looks_at_the_host():
    """Twenty samples of 3 tokens in two slots, and so a queue of 8."""
    short = engine(SamplingSettings(C, ENDLESS, 0), max_slots=2)
    assert len(list(short.generate(ADAPTER, [Request([20, 21], 20, 7, 3)], KEY))) == 20
    assert (short.statistics.steps, short.statistics.chunks, short.statistics.occupancy) == (30, 3, 1)


def test_a_prompt_is_prefilled_once_for_all_its_samples():
    one = engine(max_slots=3)
    assert len(list(one.generate(ADAPTER, requests(), KEY))) == N * G
    assert one.statistics.prompts == N and one.statistics.started == N * G
    assert one.statistics.prefills == 3  # two at once is the least on a CPU


def test_prompts_are_prefilled_as_many_at_once_as_a_program_takes():
    """A sixteenth of the slots."""
    many = engine(SamplingSettings(C, ENDLESS, 0), max_slots=64)
    waiting = [Request([20, 21], 1, i, 1 + i % C) for i in range(257)]
    assert len(list(many.generate(ADAPTER, waiting, KEY))) == len(waiting)
    assert many.statistics.prompts == len(waiting)
    assert many.statistics.prefills == 256 // 4 + 1


def test_a_key_of_the_older_kind_draws_the_same_and_is_the_callers_still():
    older = jax.random.key_data(KEY)
    for _ in range(2):
        found = list(engine(max_slots=3).generate(ADAPTER, requests(), older))
        assert all(same(done, with_slots(3)[done.request, done.sample]) for done in found)


@pytest.mark.parametrize("slots", [None, 8])
@pytest.mark.parametrize("key", [KEY, jax.random.key(5, impl="rbg"), jax.random.PRNGKey(5)])
def test_programs_compiled_ahead_are_those_that_a_rollout_of_any_key_calls(key, slots):
    whole = engine(max_slots=slots)
    prompts = Prompts(jnp.ones((3, P), jnp.int32), jnp.array([3, 4, 2]), jnp.arange(3))
    assert len(list(whole.lowered(ADAPTER, 3, key, G))) >= 2
    out = whole.rollout(ADAPTER, prompts, key, G)
    again = engine(max_slots=3).rollout(ADAPTER, prompts, key, G)
    np.testing.assert_array_equal(out.tokens, again.tokens)
    with pytest.raises(ValueError, match="the key is 0; expected one PRNG key"):
        whole.rollout(ADAPTER, prompts, 0, G)


def test_more_samples_than_memory_run_in_turn():
    small = engine(cache_bytes=32_500)
    assert small.plan(N * G, N).slots == 3  # whose programs are there already
    assert_same(finished(small.generate(ADAPTER, requests(), KEY)), with_slots(3))


def test_a_rollout_is_planned_as_wide_as_its_prompts():
    """A prefill of narrower ones takes less of the cache and may take more beside it: more of them at once."""
    memory = engine().plan(N * G, N, ADAPTER).nbytes
    wide = Engine(MODEL, SETTINGS, max_prompt_length=8 * P, cache_bytes=memory)
    assert wide.plan(N * G, N, ADAPTER).slots < N * G
    np.testing.assert_array_equal(wide.rollout(ADAPTER, batch(), KEY, G).tokens, rolled_out().tokens)
    assert wide.statistics.prefills == 1
