"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) and the scalings that extend their context.

The frequencies of a head of E elements are theta^(-2i/E), i = 0..E/2-1, and position p turns pair i by p times
frequency i. A scaling replaces the frequencies once and for all; it does not depend on the length of a row.

    linear   all divided by the factor (Chen et al. 2023, arXiv 2306.15595)
    llama3   those of long wavelengths divided by it, short ones kept, a blend between (Llama 3.1's model card)
    yarn     a ramp over the pairs from kept to divided, and cosines and sines lengthened (Peng et al. 2023, arXiv
             2309.00071)

Frequencies are NumPy constants in float32, in the order of operations of transformers: a frequency that differs in its
last bit turns position 100,000 by another angle.

Dimension letters: B rows, T positions, H heads, E head size, F = E / 2 frequencies.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.errors import UserError, shown
from qerl_jax.json_fields import Fields


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: frequency / factor."""

    factor: float

    def __call__(self, periods_F: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
        return 1 / periods_F / self.factor, 1.0


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """A wavelength w of more than L / low_freq_factor (L = original_max_position_embeddings) is divided by `factor`,
    one of less than L / high_freq_factor kept; between them the share kept is (L / w - low) / (high - low)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __call__(self, periods_F: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
        frequencies_F = 1 / periods_F
        low, high, length = self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings
        wavelengths_F = 2 * math.pi / frequencies_F
        kept_F = (length / wavelengths_F - low) / (high - low)
        blended_F = (1 - kept_F) * frequencies_F / self.factor + kept_F * frequencies_F
        scaled_F = np.where(wavelengths_F < length / high, frequencies_F, blended_F)
        return np.where(wavelengths_F > length / low, frequencies_F / self.factor, scaled_F), 1.0


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """Pairs that turn more than `beta_fast` times over the original length are kept, those that turn less than
    `beta_slow` times divided by `factor`. Cosines and sines are multiplied by `attention_factor`, 0.1 ln(factor) + 1
    where it is None."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __call__(self, periods_F: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
        half = periods_F.shape[0]

        def pair_that_turns(times: float) -> float:
            turns = self.original_max_position_embeddings / (times * 2 * math.pi)
            return 2 * half * math.log(turns) / (2 * math.log(theta))

        low, high = max(pair_that_turns(self.beta_fast), 0), min(pair_that_turns(self.beta_slow), 2 * half - 1)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        width = high - low or 0.001
        kept_F = 1 - np.clip((np.arange(half, dtype=np.float32) - low) / width, 0, 1)
        length = 0.1 * math.log(max(self.factor, 1.0)) + 1.0
        return 1 / (self.factor * periods_F) * (1 - kept_F) + 1 / periods_F * kept_F, self.attention_factor or length


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling
_SCALINGS: dict[str, type[RopeScaling]] = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}
_LARGEST = 1e6  # of a scaling's numbers, and the least is its inverse: beyond, angles overflow
# Of parameters that published models have.
_HINTS = {
    "attn_factor": "; transformers ignores attn_factor, vLLM multiplies 0.1 ln(factor) + 1 by it: leave it out, or "
    "write the product as attention_factor"
}
_KINDS: dict[Any, type] = {int: int, float: float, bool: bool, float | None: float}


def read_rope(hf: dict[str, Any], where: str, max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    """Theta and scaling from a `config.json`: `rope_parameters` (v5), or `rope_theta` and `rope_scaling` (v4).

    Raises:
      UserError: an unsupported type, or a parameter that is missing, unknown or out of range; names `where` and the
        key.
    """
    spellings = [hf[key] for key in ("rope_scaling", "rope_parameters") if hf.get(key)] or [{}]
    for given in spellings:
        if not isinstance(given, dict):
            raise UserError(f"{where}: rope parameters are {shown(repr(given))}; expected a mapping")
    if _named(spellings[0]) != _named(spellings[-1]):
        first, second = (shown(repr(given)) for given in spellings)
        raise UserError(f"{where}: rope_scaling is {first}, but rope_parameters {second}; expected the same, or one")
    # transformers 4 reads the theta beside rope_scaling, 5 one within it or rope_parameters first.
    thetas = [given["rope_theta"] for given in (*spellings, hf) if given.get("rope_theta") is not None]
    for other in thetas:
        if other != thetas[0]:
            found = " and ".join(shown(repr(value)) for value in (other, thetas[0]))
            raise UserError(f"{where}: rope_theta is {found} in two places; expected the same, or one")
    theta = Fields(hf | {"rope_theta": thetas[0]} if thetas else hf, where).get("rope_theta", float, 10000.0)
    if theta <= 1:
        raise UserError(f"{where}: rope_theta is {theta}; expected more than 1, so that each pair turns slower")
    parameters = _named(spellings[0])
    kind = parameters.pop("rope_type", "default")
    if kind != "default" and (not isinstance(kind, str) or kind not in _SCALINGS):
        raise UserError(
            f"{where}: rope_type is {shown(repr(kind))}; supported: 'default', {', '.join(map(repr, _SCALINGS))}"
        )
    if parameters.pop("partial_rotary_factor", hf.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UserError(f"{where}: partial_rotary_factor is not 1; heads that rotate in part are not supported")
    scaling = None if kind == "default" else _SCALINGS[kind]
    fields = {field.name: field for field in dataclasses.fields(scaling)} if scaling else {}
    original = "original_max_position_embeddings"
    if original in fields:
        parameters[original] = hf.get(original) or parameters.get(original) or max_position_embeddings
    if unknown := sorted(set(parameters) - set(fields)):
        raise UserError(
            f"{where}: rope parameter {shown(unknown[0])} ({shown(repr(parameters[unknown[0]]))}) is not supported for "
            f"rope_type {kind!r}; allowed: {', '.join(['rope_theta', *fields])}{_HINTS.get(unknown[0], '')}"
        )
    if scaling is None:
        return theta, None
    values = Fields(parameters, f"{where}: rope_type {kind!r}")
    read = {
        name: values.get(name, _KINDS[field.type])
        for name, field in fields.items()
        if field.default is dataclasses.MISSING or name in parameters
    }
    for name, value in read.items():
        if isinstance(value, float) and not 1 / _LARGEST <= value <= _LARGEST:
            raise UserError(f"{where}: {name} is {value}; expected a number from {1 / _LARGEST:g} to {_LARGEST:g}")
    if scaling is Llama3Scaling and read["high_freq_factor"] <= read["low_freq_factor"]:
        raise UserError(
            f"{where}: high_freq_factor is {read['high_freq_factor']}; expected more than low_freq_factor, "
            f"{read['low_freq_factor']}"
        )
    return theta, scaling(**read)


def _named(given: dict[str, Any]) -> dict[str, Any]:
    """Without theta and absent values, the type under its newer name."""
    known = {key: value for key, value in given.items() if value is not None and key not in ("rope_theta", "type")}
    return {"rope_type": given.get("type") or "default"} | known


def rope_to_hf(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The entries of a `config.json` from which transformers 4 and 5 read the same frequencies."""
    if scaling is None:
        return {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    [kind] = [name for name, cls in _SCALINGS.items() if isinstance(scaling, cls)]
    values = {name: value for name, value in dataclasses.asdict(scaling).items() if value is not None}
    parameters = {"rope_type": kind, **values}
    return {
        "rope_theta": theta,
        "rope_scaling": parameters,
        "rope_parameters": parameters | {"rope_theta": theta},
    }


@functools.cache
def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[np.ndarray, float]:
    """float32 frequencies [head_dim / 2], and the factor on cosines and sines (1 but for yarn)."""
    periods_F = np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    frequencies_F, factor = (1 / periods_F, 1.0) if scaling is None else scaling(periods_F, theta)
    return frequencies_F.astype(np.float32), factor


def rotation(
    positions_BT: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the angles at each position, float32 [B, T, F]."""
    frequencies_F, factor = rope_frequencies(head_dim, theta, scaling)
    angles_BTF = positions_BT[..., None].astype(jnp.float32) * frequencies_F
    return jnp.cos(angles_BTF) * factor, jnp.sin(angles_BTF) * factor


def rotated(x_BTHE: jax.Array, cos_BTF: jax.Array, sin_BTF: jax.Array) -> jax.Array:
    """x turned by `rotation`'s angles, in x's dtype, with the halves convention of Hugging Face: element i pairs with
    i + E / 2."""
    cos, sin = cos_BTF[:, :, None], sin_BTF[:, :, None]
    wide = x_BTHE.astype(jnp.promote_types(x_BTHE.dtype, jnp.float32))
    first, second = jnp.split(wide, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTHE.dtype)
