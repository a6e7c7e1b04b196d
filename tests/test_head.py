"""The output matrix: float32 logits from bfloat16 hidden states, and a gradient that multiplies in bfloat16."""

import jax
import jax.numpy as jnp
from tiny import CONFIG

from qerl_jax.models.init import init_model
from qerl_jax.models.transformer import head


def test_the_gradient_is_a_product_in_the_compute_dtype():
    """With the weights taken to float32 it would be the slowest product of an update."""
    model = init_model(jax.random.key(0), CONFIG, jnp.bfloat16)
    hidden = jax.random.normal(jax.random.key(1), (6, CONFIG.hidden_size), jnp.bfloat16)
    dlogits = jax.random.normal(jax.random.key(2), (6, CONFIG.vocab_size))

    def gradient(hidden):
        return jax.vjp(lambda h: head(model, h), hidden)[1](dlogits)[0]

    products = [e for e in jax.make_jaxpr(gradient)(hidden).eqns if e.primitive.name == "dot_general"]
    assert products and all(v.aval.dtype == jnp.bfloat16 for e in products for v in e.invars)
    matrix = model.base.embed if model.base.lm_head is None else model.base.lm_head
    expected = dlogits @ matrix.astype(jnp.float32)
    made = gradient(hidden).astype(jnp.float32)
    assert float(jnp.abs(made - expected).max()) < 0.02 * float(jnp.abs(expected).max())
