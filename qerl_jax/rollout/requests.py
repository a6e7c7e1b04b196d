"""What the engine is asked for, what it gives back, and what it counts."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and what is wanted of it.

    Attributes:
      prompt: token ids.
      n: how many samples.
      place: its identity for the random number generator, an int32; None is its number among the requests.
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
    """Counts of one engine since it was made.

    Attributes:
      steps, slot_steps: decode steps; the same times the slots in use.
      drawn: tokens that these steps drew, of samples that go on too.
      tokens, samples: of samples that have ended, and how many those are.
      started: samples that are or were in a slot.
      prompts, prefills: prompts prefilled, and the programs that did it.
      chunks: calls of the decode loop; between two of them the host prefills and takes what has ended.
      seconds: in `generate` and `rollout`, compilation included.
    """

    steps: int = 0
    slot_steps: int = 0
    drawn: int = 0
    tokens: int = 0
    samples: int = 0
    started: int = 0
    prompts: int = 0
    prefills: int = 0
    chunks: int = 0
    seconds: float = 0.0

    def add(self, **amounts: float) -> None:
        """Adds to the counts of these names."""
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)

    @property
    def occupancy(self) -> float:
        """The share of slot-steps that drew a sample's token."""
        return self.drawn / max(1, self.slot_steps)
