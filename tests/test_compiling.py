"""Programs that are compiled in threads."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.compiling import Programs


def test_a_key_is_compiled_once_and_errors_come_to_who_asks():
    programs, x = Programs(2), jax.ShapeDtypeStruct((3,), jnp.float32)
    programs.start("twice", lambda x: 2 * x, x)
    programs.start("twice", lambda x: 3 * x, x)  # the same key: nothing new
    assert len(programs) == 1
    assert programs.get("twice")(jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert programs.seconds > 0 and set(programs.compile_seconds) == {"twice"}
    with pytest.raises(TypeError, match="shape"):
        programs.start("wrong", lambda x: x @ jnp.ones((2, 2)), x)
    with pytest.raises(KeyError):
        programs.get("never started")
    programs.close()
