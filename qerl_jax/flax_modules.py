"""The same packed weights and LoRA as `flax.nnx` modules, for other people's models.

`nnx.split(model, nnx.LoRAParam, ...)` separates what is trained from what is frozen: a `PackedLinear` holds its packed
weight in `PackedParam` variables and its adapter in `nnx.LoRAParam` ones.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from qerl_jax.formats import Weight
from qerl_jax.models.linear import linear
from qerl_jax.models.params import LoRA, check_lora, lora_scaling


class PackedParam(nnx.Variable):
    """A frozen weight in one of `qerl_jax.formats`; optimizers of `nnx.Param` or `nnx.LoRAParam` do not see it."""


class PackedLinear(nnx.Module):
    """y = x W^T + bias + (alpha / r) (x A^T) B^T with W [N, K] frozen and A [R, K], B [N, R] trained.

    Attributes:
      weight: `PackedParam` of the packed arrays.
      bias: `PackedParam` [N], or None.
      lora_a, lora_b: `nnx.LoRAParam`, float32; B starts at zero, so that the layer starts as the frozen one.

    Raises:
      UserError: a rank or an alpha that is too low or too high.
    """

    def __init__(
        self,
        weight: Weight,
        *,
        lora_r: int,
        lora_alpha: float,
        bias: jax.Array | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_lora(lora_r, lora_alpha)
        N, K = weight.shape
        self.weight = PackedParam(weight)
        self.bias = None if bias is None else PackedParam(bias)
        a = jax.random.uniform(rngs.params(), (lora_r, K), jnp.float32, -(K**-0.5), K**-0.5)
        self.lora_a = nnx.LoRAParam(a)
        self.lora_b = nnx.LoRAParam(jnp.zeros((N, lora_r), jnp.float32))
        self.scaling = lora_scaling(lora_r, lora_alpha, use_rslora=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., K] -> [..., N], in x's dtype."""
        lora = LoRA(self.lora_a[...], self.lora_b[...], self.scaling)
        return linear(x, self.weight.get_value(), lora, None if self.bias is None else self.bias[...])
