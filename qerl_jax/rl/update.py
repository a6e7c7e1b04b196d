"""One optimizer step from a batch of scored completions.

The loss is a function of the whole optimizer batch's log-probabilities [B, C], while the network runs in micro-batches,
packs of rows (see `packs`), and accumulation equals the full batch for every loss. A configured loss is a sum over
tokens, with weights that depend on the batch's mask alone. They are all that a pack has to know of the others, so each
pack goes through the network once, forward and back. Any other function may normalise or clip across rows, and a
configured loss with a top_entropy_quantile below 1 chooses tokens by all entropies. Where the batch may be several
packs, a first pass then collects log-probabilities (and entropies), the gradient with respect to all of them is taken
at once, and a second pass carries it back.

An update has two halves: `gather_gradients` goes through the network, `apply_gradients` takes the optimizer's step. A
run compiles each as a program of its own, side by side: that of both takes longer than the two after one another.

Dimension letters: B rows of the optimizer batch, groups of G completions, P prompt slots, C completion slots, N rows of
a pack.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from qerl_jax.errors import UserError, check_kind
from qerl_jax.models.packed_rows import frames_of
from qerl_jax.models.packs import Body, in_packs, put
from qerl_jax.models.params import Adapter, Model
from qerl_jax.rl.advantages import AdvantageFn, advantages_of, group_advantages
from qerl_jax.rl.correction import correction_weights, gap_metrics
from qerl_jax.rl.logprobs import completion_logps, longest_row
from qerl_jax.rl.losses import LossFn, Metrics, high_entropy, policy_loss, token_weights
from qerl_jax.rl.state import Batch, TrainState, UpdateSettings
from qerl_jax.tracing import is_traced

# In float16 the cotangents inside a layer are float16 too, which has numbers from 2^-24 to 65504, and those of a mean
# over 10^4 tokens are below. A backward pass is linear: so the largest of a micro-batch's begins in [2^k, 2^(k + 1)),
# by a power of two that adds no rounding and no state. With 10^4 tokens gradients are equally near to float32's, 7
# times nearer than bfloat16's, for k from -4 to 8 in networks of 2 layers, and with 2,000 from 4 to 14 in one of 12.
# Above, the adapter's own gradients overflow, sums over tokens that plain products round to 16 bits (up to 163 times
# the largest |dlogp|); below, lower layers' cotangents vanish. 4 leaves room for gradients 12 times as large: what
# overflows is refused, while what underflows loses bits one by one.
_LARGEST_DLOGP = 4
_NUMBERS = jax.Array | np.ndarray | np.generic | float | int
_OF_TOKENS = ("mask", "sampled_logps", "old_logps", "ref_logps")
# Prompt tokens and lengths, completion tokens and lengths: what a pass through the network needs of a batch.
Rows = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
# What the loss needs of them besides: sampled, old and reference log-probabilities, advantages [B, 1] or [B, C], mask,
# and whether the policy is still that of the rollout [B, 1].
Constants = tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array, jax.Array, jax.Array]


class Given(NamedTuple):
    """What packs are given of an optimizer batch: rows [B, ...], of which each takes its own.

    known [B, C] is what a pack has to know of the whole batch: the weights of its tokens, or the loss's gradient with
    respect to its log-probabilities; None where one pack is the whole batch, in the batch's order.
    """

    rows: Rows
    constants: Constants
    known: jax.Array | None


class Gathered(NamedTuple):
    """What packs gather: the sum of the adapter's gradients, log-probabilities and entropies [B, C]."""

    grads: Adapter
    logps_BC: jax.Array
    entropies_BC: jax.Array


def _in_packs(body: Body, carry: Any, rows: Any, batch: Batch, settings: UpdateSettings) -> Any:
    lengths_B = batch.prompt_lengths + batch.completion_lengths
    longest = longest_row(batch.prompt.shape[1], batch.completion.shape[1])
    B = lengths_B.shape[0]
    slots = min(settings.micro_batch_size, B) * longest
    return in_packs(body, carry, rows, lengths_B, slots=slots, frames=frames_of(B, slots, longest))


