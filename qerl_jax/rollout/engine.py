"""The engine: completions of any number of prompts, with the slots kept full.

A sample that ends makes room for one that waits, on the device and in the next step; a prompt is prefilled once, some
time before its first sample starts, and its row of the pool is free again when the last one has ended. What a sample is
depends on the weights, the key, its request and its number alone, whatever ran beside it.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import check_kind, is_number, is_whole
from qerl_jax.keys import of_threefry
from qerl_jax.models.linear import fewest_rows
from qerl_jax.models.params import Adapter, Model, Norms, check_kinds, check_norms, norms_of
from qerl_jax.rollout.batch import Prompts, Rollout, is_place, of_arrays
from qerl_jax.rollout.generate import check_limits, check_rows
from qerl_jax.rollout.memory import Plan, plan_slots
from qerl_jax.rollout.prepared import prepared
from qerl_jax.rollout.programs import programs
from qerl_jax.rollout.refilling import EngineCall, lowered_call
from qerl_jax.rollout.requests import Completion, Request, Statistics
from qerl_jax.rollout.sampling import SamplingSettings
from qerl_jax.rollout.tail import decode_to_the_end, default_tail_sizes, worthwhile
from qerl_jax.tracing import is_traced


class Engine:
    """Samples completions from one model with one choice of sampling settings, by programs of its own: not inside of
    `jax.jit`, `vmap` or `grad`, where `generate` is.

    Args:
      model: the frozen network.
      settings: lengths, EOS ids and sampling.
      max_prompt_length: P, the most tokens of a prompt.
      max_slots: most samples that decode at once; None is as many as there are, or as fit in memory.
      cache_bytes: bytes for the keys and values; None is what the device has beside this model and an adapter, or 4 GB
        on a CPU. Give a number where the device holds more.
      tail_sizes: numbers of slots in which the last samples go on, () for never; None is `default_tail_sizes()` of
        `qerl_jax.rollout.tail`.
      in_training: whether an optimizer's state for the adapter is on the device too, which leaves less for
        `cache_bytes` of None.

    Attributes:
      statistics: what it has done.

    Raises:
      ValueError: `max_slots`, `max_prompt_length` or one of `tail_sizes` that is no whole number from 1 on,
        `cache_bytes` that are no number above 0, or an id in `settings` that is beyond the vocabulary.
      TypeError: no Model, or other settings.
    """

    def __init__(
        self,
        model: Model,
        settings: SamplingSettings,
        *,
        max_prompt_length: int,
        max_slots: int | None = None,
        cache_bytes: float | None = None,
        tail_sizes: Sequence[int] | None = None,
        in_training: bool = True,
    ) -> None:
        check_kind("model", model, Model, " (`load_model` gives one)")
        check_kind("settings", settings, SamplingSettings)
        if max_slots is not None and (not is_whole(max_slots) or max_slots < 1):
            raise ValueError(f"max_slots is {max_slots!r}; allowed: 1 or more, or None for as many as fit")
        if cache_bytes is not None and not (is_number(cache_bytes) and 0 < cache_bytes < math.inf):
            raise ValueError(
                f"cache_bytes is {cache_bytes!r}; allowed: a number of bytes above 0, or None for what the device has "
                "beside the model"
            )
        if not all(is_whole(size) and size > 0 for size in tail_sizes or ()):
            raise ValueError(
                f"tail_sizes are {tail_sizes!r}; allowed: numbers of slots, each 1 or more, or () for none"
            )
        if not is_whole(max_prompt_length) or max_prompt_length < 1:
            raise ValueError(f"max_prompt_length is {max_prompt_length!r}; allowed: 1 or more tokens")
        settings.check_ids(model.config.vocab_size)
        self.model, self.settings, self.max_prompt_length = model, settings, max_prompt_length
        self.max_slots, self.cache_bytes = max_slots, None if cache_bytes is None else int(cache_bytes)
        self.tail_sizes = default_tail_sizes() if tail_sizes is None else tail_sizes
        self.in_training = in_training
        self.statistics = Statistics()

    def plan(self, samples: int, prompts: int, adapter: Adapter | None = None) -> Plan:
        """Slots and pool rows for so many samples of so many prompts; raises UserError if not one slot fits."""
        return self._plan(self.max_prompt_length, samples, prompts, adapter)

    def _plan(self, width: int, samples: int, prompts: int, adapter: Adapter | None) -> Plan:
        """`plan` for prompts with so many token slots."""
        return plan_slots(
            self.model,
            self.settings,
            width,
            samples=samples,
            prompts=prompts,
            max_slots=self.max_slots,
            cache_bytes=self.cache_bytes,
            adapter=adapter,
            in_training=self.in_training,
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

        `limits` are the most tokens of each prompt's completions; None is the settings' max_completion_length.

        Raises:
          ValueError: no prompts, or parts of them that are not one for each; a prompt is empty, too long, has a place
            that is no int32, a token id outside the vocabulary or, with its completion, more tokens than the network
            has positions; `prompts` are wider than max_prompt_length; wrong limits; no PRNG key; norms of another
            network.
          TypeError: not an Adapter, or a call that JAX is tracing.
        """
        self._check_call(adapter, norms, prompts, key)
        prompts = of_arrays(prompts)
        check_rows(prompts)
        (N, P), G, C = prompts.tokens.shape, num_generations, self.settings.max_completion_length
        limits_N = np.full(N, C, np.int32) if limits is None else np.asarray(limits)
        check_limits(limits_N, N, C)
        limits_N, key = limits_N.astype(np.int32), of_threefry(key)
        if self.max_prompt_length < P:
            raise ValueError(f"prompts have {P} token slots; allowed: up to the engine's {self.max_prompt_length}")
        tokens, lengths, places = jax.device_get((prompts.tokens, prompts.lengths, prompts.places))
        requests = [
            Request(row[:length].tolist(), G, int(place), int(limit))
            for row, length, place, limit in zip(tokens, lengths, places, limits_N, strict=True)
        ]
        for number, request in enumerate(requests):
            if (error := self._refusal(request)) is not None:
                raise ValueError(f"prompt {number} {error}")
        if self._at_once(self._plan(P, N * G, N, adapter), N * G):
            began = time.perf_counter()
            slots, new = programs().begun(self.model, adapter, prompts, key, self.settings, G, norms, limits_N)
            model, adapter = prepared(self.model, adapter, new)
            norms = norms_of(model, adapter) if norms is None else norms
            out, slot_steps = decode_to_the_end(
                slots, model, adapter, norms, self.settings, np.repeat(limits_N, G), G, self.tail_sizes
            )
            lengths = np.asarray(out.lengths)
            total = int(lengths.sum())
            # A sample's first token comes from its prompt, not from a step.
            self.statistics.add(steps=int(lengths.max()) - 1, slot_steps=slot_steps, drawn=total - N * G, tokens=total)
            self.statistics.add(samples=N * G, started=N * G, prompts=N, prefills=1, chunks=1)
            self.statistics.add(seconds=time.perf_counter() - began)
            return out
        ids = np.full((N * G, C), self.settings.pad_token_id, np.int32)
        logps, ended = np.zeros((2, N * G, C), np.float32), np.zeros((2, N * G), np.int32)
        for done in self.generate(adapter, requests, key, norms=norms):
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

    def _at_once(self, plan: Plan, samples: int) -> bool:
        """Whether a rollout of so many samples is one whole, and not a queue."""
        return fewest_rows() <= samples == plan.slots

    def lowered(
        self, adapter: Adapter | None, prompts: int, key: jax.Array, num_generations: int, norms: Norms | None = None
    ) -> Iterator[jax.stages.Lowered]:
        """The programs that `rollout` begins with for so many prompts, all as wide as max_prompt_length, the largest
        first. Once they are compiled the call finds them ready. Programs for the last samples in fewer slots are not
        among them. Arrays may be ShapeDtypeStructs."""
        N, G, C = prompts, num_generations, self.settings.max_completion_length
        plan, model = self.plan(N * G, N, adapter), self.model
        if not self._at_once(plan, N * G):
            yield from self._lowered_queue(adapter, plan, key, norms)
            return
        key = jax.eval_shape(of_threefry, key)
        shape: Any = jax.ShapeDtypeStruct
        each_N = shape((N,), jnp.int32)
        of_prompts = Prompts(shape((N, self.max_prompt_length), jnp.int32), each_N, each_N)
        begun = programs().begun.lower(model, adapter, of_prompts, key, self.settings, G, norms, each_N)
        slots, new = begun.out_info
        model, adapter = prepared(model, adapter, new)
        norms = norms_of(model, adapter) if norms is None else norms
        leave = max(worthwhile(self.tail_sizes, N * G, C - 1), default=0)
        yield begun
        yield programs().finished.lower(slots, model, adapter, norms, C, leave, self.settings, group=G)

    def lowered_requests(
        self, adapter: Adapter | None, requests: Sequence[Request], key: jax.Array
    ) -> Iterator[jax.stages.Lowered]:
        """`lowered` for `generate` with clean norms, of requests that can all run."""
        plan = self.plan(sum(request.n for request in requests), len(requests), adapter)
        return self._lowered_queue(adapter, plan, key, None)

    def _lowered_queue(
        self, adapter: Adapter | None, plan: Plan, key: jax.Array, norms: Norms | None
    ) -> Iterator[jax.stages.Lowered]:
        made = programs().made.lower(self.model, adapter)
        model, adapter = prepared(self.model, adapter, made.out_info)
        norms = norms_of(model, adapter) if norms is None else norms
        key = jax.eval_shape(of_threefry, key)
        yield from lowered_call(model, adapter, norms, self.settings, plan, self.max_prompt_length, key)
        yield made

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

        Calls with fewer samples than `max_slots`, or fewer requests than one and a half times as many, compile programs
        of their own for each number of them, and keep those as long as the process lives.

        Args:
          adapter: the policy's; None is the base alone.
          requests: what is wanted.
          key: PRNG key, of either kind that JAX has.
          norms: norm scales to use instead of the clean ones.
          until: called between chunks with the ids of a sample so far; returns the number of tokens with which the
            sample is over (finish_reason "stop"), or None. It must not depend on ids behind that number.
          every: the steps of a chunk, at most 256; None is 256. If it is given, samples that go on are yielded too,
            after each chunk, as far as they have come.

        Raises:
          ValueError: `every` below 1; something that is no request, or no PRNG key; `until` returns something else;
            norms of another network.
          TypeError: not an Adapter, or a call that JAX is tracing.
        """
        self._check_call(adapter, norms, key)
        if every is not None and (not is_whole(every) or every < 1):
            raise ValueError(f"every is {every!r}; allowed: 1 or more steps, or None")
        good: dict[int, Request] = {}
        for number, request in enumerate(requests):
            if not isinstance(request, Request):
                raise ValueError(f"request {number} is {request!r:.60}; expected a Request")
            error = self._refusal(request)
            if error is None:
                good[number] = request
            else:
                yield Completion(number, 0, [], np.zeros(0, np.float32), None, "error", error)
        if good:
            key = of_threefry(key)
            plan = self.plan(sum(request.n for request in good.values()), len(good), adapter)
            model, adapter = prepared(self.model, adapter, programs().made(self.model, adapter))
            norms = norms_of(model, adapter) if norms is None else norms
            yield from EngineCall(
                model,
                adapter,
                norms,
                settings=self.settings,
                plan=plan,
                tail_sizes=self.tail_sizes,
                max_prompt_length=self.max_prompt_length,
                requests=good,
                key=key,
                until=until,
                every=every,
                statistics=self.statistics,
            ).run()

    def _check_call(self, adapter: Adapter | None, norms: Norms | None, *arrays: Any) -> None:
        """Raises TypeError or ValueError for what no call can be made with."""
        check_kinds(self.model, adapter)
        if norms is not None:
            check_norms(self.model, norms)
        if is_traced((self.model, adapter, norms, arrays)):
            raise TypeError(
                "an Engine runs programs of its own, one by one, and cannot be called inside of jax.jit, vmap or "
                "grad; expected a call outside of them, or qerl_jax.generate inside"
            )

    def _refusal(self, request: Request) -> str | None:
        """Why a request cannot run, or None."""
        try:
            ids = np.asarray(request.prompt)
        except ValueError:  # of lists in it that differ in length
            ids = np.zeros((0, 0))
        if ids.ndim != 1 or (ids.size > 0 and ids.dtype.kind not in "iu"):
            return f"is {request.prompt!r:.60}; expected token ids"
        for what in ("n", "place", "max_completion_length"):
            number = getattr(request, what)
            if not is_whole(number) and (number is not None or what == "n"):
                return f"has {what} {number!r}; expected a whole number"
        length, vocabulary, C = len(ids), self.model.config.vocab_size, self.settings.max_completion_length
        strange = self.model.config.unknown_id(ids)
        limit = request.max_completion_length
        if length == 0:
            return "is empty; expected one token or more"
        if length > self.max_prompt_length:
            return f"has {length} tokens; allowed: 1 to {self.max_prompt_length}"
        if strange is not None:
            return f"has the token id {strange}; allowed: 0 to {vocabulary - 1}"
        if request.n < 1:
            return f"asks for {request.n} samples; allowed: 1 or more"
        if request.place is not None and not is_place(request.place):
            return f"has the place {request.place}; allowed: an int32"
        if limit is not None and not 1 <= limit <= C:
            return f"asks for {limit} tokens; allowed: 1 to the engine's {C}"
        most, positions = limit or C, self.model.config.positions
        if length + most > positions:
            return f"has {length} tokens and may get {most} more; the network has {positions} positions"
        return None
