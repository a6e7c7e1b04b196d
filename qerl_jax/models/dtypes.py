"""The dtype in which a model computes.

float16 has three bits more than bfloat16, so that sampler and learner, which round independently, are an eighth as far
apart; and its numbers end at 65504, beyond which an activation becomes infinite and the step is refused.
"""

from typing import Literal, get_args

DtypeName = Literal["float32", "bfloat16", "float16"]
DtypeOption = Literal["auto", DtypeName]
DTYPES: tuple[DtypeName, ...] = get_args(DtypeName)


def settled_dtype(name: DtypeOption) -> DtypeName:
    """What `auto` means here: bfloat16 on a GPU, float32 on a CPU, which has no fast bfloat16."""
    if name != "auto":
        return name
    import jax  # on use: the configuration, which must not import JAX, has its names from here

    return "float32" if jax.default_backend() == "cpu" else "bfloat16"
