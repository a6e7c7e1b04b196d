"""The engine: completions of any number of prompts, with the slots kept full.

A sample that ends makes room for one that waits, between chunks of decoding; a prompt is prefilled once, when its first
sample starts, and its row of the pool is free again when the last one has ended. What a sample is depends on the
weights, the key, its request and its number alone, whatever ran beside it.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.models.linear import fewest_rows
from qerl_jax.models.params import Adapter, Model, Norms, norms_of
from qerl_jax.rollout.attention import KVCache
from qerl_jax.rollout.batch import Prompts, Rollout
from qerl_jax.rollout.memory import Plan, plan_slots
from qerl_jax.rollout.prepared import prepared
from qerl_jax.rollout.programs import programs
from qerl_jax.rollout.sampling import SamplingSettings
from qerl_jax.rollout.slots import Slots, empty_completions, empty_pool, empty_slots

_CHUNK = 256  # steps between two looks at the host, so that Ctrl-C is heard
_REFILL = 16  # slots are refilled when one in so many has ended


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and what is wanted of it.

    Attributes:
      prompt: token ids.
      n: how many samples.
      place: its identity for the random number generator; None is its number among the requests.
      max_completion_length: most tokens of a sample; None is the engine's.
    """

    prompt: Sequence[int]
    n: int = 1
    place: int | None = None
    max_completion_length: int | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """A sample that has ended, or, where progress was asked for, what there is of it; or a request that was refused.

    Attributes:
      request, sample: the number of the request, and of the sample in it (0-based).
      ids: its tokens, the EOS included.
      logps: log_softmax(logits / temperature) of each over the full vocabulary, float32.
      truncated_logps: the same renormalised over the tokens that sampling allowed; None where it allowed all.
      finish_reason: "eos", "length", "stop" (see `Engine.generate`), "error", or None while it goes on.
      error: why the request was refused.
    """

    request: int
    sample: int
    ids: list[int]
    logps: np.ndarray
    truncated_logps: np.ndarray | None
    finish_reason: str | None
    error: str | None = None


@dataclasses.dataclass
class Statistics:
    """Counts of one engine since it was made. Occupancy is the share of slot-steps that drew a token that was kept."""

    steps: int = 0
    slot_steps: int = 0
    tokens: int = 0
    samples: int = 0
    fills: int = 0
    prompts: int = 0
    seconds: float = 0.0

    @property
    def occupancy(self) -> float:
        """Tokens drawn by decode steps over slots x steps; a sample's first token comes from its prompt."""
        return (self.tokens - self.samples) / max(1, self.slot_steps)

    @property
    def tokens_per_second(self) -> float:
        """Tokens over the seconds in `generate` and `rollout`, compilation included."""
        return self.tokens / max(1e-9, self.seconds)


