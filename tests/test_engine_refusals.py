"""What the engine refuses: requests, prompts, adapters, calls inside of a trace."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from tiny import CONFIG, tiny_adapter
from tiny_engine import ADAPTER, KEY, MODEL, SETTINGS, C, G, P, engine, requests, same, with_slots

from qerl_jax.errors import UserError
from qerl_jax.models.init import init_adapter, init_model
from qerl_jax.models.saving import merge_adapter
from qerl_jax.models.transformer import logits
from qerl_jax.rollout import Engine, Prompts, Request, SamplingSettings, generate

pytestmark = pytest.mark.usefixtures("compiled_for_users")

ONE_PROMPT = Prompts(jnp.ones((1, 4), jnp.int32), jnp.array([4]), jnp.arange(1))


def test_a_bad_request_is_named_and_the_others_run():
    good = requests()[0]
    bad = {
        1: (Request([]), "is empty"),
        2: (Request([20] * (P + 1)), f"has {P + 1} tokens; allowed: 1 to {P}"),
        3: (Request([20, CONFIG.vocab_size]), f"has the token id {CONFIG.vocab_size}; allowed: 0 to"),
        4: (Request([-1]), "has the token id -1"),
        5: (Request([20], n=0), "asks for 0 samples"),
        6: (Request([20], max_completion_length=C + 1), f"asks for {C + 1} tokens; allowed: 1 to the engine's {C}"),
        7: (Request("twenty"), "is 'twenty'; expected token ids"),
        8: (Request([20.0]), "is [20.0]; expected token ids"),
        9: (Request([20], place=2**31), "has the place 2147483648; allowed: an int32"),
        10: (Request([20, [21, 22]]), "is [20, [21, 22]]; expected token ids"),
        11: (Request([20], n="2"), "has n '2'; expected a whole number"),
        12: (Request([20], n=2.5), "has n 2.5; expected a whole number"),
        13: (Request([20], place=1.5), "has place 1.5; expected a whole number"),
        14: (Request([20], max_completion_length=True), "has max_completion_length True; expected a whole number"),
    }
    found = list(engine(max_slots=3).generate(ADAPTER, [good, *(request for request, _ in bad.values())], KEY))
    assert {done.request: done.error for done in found if done.error}.keys() == bad.keys()
    for done in found:
        if done.request in bad:
            assert done.finish_reason == "error" and bad[done.request][1] in done.error
        else:
            assert same(done, with_slots(3)[0, done.sample])
    assert len(found) == G + len(bad)
    with pytest.raises(ValueError, match=r"request 1 is \[5, 6\]; expected a Request"):
        list(engine(max_slots=3).generate(ADAPTER, [good, [5, 6]], KEY))


@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("wrong, message", [
    ({"lengths": jnp.array([3, 0, 2])}, r"prompts have 4 token slots, and lengths \[3, 0, 2\]; allowed: 1 to 4"),
    ({"lengths": jnp.array([3, 5, 2])}, r"prompts have 4 token slots, and lengths \[3, 5, 2\]"),
    ({"lengths": jnp.array([3, -1, 2])}, r"prompts have 4 token slots, and lengths \[3, -1, 2\]"),
    ({"places": jnp.arange(2)}, r"prompts have tokens \[3, 4\], lengths \[3\], places \[2\]; expected tokens"),
    ({"tokens": jnp.ones(4, jnp.int32)}, r"prompts have tokens \[4\], .*expected tokens \[N, P\]"),
    ({"tokens": jnp.full((3, 4), CONFIG.vocab_size)}, f"prompt 0 has the token id {CONFIG.vocab_size}; allowed: 0 to"),
    ({"tokens": [[5, 9], [7], [20]]}, "prompts have tokens .*, with rows filled up to one length"),
    ({"places": range(2**31 - 1, 2**31 + 2)}, "prompt 1 has the place 2147483648; allowed: an int32"),
    ({"tokens": jnp.ones((3, P + 1), jnp.int32)}, f"prompts have {P + 1} token slots; allowed: up to the engine's {P}"),
])  # fmt: skip
def test_a_rollout_of_bad_prompts_is_refused_whatever_way_it_would_go(most, wrong, message):
    good = Prompts(jnp.ones((3, 4), jnp.int32), jnp.array([3, 4, 2]), jnp.arange(3))
    with pytest.raises(ValueError, match=message):
        engine(max_slots=most).rollout(ADAPTER, good.replace(**wrong), KEY, G)


def test_a_rollout_of_no_prompts_is_refused_as_that():
    empty = Prompts(jnp.zeros((0, 4), jnp.int32), jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.int32))
    with pytest.raises(ValueError, match=r"prompts have tokens \[0, 4\], .*of one or more"):
        Engine(MODEL, SETTINGS, max_prompt_length=4).rollout(ADAPTER, empty, jax.random.key(0), num_generations=2)


@pytest.mark.parametrize("change", [lambda layers: layers[:1], lambda layers: layers * 2])
def test_an_adapter_of_another_depth_is_named(change):
    other = ADAPTER.replace(lora=change(ADAPTER.lora))
    tokens = jnp.ones((1, 4), jnp.int32)
    match = f"the adapter has {len(other.lora)} layers, the model {len(ADAPTER.lora)}"
    with pytest.raises(ValueError, match=match):
        engine().rollout(other, Prompts(tokens, jnp.array([4]), jnp.arange(1)), KEY, 2)
    with pytest.raises(ValueError, match=match):
        logits(MODEL, tokens, adapter=other)


def other_width():
    config = dataclasses.replace(MODEL.config, hidden_size=64)
    return init_adapter(jax.random.key(0), init_model(jax.random.key(0), config), lora_r=4)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (
            other_width,
            r"its pair of layer 0's q_proj has A \[4, 64\] and B \[32, 4\]; expected \[rank, 32\] and \[32, rank\]",
        ),
        (lambda: jax.tree.map(lambda x: jnp.stack([x, x]), ADAPTER), "of adapters stacked by vmap take each alone"),
        (
            lambda: ADAPTER.replace(norms=jax.tree.map(lambda x: x[:1], tiny_adapter(MODEL, train_norms=True).norms)),
            r"its norm scales have the shapes \[\(1,\), .*; expected \(32,\) of each layer",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_named(other, match):
    tokens = jnp.ones((1, 4), jnp.int32)
    prompts = Prompts(tokens, jnp.array([4]), jnp.arange(1))
    for use in (
        lambda: engine().rollout(other(), prompts, KEY, 2),
        lambda: generate(MODEL, other(), prompts, KEY, SETTINGS),
        lambda: logits(MODEL, tokens, adapter=other()),
        lambda: merge_adapter(MODEL, other()),
    ):
        with pytest.raises(ValueError, match=match):
            use()


@pytest.mark.parametrize(
    "use",
    [
        lambda adapter, key: engine().rollout(adapter, ONE_PROMPT, key, 2),
        lambda adapter, key: list(engine().generate(adapter, requests(), key)),
    ],
)
def test_a_call_that_jax_traces_is_refused_and_what_is_no_adapter_is_named(use):
    match = r"cannot be called inside of jax.jit, .* or qerl_jax.generate inside"
    with pytest.raises(TypeError, match=match):
        jax.jit(use)(ADAPTER, KEY)
    with pytest.raises(TypeError, match=match):
        jax.vmap(lambda key: use(ADAPTER, key))(jax.random.split(KEY, 2))
    with pytest.raises(TypeError, match="adapter is of type Model; expected an Adapter"):
        use(MODEL, KEY)


def test_a_pair_of_no_projection_is_named():
    """Nothing would read it."""
    misspelt = ADAPTER.replace(lora=tuple({"qproj": layer["q_proj"]} for layer in ADAPTER.lora))
    with pytest.raises(
        ValueError, match=r"layer 0 .* a pair of 'qproj' \(did you mean 'q_proj'\?\); allowed: q_proj, "
    ):
        logits(MODEL, jnp.ones((1, 4), jnp.int32), adapter=misspelt)


def test_no_sequence_goes_beyond_the_networks_positions():
    """The tiny network has 128; what may end at the last one runs."""
    far = Engine(MODEL, SamplingSettings(125, (3,), 0), max_prompt_length=8)
    tokens, places = jnp.ones((1, 4), jnp.int32), jnp.arange(1)
    match = "prompt 0 has 4 tokens and may get 125 more; the network has 128 positions"
    with pytest.raises(ValueError, match=match):
        far.rollout(ADAPTER, Prompts(tokens, jnp.array([4]), places), KEY, 1)
    (refused,) = far.generate(ADAPTER, [Request([1] * 4)], KEY)
    assert match.removeprefix("prompt 0 ") in refused.error
    (done,) = far.generate(ADAPTER, [Request([1] * 4, max_completion_length=124)], KEY)
    assert done.error is None


def test_numbers_of_slots_bytes_and_steps_are_whole_and_begin_at_one():
    for slots in (0, 1.5, "2"):
        with pytest.raises(ValueError, match=f"max_slots is {slots!r}; allowed: 1 or more"):
            engine(max_slots=slots)
    assert engine(cache_bytes=4e9).cache_bytes == 4 * 10**9
    for size in ("4GB", 0, float("nan"), float("inf"), True):
        with pytest.raises(ValueError, match=f"cache_bytes is {size!r}; allowed: a number of bytes above 0, or"):
            engine(cache_bytes=size)
    for sizes in ((8, 0), (-1,), (2.5,)):
        with pytest.raises(ValueError, match=r"tail_sizes are \(.*; allowed: numbers of slots, each 1 or more"):
            engine(tail_sizes=sizes)
    with pytest.raises(ValueError, match="max_prompt_length is 0; allowed: 1 or more"):
        Engine(MODEL, SETTINGS, max_prompt_length=0)
    for every in (0, 1.5):
        with pytest.raises(ValueError, match=f"every is {every}; allowed: 1 or more"):
            list(engine().generate(ADAPTER, requests(), KEY, every=every))


def test_ids_beyond_the_vocabulary_are_refused_when_an_engine_is_made():
    with pytest.raises(UserError, match=r"eos_token_ids is \(3, 61\); allowed: ids below the vocabulary's 61"):
        engine(SamplingSettings(C, (3, CONFIG.vocab_size), 0))
