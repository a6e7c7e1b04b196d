"""The shape of a decoder-only transformer, read from a Hugging Face `config.json` (v4 or v5 spelling)."""

import dataclasses
from typing import Any

from qerl_jax.errors import UserError

_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM"}


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

    @classmethod
    def from_hf(cls, hf: dict[str, Any], where: str = "config.json") -> "ModelConfig":
        """Reads the dictionary of a `config.json`.

        Raises:
          UserError: naming `where`, the key, what was found and what is allowed.
        """
        kind = hf.get("model_type")
        if kind not in _ARCHITECTURES:
            raise UserError(f"{where}: model_type is {kind!r}; supported are {sorted(_ARCHITECTURES)}")

        def get(key: str, kind: type, default: Any = None) -> Any:
            value: Any = hf.get(key, default)
            if value is None:
                raise UserError(f"{where}: {key} is missing")
            if kind is float and type(value) is int:
                value = float(value)
            positive = isinstance(value, int | float) and value > 0
            if type(value) is not kind or not (positive or kind is bool):
                allowed = {int: "a positive integer", float: "a positive number", bool: "true or false"}[kind]
                raise UserError(f"{where}: {key} is {value!r}; expected {allowed}")
            return value

        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise UserError(f"{where}: rope parameters are {rope!r}; expected a mapping")
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise UserError(f"{where}: rope_type is {rope_type!r}; supported is 'default'")
        if hf.get("use_sliding_window"):
            raise UserError(f"{where}: use_sliding_window is true; sliding-window attention is not supported")
        if hf.get("hidden_act", "silu") != "silu":
            raise UserError(f"{where}: hidden_act is {hf['hidden_act']!r}; supported is 'silu'")
        heads = get("num_attention_heads", int)
        hidden = get("hidden_size", int)
        config = cls(
            model_type=kind,
            vocab_size=get("vocab_size", int),
            hidden_size=hidden,
            intermediate_size=get("intermediate_size", int),
            num_hidden_layers=get("num_hidden_layers", int),
            num_attention_heads=heads,
            num_key_value_heads=get("num_key_value_heads", int, heads),
            head_dim=get("head_dim", int, hidden // heads),
            rms_norm_eps=get("rms_norm_eps", float, 1e-6),
            rope_theta=float(rope.get("rope_theta") or get("rope_theta", float, 10000.0)),
            tie_word_embeddings=get("tie_word_embeddings", bool, False),
            attention_bias=True,  # Qwen2 always has biases on q, k and v, and its config does not say so
            max_position_embeddings=get("max_position_embeddings", int, 32768),
        )
        if heads % config.num_key_value_heads:
            raise UserError(
                f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads "
                f"{config.num_key_value_heads}"
            )
        if config.head_dim % 2:
            raise UserError(f"{where}: head_dim {config.head_dim} is odd; rotary embeddings need an even one")
        return config

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that transformers (v4 and v5) reads back as this network."""
        fields = dataclasses.asdict(self)
        del fields["attention_bias"]
        return fields | {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "use_sliding_window": False,
        }
