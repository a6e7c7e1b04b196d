"""Engines of the tiny network, and what its tests ask them for."""

import functools

import jax
import numpy as np
from tiny import CONFIG, tiny_adapter, tiny_model

from qerl_jax.rollout import Engine, Request, SamplingSettings

MODEL = tiny_model()
ADAPTER = tiny_adapter(MODEL)
P, C, N, G = 9, 12, 5, 4
SETTINGS = SamplingSettings(C, (3, 4, 10, 12), 0)
KEY = jax.random.key(5)


def requests(seed=0):
    """Five prompts of 1 to P tokens with four samples each, which end at an EOS, at the limit or at limits of their
    own."""
    random = np.random.default_rng(seed)
    lengths = [1, P, 4, 2, 7]
    limits = [None, None, 3, 1, None]
    return [
        Request(random.integers(13, CONFIG.vocab_size, length).tolist(), G, 40 + i, limit)
        for i, (length, limit) in enumerate(zip(lengths, limits, strict=True))
    ]


def engine(settings=SETTINGS, **options):
    return Engine(MODEL, settings, max_prompt_length=P, **options)


def finished(completions):
    """{(place's request, sample): completion}"""
    return {(done.request, done.sample): done for done in completions if done.finish_reason is not None}


@functools.cache
def with_slots(slots):
    return finished(engine(max_slots=slots).generate(ADAPTER, requests(), KEY))


def same(a, b):
    return (a.ids, a.finish_reason) == (b.ids, b.finish_reason) and np.array_equal(a.logps, b.logps)
