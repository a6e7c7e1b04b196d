"""One call of `Engine.generate`: slots that are filled again between chunks of decoding, as samples end."""

import collections
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.models.linear import fewest_rows
from qerl_jax.models.params import Adapter, Model, Norms
from qerl_jax.rollout.attention import KVCache
from qerl_jax.rollout.memory import Plan
from qerl_jax.rollout.programs import programs
from qerl_jax.rollout.requests import Completion, Request, Statistics
from qerl_jax.rollout.sampling import SamplingSettings
from qerl_jax.rollout.slots import Slots, empty_completions, empty_pool, empty_slots

_CHUNK = 256  # steps between two looks at the host, so that Ctrl-C is heard
_REFILL = 16  # slots are refilled when one in so many has ended


class Batch:
    """One call of `Engine.generate`: what waits, what runs where, and the device's state."""

    def __init__(
        self,
        model: Model,
        adapter: Adapter | None,
        norms: Norms,
        *,
        settings: SamplingSettings,
        plan: Plan,
        max_prompt_length: int,
        requests: dict[int, Request],
        key: jax.Array,
        until: Callable[[list[int]], int | None] | None,
        every: int | None,
        statistics: Statistics,
    ) -> None:
        """Model and adapter are `prepared`; the rest is as in `Engine.generate`, with requests by number."""
        self.model, self.adapter, self.norms, self.settings = model, adapter, norms, settings
        self.max_prompt_length, self.requests, self.key = max_prompt_length, requests, key
        self.until, self.every, self.statistics = until, every, statistics
        self.waiting = collections.deque((r, g) for r, request in requests.items() for g in range(request.n))
        self.owner: list[tuple[int, int] | None] = [None] * plan.slots
        self.free_rows = list(range(plan.rows))
        self.row_of: dict[int, int] = {}
        self.unfinished = {r: request.n for r, request in requests.items()}
        hidden, layers = empty_pool(model, plan.rows, max_prompt_length)
        own = empty_completions(model, plan.allocated, settings.max_completion_length)
        cache = KVCache(layers, own, jnp.ones(plan.rows, jnp.int32))
        self.slots: Slots = empty_slots(hidden, cache, plan.allocated, settings, key)

    def run(self) -> Iterator[Completion]:
        """Yields completions until none waits or runs."""
        S, count = self.slots.live_S.shape[0], self.statistics.add
        while self.waiting or any(self.owner):
            began = time.perf_counter()
            self._refill()
            idle = S - len(self.owner) + self.owner.count(None)
            stop_at = min(S, idle + max(1, S // _REFILL)) if self.waiting else S
            self.slots, steps = programs().decode(
                self.slots, self.model, self.adapter, self.norms, self.every or _CHUNK, stop_at, self.settings
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
            limits[slot] = request.max_completion_length or self.settings.max_completion_length
            places[slot] = number if request.place is None else request.place
        self._admit(admitted)
        if which.any():
            keys = programs().sample_keys(self.key, jnp.asarray(places), jnp.asarray(indices))
            self.slots = programs().fill(
                self.slots, self.model, jnp.asarray(which), jnp.asarray(rows), keys, jnp.asarray(limits),
                self.settings,
            )  # fmt: skip
            self.statistics.add(fills=1, prompts=len(admitted))

    def _admit(self, numbers: list[int]) -> None:
        """Prefills prompts, in batches of two sizes only, so that two programs are compiled: all the pool, and what a
        refill brings. On a CPU, where larger ones are no faster, of one."""
        rows, P = self.slots.prompt_hidden_RD.shape[0], self.max_prompt_length
        small = max(fewest_rows(), rows // _REFILL)
        large = small if jax.default_backend() == "cpu" else rows
        while numbers:
            size = large if len(numbers) > large // 2 else small
            batch, numbers = numbers[:size], numbers[size:]
            tokens = np.full((size, P), self.settings.pad_token_id, np.int32)
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
            self.statistics.add(tokens=len(found.ids), samples=1)
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
