"""Fresh parameters: a random network of a given shape, a LoRA adapter, and the change of a network's weight format."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from qerl_jax.errors import UserError, check_kind, nearest
from qerl_jax.formats import PACKED, NVFP4Weight, Weight, dequantized, format_of, repacked
from qerl_jax.keys import check_key, of_threefry
from qerl_jax.models.config import QKV, ModelConfig
from qerl_jax.models.dtypes import network_dtype
from qerl_jax.models.params import (
    PROJECTIONS,
    Adapter,
    Base,
    Layer,
    LoRA,
    Model,
    check_lora,
    lora_scaling,
    norms_to_train,
    projection_shape,
    small_shapes,
)
from qerl_jax.option_names import check_format

# Projections that read the same input share one NVFP4 global scale, as llm-compressor writes them.
SHARED_SCALE = (QKV, ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def init_layer(key: jax.Array, config: ModelConfig, dtype: jnp.dtype, std: float) -> Layer:
    """One random layer: weights N(0, std^2) in `dtype`, norm scales 1, biases 0."""
    fields: dict[str, Any] = {
        name: _normal(k, projection_shape(config, name), std, dtype)
        for name, k in zip(PROJECTIONS, jax.random.split(key, len(PROJECTIONS)), strict=True)
    }

    for name, shape in small_shapes(config).items():
        fields[name] = jnp.ones(shape, jnp.float32) if name.endswith("norm") else jnp.zeros(shape, dtype)
    return Layer(**fields)


def _normal(key: jax.Array, shape: tuple[int, ...], std: float, dtype: jnp.dtype) -> jax.Array:
    """N(0, std^2), drawn in float32. Drawn in bfloat16, JAX's numbers have 128 values and a mean of -0.012 std, and a
    network of such weights has a direction that outgrows all others."""
    return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def init_model(key: jax.Array, config: ModelConfig, dtype: Any = jnp.float32, std: float = 0.02) -> Model:
    """A random network: weights N(0, std^2), norm scales 1, biases 0; projections in `dtype`, unquantized.

    Raises:
      UserError: a dtype other than float32, bfloat16 and float16.
      TypeError: not a ModelConfig. ValueError: no PRNG key.
    """
    check_key(key)
    check_kind("config", config, ModelConfig)
    dtype = network_dtype(dtype)
    embed_key, head_key, layers_key = jax.random.split(key, 3)
    table = config.vocab_size, config.hidden_size
    keys = jax.random.split(layers_key, config.num_hidden_layers)
    base = Base(
        embed=_normal(embed_key, table, std, dtype),
        layers=tuple(init_layer(k, config, dtype, std) for k in keys),
        final_norm=jnp.ones(config.hidden_size, jnp.float32),
        lm_head=None if config.tie_word_embeddings else _normal(head_key, table, std, dtype),
    )
    return Model(base, config)


def quantize(model: Model, weight_format: str = "nvfp4") -> Model:
    """The same network with its linear layers in `weight_format`; everything else, and what is in that format already,
    stays as it is. "bf16" unpacks in the embeddings' dtype.

    Raises:
      UserError: an unknown format, a weight of a shape that the format does not hold, one that is not
        finite (outside of a trace), which 4 bits do not hold, or one that is in another packed format and would be
        rounded a second time.
    """
    check_format(str(weight_format))  # None, which means a folder's own elsewhere, is no format to write
    dtype = model.base.embed.dtype

    def plain(i: int, layer: Layer) -> Layer:
        unpacked = {}
        for name in PROJECTIONS:
            weight = getattr(layer, name)
            found = format_of(weight)
            known = found == "bf16" and not isinstance(weight, jax.core.Tracer)
            if weight_format != "bf16" and known and not all_finite(weight):
                raise UserError(f"layer {i}: {name}: expected finite weights, found NaN or infinity")
            if found in ("bf16", weight_format):
                continue
            if weight_format != "bf16":
                raise UserError(
                    f"{name} is in {found} already and would be rounded a second time; allowed: {found}, bf16"
                )
            unpacked[name] = dequantized(weight, dtype)
        return layer.replace(**unpacked)

    layers = tuple(quantize_layer(plain(i, layer), weight_format) for i, layer in enumerate(model.base.layers))
    return model.replace(base=model.base.replace(layers=layers))


@jax.jit
def all_finite(array: jax.Array) -> jax.Array:
    """Whether no element is NaN or infinite, bool []."""
    # 0 x of such a number is NaN. Of `isfinite` of all, XLA would keep a byte for each on a CPU.
    return jnp.isfinite((0 * array).sum())


def quantize_layer(layer: Layer, weight_format: str) -> Layer:
    """A layer's plain weights in `weight_format`, those of float16 quantized as float32."""
    weights: dict[str, Weight] = {}
    for group in SHARED_SCALE:
        dense = {name: w for name in group if format_of(w := getattr(layer, name)) == "bf16"}
        if weight_format == "bf16" or not dense:
            continue
        made = PACKED[weight_format]
        dense = {name: w.astype(jnp.float32) if w.dtype == jnp.float16 else w for name, w in dense.items()}
        for name, w in dense.items():
            if not made.fits(*w.shape):
                raise UserError(f"{name}: {made.needs}, found {list(w.shape)}")
        shared = None
        if made.shared_scale is not None:
            amax = jnp.max(jnp.stack([jnp.abs(w).max() for w in dense.values()]))
            shared = made.shared_scale(amax, jnp.result_type(*dense.values()))
        weights |= {name: made.quantize(w, shared) for name, w in dense.items()}
    return layer.replace(**weights)


