"""Random networks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG, tiny_model

from qerl_jax.errors import UserError
from qerl_jax.formats import repacked
from qerl_jax.models.init import all_finite, init_adapter, init_model
from qerl_jax.policy import load_policy


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_random_weights_have_no_mean_and_the_asked_deviation(dtype):
    base = init_model(jax.random.key(0), CONFIG, dtype, std=0.02).base
    for weight in (base.embed, base.layers[0].up_proj, base.layers[1].q_proj):
        assert weight.dtype == dtype
        w = np.asarray(weight, np.float64)
        assert abs(w.mean()) < 4 * 0.02 / w.size**0.5
        assert w.std() == pytest.approx(0.02, rel=0.05)
        assert np.abs(w).max() > 3 * 0.02


@pytest.mark.parametrize(
    ("dtype", "named"),
    [("flot32", "'flot32'"), (3.5, "3.5"), (jnp.int8, "int8"), ("float64", "float64"), (None, "None")],
)
def test_a_dtype_that_no_network_has(dtype, named):
    with pytest.raises(UserError, match=f"dtype is {named}; allowed: float32, bfloat16, float16"):
        init_model(jax.random.key(0), CONFIG, dtype=dtype)


def test_a_dtype_may_be_given_by_name():
    assert init_model(jax.random.key(0), CONFIG, dtype="bfloat16").base.embed.dtype == jnp.bfloat16


@pytest.mark.parametrize(("options", "message"), [
    ({"lora_r": 2.0}, "lora_r is 2.0; allowed: an int from 1 to 2147483647"),
    ({"lora_r": True}, "lora_r is True; allowed: an int from 1 to 2147483647"),
    ({"lora_r": 0}, "lora_r is 0; allowed: an int from 1 to 2147483647"),
    ({"lora_r": 10**400}, "lora_r is 10{59}; allowed: an int from 1 to 2147483647"),
    ({"lora_alpha": 0}, "lora_alpha is 0; allowed: a number above 0"),
    ({"lora_alpha": True}, "lora_alpha is True; allowed: a number above 0"),
    ({"lora_alpha": "16"}, "lora_alpha is '16'; allowed: a number above 0"),
    ({"lora_alpha": float("nan")}, "lora_alpha is nan; allowed: a number above 0, up to 1e.30"),
    ({"lora_alpha": 10**400}, "lora_alpha is 10{59}; allowed: a number above 0, up to 1e.30"),
])  # fmt: skip
def test_a_rank_or_an_alpha_that_trains_nothing_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        init_adapter(jax.random.key(0), tiny_model(), **options)


@pytest.mark.parametrize(
    ("key", "config", "error", "message"),
    [
        (0, CONFIG, ValueError, r"the key is 0; expected one PRNG key, as jax\.random\.key\(seed\) makes it"),
        (jax.random.split(jax.random.key(0)), CONFIG, ValueError, r"the key is .*; expected one PRNG key"),
        (CONFIG, jax.random.key(0), ValueError, r"the key is ModelConfig.*; expected one PRNG key"),
        (jax.random.key(0), "qwen2.5-7b", TypeError, r"config is of type str; expected a ModelConfig"),
    ],
)
def test_a_network_of_no_key_or_no_config_is_refused(key, config, error, message):
    with pytest.raises(error, match=message):
        init_model(key, config)


def test_an_adapter_of_no_key_or_no_model_is_refused():
    """At once and in a trace, where a key of either kind is taken."""
    key = jax.random.key(0)
    for init in (init_adapter, jax.jit(init_adapter)):
        for wrong in (0, jax.random.split(key, 2)):
            with pytest.raises(ValueError, match=r"the key is .*; expected one PRNG key, as jax\.random\.key\(seed\)"):
                init(wrong, tiny_model())
        with pytest.raises(TypeError, match=r"model is of type .*; expected a Model"):
            init(key, key)
        typed, words = init(key, tiny_model()), init(jax.random.PRNGKey(0), tiny_model())
        assert all(map(np.array_equal, jax.tree.leaves(typed), jax.tree.leaves(words)))


@pytest.mark.parametrize(("modules", "message"), [
    ("q_proj", r"target_modules is 'q_proj', one text; expected a list of names, such as \['q_proj'\]; allowed in it:"),
    (["q_prj"], r"target_modules holds 'q_prj'; allowed: q_proj, .*, down_proj \(did you mean 'q_proj'\?\)"),
    ([None], "target_modules holds None; allowed: q_proj, .*, down_proj$"),
    ([], "target_modules is empty; allowed: one projection or more"),
])  # fmt: skip
def test_modules_that_cannot_be_trained_are_refused_by_name(modules, message):
    with pytest.raises(UserError, match=f"^{message}"):
        init_adapter(jax.random.key(0), tiny_model(), target_modules=modules)


def test_loading_for_kernels_has_no_weights_twice(monkeypatch):
    before, held = {id(array): array for array in jax.live_arrays()}, []  # kept: ids of dead ones are given again

    def noted(weight, dtype):
        held.append(sum(x.nbytes for x in jax.live_arrays() if id(x) not in before and x.dtype == jnp.uint8))
        return repacked(weight, dtype)

    monkeypatch.setattr("pallas_kernels.has_kernels", lambda: True)
    monkeypatch.setattr("qerl_jax.models.init.repacked", noted)
    policy = load_policy("builtin:quickstart", "nvfp4", "bfloat16")
    last = policy.model.base.layers[-1].down_proj
    assert len(held) == 14 and held[-1] == last.shape[0] * last.shape[1] // 2  # all others have gone by then


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(dtype):
    largest = jnp.full((300, 70), jnp.finfo(dtype).max, dtype)
    assert all_finite(largest) and all_finite(-largest) and all_finite(largest[:0])
    for number in (jnp.nan, jnp.inf, -jnp.inf):
        assert not any(all_finite(largest.at[at].set(number)) for at in ((0, 0), (17, 3), (299, 69)))