class Engine:
    """Samples completions from one model with one choice of sampling settings.

    Args:
      model: the frozen network.
      settings: lengths, EOS ids and sampling.
      max_prompt_length: P, the most tokens of a prompt.
      max_slots: most samples that decode at once; None is as many as there are, or as fit in memory.
      cache_bytes: bytes for the keys and values; None is what the device has left, or 4 GB on a CPU.
    """

    def __init__(
        self,
        model: Model,
        settings: SamplingSettings,
        *,
        max_prompt_length: int,
        max_slots: int | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        self.model, self.settings, self.max_prompt_length = model, settings, max_prompt_length
        self.max_slots, self.cache_bytes = max_slots, cache_bytes
        self.statistics = Statistics()

    def plan(self, samples: int, prompts: int, adapter: Adapter | None = None) -> Plan:
        """Slots and pool rows for so many samples of so many prompts; raises UserError if not one slot fits."""
        return plan_slots(
            self.model,
            self.settings,
            self.max_prompt_length,
            samples=samples,
            prompts=prompts,
            max_slots=self.max_slots,
            cache_bytes=self.cache_bytes,
            resident=[adapter] * 3,  # an optimizer keeps two numbers for each one of the adapter
        )

    def rollout(
        self,
        adapter: Adapter | None,
        prompts: Prompts,
        key: jax.Array,
        num_generations: int,
        norms: Norms | None = None,
        limits: Sequence[int] | None = None,
    ) -> Rollout:
        """`qerl_jax.rollout.generate` for any number of prompts: in two programs where all samples fit at once.

        `limits` are the most tokens of each prompt's completions; None is the settings' max_completion_length."""
        N, G, C = prompts.tokens.shape[0], num_generations, self.settings.max_completion_length
        limits_N = np.full(N, C, np.int32) if limits is None else np.asarray(limits, np.int32)
        if limits_N.shape != (N,) or not np.all((limits_N >= 1) & (limits_N <= C)):
            raise ValueError(f"limits are {limits!r}; expected {N} numbers from 1 to {C}")
        if fewest_rows() <= N * G and self.plan(N * G, N, adapter).slots == N * G:
            began = time.perf_counter()
            slots, new = programs().begun(self.model, adapter, prompts, key, self.settings, G, norms, limits_N)
            model, adapter = prepared(self.model, adapter, new)
            norms = norms_of(model, adapter) if norms is None else norms
            slots, _ = programs().finished(slots, model, adapter, norms, C, N * G, self.settings, group=G)
            out: Rollout = slots.out
            lengths = np.asarray(out.lengths)
            steps = int(lengths.max()) - 1
            self._count(steps=steps, slot_steps=steps * N * G, tokens=int(lengths.sum()), samples=N * G, prompts=N)
            self._count(fills=1, seconds=time.perf_counter() - began)
            return out
        tokens, lengths, places = (np.asarray(part) for part in jax.device_get(jax.tree.leaves(prompts)))
        requests = [
            Request(row[:length].tolist(), G, int(place), int(limit))
            for row, length, place, limit in zip(tokens, lengths, places, limits_N, strict=True)
        ]
        ids = np.full((N * G, C), self.settings.pad_token_id, np.int32)
        logps, ended = np.zeros((2, N * G, C), np.float32), np.zeros((2, N * G), np.int32)
        for done in self.generate(adapter, requests, key, norms=norms):
            if done.error is not None:
                raise ValueError(f"prompt {done.request} {done.error}")
            row, length = done.request * G + done.sample, len(done.ids)
            ids[row, :length], logps[0, row, :length] = done.ids, done.logps
            if done.truncated_logps is not None:
                logps[1, row, :length] = done.truncated_logps
            ended[:, row] = length, done.finish_reason == "eos"
        return Rollout(
            tokens=jnp.asarray(ids),
            lengths=jnp.asarray(ended[0]),
            terminated=jnp.asarray(ended[1] == 1),
            logps=jnp.asarray(logps[0]),
            truncated_logps=jnp.asarray(logps[1]) if self.settings.truncated else None,
        )

    def generate(
        self,
        adapter: Adapter | None,
        requests: Sequence[Request],
        key: jax.Array,
        *,
        norms: Norms | None = None,
        until: Callable[[list[int]], int | None] | None = None,
        every: int | None = None,
    ) -> Iterator[Completion]:
        """Yields samples as they end, in no particular order; first the requests that are refused, each alone.

        Args:
          adapter: the policy's; None is the base alone.
          requests: what is wanted.
          key: PRNG key.
          norms: norm scales to use instead of the clean ones.
          until: looked at between chunks: given the ids of a sample so far, the number of tokens with which it is over
            (finish_reason "stop"), or None. It must not depend on ids behind that number.
          every: the steps of a chunk; the samples that go on are then yielded too after each, as far as they are.
        """
        good: dict[int, Request] = {}
        for number, request in enumerate(requests):
            error = self._refusal(request)
            if error is None:
                good[number] = request
            else:
                yield Completion(number, 0, [], np.zeros(0, np.float32), None, "error", error)
        if good:
            yield from _Batch(self, adapter, good, key, norms, until, every).run()

    def _refusal(self, request: Request) -> str | None:
        """Why a request cannot run, or None."""
        length, vocabulary, C = len(request.prompt), self.model.config.vocab_size, self.settings.max_completion_length
        strange = next((token for token in request.prompt if not 0 <= token < vocabulary), None)
        limit = request.max_completion_length
        if length == 0:
            return "is empty; expected one token or more"
        if length > self.max_prompt_length:
            return f"has {length} tokens; allowed: 1 to {self.max_prompt_length}"
        if strange is not None:
            return f"has the token id {strange}; allowed: 0 to {vocabulary - 1}"
        if request.n < 1:
            return f"asks for {request.n} samples; allowed: 1 or more"
        if limit is not None and not 1 <= limit <= C:
            return f"asks for {limit} tokens; allowed: 1 to the engine's {C}"
        return None

    def _count(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            setattr(self.statistics, name, getattr(self.statistics, name) + amount)


class _Batch:
    """One call of `Engine.generate`: what waits, what runs where, and the device's state."""

    def __init__(
        self,
        engine: Engine,
        adapter: Adapter | None,
        requests: dict[int, Request],
        key: jax.Array,
        norms: Norms | None,
        until: Callable[[list[int]], int | None] | None,
        every: int | None,
    ) -> None:
        self.engine, self.requests, self.key = engine, requests, key
        self.until, self.every = until, every
        self.waiting = collections.deque((r, g) for r, request in requests.items() for g in range(request.n))
        plan = engine.plan(len(self.waiting), len(requests), adapter)
        self.owner: list[tuple[int, int] | None] = [None] * plan.slots
        self.free_rows = list(range(plan.rows))
        self.row_of: dict[int, int] = {}
        self.unfinished = {r: request.n for r, request in requests.items()}
        self.model, self.adapter = prepared(engine.model, adapter, programs().made(engine.model, adapter))
        self.norms = norms_of(engine.model, adapter) if norms is None else norms
        hidden, layers = empty_pool(self.model, plan.rows, engine.max_prompt_length)
        own = empty_completions(self.model, plan.allocated, engine.settings.max_completion_length)
        cache = KVCache(layers, own, jnp.ones(plan.rows, jnp.int32))
        self.slots: Slots = empty_slots(hidden, cache, plan.allocated, engine.settings, key)

    def run(self) -> Iterator[Completion]:
        """Yields completions until none waits or runs."""
        S, count = self.slots.live_S.shape[0], self.engine._count
        while self.waiting or any(self.owner):
            began = time.perf_counter()
            self._refill()
            idle = S - len(self.owner) + self.owner.count(None)
            stop_at = min(S, idle + max(1, S // _REFILL)) if self.waiting else S
            self.slots, steps = programs().decode(
                self.slots, self.model, self.adapter, self.norms, self.every or _CHUNK, stop_at, self.engine.settings
            )
            count(steps=int(steps), slot_steps=int(steps) * S)
            completions = self._harvest()
            count(seconds=time.perf_counter() - began)
            yield from completions

    def _refill(self) -> None:
        """Puts waiting samples into slots without an owner, and their prompts into the pool."""
        S = self.slots.live_S.shape[0]
        admitted: list[int] = []
        which, rows, limits = np.zeros(S, bool), np.zeros(S, np.int32), np.zeros(S, np.int32)
        places, indices = np.zeros(S, np.int32), np.zeros(S, np.int32)
        for slot in (slot for slot, owner in enumerate(self.owner) if owner is None):
            if not self.waiting:
                break
            number, sample = self.owner[slot] = self.waiting.popleft()
            request = self.requests[number]
            if number not in self.row_of:
                # There is one: as many rows as slots, or as requests, and each is held for a request in work.
                self.row_of[number] = self.free_rows.pop()
                admitted.append(number)
            which[slot], rows[slot], indices[slot] = True, self.row_of[number], sample
            limits[slot] = request.max_completion_length or self.engine.settings.max_completion_length
            places[slot] = number if request.place is None else request.place
        self._admit(admitted)
        if which.any():
            keys = programs().sample_keys(self.key, jnp.asarray(places), jnp.asarray(indices))
            self.slots = programs().fill(
                self.slots, self.model, jnp.asarray(which), jnp.asarray(rows), keys, jnp.asarray(limits),
                self.engine.settings,
            )  # fmt: skip
            self.engine._count(fills=1, prompts=len(admitted))

    def _admit(self, numbers: list[int]) -> None:
        """Prefills prompts, in batches of two sizes only, so that two programs are compiled: all the pool, and what a
        refill brings. On a CPU, where larger ones are no faster, of one."""
        rows, P = self.slots.prompt_hidden_RD.shape[0], self.engine.max_prompt_length
        small = max(fewest_rows(), rows // _REFILL)
        large = small if jax.default_backend() == "cpu" else rows
        while numbers:
            size = large if len(numbers) > large // 2 else small
            batch, numbers = numbers[:size], numbers[size:]
            tokens = np.full((size, P), self.engine.settings.pad_token_id, np.int32)
            lengths, places = np.ones(size, np.int32), np.full(size, rows, np.int32)
            for i, number in enumerate(batch):
                prompt = self.requests[number].prompt
                tokens[i, : len(prompt)], lengths[i], places[i] = prompt, len(prompt), self.row_of[number]
            self.slots = programs().admit(
                self.slots, self.model, self.adapter, self.norms, jnp.asarray(tokens), jnp.asarray(lengths),
                jnp.asarray(places),
            )  # fmt: skip

    def _harvest(self) -> list[Completion]:
        """The samples that have ended, whose slots are free now; with `every`, then those that go on."""
        live = np.asarray(self.slots.live_S)
        looked_at = self.until is not None or self.every is not None
        taken = [slot for slot, owner in enumerate(self.owner) if owner and (looked_at or not live[slot])]
        if not taken:
            return []
        out = jax.device_get(self.slots.out)
        ended, going_on, stopped = [], [], np.zeros(live.shape, bool)
        for slot in taken:
            found = self._completion(slot, out, bool(live[slot]))
            if found.finish_reason is None:
                going_on.append(found)
                continue
            ended.append(found)
            stopped[slot], self.owner[slot] = live[slot], None
            self.engine._count(tokens=len(found.ids), samples=1)
            self.unfinished[found.request] -= 1
            if self.unfinished[found.request] == 0:
                self.free_rows.append(self.row_of.pop(found.request))
        if stopped.any():
            self.slots = self.slots.replace(live_S=self.slots.live_S & ~jnp.asarray(stopped))
        return ended + (going_on if self.every is not None else [])

    def _completion(self, slot: int, out: Any, live: bool) -> Completion:
        owner, length = self.owner[slot], int(out.lengths[slot])
        assert owner is not None
        ids = out.tokens[slot, :length].tolist()
        reason = None if live else ("eos" if out.terminated[slot] else "length")
        over = self.until(ids) if self.until is not None else None
        if over is not None and over <= length:
            length, ids, reason = over, ids[:over], "stop"
        truncated = None if out.truncated_logps is None else out.truncated_logps[slot, :length]
        return Completion(*owner, ids, out.logps[slot, :length], truncated, reason)