def _learner(
    model: Model, adapter: Adapter | None, rows: Rows, live_N: jax.Array, settings: UpdateSettings
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies [N, C] of a pack's rows, those that are `live`."""
    prompt, prompt_lengths, completion, completion_lengths = rows
    return completion_logps(
        model,
        adapter,
        prompt,
        jnp.where(live_N, prompt_lengths, 0),
        completion,
        jnp.where(live_N, completion_lengths, 0),
        settings.temperature,
        settings.gradient_checkpointing,
        min(settings.micro_batch_size, live_N.shape[0]),
    )


def _carried_back(backward: Callable[[jax.Array], tuple[Adapter]], dlogp: jax.Array, dtype: jnp.dtype) -> Adapter:
    """The adapter's gradient from that of the log-probabilities, in a network that computes in `dtype`."""
    if dtype != jnp.float16:
        return backward(dlogp)[0]
    # By its bits, since 2^n is not exact on every device. Of 0, infinity and NaN it is finite: they stay what they are.
    exponent = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(dlogp)), jnp.int32) >> 23
    exponent = jnp.clip(254 + _LARGEST_DLOGP - exponent, 1, 253)
    scale, inverse = (jax.lax.bitcast_convert_type(e << 23, jnp.float32) for e in (exponent, 254 - exponent))
    return jax.tree.map(lambda leaf: leaf * inverse, backward(dlogp * scale)[0])


def score(model: Model, adapter: Adapter | None, batch: Batch, settings: UpdateSettings) -> jax.Array:
    """Log-probabilities [B, C] of the batch's completions under (model, adapter), without gradient."""
    (logps_BC,) = _first_pass(model, adapter, _of_arrays(batch), settings, 1)
    return logps_BC


def _first_pass(
    model: Model, adapter: Adapter | None, batch: Batch, settings: UpdateSettings, parts: int
) -> tuple[jax.Array, ...]:
    """Log-probabilities and, where 2 `parts` are wanted, entropies [B, C], without gradient."""
    # A bare loop would be compiled in every call, and its program kept.
    run = _scored if is_traced((model, adapter, batch)) else _scored_program
    found: tuple[jax.Array, ...] = run(model, adapter, batch, settings, parts)
    return found


def _scored(
    model: Model, adapter: Adapter | None, batch: Batch, settings: UpdateSettings, parts: int
) -> tuple[jax.Array, ...]:
    B = batch.completion.shape[0]

    def run(found: tuple[jax.Array, ...], rows: Rows, places: jax.Array) -> Any:
        return put(found, places, _learner(model, adapter, rows, places < B, settings)[:parts])

    zeros = (jnp.zeros(batch.completion.shape, jnp.float32),) * parts
    found: tuple[jax.Array, ...] = _in_packs(run, zeros, _rows(batch), batch, settings)
    return found


_scored_program = jax.jit(_scored, static_argnames=("settings", "parts"))


def _of_arrays(batch: Batch) -> Batch:
    """The batch with arrays of JAX in the place of NumPy's, and of lists."""
    return jax.tree.map(jnp.asarray, batch, is_leaf=lambda leaf: isinstance(leaf, list))


def _rows(batch: Batch) -> Rows:
    return batch.prompt, batch.prompt_lengths, batch.completion, batch.completion_lengths


