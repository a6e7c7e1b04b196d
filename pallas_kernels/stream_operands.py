"""The streaming kernel's operands and outputs, in their order (see stream_kernel.build)."""

import dataclasses

from .stream_plan import Plan


@dataclasses.dataclass(frozen=True)
class Refs:
    """One of each for every weight unless said otherwise."""

    x: list  # one, or two when the first is in fragment order and x A^T needs the plain one
    data: list
    global_scale: list
    bias: list  # or empty
    h: list  # one, or empty when the kernel computes it
    b: list  # B of LoRA; None for a weight without
    a: list  # A and scale of LoRA like B, or empty when h is given
    lora_scale: list
    outs: list  # with SwiGLU one
    lora_space: list  # counters and sums of the slices, or empty when h is given
    shared: object

    @classmethod
    def of(cls, refs, plan: Plan, has_bias: bool) -> "Refs":
        left, n_w = list(refs), len(plan.n)

        def take(count):
            taken, left[:] = left[:count], left[count:]
            return taken

        def take_of_adapters():
            taken = iter(take(sum(rank > 0 for rank in plan.ranks)))
            return [next(taken) if rank else None for rank in plan.ranks]

        x, data, scale = take(1 + (plan.config.wgmma and plan.computes_h)), take(n_w), take(n_w)
        bias, h = take(n_w if has_bias else 0), take(plan.given_h)
        a = take_of_adapters() if plan.computes_h else []
        b = take_of_adapters()
        lora_scale = take_of_adapters() if plan.computes_h else []
        counters, outs, sums = take(plan.computes_h), take(len(plan.outs)), take(plan.computes_h)
        (shared,) = left
        return cls(x, data, scale, bias, h, b, a, lora_scale, outs, counters + sums, shared)
