"""The table of formats: every one is loaded, applied, differentiated and told apart in the same way."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from folders import NVFP4, V5, packed_arrays, random_arrays, write_folder
from folders import assert_equal as assert_trees_equal
from tiny import tiny_model

from qerl_jax.errors import UserError
from qerl_jax.flax_modules import PackedLinear
from qerl_jax.formats import FORMATS, PACKED, dequantize, dequantized, format_of, repacked
from qerl_jax.models.fingerprint import fingerprint
from qerl_jax.models.init import quantize
from qerl_jax.models.linear import linear
from qerl_jax.models.loading import load_model
from qerl_jax.models.params import PROJECTIONS, LoRA
from qerl_jax.models.saving import save_model

KEYS = jax.random.split(jax.random.key(0), 4)
W = 0.1 * jax.random.normal(KEYS[0], (24, 64))
X = jax.random.normal(KEYS[1], (5, 64))
LORA = LoRA(jax.random.normal(KEYS[2], (4, 64)), jax.random.normal(KEYS[3], (24, 4)), 0.5)
# Relative error (RMS) of normally distributed weights: a uniform quantizer's step over sqrt(12), by block maximum.
ERROR = {"nvfp4": 0.10, "mxfp4": 0.14, "nf4": 0.10, "nf4_double_quant": 0.10}

packed_formats = pytest.mark.parametrize("name", PACKED)


def made(name, w=W):
    return PACKED[name].quantize(w, None)


def test_the_table_holds_every_named_format():
    assert (*PACKED, "bf16") == FORMATS
    assert format_of(W) == "bf16" and format_of(repacked(made("nvfp4"))) == "nvfp4"


@pytest.mark.parametrize(
    ("name", "fitting", "not_fitting"),
    [
        ("nvfp4", [(3, 16), (1, 48)], [(16, 24), (16, 8)]),
        ("mxfp4", [(3, 32), (1, 96)], [(32, 48), (32, 16)]),
        ("nf4", [(32, 2), (4, 48), (1, 64)], [(64, 3), (5, 48)]),
        ("nf4_double_quant", [(32, 2), (4, 48), (1, 64)], [(64, 3), (5, 48)]),
    ],
)
def test_what_fits_can_be_quantized_and_nothing_else(name, fitting, not_fitting):
    assert all(PACKED[name].fits(*shape) for shape in fitting)
    for shape in fitting:
        assert jax.eval_shape(lambda w: made(name, w), jnp.zeros(shape)).shape == shape
    assert not any(PACKED[name].fits(*shape) for shape in not_fitting)
    for shape in not_fitting:
        needs = re.escape(PACKED[name].needs.split(" needs ")[1])  # as those of a folder are told
        with pytest.raises(ValueError, match=rf"takes float32 or bfloat16 \[N, K\] with {needs}; got"):
            made(name, jnp.zeros(shape))


@packed_formats
def test_a_weight_knows_its_format_and_shape(name):
    weight = made(name)
    assert isinstance(weight, PACKED[name].weight) and format_of(weight) == name and weight.shape == (24, 64)


@packed_formats
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_are_near_and_rounded_once(name, dtype):
    weight = made(name)
    values = dequantize(weight, jnp.float32)
    assert 0.05 < float(jnp.linalg.norm(values - W) / jnp.linalg.norm(W)) < ERROR[name]
    np.testing.assert_array_equal(dequantize(weight, dtype), values.astype(dtype))


@packed_formats
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_whole_model_is_unpacked_by_one_program_a_weight(tmp_path, monkeypatch, name, dtype):
    weight, model = made(name), tiny_model(weight_format=name, dtype=dtype)
    assert np.array_equal(dequantized(weight, dtype), dequantize(weight, dtype))

    def traced(weight, dtype):
        assert isinstance(weight.packed, jax.core.Tracer)
        return unpack(weight, dtype)

    unpack = PACKED[name].dequantize
    monkeypatch.setitem(PACKED, name, PACKED[name]._replace(dequantize=traced))
    plain = quantize(model, "bf16")
    save_model(model, tmp_path / "plain")
    assert_trees_equal(load_model(tmp_path / "plain"), plain)
    if name == "nvfp4":
        save_model(model, tmp_path / "packed", weight_format=name)
        assert_trees_equal(load_model(tmp_path / "packed", "bf16"), plain)


@packed_formats
def test_under_jit_and_vmap(name):
    both = jnp.stack([W, 3 * W])
    weights = jax.jit(jax.vmap(PACKED[name].quantize, in_axes=(0, None)), static_argnums=1)(both, None)
    for i in range(2):
        expected = made(name, both[i])
        for a, b in zip(jax.tree.leaves(weights), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(np.asarray(a[i]), np.asarray(b))
    y = jax.jit(jax.vmap(lambda weight: linear(X, weight, LORA)))(weights)
    np.testing.assert_allclose(y[1], linear(X, made(name, both[1]), LORA), rtol=1e-5, atol=1e-4)


@packed_formats
def test_linear_and_its_gradients_are_those_of_the_dequantized_weight(name):
    weight = made(name)
    w = dequantize(weight, jnp.float32)

    def ours(x, lora):
        return jnp.sin(linear(x, weight, lora)).sum()

    def theirs(x, lora):
        return jnp.sin(x @ w.T + 0.5 * (x @ lora.a.T) @ lora.b.T).sum()

    for a, b in zip(
        jax.tree.leaves(jax.value_and_grad(ours, (0, 1))(X, LORA)),
        jax.tree.leaves(jax.value_and_grad(theirs, (0, 1))(X, LORA)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


@packed_formats
def test_as_a_flax_module(name):
    layer = PackedLinear(made(name), lora_r=4, lora_alpha=8, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(nnx.jit(layer)(X), X @ dequantize(made(name), jnp.float32).T, rtol=1e-5, atol=1e-5)


def assert_equal(layer, other):
    ours, theirs = ([getattr(part, name) for name in PROJECTIONS] for part in (layer, other))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@packed_formats
@pytest.mark.parametrize("source", [ml_dtypes.bfloat16, np.float16])  # float16 counts as float32
def test_loading_in_a_format_equals_loading_and_quantizing(tmp_path, name, source):
    arrays = random_arrays(source)
    if name == "mxfp4":  # its blocks are of 32 inputs, the folder's down_proj has 48
        arrays = {n: np.pad(a, [(0, 0), (0, 16)]) if "down_proj" in n else a for n, a in arrays.items()}
        arrays = {n: np.pad(a, [(0, 16), (0, 0)]) if "gate" in n or "up_proj" in n else a for n, a in arrays.items()}
    sizes = {"intermediate_size": 64 if name == "mxfp4" else 48}
    folder = write_folder(tmp_path, arrays, V5 | sizes)
    loaded, stored = load_model(folder, name), load_model(folder)
    again = quantize(stored, name)
    for layer, other in zip(loaded.base.layers, again.base.layers, strict=True):
        assert {format_of(getattr(layer, projection)) for projection in PROJECTIONS} == {name}
        assert_equal(layer, other)
    assert len({fingerprint(model) for model in (loaded, stored)}) == 2


def test_only_nvfp4_shares_a_scale():
    assert [name for name in PACKED if PACKED[name].shared_scale is not None] == ["nvfp4"]


def test_formats_have_fingerprints_of_their_own():
    assert len({fingerprint(load_model("builtin:quickstart", name, "float32")) for name in FORMATS}) == len(FORMATS)


@pytest.mark.parametrize(
    ("name", "intermediate", "message"),
    [
        ("mxfp4", 48, r"down_proj.weight: MXFP4 needs inputs in multiples of 32, found \[32, 48\]"),
        ("nf4", 49, r"gate_proj.weight: NF4 needs an even number of inputs and .* of 64, found \[49, 32\]"),
        ("nf4_double_quant", 49, r"gate_proj.weight: NF4 needs .* found \[49, 32\]"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path, name, intermediate, message):
    more = intermediate - 48
    arrays = {n: np.pad(a, [(0, 0), (0, more)]) if "down_proj" in n else a for n, a in random_arrays().items()}
    arrays = {n: np.pad(a, [(0, more), (0, 0)]) if "gate" in n or "up_proj" in n else a for n, a in arrays.items()}
    folder = write_folder(tmp_path, arrays, V5 | {"intermediate_size": intermediate})
    with pytest.raises(UserError, match=message):
        load_model(folder, name)
    with pytest.raises(UserError, match=message.replace(".weight", "")):
        quantize(load_model(folder), name)


@packed_formats
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_not_quantized(name, broken):
    plain = tiny_model(weight_format="bf16")
    first, second = plain.base.layers
    second = second.replace(k_proj=second.k_proj.at[1, 2].set(broken))
    model = plain.replace(base=plain.base.replace(layers=(first, second)))
    with pytest.raises(UserError, match=r"^layer 1: k_proj: expected finite weights, found NaN or infinity$"):
        quantize(model, name)
    assert np.array_equal(quantize(model, "bf16").base.layers[1].k_proj, second.k_proj, equal_nan=True)
    jax.eval_shape(lambda model: quantize(model, name), model)  # a trace knows no values


def test_a_stored_format_is_kept_or_unpacked_but_not_exchanged(tmp_path):
    folder = write_folder(tmp_path, packed_arrays(), V5 | {"quantization_config": NVFP4})
    with pytest.raises(UserError, match=r"'nf4', but .* holds nvfp4 weights, .*; allowed: nvfp4, bf16"):
        load_model(folder, "nf4")
