"""How logits of this library and of the other programs are compared: float32, to 2e-5 of the largest one."""

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax import load_model, logits
from qerl_jax.formats import MXFP4Weight, NVFP4Weight, dequantize

IDS = np.arange(3, 33, dtype=np.int32).reshape(2, 15)
FAMILIES = ("qwen2", "qwen3", "llama")
RELATIVE = 2e-5


def our_logits(model, adapter=None):
    return np.asarray(logits(model, IDS, adapter=adapter))


def assert_logits(found, expected):
    assert found.shape == expected.shape and found.dtype == expected.dtype == np.float32
    span = np.abs(expected).max()
    assert span > 1  # logits of nothing would agree too
    np.testing.assert_allclose(found, expected, rtol=0, atol=RELATIVE * span)


def unpacked(folder):
    """A packed folder in float32, with its linear layers rounded to bfloat16, as compressed-tensors unpacks them."""
    return in_bfloat16(load_model(folder, dtype="float32"))


def in_bfloat16(model):
    """Packed weights unpacked into bfloat16, and held in float32."""

    def unpack(weight):
        return weight if isinstance(weight, jax.Array) else dequantize(weight, jnp.bfloat16).astype(jnp.float32)

    return jax.tree.map(unpack, model, is_leaf=lambda node: isinstance(node, (NVFP4Weight, MXFP4Weight)))


def rounded(model):
    """A plain model that went through bfloat16 but for its norm scales, as a merged folder has it."""

    def through(path, leaf):
        return leaf if "norm" in jax.tree_util.keystr(path) else leaf.astype(jnp.bfloat16).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(through, model)