def for_kernels(model: Model, *, consume: bool = False) -> Model:
    """The same network with its NVFP4 weights in the order that the GPU kernels read (see `formats.kernel_nvfp4`).

    With `consume` the packed arrays of `model` are deleted on the way, each as soon as its copy is made; in a trace,
    where they hold no memory, they stay. Without it all weights are there twice until the caller lets go of `model`.
    """
    dtype = model.base.embed.dtype

    def reordered(weight: Weight) -> Weight:
        if not isinstance(weight, NVFP4Weight):
            return weight
        new = repacked(weight, dtype)
        if consume and not isinstance(weight.packed, jax.core.Tracer):
            weight.packed.delete()
            weight.scale.delete()
        return new

    layers = tuple(
        layer.replace(**{name: reordered(getattr(layer, name)) for name in PROJECTIONS}) for layer in model.base.layers
    )
    return model.replace(base=model.base.replace(layers=layers))


def init_adapter(
    key: jax.Array,
    model: Model,
    lora_r: int = 16,
    lora_alpha: float = 32.0,
    target_modules: Iterable[str] = PROJECTIONS,
    train_norms: bool = False,
    use_rslora: bool = False,
) -> Adapter:
    """A LoRA adapter that changes nothing yet: A uniform in +-1/sqrt(K) (PEFT's Kaiming with a = sqrt 5), B zero.

    Args:
      key: PRNG key for A.
      model: the network it belongs to.
      lora_r, lora_alpha: rank and alpha; the scaling is alpha / rank, with use_rslora alpha / sqrt(rank).
      target_modules: which of `PROJECTIONS` get a pair.
      train_norms: also train input and post-attention norm scales, starting from the base's.

    Raises:
      UserError: an unknown projection name, none, one text in place of a list, or a rank or an alpha that is too low or
        too high.
      TypeError: not a Model. ValueError: no PRNG key.
    """
    key = of_threefry(key)
    check_kind("model", model, Model)
    if isinstance(target_modules, str):  # whose letters would be taken for names
        raise UserError(
            f"target_modules is {target_modules!r}, one text; expected a list of names, such as ['q_proj']; allowed in "
            f"it: {', '.join(PROJECTIONS)}"
        )
    names = tuple(target_modules)
    for name in names:
        if name not in PROJECTIONS:
            hint = nearest(name, PROJECTIONS)
            raise UserError(f"target_modules holds {name!r}; allowed: {', '.join(PROJECTIONS)}{hint}")
    if not names:
        raise UserError("target_modules is empty; allowed: one projection or more")
    check_lora(lora_r, lora_alpha)

    scaling = lora_scaling(lora_r, lora_alpha, use_rslora)

    def pair(key: jax.Array, name: str) -> LoRA:
        N, K = projection_shape(model.config, name)
        a = jax.random.uniform(key, (lora_r, K), jnp.float32, -(K**-0.5), K**-0.5)
        return LoRA(a, jnp.zeros((N, lora_r), jnp.float32), scaling, use_rslora)

    lora = tuple(
        {name: pair(jax.random.fold_in(jax.random.fold_in(key, i), PROJECTIONS.index(name)), name) for name in names}
        for i in range(len(model.base.layers))
    )
    return Adapter(lora, norms_to_train(model) if train_norms else None)
