"""Completions for a batch of prompts as one pure function: all slots are filled at once, and decode until all ended.

A sample's randomness depends on the key, its prompt's place in the data order, its index in the group and the token's
position, never on the batch it stands in. Dimension letters: N prompts, G completions per prompt, P prompt slots,
C completion slots, B = N * G rows.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import UserError, is_whole
from qerl_jax.keys import check_key
from qerl_jax.models.params import Adapter, Model, Norms, check_kinds, check_norms, norms_of
from qerl_jax.rollout.batch import Prompts, Rollout, of_arrays
from qerl_jax.rollout.begun import begun
from qerl_jax.rollout.prepared import prepared
from qerl_jax.rollout.programs import programs
from qerl_jax.rollout.sampling import SamplingSettings
from qerl_jax.rollout.slots import decode
from qerl_jax.tracing import is_traced

Limits = jax.Array | np.ndarray | Sequence[int]


def generate(
    model: Model,
    adapter: Adapter | None,
    prompts: Prompts,
    key: jax.Array,
    settings: SamplingSettings,
    num_generations: int = 1,
    norms: Norms | None = None,
    limits_N: Limits | None = None,
) -> Rollout:
    """Samples `num_generations` completions for every prompt until all have ended.

    All of them decode at once; `Engine` takes more than the memory holds. To `jax.grad` completions and their recorded
    log-probabilities are constants, whatever they were drawn with.

    Args:
      model, adapter: the policy; adapter None is the base alone.
      prompts: see `Prompts`.
      key: PRNG key of this rollout.
      settings: lengths, EOS ids and sampling; static under jit.
      num_generations: G, static under jit.
      norms: norm scales to use instead of the clean ones (AQN).
      limits_N: most tokens of each prompt's completions, from 1 to settings.max_completion_length, which None is; those
        that are traced are brought into this range.

    Raises:
      UserError: an id in `settings`, or one of the prompts that is known, is beyond the vocabulary; prompts whose
        lengths or places are not one for each, lengths beyond the slots, or places that are no int32; num_generations
        below 1; wrong limits; or a prompt and its completion may be more tokens than the network has positions, where
        under jit prompts whose lengths are traced may fill all their slots.
      TypeError: not a Model and an Adapter, or no Norms. ValueError: no PRNG key, or norms of another network.
    """
    check_kinds(model, adapter)
    if norms is not None:
        check_norms(model, norms)
    check_key(key)
    settings.check_ids(model.config.vocab_size)
    prompts = of_arrays(prompts)
    _check_prompts(model, prompts, num_generations)
    _check_positions(model, prompts, settings, limits_N)
    limits_N = None if limits_N is None else jnp.asarray(limits_N)
    if is_traced((model, adapter, prompts, key, norms, limits_N)):
        begin, finish = begun, decode
    else:  # a bare loop would be compiled in every call, and its program kept
        begin, finish = programs().begun, programs().finished
    # A while loop has no gradient, and JAX says so by an error of its inner parts.
    model, adapter, norms = jax.lax.stop_gradient((model, adapter, norms))
    slots, new = begin(model, adapter, prompts, key, settings, num_generations, norms, limits_N)
    model, adapter = prepared(model, adapter, new)
    norms = norms_of(model, adapter) if norms is None else norms
    C = settings.max_completion_length
    rollout: Rollout = finish(slots, model, adapter, norms, C, 0, settings, group=num_generations).out
    return rollout


def check_limits(limits_N: Limits, prompts: int, max_completion_length: int) -> None:
    """Raises UserError if these are not the most tokens of so many prompts' completions."""
    limits_N = np.asarray(limits_N)
    whole = limits_N.shape == (prompts,) and limits_N.dtype.kind in "iu"
    if not whole or not np.all((limits_N >= 1) & (limits_N <= max_completion_length)):
        raise UserError(f"limits are {limits_N.tolist()}; expected {prompts} numbers from 1 to {max_completion_length}")


def check_rows(prompts: Prompts) -> None:
    """Raises UserError for prompts that are none, whose parts are not one for each or are no whole numbers, or whose
    lengths, if known, are not from 1 to their slots."""
    parts = {"tokens": prompts.tokens, "lengths": prompts.lengths, "places": prompts.places}
    shapes = {name: part.shape for name, part in parts.items()}
    N, P = shapes["tokens"] if len(shapes["tokens"]) == 2 else (0, 0)
    if N < 1 or P < 1 or shapes["lengths"] != (N,) or shapes["places"] != (N,):
        found = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise UserError(f"prompts have {found}; expected tokens [N, P], lengths [N] and places [N], of one or more")
    for name, part in parts.items():
        if not jnp.issubdtype(part.dtype, jnp.integer):
            raise UserError(f"prompts have {name} of {part.dtype}; expected whole numbers")
    if isinstance(prompts.lengths, jax.core.Tracer):
        return
    lengths = np.asarray(prompts.lengths)
    if not np.all((lengths >= 1) & (lengths <= P)):
        raise UserError(f"prompts have {P} token slots, and lengths {lengths.tolist()}; allowed: 1 to {P}")


def _check_prompts(model: Model, prompts: Prompts, num_generations: int) -> None:
    """Raises UserError for prompts that `Prompts` does not allow, as far as they are known."""
    check_rows(prompts)
    if not is_whole(num_generations) or num_generations < 1:
        raise UserError(f"num_generations is {num_generations!r}; allowed: a whole number, 1 or more")
    if not any(isinstance(of, jax.core.Tracer) for of in (prompts.tokens, prompts.lengths)):
        strange = model.config.unknown_id(np.asarray(prompts.tokens), np.asarray(prompts.lengths))
        if strange is not None:
            raise UserError(f"prompts have the token id {strange}; allowed: 0 to {model.config.vocab_size - 1}")


def _check_positions(model: Model, prompts: Prompts, settings: SamplingSettings, limits_N: Limits | None) -> None:
    """Of what is traced the most that it can be."""
    P, C, positions = prompts.tokens.shape[1], settings.max_completion_length, model.config.positions
    lengths, most = (None if isinstance(known, jax.core.Tracer) else known for known in (prompts.lengths, limits_N))
    if most is not None:
        check_limits(most, len(prompts.tokens), C)
    longest = int(np.max(np.add(P if lengths is None else lengths, C if most is None else most), initial=0))
    if longest > positions:
        of = f"prompts of up to {P} tokens, their slots," if lengths is None else "a prompt"
        raise UserError(
            f"{of} and a completion may be {longest} tokens; the network has {positions} positions: lower "
            "max_completion_length or the limits, or give shorter prompts"
        )
