"""The shape of a decoder-only transformer, read from a Hugging Face `config.json` (v4 or v5 spelling)."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from qerl_jax.errors import UserError
from qerl_jax.json_fields import Fields
from qerl_jax.models.rope import RopeScaling, YarnScaling, read_rope, rope_to_hf

QKV = ("q_proj", "k_proj", "v_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


class Family(NamedTuple):
    """What distinguishes one family of networks from another. All else is a number of its `config.json`, or the same
    in all: SwiGLU, RMSNorm by x / rms(x) times a scale, embeddings as they are.

    What a layer computes stands in `models.transformer`. Two kernels compute it again where tokens are decoded on a
    Hopper GPU: `between_attentions` (called in `rollout.fused`) what `block` does, without attention, and
    `decode_attention` (in `rollout.attention`) what `split_heads` and attention do. AWQ folds its scales into the norm
    that projections read (`quantization.awq`).
    """

    architecture: str
    attention_biases: tuple[str, ...]  # projections that have a bias where attention_bias is true
    options: tuple[str, ...] = ()  # which biases its config.json can switch on; otherwise the family settles them
    qk_norm: bool = False  # an RMSNorm over each head's queries and keys, before they are rotated
    head_dim: int | None = None  # where config.json has none; None is hidden_size / num_attention_heads
    max_position_embeddings: int = 32768  # where config.json has none
    sliding_window: bool = True  # whether config.json can ask for it


FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", QKV),
    "qwen3": Family("Qwen3ForCausalLM", (*QKV, "o_proj"), ("attention_bias",), qk_norm=True, head_dim=128),
    "llama": Family(
        "LlamaForCausalLM",
        (*QKV, "o_proj"),
        ("attention_bias", "mlp_bias"),
        max_position_embeddings=2048,
        sliding_window=False,
    ),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Hyper-parameters of the network; hashable, so it can be static under `jax.jit`."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    attention_bias: bool
    max_position_embeddings: int
    mlp_bias: bool = False
    rope_scaling: RopeScaling | None = None

    def __repr__(self) -> str:
        # Without options at their default: a base's fingerprint holds this text, and an option added later must not
        # change the fingerprints of runs that never had it.
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given = [f"{f.name}={values[f.name]!r}" for f in dataclasses.fields(self) if values[f.name] != f.default]
        return f"ModelConfig({', '.join(given)})"

    @property
    def family(self) -> Family:
        """What the network has besides its numbers."""
        return FAMILIES[self.model_type]

    @property
    def positions(self) -> int:
        """The most tokens of a row: `max_position_embeddings`, or what YaRN makes of the original length if that is
        more (a folder whose scaling was added to its config.json still has the length from before)."""
        scaling = self.rope_scaling
        if not isinstance(scaling, YarnScaling):
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(scaling.factor * scaling.original_max_position_embeddings))

    def unknown_id(self, ids: np.ndarray, lengths: np.ndarray | None = None) -> int | None:
        """The first of these token ids that the vocabulary does not have; None if it has all. With `lengths` ids are
        rows, of which so many are tokens and the rest is padding."""
        if lengths is not None:
            ids = ids[np.arange(ids.shape[1]) < lengths[:, None]]
        return next((int(token) for token in ids[(ids < 0) | (ids >= self.vocab_size)]), None)

    @property
    def biases(self) -> tuple[str, ...]:
        """The projections that have a bias."""
        attention = self.family.attention_biases if self.attention_bias else ()
        return attention + (MLP if self.mlp_bias else ())

    @classmethod
    def from_hf(cls, hf: dict[str, Any], where: str = "config.json") -> "ModelConfig":
        """Reads the dictionary of a `config.json`. Keys that are absent have transformers' defaults.

        Raises:
          UserError: naming `where`, the key, what was found and what is allowed.
        """
        kind = hf.get("model_type")
        if not isinstance(kind, str) or kind not in FAMILIES:
            raise UserError(f"{where}: model_type is {kind!r}; supported are {sorted(FAMILIES)}")
        family, fields = FAMILIES[kind], Fields(hf, where)
        if hf.get("hidden_act", "silu") != "silu":
            raise UserError(f"{where}: hidden_act is {hf['hidden_act']!r}; supported is 'silu'")
        if not fields.get("is_causal", bool, True):
            raise UserError(
                f"{where}: is_causal is false, as in embedding models: tokens would see those behind them; supported "
                "are models that generate, where it is true or absent"
            )
        heads, hidden = fields.get("num_attention_heads", int), fields.get("hidden_size", int)
        positions = fields.get("max_position_embeddings", int, family.max_position_embeddings)
        theta, scaling = read_rope(hf, where, positions)
        config = cls(
            model_type=kind,
            vocab_size=fields.get("vocab_size", int),
            hidden_size=hidden,
            intermediate_size=fields.get("intermediate_size", int),
            num_hidden_layers=fields.get("num_hidden_layers", int),
            num_attention_heads=heads,
            num_key_value_heads=fields.get("num_key_value_heads", int, heads),
            head_dim=fields.get("head_dim", int, family.head_dim or hidden // heads),
            rms_norm_eps=fields.get("rms_norm_eps", float, 1e-6),
            rope_theta=theta,
            tie_word_embeddings=fields.get("tie_word_embeddings", bool, False),
            # A family that does not ask has them always: Qwen2's config does not mention its biases.
            attention_bias="attention_bias" not in family.options or fields.get("attention_bias", bool, False),
            max_position_embeddings=positions,
            mlp_bias="mlp_bias" in family.options and fields.get("mlp_bias", bool, False),
            rope_scaling=scaling,
        )
        if heads % config.num_key_value_heads:
            raise UserError(
                f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads "
                f"{config.num_key_value_heads}"
            )
        if config.head_dim % 2:
            raise UserError(f"{where}: head_dim {config.head_dim} is odd; rotary embeddings need an even one")
        if family.sliding_window and _slides(hf, fields, config):
            raise UserError(
                f"{where}: use_sliding_window is true for layers that would then see {hf.get('sliding_window', 4096)} "
                f"positions of {positions}; sliding-window attention is not supported"
            )
        return config

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that transformers (v4 and v5) reads back as this network."""
        values = dataclasses.asdict(self)
        del values["rope_theta"], values["rope_scaling"]
        for name in ("attention_bias", "mlp_bias"):
            if name not in self.family.options:
                del values[name]
        if self.family.sliding_window:
            values["use_sliding_window"] = False
        return (
            values
            | {"architectures": [self.family.architecture], "hidden_act": "silu"}
            | rope_to_hf(self.rope_theta, self.rope_scaling)
        )


def _slides(hf: dict[str, Any], fields: Fields, config: ModelConfig) -> bool:
    """Whether a layer's attention would miss a position that plain attention sees (transformers' rules)."""
    if not fields.get("use_sliding_window", bool, False) or hf.get("sliding_window", 4096) is None:
        return False
    if fields.get("sliding_window", int, 4096) >= config.positions:
        return False
    if hf.get("layer_types") is not None:
        kinds = hf["layer_types"]
        whole = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
        return not (whole and len(kinds) == config.num_hidden_layers)
    # The layers from max_window_layers on, counted from 0, slide.
    return hf.get("max_window_layers") == 0 or (fields.get("max_window_layers", int, 28) < config.num_hidden_layers)