def update_step(
    state: TrainState,
    model: Model,
    batch: Batch,
    *,
    optimizer: optax.GradientTransformation,
    settings: UpdateSettings,
    loss_fn: LossFn | None = None,
    advantage_fn: AdvantageFn | None = None,
) -> tuple[TrainState, Metrics]:
    """One optimizer step; pure, so jit it with `donate_argnums=0`, or vmap it.

    Args:
      state: see `TrainState`.
      model: the frozen network.
      batch: B rows, a multiple of num_generations, of which each as many in a row are a group; one whose rows are to be
        shuffled is given its advantages before. Whatever the loss, all updates but the first after the rollout need
        old_logps, which `with_policies` adds, or settings.old_logprobs `sampler`, also a loss that looks at neither.
      optimizer: any optax transformation over the adapter that goes by gradients and parameters alone. One whose update
        asks for more, as `reduce_on_plateau` does for the loss, has to be wrapped by you.
      settings: static choices.
      loss_fn: `(logp, old_logp, ref_logp, advantages, mask) -> (loss, metrics)` over the whole batch, all [B, C];
        ref_logp is None where the batch has none (`with_policies` adds it). The default is `settings.loss`. Where
        micro_batch_size is less than B, a function of your own costs one forward pass more, as does the default with
        a top_entropy_quantile below 1.
      advantage_fn: rewards [N, G] -> advantages [N, G] or, for each token, [N, G, C]; for a batch that brings no
        advantages. The default is `group_advantages`, of two completions and more.

    Returns:
      The next state and scalar metrics. If the loss, a gradient, what the optimizer makes of it or a recorded
      log-probability is not finite, the state comes back unchanged and metrics["nonfinite"] is 1. The same happens
      where old_logps are needed and missing, in a batch of another step than the state's: then the loss and
      "sampling/sampling_logp_difference/mean" are NaN.

    Raises:
      ValueError: the batch cannot be cut into groups, has parts that are not of its rows, or brings advantages beside
        `advantage_fn`; a function of yours returns something else than it should.
      TypeError: arguments of another kind, or in another order.
    """
    check_kind("settings", settings, UpdateSettings, " (`StepSettings.update`)")
    check_kind("state", state, TrainState, " (`init_state` gives one)")
    check_kind("model", model, Model, " (`load_model` gives one)")
    check_kind("batch", batch, Batch, " (`make_batch` gives one)")
    batch = _of_arrays(batch)
    constants = _constants(state, batch, settings, advantage_fn)
    gathered = _gathered(state.adapter, model, batch, constants, settings, loss_fn)
    return _applied(state, constants, gathered, optimizer, settings, loss_fn)


def gather_gradients(
    state: TrainState, model: Model, batch: Batch, *, settings: UpdateSettings, loss_fn: LossFn | None = None
) -> Gathered:
    """The half of `update_step` that goes through the network; the arguments are its."""
    batch = _of_arrays(batch)
    return _gathered(state.adapter, model, batch, _constants(state, batch, settings, None), settings, loss_fn)


def apply_gradients(
    state: TrainState,
    batch: Batch,
    gathered: Gathered,
    *,
    optimizer: optax.GradientTransformation,
    settings: UpdateSettings,
    loss_fn: LossFn | None = None,
) -> tuple[TrainState, Metrics]:
    """The other half: the next state and metrics, from what `gather_gradients` gave for this state and batch."""
    constants = _constants(state, _of_arrays(batch), settings, None)
    return _applied(state, constants, gathered, optimizer, settings, loss_fn)


def _constants(
    state: TrainState, batch: Batch, settings: UpdateSettings, advantage_fn: AdvantageFn | None
) -> Constants:
    """What the loss needs of a batch besides log-probabilities of the policy itself, checked."""
    B, G = batch.completion.shape[0], settings.num_generations
    if B < 1 or B % G:
        raise ValueError(f"a batch has {B} completions; allowed: a multiple of num_generations {G}, and not 0")
    of_rows, of_tokens = (B,), batch.completion.shape
    for name in ("prompt_lengths", "completion_lengths", "rewards", "advantages", *_OF_TOKENS):
        value, allowed = getattr(batch, name), [of_tokens if name in _OF_TOKENS else of_rows]
        allowed += [of_tokens] if name == "advantages" else []
        if value is not None and jnp.shape(value) not in allowed:
            expected = " or ".join(map(str, allowed))
            raise ValueError(f"the batch's {name} have the shape {jnp.shape(value)}; expected {expected}")
    if batch.prompt.ndim != 2 or len(batch.prompt) != B:
        raise ValueError(f"the batch's prompt has the shape {batch.prompt.shape}; expected a row for each of {B}")
    if not (batch.mask.dtype == bool or jnp.issubdtype(batch.mask.dtype, jnp.integer)):
        raise ValueError(
            f"the batch's mask is {batch.mask.dtype}; expected bool: tokens that count (advantages [B, C] weigh them)"
        )
    mask_BC = batch.mask.astype(bool) & (jnp.arange(of_tokens[1]) < batch.completion_lengths[:, None])
    if jnp.shape(batch.rollout_step) not in ((), of_rows):
        found = jnp.shape(batch.rollout_step)
        raise ValueError(f"the batch's rollout_step has the shape {found}; expected (), or {of_rows} of each row")
    on_policy_B1 = jnp.broadcast_to(jnp.reshape(state.step == batch.rollout_step, (-1, 1)), (B, 1))
    if batch.advantages is not None and advantage_fn is not None:
        raise ValueError("the batch has advantages; advantage_fn is for a batch whose advantages are None")
    advantages = batch.advantages
    if advantages is None:
        advantages = advantages_of(advantage_fn or group_advantages, batch.rewards.reshape(-1, G), of_tokens[1])
    # Where no token counts an advantage may be anything, as a log-probability may, and 0 * NaN is NaN.
    if advantages.ndim == 1:
        advantages = jnp.where(mask_BC.any(1), advantages, 0.0)[:, None]
    else:
        advantages = jnp.where(mask_BC, advantages, 0.0)
    return batch.sampled_logps, batch.old_logps, batch.ref_logps, advantages, mask_BC, on_policy_B1


