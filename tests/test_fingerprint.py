import jax
import pytest

from qerl_jax.models.fingerprint import fingerprint
from qerl_jax.models.loading import load_model


def test_the_shipped_policy_quantizes_to_the_same_bytes_on_every_backend():
    """The value is that of compressed-tensors' arithmetic in NumPy. A float64 quotient rounded to float32 and back by
    conversions alone gave 32 other code bytes on a GPU."""
    assert fingerprint(load_model("builtin:quickstart", "nvfp4", "float32")) == "bbc8f26552dfb285"


@pytest.mark.parametrize("leaf", [0, 1, -1])
def test_one_changed_bit_changes_it(leaf):
    model = load_model("builtin:quickstart", "nvfp4", "float32")
    leaves, tree = jax.tree.flatten(model)
    raw = leaves[leaf]
    flat = jax.lax.bitcast_convert_type(raw.reshape(-1), "uint8").reshape(-1)
    changed = flat.at[flat.size // 2].set(flat[flat.size // 2] ^ 1).reshape(-1, raw.dtype.itemsize)
    changed = changed[:, 0] if raw.dtype.itemsize == 1 else changed
    leaves[leaf] = jax.lax.bitcast_convert_type(changed, raw.dtype).reshape(raw.shape)
    assert fingerprint(jax.tree.unflatten(tree, leaves)) != fingerprint(model)
