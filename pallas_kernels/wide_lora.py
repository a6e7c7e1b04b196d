"""LoRA in the wide kernel: the multiplying warps add h B^T to the sums of x W^T, h = s x A^T of all weights.

h lies side by side [M, sum of ranks] in 16 bits. It goes through the ring of x, and is multiplied by fragments of B,
which goes through the ring of weights, 16 ranks of a tile's outputs at a time. These are the ranks of the tile's own
weight (`WidePlan.own_ranks`), or those of all: then zeros of B where they are another weight's, since CTAs that share
slots of x may have different weights. Of CTAs that split D only the first adds LoRA; the others load zeros for h, from
behind the last rank.

Of dx = dy W the same is added with s dy B in the place of h, and A^T in the place of B (wide.py).

Where h is given, both come before x and the weights, while the CTA still stores the tile before. Where spare CTAs make
h (wide_spare.py), they come behind, which is the time they have.
"""

from . import ptx as p
from . import ptx_memory as mem
from . import ptx_tensor as pt
from .wide_fragments import BLOCK_BYTES
from .wide_plan import B_BOX, B_BOXES, LORA_STEPS, WidePlan


class LoraWarps:
    """What one of the eight multiplying warps does for LoRA. The CTA's class sets the attributes before."""

    plan: WidePlan

    def add_lora(self, group, state):
        """The state with (x A^T) B^T added to its sums, from the slots that come next; the last of them is under way
        when this returns."""
        plan = self.plan
        pair = p.mul(p.and_(self.lane, 3), 4)  # bytes
        of_group = p.add(self.w_base, p.mul(group, 64 * 32))
        places = [p.add(p.add(of_group, p.mul(self.fragments.row(h), 32)), pair) for h in range(2)]
        w, w_parity, x, x_parity, *acc = state
        for start in range(0, plan.lora_steps, LORA_STEPS):
            operands, slots = [], []  # B's fragments of 16 ranks each, as `fragments.decode` gives those of weights
            for first in range(start, min(start + LORA_STEPS, plan.lora_steps), B_BOXES):
                mem.barrier_wait(p.add(self.w_full, p.mul(w, 8)), w_parity)
                here = [p.add(place, p.mul(w, BLOCK_BYTES)) for place in places]
                for box in range(min(B_BOXES, plan.lora_steps - first)):
                    at = [(place, box * B_BOX + half) for half in (0, 16) for place in here]
                    operands.append([mem.load_shared_b32(*place) for place in at])
                slots.append(w)
                w, w_parity = self.advance(w, w_parity, plan.config.w_depth)
            mem.barrier_wait(p.add(self.x_full, p.mul(x, 8)), x_parity)
            descriptor = pt.swizzled_descriptor(p.add(self.base, p.mul(x, plan.x_slot)))
            p.wgmma_fence()
            for k, a in enumerate(operands):
                acc = p.wgmma_half(acc, a, p.add_64(descriptor, 2 * k))
            p.wgmma_commit()
            for slot in slots:
                self.release_w(slot)
            p.wgmma_wait(1)
            if start:
                self.release_x(self.before(x))
            x, x_parity = self.advance(x, x_parity, plan.config.x_depth)
        return [w, w_parity, x, x_parity, *acc]