def _gathered(
    adapter: Adapter,
    model: Model,
    batch: Batch,
    constants: Constants,
    settings: UpdateSettings,
    loss_fn: LossFn | None,
) -> Gathered:
    known, entropies = None, []
    if not _looks_across(settings, loss_fn):
        *_, mask_BC, _ = constants
        known = token_weights(mask_BC, settings.loss.loss_type)
    elif settings.micro_batch_size < len(batch.completion):
        logps, *entropies = _first_pass(model, adapter, batch, settings, 2 if loss_fn is None else 1)
        known = _gradient(logps, constants, settings, _of_whole(settings, loss_fn, constants, *entropies))

    def accumulate(gathered: Gathered, part: Given, places: jax.Array) -> Gathered:
        return _accumulated(gathered, adapter, model, part, places, settings, loss_fn)

    zeros_BC = jnp.zeros(batch.completion.shape, jnp.float32)
    gathered = Gathered(jax.tree.map(jnp.zeros_like, adapter), zeros_BC, zeros_BC)
    gathered = _in_packs(accumulate, gathered, Given(_rows(batch), constants, known), batch, settings)
    # Those by which tokens were chosen: others may differ in their last bits, and choose others.
    return gathered._replace(entropies_BC=entropies[0]) if entropies else gathered


def _accumulated(
    gathered: Gathered,
    adapter: Adapter,
    model: Model,
    part: Given,
    places: jax.Array,
    settings: UpdateSettings,
    loss_fn: LossFn | None,
) -> Gathered:
    """What has been gathered with one more pack, which goes through the network once, forward and back.

    Args:
      part: the pack's rows [N, ...].
      places: [N], where they stand in the batch; B where there is none.
    """
    sampled, old, ref, advantages, mask, on_policy = part.constants
    live_N = places < gathered.logps_BC.shape[0]
    live_N1 = live_N[:, None]
    known = None if part.known is None else jnp.where(live_N1, part.known, 0)
    constants = sampled, old, ref, advantages, mask & live_N1, on_policy

    def learner(adapter: Adapter) -> tuple[jax.Array, jax.Array]:
        return _learner(model, adapter, part.rows, live_N, settings)

    logp, backward, entropy = jax.vjp(learner, adapter, has_aux=True)
    if not _looks_across(settings, loss_fn):
        dlogp = _gradient(logp, constants, settings, functools.partial(policy_loss, settings.loss, weights_BC=known))
    elif known is None:
        dlogp = _gradient(logp, constants, settings, _of_whole(settings, loss_fn, constants, entropy))
    else:
        dlogp = known
    grads = _carried_back(backward, dlogp, model.base.embed.dtype)
    found = put((gathered.logps_BC, gathered.entropies_BC), places, (logp, entropy))
    return Gathered(jax.tree.map(jnp.add, gathered.grads, grads), *found)


def _applied(
    state: TrainState,
    constants: Constants,
    gathered: Gathered,
    optimizer: optax.GradientTransformation,
    settings: UpdateSettings,
    loss_fn: LossFn | None,
) -> tuple[TrainState, Metrics]:
    """The optimizer's step, and the metrics of the whole batch."""
    grads, logp_BC, entropy_BC = gathered
    loss, metrics = _loss_of(logp_BC, constants, settings, _of_whole(settings, loss_fn, constants, entropy_BC))

    grad_norm = optax.tree.norm(grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.adapter)
    updated = TrainState(state.step + 1, optax.apply_updates(state.adapter, updates), opt_state)
    # A token drawn from logits that are not numbers has been recorded with NaN, whatever the learner makes of it.
    sampled_BC, *_, mask_BC, _ = constants
    drawn = jnp.isfinite(sampled_BC) | ~mask_BC
    sound = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(updates)]).all()
    # One number: else XLA makes it of those of all arrays again in each array's kernel.
    finite = jax.lax.optimization_barrier(jnp.isfinite(loss) & jnp.isfinite(grad_norm) & sound & drawn.all())
    state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)
    active = jnp.maximum(jnp.sum(mask_BC, dtype=entropy_BC.dtype), 1)
    own = {
        "loss": loss,
        "grad_norm": grad_norm,
        "entropy": jnp.where(mask_BC, entropy_BC, 0.0).sum() / active,
        "nonfinite": (~finite).astype(jnp.int32),
    }
    return state, joined_metrics(own, metrics)


