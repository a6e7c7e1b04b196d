"""The two trees of the library: the frozen `Model` and the trainable `Adapter`.

Dimension letters: V vocabulary, D hidden size, E head size, K inputs and N outputs of a linear layer, R LoRA rank.
A projection is [N, K] (out, in), as files store it: a plain array, or a packed weight of `qerl_jax.formats`.
"""

import math
from typing import Any, get_args

import flax.struct
import jax

from qerl_jax.errors import UserError, check_kind, is_number, is_whole, nearest
from qerl_jax.formats import Weight
from qerl_jax.models.config import ModelConfig
from qerl_jax.option_names import Projection
from qerl_jax.trees import Tree

PROJECTIONS: tuple[Projection, ...] = get_args(Projection)


class Layer(Tree):
    """One transformer block. Norm scales are float32: [D], and [E] for those of queries and keys. What the network does
    not have (see `small_shapes`) is None."""

    input_norm: jax.Array
    post_attention_norm: jax.Array
    q_proj: Weight
    k_proj: Weight
    v_proj: Weight
    o_proj: Weight
    gate_proj: Weight
    up_proj: Weight
    down_proj: Weight
    q_bias: jax.Array | None = None
    k_bias: jax.Array | None = None
    v_bias: jax.Array | None = None
    o_bias: jax.Array | None = None
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None


class Base(Tree):
    """All weights of the frozen network. `lm_head` is None where it is tied to `embed` ([V, D])."""

    embed: jax.Array
    layers: tuple[Layer, ...]
    final_norm: jax.Array
    lm_head: jax.Array | None


class Model(Tree):
    """A frozen network: its shape (static under jit) and weights. Pass it to jitted functions, never close over it."""

    base: Base
    config: ModelConfig = flax.struct.field(pytree_node=False)


class Norms(Tree):
    """RMSNorm scales, float32: one [D] per layer before attention and before the MLP, and the final one. Those of
    queries and keys are not among them: they are neither trained nor noisy."""

    input: tuple[jax.Array, ...]
    post_attention: tuple[jax.Array, ...]
    final: jax.Array


class TrainedNorms(Tree):
    """The scales that an adapter may train, float32; the final norm is never trained."""

    input: tuple[jax.Array, ...]
    post_attention: tuple[jax.Array, ...]


class LoRA(Tree):
    """y += scaling * (x A^T) B^T, with A [R, K] and B [N, R] in float32 (Hu et al. 2021, arXiv 2106.09685).

    The scaling is alpha / R, or alpha / sqrt(R) where the pair is rank-stabilised (Kalajdzievski 2023, arXiv
    2312.03732); which of them it is matters to a file that states alpha, not to the product.
    """

    a: jax.Array
    b: jax.Array
    scaling: float = flax.struct.field(pytree_node=False)
    rank_stabilised: bool = flax.struct.field(pytree_node=False, default=False)


# Within these every scaling is a float; Python's whole numbers may be larger.
MOST_RANK, MOST_ALPHA = 2**31 - 1, 1e30


def check_lora(lora_r: Any, lora_alpha: Any) -> None:
    """Raises UserError for a rank or an alpha of a new pair with which nothing could be trained."""
    if not is_whole(lora_r) or not 1 <= lora_r <= MOST_RANK:
        raise UserError(f"lora_r is {lora_r!r:.60}; allowed: an int from 1 to {MOST_RANK}")
    if not is_number(lora_alpha) or not 0 < lora_alpha <= MOST_ALPHA:
        raise UserError(f"lora_alpha is {lora_alpha!r:.60}; allowed: a number above 0, up to {MOST_ALPHA:g}")


def lora_scaling(rank: int, alpha: float, use_rslora: bool) -> float:
    """alpha / rank, or alpha / sqrt(rank) with use_rslora."""
    return alpha / (math.sqrt(rank) if use_rslora else rank)


def lora_alpha(rank: int, scaling: float, use_rslora: bool) -> float:
    """The alpha whose `lora_scaling` this is, a whole number if possible. Dividing and multiplying may miss it by an
    ulp: an alpha of 16 would be 15.999999999999998."""
    alpha = float(scaling) / lora_scaling(rank, 1.0, use_rslora)
    near = round(alpha), alpha, math.nextafter(alpha, 0), math.nextafter(alpha, math.inf)
    return next((one for one in near if lora_scaling(rank, one, use_rslora) == scaling), alpha)


class Adapter(Tree):
    """Everything that is trained: LoRA pairs by projection name, one dictionary per layer, and the norm scales if
    they are trained too (input and post-attention, never the final one)."""

    lora: tuple[dict[str, LoRA], ...]
    norms: TrainedNorms | None = None


