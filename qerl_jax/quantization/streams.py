"""Activations of many rows on their way through a network, layer by layer.

A stream is one host array [S, T, D], the residual stream of all its rows after the layers so far. A layer takes it to
the device a batch of rows at a time and writes its results in its place, so one layer's activations is all there is.
"""

import copy
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.models.params import Layer, Model
from qerl_jax.models.transformer import embedded, final_norm, run_layer
from qerl_jax.quantization.calibration import Rows
from qerl_jax.quantization.observation import Seen, nothing_seen, observe
from qerl_jax.rl.logprobs import token_logps

# The residual stream after a layer.
_after = jax.jit(run_layer, static_argnums=0)


class TextFigures(NamedTuple):
    """Of the tokens that count: exp of the mean negative log-likelihood, infinite beyond float64's largest number, and
    the mean entropy of the network's predictions of them, in nats."""

    perplexity: float
    entropy: float


class Stream:
    """The residual stream of some rows."""

    def __init__(self, ends: Model, rows: Rows, tokens_per_batch: int) -> None:
        """Embeds the rows.

        Args:
          ends: a network without layers: embeddings, final norm and head.
          rows: the tokens.
          tokens_per_batch: how many are on the device at a time, a whole row at least.
        """
        self._ends, self._rows = ends, rows
        S, T = rows.tokens.shape
        self._batch = max(1, min(S, tokens_per_batch // T))
        self.x_STD = np.empty((S, T, ends.config.hidden_size), ends.base.embed.dtype)
        for place in range(0, S, self._batch):
            part = slice(place, place + self._batch)
            self.x_STD[part] = np.asarray(embedded(ends, jnp.asarray(rows.tokens[part])))

    def copy(self) -> "Stream":
        """Another stream of the same rows, which stands where this one does."""
        other = copy.copy(self)
        other.x_STD = self.x_STD.copy()
        return other

    def advance(self, layer: Layer) -> None:
        """Runs the layer, whose weights are plain and in the stream's dtype, on all rows."""
        for place, x_BTD, _ in self._batches():
            rows = self.x_STD[place : place + self._batch]
            rows[:] = np.asarray(_after(self._ends.config, layer, x_BTD))[: len(rows)]

    def observe(self, layer: Layer) -> dict[str, Seen]:
        """What the layer's projections would read; the stream stays where it is."""
        seen = nothing_seen(self._ends.config)
        for _, x_BTD, lengths_B in self._batches():
            # Waited for: batches that are only queued would all be on the device.
            seen = jax.block_until_ready(observe(self._ends.config, layer, x_BTD, lengths_B, seen))
        return seen

    def distance(self, other: "Stream") -> float:
        """||x - y|| / ||y|| over the tokens of this stream x and another one y of the same rows."""
        apart, whole = 0.0, 0.0
        for x_TD, y_TD, length in zip(self.x_STD, other.x_STD, self._rows.lengths, strict=True):
            y = y_TD[:length].astype(np.float64)
            apart += float(np.square(x_TD[:length].astype(np.float64) - y).sum())
            whole += float(np.square(y).sum())
        return math.sqrt(apart / whole)

    def figures(self) -> TextFigures:
        """Perplexity and entropy of the text, of a stream that has passed the last layer."""
        total, entropy, count = 0.0, 0.0, 0
        for place, x_BTD, lengths_B in self._batches():
            tokens = self._rows.tokens[place : place + self._batch]
            targets = np.zeros(x_BTD.shape[:2], np.int32)
            targets[: len(tokens), :-1] = tokens[:, 1:]
            logps_BT, entropies_BT = _predictions(self._ends, x_BTD, jnp.asarray(targets))
            predicted = np.arange(1, x_BTD.shape[1] + 1)
            starts = np.pad(self._rows.starts[place : place + self._batch], (0, self._batch - len(tokens)))
            live = (predicted >= starts[:, None]) & (predicted < np.asarray(lengths_B)[:, None])
            total -= float(np.asarray(logps_BT, np.float64)[live].sum())
            entropy += float(np.asarray(entropies_BT, np.float64)[live].sum())
            count += int(live.sum())
        with np.errstate(over="ignore"):
            return TextFigures(float(np.exp(total / count)), entropy / count)

    def _batches(self) -> Iterator[tuple[int, jax.Array, jax.Array]]:
        """(first row, activations, lengths); the last batch is filled up with rows of length 0, so that one program
        serves all."""
        for place in range(0, len(self.x_STD), self._batch):
            x, lengths = self.x_STD[place : place + self._batch], self._rows.lengths[place : place + self._batch]
            missing = self._batch - len(x)
            x, lengths = np.pad(x, ((0, missing), (0, 0), (0, 0))), np.pad(lengths, (0, missing))
            # A copy: on CPU the device array would otherwise be the host array, which is about to change.
            yield place, jnp.array(x, copy=True), jnp.asarray(lengths)


@jax.jit
def _predictions(ends: Model, x_BTD: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden_BTD = final_norm(ends, ends.base.final_norm, x_BTD)
    logps_M, entropies_M = token_logps(ends, hidden_BTD.reshape(-1, x_BTD.shape[-1]), targets_BT.reshape(-1), 1.0)
    return logps_M.reshape(targets_BT.shape), entropies_M.reshape(targets_BT.shape)
