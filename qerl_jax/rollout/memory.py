"""How many samples fit in memory: planned before anything is allocated.

A slot and a row of the prompt pool cost a known number of bytes; what the weights and the work beside them need is
taken off the device's limit first. The figures of the work are upper estimates of XLA's temporaries, not counts.

The activations of an update are not taken off: they and the slots never live at the same time. A rollout leaves its
tokens and log-probabilities behind and nothing else, so an update has what weights, adapter and optimizer leave free,
and the next rollout has the same again.
"""

import bisect
import dataclasses
import functools
from typing import Any

import jax

from pallas_kernels import joins_gate_and_up, lora_inside
from qerl_jax.errors import UserError
from qerl_jax.formats import KernelNVFP4
from qerl_jax.models.attention import by_cudnn
from qerl_jax.models.config import MLP
from qerl_jax.models.linear import fewest_rows
from qerl_jax.models.params import Adapter, Model
from qerl_jax.models.transformer import lora_of
from qerl_jax.rollout.attention import cache_dtypes, has_kernel
from qerl_jax.rollout.decode import CHUNK_TOKENS, PACK_TOKENS, pack_of
from qerl_jax.rollout.prepared import made
from qerl_jax.rollout.sampling import SamplingSettings

_SHARE = 0.9  # of the device's limit; the rest is for fragmentation and what is not counted
_CPU_BYTES = 4 * 10**9  # for slots and pool on a CPU, unless another limit is given


@dataclasses.dataclass(frozen=True)
class Plan:
    """Slots to use and rows of the pool, the bytes of one of each, and the budget for them; and the bytes of what else
    a rollout makes: what it makes ready (see `prepared`), and a prefill's activations."""

    slots: int
    rows: int
    slot_bytes: int
    row_bytes: int
    budget: int
    made: int

    @property
    def allocated(self) -> int:
        """Slots to allocate, see `allocated_for`."""
        return allocated_for(self.slots)

    @property
    def nbytes(self) -> int:
        """Of slots and pool, and of what else is made."""
        return self.allocated * self.slot_bytes + self.rows * self.row_bytes + self.made


