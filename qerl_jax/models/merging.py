"""An adapter folded into its base: W + scaling * B A in float32, rounded once; trained norms take the base's place.

A packed base is unpacked for it: 4-bit weights could not hold what training added. The product is computed in full
float32 on a GPU too, whose default would round A and B to fewer bits than the sum keeps.
"""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp

from qerl_jax.errors import UserError, check_kind
from qerl_jax.formats import Weight, dequantize
from qerl_jax.models.dtypes import network_dtype
from qerl_jax.models.loading import layer_name, named_weights
from qerl_jax.models.params import PROJECTIONS, Adapter, LoRA, Model, check_fits, check_kinds
from qerl_jax.models.saving import described, write_model_folder, written_dtype
from qerl_jax.models.shards import Stored


def merge_adapter(model: Model, adapter: Adapter) -> Model:
    """The network that computes by itself what `model` computes with `adapter`: plain weights in the embeddings' dtype.

    It takes as much memory as the model in that dtype; `save_merged` needs one tensor at a time.

    Args:
      model: the base, in any weight format.
      adapter: LoRA pairs for any of its projections, and norm scales if they are trained.

    Raises:
      TypeError: not a Model and an Adapter.
      ValueError: the adapter is of another network, has a pair of no projection, or is several stacked in one.
    """
    check_kinds(model, None)
    check_kind("adapter", adapter, Adapter)
    check_fits(model, adapter)
    dtype = model.base.embed.dtype
    layers = []
    for old, pairs in zip(_with_norms(model, adapter).base.layers, adapter.lora, strict=True):
        layers.append(
            old.replace(**{name: _merged(getattr(old, name), pairs.get(name), dtype) for name in PROJECTIONS})
        )
    return model.replace(base=model.base.replace(layers=tuple(layers)))


def save_merged(
    model: Model,
    adapter: Adapter | None,
    path: str | os.PathLike[str],
    *,
    tokenizer_from: str | os.PathLike[str] | None = None,
    dtype: Any = None,
) -> None:
    """Writes `merge_adapter(model, adapter)` as a folder, one tensor unpacked and merged at a time.

    Args:
      model, adapter: as for `merge_adapter`; None writes the base alone.
      path, tokenizer_from: as for `save_model`.
      dtype: float32, bfloat16 or float16, of all tensors in the folder; None takes the embeddings', and float32 for
        norm scales that it would round. A sum is rounded once, to this.

    Raises:
      UserError: as `save_model`, another dtype, or numbers that are not finite in it. TypeError, ValueError: as
        `merge_adapter`.
    """
    check_kinds(model, adapter)
    target = model.base.embed.dtype if dtype is None else network_dtype(dtype)
    pairs: dict[str, LoRA] = {}
    if adapter is not None:
        check_fits(model, adapter)
        model = _with_norms(model, adapter)
        pairs = {layer_name(i, name): pair for i, layer in enumerate(adapter.lora) for name, pair in layer.items()}

    def stored(name: str, weight: Weight) -> Stored:
        as_dtype = written_dtype(name, weight, target) if dtype is None else target

        def make() -> jax.Array:
            made = _merged(weight, pairs.get(name), as_dtype)
            if not jnp.isfinite(made).all():
                raise UserError(
                    f"tensor {name} has numbers that are not finite, or that {as_dtype} does not hold (up to "
                    f"{float(jnp.finfo(as_dtype).max):g}); nothing was written"
                )
            return made

        return Stored(jax.ShapeDtypeStruct(weight.shape, as_dtype), make)

    hf = described(model, target, tokenizer_from)
    tensors = {name: stored(name, weight) for name, weight in named_weights(model).items()}
    write_model_folder(path, hf, tensors, tokenizer_from)


@functools.partial(jax.jit, static_argnames="dtype")
def _merged(weight: Weight, pair: LoRA | None, dtype: jnp.dtype) -> jax.Array:
    if pair is None:
        return dequantize(weight, dtype)
    change_NK = jnp.matmul(pair.b, pair.a, precision=jax.lax.Precision.HIGHEST)
    return (dequantize(weight, jnp.dtype(jnp.float32)) + pair.scaling * change_NK).astype(dtype)


def _with_norms(model: Model, adapter: Adapter) -> Model:
    if adapter.norms is None:
        return model
    norms = zip(model.base.layers, adapter.norms.input, adapter.norms.post_attention, strict=True)
    layers = tuple(layer.replace(input_norm=first, post_attention_norm=second) for layer, first, second in norms)
    return model.replace(base=model.base.replace(layers=layers))
