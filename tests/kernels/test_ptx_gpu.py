"""Instructions of `pallas_kernels.ptx` on a CUDA device, bit for bit: `python -m pytest -m gpu tests/kernels`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import lane_level
from pallas_kernels import ptx as p
from pallas_kernels import ptx_memory as mem

pytestmark = pytest.mark.gpu

THREADS = 128
SPECIAL = [0.0, np.inf, np.nan, 2.0**-149, 2.0**-127, 2.0**-126, 1.0, 128.0, 3.4028235e38]


def applied(f, *operands):
    """f(address of a number of each operand) of float32 [N], N a multiple of 128, computed by a kernel."""
    count = operands[0].size

    def each_number(_, *refs):
        *given, out = map(mem.global_address, refs)
        at = p.mul(p.add(p.mul(p.sreg("ctaid.x"), THREADS), p.sreg("tid.x")), 4)
        mem.store_global_f32(mem.offset(out, at), f(*(mem.load_global_f32(mem.offset(a, at)) for a in given)))

    out = jax.ShapeDtypeStruct((count,), jnp.float32)
    call = lane_level.kernel(each_number, [out], "bfloat16", grid=count // THREADS, warps=THREADS // 32)
    return np.asarray(jax.jit(call)(*operands)[0])


@pytest.mark.parametrize(
    ("without", "plain"), [(p.divide_without_call, p.divide), (p.rsqrt_without_call, p.rsqrt)], ids=["divide", "rsqrt"]
)
def test_without_a_call_it_rounds_alike(without, plain, rng):
    count = 1 if plain is p.rsqrt else 2
    numbers = rng.integers(0, 2**31, (count, 2**20), np.uint32).view(np.float32)
    if count == 2:
        pairs = np.array([(a, b) for a in SPECIAL for b in SPECIAL], np.float32)
        numbers[:, : len(pairs)] = pairs.T
        numbers[0, -(2**18) :] = 128.0
        numbers[1] *= np.float32(1) - 2 * (rng.random(2**20) < 0.5).astype(np.float32)
    else:
        numbers[0, : len(SPECIAL)] = SPECIAL
    got, want = (applied(f, *map(jnp.asarray, numbers)) for f in (without, plain))
    np.testing.assert_array_equal(got, want)  # NaN equals NaN
