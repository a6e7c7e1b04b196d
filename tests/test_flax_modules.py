import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from qerl_jax.flax_modules import PackedLinear, PackedParam
from qerl_jax.formats import dequantize, quantize_nvfp4

W = jax.random.normal(jax.random.key(0), (24, 32))


class TwoLayers(nnx.Module):
    def __init__(self, rngs):
        self.first = PackedLinear(quantize_nvfp4(W), lora_r=4, lora_alpha=8, rngs=rngs)
        self.second = PackedLinear(quantize_nvfp4(W.T[:, :16].T.reshape(16, 32)), lora_r=4, lora_alpha=8, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.pad(self.first(x), ((0, 0), (0, 8))))


def test_starts_as_the_frozen_layer():
    layer = PackedLinear(quantize_nvfp4(W), lora_r=4, lora_alpha=8, bias=jnp.ones(24), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (5, 32))
    np.testing.assert_allclose(layer(x), x @ dequantize(quantize_nvfp4(W), jnp.float32).T + 1, rtol=1e-5, atol=1e-5)


def test_a_rank_below_one_is_refused():
    with pytest.raises(ValueError, match="lora_r is 0; allowed: an int from 1 to 2147483647"):
        PackedLinear(quantize_nvfp4(W), lora_r=0, lora_alpha=8, rngs=nnx.Rngs(0))


def test_trains_with_nnx_optimizer_and_leaves_the_base_alone():
    model = TwoLayers(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-2), wrt=nnx.LoRAParam)
    x = jax.random.normal(jax.random.key(1), (64, 32))
    y = jnp.sin(x[:, :16])
    frozen = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, PackedParam))]

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2), argnums=nnx.DiffState(0, nnx.LoRAParam))(
            model
        )
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(150)]
    assert losses[-1] < 0.6 * losses[0]
    for before, after in zip(frozen, jax.tree.leaves(nnx.state(model, PackedParam)), strict=True):
        np.testing.assert_array_equal(before, np.asarray(after))


def test_split_gives_the_two_trees():
    _, lora, frozen = nnx.split(TwoLayers(nnx.Rngs(0)), nnx.LoRAParam, PackedParam)
    assert len(jax.tree.leaves(lora)) == 4
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(frozen)} == {"uint8", "float8_e4m3fn", "float32"}