def allocated_for(slots: int) -> int:
    """Slots that are computed where so many are used. On a CPU they are filled up to a multiple of four. For a few
    numbers that do not fill its vectors (3, 5, 6, 7, 11, 13, 14, 15), XLA computes a logarithm by another function, and
    here there is one for each slot: the last bits of log-probabilities would depend on the number of slots."""
    if jax.default_backend() != "cpu" or slots <= fewest_rows():
        return max(fewest_rows(), slots)
    return -(-slots // 4) * 4


def plan_slots(
    model: Model,
    settings: SamplingSettings,
    max_prompt_length: int,
    *,
    samples: int,
    prompts: int,
    max_slots: int | None = None,
    cache_bytes: int | None = None,
    adapter: Adapter | None = None,
    in_training: bool = True,
) -> Plan:
    """As many slots as there are samples, or as fit.

    The pool has a row for every prompt that can be at work at once, at most one for each slot, and half as many again
    for prompts that are prefilled ahead.

    Args:
      model: the network.
      settings: the completions' length and sampling.
      max_prompt_length: P, the width of the pool.
      samples, prompts: how many there are, 1 or more.
      max_slots: no more than these.
      cache_bytes: the bytes for slots and pool; None is what the device has beside this model and the adapter, or 4 GB
        on a CPU. Give a number where the device holds more.
      adapter: the policy's, which stays on the device.
      in_training: whether an optimizer's state for the adapter is there too.

    Raises:
      UserError: not even one slot fits, with the numbers.
    """
    config, itemsize = model.config, model.base.embed.dtype.itemsize
    C, P, V = settings.max_completion_length, max_prompt_length, config.vocab_size
    numbers = config.num_key_value_heads * config.head_dim
    dtypes = cache_dtypes(model, settings.kv_cache_dtype)
    layer = numbers * sum(dtype.itemsize for dtype in dtypes)
    position = config.num_hidden_layers * layer
    # Kept: the cache, and token and log-probabilities. At work: float32 logits four times over (scaled, truncated,
    # noise, their sum), and without a kernel one layer's copy of the slot's prompt, of a narrow cache of the whole
    # context, in the compute dtype; or, where the last samples move into at most half as many slots, one layer's copy
    # of those.
    copied = 0
    if not has_kernel(config, model.base.embed.dtype, *dtypes):
        copied = P if settings.kv_cache_dtype == "auto" else P + C
    slot_bytes = C * (position + 12) + max(16 * V + copied * 2 * numbers * itemsize, C * layer // 2)
    row_bytes = P * position + config.hidden_size * itemsize

    def rows(slots: int) -> int:
        # Simulated for 64 slots at 7B on an H200, one sample of each prompt and lengths ~ 1 / length^2 from 64 to 4096:
        # an eighth ahead gives 93% of the rate that as many ahead as slots give, a quarter 97%, a half 99%.
        return min(prompts, slots + slots // 2)

    def needed(slots: int) -> int:
        return allocated_for(slots) * slot_bytes + rows(slots) * row_bytes

    most = samples if max_slots is None else min(samples, max_slots)
    beside = _made_bytes(model, adapter) + _prefill_bytes(model, adapter, P, rows(most))
    # An optimizer keeps two numbers for each one of an adapter.
    kept = nbytes((model, [adapter] * (3 if in_training else 1)))
    budget = _device_bytes(kept + beside) if cache_bytes is None else cache_bytes
    slots = bisect.bisect_right(range(1, most + 1), budget, key=needed)
    if slots == 0:
        raise UserError(
            f"not one completion fits in memory: {C} tokens (max_completion_length) need {sized(slot_bytes)} and "
            f"a prompt of up to {P} tokens (max_prompt_length) {sized(row_bytes)}; {sized(max(0, budget))} "
            "are there for them. Shorten one of the lengths, or give the cache more memory (a run's is "
            "generation.kv_cache_gb)"
        )
    return Plan(slots, rows(slots), slot_bytes, row_bytes, budget, beside)


def _device_bytes(taken: int) -> int:
    """What the device has for slots and pool beside `taken`: not beside what else happens to be allocated, so that a
    run that is continued plans as before."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(_SHARE * stats["bytes_limit"]) - taken if "bytes_limit" in stats else _CPU_BYTES


def sized(count: int) -> str:
    """`40.0 GB`, `16.0 MB`, `4.9 kB` or `12 bytes`."""
    sizes = {"GB": 1e9, "MB": 1e6, "kB": 1e3}
    return next((f"{count / size:.1f} {unit}" for unit, size in sizes.items() if count >= size), f"{count} bytes")


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _made_bytes(model: Model, adapter: Adapter | None) -> int:
    """Of what `made` makes of them."""
    leaves, structure = jax.tree.flatten((model, adapter))
    return _made_of_shapes(structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))


@functools.lru_cache(maxsize=64)  # a trace takes 5 to 15 ms, in which a GPU waits for a rollout to begin
def _made_of_shapes(structure: Any, kinds: tuple[tuple[Any, ...], ...]) -> int:
    """`_made_bytes` of a pytree of arrays of these shapes and dtypes."""
    return nbytes(jax.eval_shape(made, *structure.unflatten(jax.ShapeDtypeStruct(*kind) for kind in kinds)))


def _prefill_bytes(model: Model, adapter: Adapter | None, max_prompt_length: int, prompts: int) -> int:
    """What `prefill` makes beside the pool. Prompts beyond those that go through the network at once add nothing.

    Fitted from above to what XLA says of compiled programs (tests/test_prefill_memory.py): for each token the residual
    stream, and the larger of what a layer's attention and its MLP hold at once; and, of a prompt that goes through them
    in chunks, what is kept of all its tokens between them.
    """
    config, dtype = model.config, model.base.embed.dtype
    P, size, D = max_prompt_length, dtype.itemsize, config.hidden_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    between = framed = 0
    if P > PACK_TOKENS:
        tokens = scored = CHUNK_TOKENS
        chunks = -(-P // tokens)
        positions = seen = chunks * tokens
        # Queries, keys and values; and what is attended, and a copy of the three of half the chunks, or by products
        # keys and values in their order.
        between = positions * (queries + 2 * keys)
        if by_cudnn(dtype):
            between += positions * queries + -(-chunks // 2) * tokens * (queries + 2 * keys)
        else:
            between += positions * 2 * keys
    else:
        # A program of fewer prompts than all that there are may have the larger pack.
        positions = tokens = P * min(prompts, -(-PACK_TOKENS // P))
        seen, scored = P, P * pack_of(prompts, P)[1].rows
        framed = 0 if scored == tokens else scored  # into which a pack is moved, unless it stands so
    # The stream's norm; queries in float32, as they are and rotated, or attended; keys and values twice.
    attention = tokens * (size * D + (4 + 2 * size) * queries + 2 * size * keys)
    scores = scored * seen * ((4 + size) * config.num_attention_heads + 2)  # with probabilities and their mask
    if by_cudnn(dtype):
        attention += framed * size * 2 * (queries + keys)
    elif framed:
        attention = max(attention, scores + size * (framed * (queries + 2 * keys) + tokens * 2 * keys))
    else:
        attention += scores
    # What is added to the stream, their sum and a norm; and what is between gate, up and down.
    inner, decoded = _inner_arrays(model, adapter, tokens)
    mlp = (8 + size) * D + size * inner * config.intermediate_size
    return positions * 4 * D + between * size + max(attention, tokens * mlp) + decoded


def _inner_arrays(model: Model, adapter: Adapter | None, tokens: int) -> tuple[int, int]:
    """Arrays of the MLP's inner width that are there at once, and the bytes of a packed weight that is decoded for its
    product.

    The arrays are SwiGLU's result and, without a kernel that makes it, gate and up too, and what adapters add to them.
    (On a GPU there is only one of them; but XLA joins some layers' matrices of keys and values with LoRA's A, which
    takes 225 MB in 7B, where the others make 310 here.)
    """
    gate, lora = model.base.layers[0].gate_proj, lora_of(adapter, 0)
    ranks = tuple(lora[name].a.shape[0] if name in lora else 0 for name in MLP[:2])
    F, D = gate.shape
    is_packed = isinstance(gate, KernelNVFP4)
    if is_packed and joins_gate_and_up() and lora_inside(tokens, D, (F, F), ranks):
        return 1, 0
    return 5 if any(ranks) else 3, is_packed * F * D * model.base.embed.dtype.itemsize
