"""`linears` where one kernel adds LoRA and biases: what is lowered for a GPU, and its numbers with the kernel's program
run in NumPy (see emulator.py)."""

import dataclasses

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from tiny import CONFIG

from pallas_kernels import compiling_for, fp4_matmul, stream_kernel, variants
from pallas_kernels.stream_plan import RESIDENT, make_plan
from qerl_jax.formats import dequantize, quantize_nvfp4, repacked
from qerl_jax.models.init import for_kernels, init_adapter, init_model, quantize
from qerl_jax.models.linear import linears
from qerl_jax.models.params import LoRA, norms_of
from qerl_jax.rollout.attention import KVCache, empty_kv
from qerl_jax.rollout.decode import decode_step


def _bf16(seed, *shape, scale=1.0):
    return scale * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


WEIGHTS = [quantize_nvfp4(_bf16(i, n, 512)) for i, n in enumerate((48, 16, 32))]
LORAS = [
    LoRA(jax.random.normal(jax.random.key(4), (32, 512)), 0.05 * jax.random.normal(jax.random.key(5), (48, 32)), 0.5),
    None,
    LoRA(jax.random.normal(jax.random.key(6), (8, 512)), 0.05 * jax.random.normal(jax.random.key(7), (32, 8)), 2.0),
]
BIASES = [_bf16(8, 48), _bf16(9, 16), None]


def lowered(f, *arguments):
    with compiling_for(90):
        # A function of its own: `jit` would return what it traced for another target or choice.
        return export.export(jax.jit(lambda *a: f(*a)), platforms=["cuda"])(*arguments).mlir_module()


def kernels(module):
    return module.count("stablehlo.custom_call @mosaic_gpu")


def dots(module):
    return module.count("stablehlo.dot_general")


@pytest.mark.parametrize("rows", [1, 16, 64, 65])
def test_few_rows_are_one_kernel_and_no_other_product(rows):
    module = lowered(linears, _bf16(0, rows, 512), [repacked(w) for w in WEIGHTS], LORAS, BIASES)
    assert (kernels(module), dots(module)) == (1, 0)
    assert "stablehlo.divide" not in module, "an operation on a scalar is a launch"
    assert f"tensor<{rows}x48xf32>" not in module, "the kernel rounds its sums"


def test_packed_weights_beside_plain_ones_have_a_kernel_each():
    """As q and v beside a plain k, which one product takes; the packed ones' adapters and biases are in the kernels."""
    weights = [repacked(WEIGHTS[0]), dequantize(WEIGHTS[1], jnp.bfloat16), repacked(WEIGHTS[2])]
    module = lowered(linears, _bf16(0, 16, 512), weights, LORAS, BIASES)
    assert (kernels(module), dots(module)) == (2, 1)


def test_weights_that_would_take_two_waves_with_adapters_are_multiplied_one_by_one():
    """Gate and up of Qwen2.5-32B at 64 rows: a kernel that both call, one that orders x, and no other product."""
    shape, (N, K) = jax.ShapeDtypeStruct, (27648, 5120)
    weight = jax.eval_shape(lambda w: repacked(quantize_nvfp4(w)), shape((N, K), jnp.bfloat16))
    lora = LoRA(shape((32, K), jnp.float32), shape((N, 32), jnp.float32), 0.5)
    module = lowered(linears, shape((64, K), jnp.bfloat16), [weight] * 2, [lora] * 2, [None] * 2)
    assert (kernels(module), dots(module)) == (2, 0)
    assert f"tensor<64x{N}xbf16>" in module and f"tensor<64x{2 * N}xbf16>" not in module


def test_gradients_are_one_kernel_for_all_weights():
    arguments = _bf16(0, 65, 512), [repacked(w) for w in WEIGHTS], LORAS, BIASES

    def loss(loras, x):
        return sum(y.astype(jnp.float32).sum() for y in linears(x, arguments[1], loras, BIASES))

    module = lowered(jax.value_and_grad(loss, argnums=(0, 1)), LORAS, arguments[0])
    assert kernels(module) == 1 + 1  # and the sum of dy W over them


def test_other_dtypes_and_devices_do_not_ask_the_kernel():
    weights, x = [repacked(w) for w in WEIGHTS], _bf16(0, 4, 512)
    assert dots(lowered(linears, x.astype(jnp.float32), weights, LORAS, BIASES)) > 0
    with compiling_for(75):
        module = export.export(jax.jit(linears), platforms=["cuda"])(x, weights, LORAS, BIASES).mlir_module()
    assert kernels(module) == 0 and dots(module) > 0