def projection_shape(config: ModelConfig, name: str) -> tuple[int, int]:
    """(out, in) of the projection `name`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, int]] = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    return shapes[name]


def bias_name(projection: str) -> str:
    """The field of `Layer` with the bias of `projection`."""
    return projection.removesuffix("_proj") + "_bias"


def small_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every field of a `Layer` besides the projections: norm scales, whose names end in "norm", and biases."""
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (config.hidden_size,),
        "post_attention_norm": (config.hidden_size,),
    }
    if config.family.qk_norm:
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    return shapes | {bias_name(name): projection_shape(config, name)[:1] for name in config.biases}


def check_kinds(model: Model, adapter: Adapter | None) -> None:
    """Raises TypeError for arguments of another kind, or in another order."""
    check_kind("model", model, Model)
    if adapter is not None:
        check_kind("adapter", adapter, Adapter, ", or None for the base alone")


def check_fits(model: Model, adapter: Adapter) -> None:
    """Raises ValueError for an adapter of another network: with more or fewer layers, pairs of no projection, or arrays
    of other widths; or for several adapters stacked in one."""
    if len(adapter.lora) != len(model.base.layers):
        raise ValueError(f"the adapter has {len(adapter.lora)} layers, the model {len(model.base.layers)}")
    for i, layer in enumerate(adapter.lora):
        if (name := next((name for name in layer if name not in PROJECTIONS), None)) is not None:
            hint = nearest(name, PROJECTIONS)
            raise ValueError(
                f"layer {i} of the adapter has a pair of {name!r}{hint}; allowed: {', '.join(PROJECTIONS)}"
            )
    check_single(adapter)
    for i, layer in enumerate(adapter.lora):
        for name in (name for name in PROJECTIONS if name in layer):  # jit sorts a dictionary
            pair, (N, K) = layer[name], projection_shape(model.config, name)
            R = pair.a.shape[0]
            if pair.a.shape != (R, K) or pair.b.shape != (N, R):
                raise ValueError(
                    f"the adapter is of another network: its pair of layer {i}'s {name} has A {list(pair.a.shape)} and "
                    f"B {list(pair.b.shape)}; expected [rank, {K}] and [{N}, rank]"
                )
    if adapter.norms is not None:
        width = (model.config.hidden_size,)
        found = [[scale.shape for scale in scales] for scales in (adapter.norms.input, adapter.norms.post_attention)]
        if found != [[width] * len(adapter.lora)] * 2:
            raise ValueError(
                f"the adapter is of another network: its norm scales have the shapes {found[0]} and {found[1]}; "
                f"expected {width} of each layer"
            )


def check_single(adapter: Adapter) -> None:
    """Raises ValueError for adapters that `vmap` has stacked in one."""
    shapes = (pair.a.shape for layer in adapter.lora for pair in layer.values())
    if (stacked := next((shape for shape in shapes if len(shape) != 2), None)) is not None:
        raise ValueError(f"a pair's A is [rank, inputs], got {stacked}; of adapters stacked by vmap take each alone")


def norms_of(model: Model, adapter: Adapter | None) -> Norms:
    """The clean norm scales in force: the adapter's where it trains them, else the base's.

    Raises:
      TypeError: not a Model and an Adapter. ValueError: the adapter is of another network, or several in one.
    """
    check_kinds(model, adapter)
    if adapter is not None:
        check_fits(model, adapter)
        if adapter.norms is not None:
            return Norms(adapter.norms.input, adapter.norms.post_attention, model.base.final_norm)
    layers = model.base.layers
    return Norms(
        input=tuple(layer.input_norm for layer in layers),
        post_attention=tuple(layer.post_attention_norm for layer in layers),
        final=model.base.final_norm,
    )


def norms_to_train(model: Model) -> TrainedNorms:
    """The base's scales as an adapter begins with them. Copies: an update donates the adapter, and the base must
    outlive it."""
    layers = model.base.layers
    return TrainedNorms(
        tuple(layer.input_norm.copy() for layer in layers), tuple(layer.post_attention_norm.copy() for layer in layers)
    )


def check_norms(model: Model, norms: Norms) -> None:
    """Raises TypeError for what are no norm scales, ValueError for those of another network: they would be broadcast,
    or left out."""
    check_kind("norms", norms, Norms, " (`norms_of` gives them)")
    found, expected = ([leaf.shape for leaf in jax.tree.leaves(of)] for of in (norms, norms_of(model, None)))
    if found != expected:
        raise ValueError(
            f"norms are of another network: {len(norms.input)} and {len(norms.post_attention)} scales of layers, and "
            f"the final one, of the shapes {sorted(set(found))}; expected {len(model.base.layers)} and "
            f"{len(model.base.layers)}, of {sorted(set(expected))}"
        )


def parameter_count(tree: Any) -> int:
    """Number of array elements in a pytree (packed bytes count as one element each)."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
