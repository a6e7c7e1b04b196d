"""Completions for a batch of prompts: one prefill per prompt, then one jitted while loop over tokens.

A sample's randomness depends on the key, its prompt's place in the data order, its index in the group and the token's
position, never on the batch it stands in. Dimension letters: N prompts, G completions per prompt, P prompt slots,
C completion slots, B = N * G rows.
"""

import flax.struct
import jax
import jax.numpy as jnp

from qerl_jax.formats import KernelNVFP4, Weight, dequantize
from qerl_jax.models.params import PROJECTIONS, Adapter, Model, Norms, norms_of
from qerl_jax.models.transformer import head
from qerl_jax.rollout.attention import KVCache
from qerl_jax.rollout.decode import decode_step, prefill
from qerl_jax.rollout.sampling import SamplingSettings, sample


class Prompts(flax.struct.PyTreeNode):
    """Prompts padded on the right: tokens [N, P] int32, lengths [N] int32 (at least 1), and each prompt's place in the
    data order [N] int32, which is its identity for the random number generator."""

    tokens: jax.Array
    lengths: jax.Array
    places: jax.Array


class Rollout(flax.struct.PyTreeNode):
    """Completions of a batch, prompt-major: rows n * G .. n * G + G - 1 belong to prompt n.

    tokens [B, C] int32, padded after the end; lengths [B], the EOS included; terminated [B], whether an EOS was drawn;
    logps [B, C] float32, log_softmax(logits / temperature) over the full vocabulary, 0 after the end; truncated_logps,
    the same renormalised over the tokens that sampling allowed, None where it allowed all.
    """

    tokens: jax.Array
    lengths: jax.Array
    terminated: jax.Array
    logps: jax.Array
    truncated_logps: jax.Array | None


class _Decode(flax.struct.PyTreeNode):
    step: jax.Array
    hidden_BD: jax.Array
    cache: KVCache
    out: Rollout


def unpacked(model: Model) -> Model:
    """The model with its linear layers dequantized to its compute dtype: XLA does not fuse the decoding of 4-bit codes
    into its matmuls, so the plain path decodes them once before a loop instead of once a token. Weights in the kernels'
    layout stay packed: the kernels decode them on the way."""
    dtype = model.base.embed.dtype

    def plain(weight: Weight) -> Weight:
        return weight if isinstance(weight, KernelNVFP4) else dequantize(weight, dtype)

    layers = tuple(
        layer.replace(**{name: plain(getattr(layer, name)) for name in PROJECTIONS}) for layer in model.base.layers
    )
    return model.replace(base=model.base.replace(layers=layers))


def generate(
    model: Model,
    adapter: Adapter | None,
    prompts: Prompts,
    key: jax.Array,
    settings: SamplingSettings,
    num_generations: int = 1,
    norms: Norms | None = None,
) -> Rollout:
    """Samples `num_generations` completions for every prompt until all have ended.

    Args:
      model, adapter: the policy; adapter None is the base alone.
      prompts: see `Prompts`.
      key: PRNG key of this rollout.
      settings: lengths, EOS ids and sampling; static under jit.
      num_generations: G, static under jit.
      norms: norm scales to use instead of the clean ones (AQN).
    """
    N, G, C = prompts.tokens.shape[0], num_generations, settings.max_completion_length
    B = N * G
    model = unpacked(model)
    norms = norms_of(model, adapter) if norms is None else norms
    eos = jnp.asarray(settings.eos_token_ids, jnp.int32)
    place_keys_N = jax.vmap(lambda place: jax.random.fold_in(key, place))(prompts.places)
    keys_B = jax.vmap(lambda k: jax.vmap(lambda g: jax.random.fold_in(k, g))(jnp.arange(G)))(place_keys_N).reshape(B)

    def draw(state: _Decode) -> Rollout:
        """Samples token number `step` of every row from the hidden states and records it."""
        out, step = state.out, state.step
        step_keys_B = jax.vmap(lambda k: jax.random.fold_in(k, step))(keys_B)
        tokens_B, logps_B, truncated_B = sample(head(model, state.hidden_BD), step_keys_B, settings)
        live_B = ~out.terminated
        ended_B = live_B & jnp.isin(tokens_B, eos)

        def put(array_BC: jax.Array, values_B: jax.Array) -> jax.Array:
            return array_BC.at[:, step].set(jnp.where(live_B, values_B, array_BC[:, step]))

        truncated_logps = out.truncated_logps
        if truncated_logps is not None and truncated_B is not None:
            truncated_logps = put(truncated_logps, truncated_B)
        return Rollout(
            tokens=put(out.tokens, tokens_B),
            lengths=out.lengths + live_B,
            terminated=out.terminated | ended_B,
            logps=put(out.logps, logps_B),
            truncated_logps=truncated_logps,
        )

    def body(state: _Decode) -> _Decode:
        out, step = state.out, state.step
        fed_NG = out.tokens[:, step - 1].reshape(N, G)
        hidden_BD, cache = decode_step(model, adapter, fed_NG, state.cache, step - 1, norms)
        state = state.replace(hidden_BD=hidden_BD, cache=cache)
        return state.replace(out=draw(state), step=step + 1)

    last_ND, cache = prefill(model, adapter, prompts.tokens, prompts.lengths, G, C, norms)
    zeros_BC = jnp.zeros((B, C), jnp.float32)
    empty = Rollout(
        tokens=jnp.full((B, C), settings.pad_token_id, jnp.int32),
        lengths=jnp.zeros(B, jnp.int32),
        terminated=jnp.zeros(B, bool),
        logps=zeros_BC,
        truncated_logps=zeros_BC if settings.truncated else None,
    )
    state = _Decode(jnp.int32(0), jnp.repeat(last_ND, G, axis=0), cache, empty)
    state = state.replace(out=draw(state), step=jnp.int32(1))
    state = jax.lax.while_loop(lambda s: (s.step < C) & ~jnp.all(s.out.terminated), body, state)
    return state.out