def _looks_across(settings: UpdateSettings, loss_fn: LossFn | None) -> bool:
    """Whether the loss of a pack depends on more of the others than the mask."""
    return loss_fn is not None or settings.loss.top_entropy_quantile < 1


def _of_whole(
    settings: UpdateSettings, loss_fn: LossFn | None, constants: Constants, entropy_BC: jax.Array | None = None
) -> LossFn:
    """The loss as a function of the whole batch, of whose entropies a configured one chooses tokens."""
    if loss_fn is not None:
        return loss_fn
    chosen_BC, quantile = None, settings.loss.top_entropy_quantile
    if quantile < 1:
        assert entropy_BC is not None
        *_, mask_BC, _ = constants
        chosen_BC = high_entropy(entropy_BC, mask_BC, quantile)
    return functools.partial(policy_loss, settings.loss, chosen_BC=chosen_BC)


def joined_metrics[T](one: dict[str, T], other: dict[str, T], whose: str = "the update") -> dict[str, T]:
    """Two dictionaries of metrics as one. A name in both is one that a loss of the user's gave, and is refused."""
    if taken := one.keys() & other.keys():
        raise UserError(f"loss_fn gave metrics whose names {whose} has itself: {', '.join(sorted(taken))}")
    return one | other


def _loss_of(
    logp: jax.Array, constants: Constants, settings: UpdateSettings, loss_fn: LossFn
) -> tuple[jax.Array, Metrics]:
    """The loss of rows with these log-probabilities, and its metrics."""
    sampled, old, ref, advantages, mask, on_policy = constants
    now = jax.lax.stop_gradient(logp)
    # The first update of a rollout is on-policy: the ratio is exactly 1, not 1 up to rounding.
    learner = now if old is None else jnp.where(on_policy, now, old)
    of_rollout = on_policy.all() if old is None else True  # whether `learner` is the policy of the rollout
    old = sampled if settings.old_logprobs == "sampler" else learner
    weights, metrics = correction_weights(settings.correction, old, sampled, mask)
    loss, loss_metrics = _checked(loss_fn(logp, old, ref, advantages * weights, mask))
    # A later update must know the old policy: with the present one instead the ratio would be 1, and never clipped.
    loss = loss if settings.old_logprobs == "sampler" else jnp.where(of_rollout, loss, jnp.nan)
    gap = {name: jnp.where(of_rollout, value, jnp.nan) for name, value in gap_metrics(learner, sampled, mask).items()}
    return loss, joined_metrics(gap | metrics, loss_metrics)


def _checked(given_back: Any) -> tuple[jax.Array, Metrics]:
    """What a loss function gave, if it is what one gives."""
    match given_back:
        case (loss, Mapping() as metrics) if isinstance(loss, jax.Array | float):
            if jnp.shape(loss) == () and jnp.issubdtype(jnp.result_type(loss), jnp.floating):
                for name, value in metrics.items():
                    if not isinstance(name, str) or not isinstance(value, _NUMBERS):
                        kind = type(value).__name__
                        raise ValueError(f"loss_fn gave the metric {name!r}, a {kind}; expected a text, and numbers")
                return jnp.asarray(loss), dict(metrics)
    parts = given_back if isinstance(given_back, tuple) else (given_back,)
    kinds = [f"{part.dtype}{list(part.shape)}" if hasattr(part, "dtype") else type(part).__name__ for part in parts]
    raise ValueError(
        f"loss_fn gave {', '.join(kinds)}; expected two: the loss, a real scalar, and a dictionary of metrics"
    )


def _gradient(logp: jax.Array, constants: Constants, settings: UpdateSettings, loss_fn: LossFn) -> jax.Array:
    return jax.grad(_loss_of, has_aux=True)(logp, constants, settings, loss_fn)[0]
