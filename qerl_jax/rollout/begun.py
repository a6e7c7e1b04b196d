"""The first part of a rollout: all prompts prefilled, and of every completion its key and its first token.

Dimension letters: N prompts, G completions each, P prompt slots, C completion slots, B = N * G rows.
"""

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.keys import of_threefry
from qerl_jax.models.params import Adapter, Model, Norms, norms_of
from qerl_jax.rollout.attention import KVCache, empty_kv
from qerl_jax.rollout.batch import Prompts
from qerl_jax.rollout.decode import prefill
from qerl_jax.rollout.prepared import Made, made, prepared
from qerl_jax.rollout.sampling import SamplingSettings
from qerl_jax.rollout.slots import Slots, started


def sample_key(key: jax.Array, place: jax.Array, index: jax.Array) -> jax.Array:
    """The key of sample number `index` of the prompt at `place`; its tokens' keys are folded in by position."""
    return jax.random.fold_in(jax.random.fold_in(of_threefry(key), place), index)


def begun(
    model: Model,
    adapter: Adapter | None,
    prompts: Prompts,
    key: jax.Array,
    settings: SamplingSettings,
    num_generations: int,
    norms: Norms | None,
    limits_N: jax.Array | np.ndarray | None,
) -> tuple[Slots, Made]:
    """The first part of `generate`: slots with the prompts prefilled and every completion's first token drawn, and what
    was made ready for the network, which `decode` needs too."""
    (N, P), G, C = prompts.tokens.shape, num_generations, settings.max_completion_length
    B = N * G
    new = made(model, adapter)
    model, adapter = prepared(model, adapter, new)
    norms = norms_of(model, adapter) if norms is None else norms
    dtype = settings.kv_cache_dtype
    pool = jnp.zeros((N, model.config.hidden_size), model.base.embed.dtype), empty_kv(model, N, P, dtype)
    last_ND, layers = prefill(model, adapter, prompts.tokens, prompts.lengths, norms, pool, jnp.arange(N))
    lengths_N = jnp.copy(prompts.lengths)  # slots may be donated, and the prompts are the caller's
    cache = KVCache(layers, empty_kv(model, B, C, dtype), lengths_N)
    row_B, index_B = jnp.divmod(jnp.arange(B, dtype=jnp.int32), G)
    keys_B = jax.vmap(sample_key, (None, 0, 0))(key, jnp.asarray(prompts.places)[row_B], index_B)
    limits_N = jnp.full(N, C, jnp.int32) if limits_N is None else jnp.clip(jnp.asarray(limits_N, jnp.int32), 1, C)
    return started(model, last_ND, cache, row_B, keys_B, limits_N[row_B], settings), new
