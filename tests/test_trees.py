"""The text of weights and of what is trained: short, and without a look at the arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tiny import tiny_adapter, tiny_model

import pallas_kernels
from qerl_jax.formats import KernelNVFP4
from qerl_jax.rl.state import init_state


def test_the_text_of_a_model_is_short_however_many_layers_it_has():
    two, nine = repr(tiny_model(layers=2)), repr(tiny_model(layers=9))
    assert two.startswith("Model(base=Base(embed=float32[61, 32], layers=[2 x Layer(input_norm=float32[32], ")
    assert "q_proj=NVFP4Weight(packed=uint8[32, 16], scale=float8_e4m3fn[32, 2], global_scale=float32[]" in two
    assert two.endswith("lm_head=None), config=" + repr(tiny_model(layers=2).config) + ")")
    assert "layers=[9 x Layer(" in nine and len(nine) == len(two) < 3000


def test_a_state_that_was_donated_has_a_text_and_so_has_one_without_arrays():
    state = init_state(tiny_adapter(tiny_model()), optax.adam(1e-3))
    said = repr(state)
    assert said.startswith("TrainState(step=int32[], adapter=Adapter(lora=[2 x {")
    assert "'q_proj': LoRA(a=float32[4, 32], b=float32[32, 4], scaling=2.0, rank_stabilised=False)" in said
    assert "ScaleByAdamState(count=int32[], mu=Adapter(" in said
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    assert repr(state) == said
    shapes = jax.tree.map(lambda leaf: leaf.shape, state)
    assert "LoRA(a=[4, 32], b=[32, 4]" in repr(shapes)
    traced = []
    jax.eval_shape(
        lambda tree: traced.append(repr(tree)), jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    )
    assert traced == [said]


def test_the_text_of_packed_weights_in_the_kernels_order():
    packed = np.random.default_rng(0).integers(0, 256, (32, 128), np.uint8)
    tiles = pallas_kernels.repack(jnp.asarray(packed), jnp.full((32, 16), 56, jnp.uint8))
    weight = KernelNVFP4(tiles, jnp.float32(1.0))
    said = "KernelWeight(n=32, k=256, dtype='bfloat16')"
    assert repr(tiles) == said and repr(weight).startswith(f"KernelNVFP4(tiles={said}, global_scale=float32[]")
