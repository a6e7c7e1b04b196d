"""One call of `Engine.generate`: a queue of samples that the device's slots take from, and what is made of their log.

Between chunks of decoding the host looks at the log, prefills prompts of samples that wait, as many as a program takes
together, and lengthens the queue. It does so before slots run empty, since the pool has rows for prompts ahead.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import is_whole
from qerl_jax.models.linear import fewest_rows
from qerl_jax.models.params import Adapter, Model, Norms
from qerl_jax.rollout.memory import Plan
from qerl_jax.rollout.programs import programs
from qerl_jax.rollout.queued import Log, Queue, freed
from qerl_jax.rollout.requests import Completion, Request, Statistics
from qerl_jax.rollout.sampling import SamplingSettings
from qerl_jax.rollout.tail import moved, worthwhile

_CHUNK = 256  # most steps between two looks at the host, so that Ctrl-C is heard
# Places of the queue for each slot. Simulated with what an H200 takes at 7B (a step of 64 slots 4 ms, a look 6, a
# prefill 14 and 23 for every 1,000 tokens), 8 samples of a prompt and lengths ~ 1 / length^2 from 8 to 64: 1 place has
# 96% of the rate of 16, 4 have 99%; with more, more prompts are prefilled before the first token.
_QUEUE = 4


@dataclasses.dataclass
class _Sample:
    """A sample that is ready or in a slot: whose it is, and what is drawn of it so far."""

    request: int
    index: int  # in its group
    limit: int
    # Tokens, log-probabilities and, where sampling is truncated, the renormalised ones; made with the first of them.
    kept: tuple[np.ndarray, ...] = ()
    length: int = 0


def _prompts_at_once(plan: Plan) -> int:
    """Prompts of a prefill. One size, so that one program is compiled: on a GPU what the pool holds ahead, since larger
    ones are faster. On a CPU they are not, and small ones have less padding."""
    ahead = plan.slots // (16 if jax.default_backend() == "cpu" else 2)
    return max(fewest_rows(), min(ahead, plan.rows))


def lowered_call(
    model: Model,
    adapter: Adapter | None,
    norms: Norms,
    settings: SamplingSettings,
    plan: Plan,
    max_prompt_length: int,
    key: jax.Array,
) -> Iterator[jax.stages.Lowered]:
    """The programs that an `EngineCall` begins with; arrays may be ShapeDtypeStructs."""
    sizes = {"rows": plan.rows, "max_prompt_length": max_prompt_length, "slots": plan.allocated, "used": plan.slots}
    empty = programs().empty_slots.lower(model, settings, key, **sizes)
    slots = empty.out_info
    size, places = _prompts_at_once(plan), _QUEUE * plan.slots
    arrays = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((size, max_prompt_length), (size,), (size,))]
    yield programs().admit.lower(slots, model, adapter, norms, *arrays)
    in_queue: Any = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in [(places,)] * 5 + [()]]
    queue = Queue(*in_queue)
    yield programs().decode_queue.lower(slots, queue, key, model, adapter, norms, _CHUNK, 1, settings, log_steps=_CHUNK)
    yield empty


class EngineCall:
    """One call of `Engine.generate`: what waits, what runs, and the device's state."""

    def __init__(
        self,
        model: Model,
        adapter: Adapter | None,
        norms: Norms,
        *,
        settings: SamplingSettings,
        plan: Plan,
        tail_sizes: Sequence[int],
        max_prompt_length: int,
        requests: dict[int, Request],
        key: jax.Array,
        until: Callable[[list[int]], int | None] | None,
        every: int | None,
        statistics: Statistics,
    ) -> None:
        """Model and adapter are `prepared`; the rest is the engine's and as in `Engine.generate`, with requests by
        number."""
        self.model, self.adapter, self.norms, self.settings, self.plan = model, adapter, norms, settings, plan
        self.max_prompt_length, self.requests, self.key = max_prompt_length, requests, key
        self.until, self.every, self.statistics = until, every, statistics
        self.tail_sizes, self.in_use = tail_sizes, plan.slots
        self.waiting = collections.deque(requests)  # requests whose prompts are not in the pool yet
        self.ready: collections.deque[int] = collections.deque()  # samples whose prompts are, by number, and no slot
        self.samples: dict[int, _Sample] = {}  # those that are ready or in a slot
        self.numbers = itertools.count()
        self.free_rows = list(range(plan.rows))
        self.row_of: dict[int, int] = {}
        self.unfinished = {r: request.n for r, request in requests.items()}
        self.slots = programs().empty_slots(
            model, settings, key, rows=plan.rows, max_prompt_length=max_prompt_length, slots=plan.allocated,
            used=plan.slots,
        )  # fmt: skip

    def run(self) -> Iterator[Completion]:
        """Yields completions until none waits or runs."""
        while self.waiting or self.samples:
            began = time.perf_counter()
            self._fill_queue()
            self._move_tail()
            completions = self._harvest(*self._decode())
            self.statistics.add(seconds=time.perf_counter() - began)
            yield from completions

    def _fill_queue(self) -> None:
        """Prefills prompts while the queue has places. A program runs with fewer prompts than it takes only with the
        last ones, or where no sample would be ready otherwise."""
        size = _prompts_at_once(self.plan)
        while self.waiting and len(self.ready) < _QUEUE * self.plan.slots:
            fit = min(len(self.waiting), len(self.free_rows), size)
            if fit == 0 or (self.ready and fit < min(len(self.waiting), size)):
                break
            self._admit([self.waiting.popleft() for _ in range(fit)], size)

    def _admit(self, numbers: list[int], size: int) -> None:
        """Prefills the prompts of requests in one program of `size` prompts; their samples are ready then."""
        tokens = np.full((size, self.max_prompt_length), self.settings.pad_token_id, np.int32)
        lengths, rows = np.ones(size, np.int32), self.plan.rows + np.arange(size, dtype=np.int32)
        for i, number in enumerate(numbers):
            request = self.requests[number]
            self.row_of[number] = rows[i] = self.free_rows.pop()
            tokens[i, : len(request.prompt)], lengths[i] = request.prompt, len(request.prompt)
            limit = request.max_completion_length or self.settings.max_completion_length
            for index in range(request.n):
                self.ready.append(next(self.numbers))
                self.samples[self.ready[-1]] = _Sample(number, index, limit)
        self.slots = programs().admit(self.slots, self.model, self.adapter, self.norms, tokens, lengths, rows)
        self.statistics.add(prompts=len(numbers), prefills=1)

    def _worthwhile(self) -> list[int]:
        """Numbers of slots that would be worth a move, see `qerl_jax.rollout.tail`, if none waited."""
        left = max(sample.limit - sample.length for sample in self.samples.values())
        return worthwhile(self.tail_sizes, self.in_use, left)

    def _move_tail(self) -> None:
        """Moves what is at work into fewer slots, if that is worth it and no more comes."""
        if self.waiting or len(self.samples) > max(self.tail_sizes, default=0):
            return
        fit = [size for size in self._worthwhile() if size >= len(self.samples)]
        if fit:
            self.in_use = min(fit)
            rows = np.argsort(-np.asarray(self.slots.samples_S), kind="stable")[: self.in_use]
            self.slots = moved(self.slots, rows, "prompt_hidden_RD")

    def _decode(self) -> tuple[Log, int]:
        """Runs a chunk; the log on the host, and the number of steps."""
        count = min(_QUEUE * self.plan.slots, len(self.ready))
        samples, rows, places, indices, limits = np.zeros((5, _QUEUE * self.plan.slots), np.int32)
        for i, number in enumerate(itertools.islice(self.ready, count)):
            sample = self.samples[number]
            place = self.requests[sample.request].place
            samples[i], rows[i] = number, self.row_of[sample.request]
            places[i] = sample.request if place is None else place
            indices[i], limits[i] = sample.index, sample.limit
        queue = Queue(*map(jnp.asarray, (samples, rows, places, indices, limits, np.int32(count))))
        more_wait = self.waiting or len(self.ready) > count
        stop_at = 1 if more_wait else self.in_use - max(self._worthwhile(), default=0)
        self.slots, *found = programs().decode_queue(
            self.slots, queue, self.key, self.model, self.adapter, self.norms, min(self.every or _CHUNK, _CHUNK),
            stop_at, self.settings, log_steps=_CHUNK,
        )  # fmt: skip
        log, steps, taken = jax.device_get(found)
        self.statistics.add(chunks=1, steps=int(steps), started=int(taken))
        for _ in range(taken):
            self.ready.popleft()
        return log, int(steps)

    def _harvest(self, log: Log, steps: int) -> list[Completion]:
        """Puts what was drawn to the samples. Returns those that have ended, whose slots are free now; with `every`,
        then those that go on."""
        numbers, *drawn = (part[:steps].T.reshape(-1) for part in jax.tree.leaves(log))  # slot after slot
        self.statistics.add(slot_steps=steps * self.in_use, drawn=int(np.sum(numbers >= 0)))
        borders = np.flatnonzero(np.diff(numbers)) + 1
        ended, going_on, stopped = [], [], np.zeros(log.samples_TS.shape[1], bool)
        for start, end in itertools.pairwise([0, *borders.tolist(), len(numbers)]):
            number = int(numbers[start])
            if number < 0:
                continue
            sample = self.samples[number]
            sample.kept = sample.kept or tuple(np.empty(sample.limit, part.dtype) for part in drawn)
            low, sample.length = sample.length, sample.length + end - start
            for kept, new in zip(sample.kept, drawn, strict=True):
                kept[low : sample.length] = new[start:end]
            last = int(sample.kept[0][sample.length - 1])
            over = last in self.settings.eos_token_ids or sample.length == sample.limit
            if not over and self.until is None and self.every is None:
                continue
            found = self._completion(sample, over)
            if found.finish_reason is None:
                going_on.append(found)
                continue
            ended.append(found)
            stopped[start // steps] = not over
            self._end(number, found)
        if stopped.any():
            self.slots = freed(self.slots, jnp.asarray(stopped))
        return ended + (going_on if self.every is not None else [])

    def _completion(self, sample: _Sample, over: bool) -> Completion:
        """The sample so far, `over` where the device has ended it."""
        length = sample.length
        ids = sample.kept[0][:length].tolist()
        reason = None if not over else "eos" if ids[-1] in self.settings.eos_token_ids else "length"
        stop = self.until(ids) if self.until is not None else None
        if stop is not None and not (is_whole(stop) and stop >= 0):
            raise ValueError(
                f"until says {stop!r:.60} of the first {length} tokens of sample {sample.index} of request "
                f"{sample.request}; allowed: the number of tokens with which it is over, a whole one >= 0, or None"
            )
        if stop is not None and stop <= length:
            length, ids, reason = stop, ids[:stop], "stop"
        _, logps, *truncated = (kept[:length].copy() for kept in sample.kept)  # which have room up to the limit
        return Completion(sample.request, sample.index, ids, logps, truncated[0] if truncated else None, reason)

    def _end(self, number: int, found: Completion) -> None:
        """Forgets a sample, and its prompt with the last one of its request."""
        del self.samples[number]
        self.statistics.add(tokens=len(found.ids), samples=1)
        self.unfinished[found.request] -= 1
        if self.unfinished[found.request] == 0:
            self.free_rows.append(self.row_of.pop(found.request))