def test_a_decode_step_has_four_kernels_a_layer_with_lora_inside_and_no_other_product():
    config = dataclasses.replace(CONFIG, head_dim=64, num_hidden_layers=1)

    def trees():
        model = for_kernels(quantize(init_model(jax.random.key(0), config, jnp.bfloat16), "nvfp4"))
        cache = KVCache(empty_kv(model, 2, 16), empty_kv(model, 4, 8), jnp.zeros(2, jnp.int32))
        return model, cache, init_adapter(jax.random.key(1), model, 32, 64.0)

    def step(model, cache, adapter, numbers_S):
        norms = norms_of(model, adapter)
        return decode_step(model, adapter, numbers_S, cache, numbers_S, numbers_S, numbers_S, norms, 2)

    with compiling_for(90):
        model, cache, adapter = jax.eval_shape(trees)
    numbers_S = jax.ShapeDtypeStruct((4,), jnp.int32)
    without, module = (lowered(step, model, cache, a, numbers_S) for a in (None, adapter))
    assert kernels(module) == kernels(without) == 5  # the fifth is attention's
    assert dots(module) == dots(without) == 0
    assert module.count("tensor<32x256xbf16>") > without.count("tensor<32x256xbf16>")  # A, padded, is an operand


@pytest.fixture
def emulated_kernel(monkeypatch):
    """Two multiprocessors, and the kernel's program run in NumPy. Yields the adapters' ranks of each call."""
    for cluster in RESIDENT:
        monkeypatch.setitem(RESIDENT, cluster, 2)
    variants.config_for.cache_clear()
    calls = []

    def build(m, k, n, config, has_bias=False, wide_out=False, ranks=(), dtype="bfloat16"):
        plan = make_plan(m, k, n, config, ranks)
        calls.append(ranks)
        shapes = [jax.ShapeDtypeStruct((m, n_i), jnp.float32 if wide_out else jnp.dtype(dtype)) for n_i in n]

        def run(x, *operands):
            left = [np.asarray(v) for v in operands]
            parts = [[left.pop(0) for _ in range(count)] for count in (len(n), len(n), len(n) if has_bias else 0)]
            return tuple(emulator.run(plan, np.asarray(x), *parts, left, wide_out=wide_out)[0])

        return lambda *operands: list(jax.pure_callback(run, tuple(shapes), *operands))

    monkeypatch.setattr(stream_kernel, "build", build)
    with compiling_for(90):
        yield calls
    variants.config_for.cache_clear()


def test_float32_results_are_the_sums_before_they_are_rounded(emulated_kernel):
    x, weight = _bf16(3, 5, 512), repacked(WEIGHTS[0])
    y = fp4_matmul(x, weight.tiles, weight.divisor, out_dtype=jnp.float32)
    x64, w = np.asarray(x, np.float64), np.asarray(dequantize(weight, jnp.float32), np.float64)
    assert y.dtype == jnp.float32 and (np.abs(y - x64 @ w.T) <= 1e-5 * (np.abs(x64) @ np.abs(w).T)).all()


def test_the_values_are_the_plain_paths(emulated_kernel):
    x = _bf16(3, 5, 512)
    ours = linears(x, [repacked(w) for w in WEIGHTS], LORAS, BIASES)
    assert emulated_kernel == [(32, 0, 16)]
    for y, weight, lora, bias in zip(ours, WEIGHTS, LORAS, BIASES, strict=True):
        x64, w = np.asarray(x, np.float64), np.asarray(dequantize(weight, jnp.float32), np.float64)
        true, bound = x64 @ w.T, 1e-5 * (np.abs(x64) @ np.abs(w).T)
        if lora is not None:
            a, b = (np.asarray(v.astype(jnp.bfloat16), np.float64) for v in (lora.a, lora.b))
            hidden = lora.scaling * x64 @ a.T  # rounded to bfloat16 between the products
            true, bound = true + hidden @ b.T, bound + 2.0**-8 * (np.abs(hidden) @ np.abs(b).T)
        if bias is not None:
            true += np.asarray(bias, np.float64)
        assert y.dtype == jnp.bfloat16
        assert (np.abs(np.asarray(y, np.float64) - true) <= bound + 2.0**-8 * np.abs(true)).all()
