"""A tree with leaves of every kind that checkpoints hold, and its comparison bit for bit."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

PROGRESS = {"cursor": 3, "names": ["a", "ü"], "sigma": 1e-05, "nested": {"x": None, "done": False}}


@flax.struct.dataclass
class Pair:
    a: jax.Array
    b: jax.Array | None
    scaling: float = flax.struct.field(pytree_node=False, default=2.0)


def make_tree(seed=0):
    """Like a TrainState: step, adapter of dataclasses in dictionaries in tuples, optimizer state."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    adapter = ({"q_proj": Pair(normal(4, 6), normal(8, 4))}, {"q_proj": Pair(normal(4, 6), None)})
    return {
        "step": jnp.int32(7 + seed),
        "adapter": adapter,
        "opt_state": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(adapter),
        "bits": jnp.asarray(rng.integers(0, 2**32, 5), jnp.uint32),
        "half": jnp.asarray(rng.normal(size=(3, 1)), jnp.bfloat16),
        "flag": jnp.array([True, False]),
        "nothing": None,
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "key": jax.random.split(jax.random.key(seed), 2),
    }


def raw(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()


def assert_same(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert type(leaf) is type(other) and leaf.dtype == other.dtype and raw(leaf) == raw(other)
