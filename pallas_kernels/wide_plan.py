"""How the wide kernel cuts a shape: the configuration, and the shared memory that it needs.

Letters: R outputs (N forward, K for dx), D inputs (K forward, N for dx), M rows of the other operand.
"""

import dataclasses
import itertools
from typing import NamedTuple

from .layout import ROWS, UNIT
from .stream_plan import RESIDENT, SMEM_LIMIT
from .wide_fragments import BLOCK, BLOCK_BYTES
from .wide_spare_plan import SparePlan, check_spare

TILE = 128  # outputs of a CTA: two warpgroups with 64 each
STAGE = 64  # inputs of x that lie side by side in shared memory: 128 bytes a row
LORA_STEPS = STAGE // 16  # of 16 ranks that a slot of x takes, in its first stage
WHOLE_BLOCKS = 128  # rows of a tile up to which a slot of the ring of x has a block's inputs, beyond that half of them
B_BOX = TILE * 32  # bytes of 16 ranks of B's rows
B_BOXES = BLOCK_BYTES // B_BOX  # that a slot of weights takes
SUM_STRIDE = (64 + 4) * 4  # bytes between rows of float32 sums in shared memory; 4 more against bank conflicts
TOTALS_ROWS = 128  # of a tile whose sums the registers hold twice, in a chain and in totals
CHUNK = 32  # rows that a warpgroup passes through shared memory at a time
SLICE = 64  # columns of a row whose squares are added up where a norm is handed over: a warpgroup's outputs
SLICE_ROWS = 32  # such sums come for whole groups of rows
MOST_NORMED = 256  # rows whose sums two warps add up while the others multiply


@dataclasses.dataclass(frozen=True)
class WideConfig:
    """One cut of a shape.

    Attributes:
      m_tile: rows of x that a CTA multiplies at once, a multiple of 32 up to 256.
      share: CTAs of neighbouring outputs, a cluster, that load each slot of x together, each its part for all.
      split: where the last wave (the only one, where all tiles fit into one) does not fill the GPU, each of its tiles
        is computed by so many CTAs, or as many as there are, which split D and add their sums at the end. Which tiles
        these are, and by how many, depends on the number of tiles, and where that depends on M, on M.
      x_depth, w_depth: slots in the rings of x (128 inputs each, 64 in tiles of more than 128 rows) and of weight
        blocks (128 inputs each).
      promote: the tensor core's additions truncate, the more the longer their chain is: after so many steps of 16
        inputs the sums are added to totals outside: in registers in tiles of up to 128 rows, else in memory of each
        lane's own, which takes longer chains to be cheap. A multiple of 8; 0 for never.
    """

    m_tile: int = 256
    share: int = 2
    split: int = 1
    x_depth: int = 4
    w_depth: int = 4
    promote: int = 0


@dataclasses.dataclass(frozen=True)
class Handover:
    """In which form x comes from the launch before, and the result goes to the one behind; plain arrays by default.

    Attributes:
      units: x comes in unit order (fragment_order.py).
      normed: x comes from a kernel that `joins`, and what it is multiplied to is divided by its root mean square here.
      joins: the result is added to the residual stream and goes out as a norm's x, not divided yet (wide_norm.py).
      gives_units: that x, or the result of `swiglu`, goes out in unit order.
      scaled: x is such a result, kept in float16's range (float16_range.py).
    """

    units: bool = False
    normed: bool = False
    joins: bool = False
    gives_units: bool = False
    scaled: bool = False


PLAIN = Handover()


class Segment(NamedTuple):
    """Blocks of D that are one weight's: the first and the one behind the last."""

    first: int
    end: int


class Run(NamedTuple):
    """Items that are computed alike, one after the other: the first and the one behind the last, rows of their tiles,
    and how many clusters split D of each."""

    first: int
    end: int
    rows: int
    parts: int


def _group_of(m_tiles: int) -> int:
    """Tiles of rows of a group: at most 16, in groups as equal as they can be."""
    return -(-max(1, m_tiles) // max(1, -(-m_tiles // 16)))


@dataclasses.dataclass(frozen=True)
class WidePlan:
    """Sizes of one kernel, and places in shared memory in bytes. `ranks` are those of LoRA, 0 where a weight has none;
    empty without any. To dx the weights that read the same x, of `inputs` outputs each, whose sum D is, are multiplied
    one behind the other, and the adapters of all are added as one. With `swiglu` the weights are gate and up, and the
    result is silu(x W_gate^T) * (x W_up^T), and these two besides, if it `keeps` them; or, of dx, the results are the
    gradients of such a gate and up, which are given, where dx is that of silu(gate) * up. With `makes_h` A is an
    operand, and CTAs that have no tile compute x A^T; without, x A^T is."""

    m: int
    d: int
    r: tuple[int, ...]
    transposed: bool
    config: WideConfig
    ranks: tuple[int, ...] = ()
    swiglu: bool = False
    makes_h: bool = False
    handover: Handover = PLAIN
    inputs: tuple[int, ...] = ()
    keeps: bool = False

    @property
    def joins_two(self) -> bool:
        """Whether the result is of gate and up, a warpgroup's each."""
        return self.swiglu and not self.transposed

    @property
    def goes_through(self) -> bool:
        """Whether dx goes on to gate and up."""
        return self.swiglu and self.transposed

    @property
    def fetches(self) -> bool:
        """Whether outputs need more of a row than sums on their way out."""
        return self.handover.joins or self.goes_through

    @property
    def given_h(self) -> bool:
        """Whether x A^T is an operand."""
        return bool(self.ranks) and not self.makes_h

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Of each weight that is multiplied, one behind the other; the blocks of x W^T are those of all weights."""
        counts = [-(-d // BLOCK) for d in self.inputs or (self.d,)]
        return tuple(map(Segment, itertools.accumulate(counts, initial=0), itertools.accumulate(counts)))

    @property
    def one_chain(self) -> bool:
        """Whether LoRA's products and those of all blocks follow each other without a wait for what was before."""
        return not self.config.promote and len(self.segments) == 1

    @property
    def blocks(self) -> int:
        return self.segments[-1].end

    @property
    def promote_blocks(self) -> int:
        """Blocks of weights in a chain of additions."""
        return self.config.promote * 16 // BLOCK

    @property
    def totals_in_registers(self) -> bool:
        return self.config.m_tile <= TOTALS_ROWS

    @property
    def outs(self) -> tuple[int, ...]:
        """Columns of the arrays that it writes."""
        if not self.swiglu:
            return self.r
        return self.r[:1] * (2 if self.transposed else 3 if self.keeps else 1)

    @property
    def own_outputs(self) -> int:
        """Of a tile's outputs those of one weight: of gate and up a warpgroup's."""
        return TILE // 2 if self.joins_two else TILE

    @property
    def own_row_tiles(self) -> int:
        """The same in KernelWeight's row tiles."""
        return self.own_outputs // ROWS

    @property
    def tiles_of(self) -> tuple[int, ...]:
        """Of each weight, or of gate and up together."""
        return tuple(-(-r // self.own_outputs) for r in (self.r[:1] if self.swiglu else self.r))

    @property
    def rank_steps(self) -> tuple[int, ...]:
        """16 ranks each."""
        return tuple(rank // 16 for rank in self.ranks)

    @property
    def first_steps(self) -> tuple[int, ...]:
        """Of each weight's ranks among those of all, and the one behind the last."""
        return tuple(itertools.accumulate(self.rank_steps, initial=0))

    @property
    def own_ranks(self) -> bool:
        """Whether a tile is multiplied by its own weight's ranks alone. It is by those of all where weights' ranks
        differ, where it is two weights', and where tiles of a cluster, which load x A^T together, may be of two."""
        alike = len(set(self.ranks)) == 1 and not self.joins_two
        return alike and all(tiles % self.config.share == 0 for tiles in self.tiles_of)

    @property
    def lora_steps(self) -> int:
        """That a tile is multiplied by."""
        return self.rank_steps[0] if self.own_ranks else self.first_steps[-1]

    @property
    def lora_slots(self) -> int:
        """Slots of the ring of x that x A^T of a tile takes."""
        return -(-self.lora_steps // LORA_STEPS)

    @property
    def m_tiles(self) -> int:
        return -(-self.m // self.config.m_tile)

    @property
    def last_rows(self) -> int:
        """Rows of the last tile of rows: as many as there are, in whole chunks and eights for each CTA that loads them;
        or `m_tile`, where it fills up a group of the others."""
        others, step = self.m_tiles - 1, max(CHUNK, 8 * self.config.share)
        rows = -(-(self.m - others * self.config.m_tile) // step) * step
        return self.config.m_tile if others % _group_of(others) else rows

    @property
    def full_m_tiles(self) -> int:
        """Tiles of `m_tile` rows."""
        return self.m_tiles - (self.last_rows < self.config.m_tile)

    @property
    def m_group(self) -> int:
        """Of those so many are multiplied by the same weights before the next weights: their x stays in the L2. Every
        group is filled up to this size."""
        return _group_of(self.full_m_tiles)

    @property
    def r_groups(self) -> int:
        return -(-sum(self.tiles_of) // self.config.share)

    @property
    def full_items(self) -> int:
        return -(-self.full_m_tiles // self.m_group) * self.m_group * self.r_groups

    @property
    def items(self) -> int:
        """Those of full tiles, and behind them those of a last tile with fewer rows."""
        return self.full_items + (self.m_tiles - self.full_m_tiles) * self.r_groups

    @property
    def resident(self) -> int:
        """Clusters that the GPU holds at once."""
        return RESIDENT[self.config.share]

    @property
    def parts(self) -> int:
        """Clusters that compute an item of the last wave together, each a part of D."""
        left = self.items % self.resident
        return min(self.config.split, self.resident // left) if left else 1

    @property
    def split_items(self) -> int:
        """Items that several clusters compute together, the last ones."""
        return self.items % self.resident if self.parts > 1 else 0

    @property
    def runs(self) -> tuple[Run, ...]:
        whole = self.items - self.split_items
        bounds = itertools.pairwise(sorted({0, self.full_items, whole, self.items}))
        return tuple(
            Run(
                first,
                end,
                self.config.m_tile if first < self.full_items else self.last_rows,
                1 if first < whole else self.parts,
            )
            for first, end in bounds
        )

    @property
    def clusters(self) -> int:
        """All of which are resident, as those that split D wait for each other."""
        return max(min(self.items - self.split_items, self.resident), self.split_items * self.parts)

    @property
    def longest_chain(self) -> int:
        """Steps of 16 inputs that a CTA adds up for an output at most."""
        return -(-self.blocks // (self.parts if self.split_items == self.items else 1)) * BLOCK // 16

    @property
    def split_tiles(self) -> int:
        return self.split_items * self.config.share

    @property
    def counters(self) -> int:
        """Of wide_split.py one for each warpgroup of a split tile, of wide_spare.py two."""
        return 2 * self.split_tiles + 2 * self.makes_h

    @property
    def ctas(self) -> int:
        """That have tiles."""
        return self.clusters * self.config.share

    @property
    def spare(self) -> SparePlan:
        """What the other CTAs do that the GPU holds at once; each of `ctas` has one tile then, or one part of one."""
        ctas = self.resident * self.config.share - self.ctas
        return SparePlan(self.m_tiles * self.config.m_tile, self.d, sum(self.rank_steps), ctas, self.barriers_at)

    @property
    def readers(self) -> int:
        """CTAs that read x A^T which spare CTAs have made: of those that split D the first."""
        return self.items * self.config.share

    @property
    def slots_of_block(self) -> int:
        """Slots of x to one block of weights."""
        return 1 if self.config.m_tile <= WHOLE_BLOCKS else BLOCK // STAGE

    @property
    def stages_of_slot(self) -> int:
        """Stages of x in a slot, one behind the other."""
        return BLOCK // STAGE // self.slots_of_block

    @property
    def x_stage(self) -> int:
        return self.config.m_tile * STAGE * 2

    @property
    def x_slot(self) -> int:
        return self.stages_of_slot * self.x_stage

    @property
    def w_at(self) -> int:
        return self.config.x_depth * self.x_slot

    @property
    def chunks_at(self) -> int:
        return self.w_at + self.config.w_depth * BLOCK_BYTES

    @property
    def barriers_at(self) -> int:
        return self.chunks_at + 2 * CHUNK * SUM_STRIDE

    @property
    def slice_rows(self) -> int:
        """Rows of the sums of squares of a slice of columns."""
        return -(-self.m // SLICE_ROWS) * SLICE_ROWS

    @property
    def inverse_at(self) -> int:
        """A barrier, and behind it 1 / root mean square of each row, where x is `normed`."""
        return self.barriers_at + 16 * (self.config.x_depth + self.config.w_depth)

    @property
    def total(self) -> int:
        of_norm = 16 + 4 * self.slice_rows if self.handover.normed else 0
        return self.inverse_at + of_norm + 1024  # 1024: to align the rings


def make_plan(
    m: int,
    d: int,
    r: tuple[int, ...],
    transposed: bool,
    config: WideConfig,
    ranks: tuple[int, ...] = (),
    swiglu: bool = False,
    makes_h: bool = False,
    handover: Handover = PLAIN,
    inputs: tuple[int, ...] = (),
    keeps: bool = False,
) -> WidePlan:
    """Raises ValueError naming the constraint when the configuration does not take the shape."""
    ranks = tuple(ranks) if any(ranks) else ()
    plan = WidePlan(m, d, tuple(r), transposed, config, ranks, swiglu, makes_h, handover, tuple(inputs), keeps)
    if plan.ranks and (len(ranks) != len(r) or any(rank % 16 for rank in ranks)):
        raise ValueError(f"LoRA has a rank for each weight, multiples of 16; got {ranks}")
    if makes_h and transposed:
        raise ValueError("spare CTAs make x A^T of the forward product")
    if config.m_tile % CHUNK or not CHUNK <= config.m_tile <= 256:
        raise ValueError(f"m_tile must be a multiple of {CHUNK} up to 256, got {config.m_tile}")
    if config.share not in RESIDENT:
        raise ValueError(f"share must be one of {sorted(RESIDENT)}, got {config.share}")
    waits = config.split > 1 or makes_h
    if waits and config.share > 2:  # of fours some GPUs hold fewer, and those that wait would wait forever
        raise ValueError(f"CTAs that wait for each other need a share of 1 or 2, got {config.share}")
    if config.m_tile % (8 * config.share):
        raise ValueError(f"m_tile must be a multiple of 8 share = {8 * config.share}, got {config.m_tile}")
    if config.promote % (BLOCK // 16):
        raise ValueError(f"promote must be a multiple of {BLOCK // 16}, got {config.promote}")
    if m < 1:
        raise ValueError(f"M must be at least 1, got {m}")
    if any(i % 8 or i < 8 for i in (d, *r, *inputs)):
        raise ValueError(
            f"the wide kernel takes N and K that are multiples of 8, got {inputs or d} inputs and {r} outputs"
        )
    slots = -(-min(plan.lora_steps, LORA_STEPS) // B_BOXES)
    if config.w_depth < slots:
        raise ValueError(f"LoRA of ranks {ranks} takes {slots} slots of weights at once, w_depth is {config.w_depth}")
    if config.split > plan.blocks:
        raise ValueError(f"{d} inputs are {plan.blocks} blocks of {BLOCK}, too few to split by {config.split}")
    if plan.joins_two and (len(r) != 2 or r[0] != r[1]):
        raise ValueError(f"swiglu takes two weights of as many outputs, got {r}")
    if keeps and not plan.joins_two:
        raise ValueError("what is kept are gate and up, of swiglu forward")
    if transposed and len(r) != 1:
        raise ValueError(f"weights of dx have their inputs in common, got {r}")
    if inputs and (not transposed or sum(inputs) != d):
        raise ValueError(f"dx has {d} inputs, those of all its weights, which have {tuple(inputs)}")
    if makes_h and not plan.ranks:
        raise ValueError("there are no adapters, of which spare CTAs could make x A^T")
    _check_handover(plan)
    if plan.total > SMEM_LIMIT:
        raise ValueError(f"{config} needs {plan.total} bytes of shared memory; limit {SMEM_LIMIT}")
    if makes_h:
        check_spare(plan.spare, plan.ranks)
    return plan


def _check_handover(plan: WidePlan):
    way, d, r = plan.handover, plan.d, plan.r
    if way != PLAIN and plan.transposed:
        raise ValueError(f"x and the result of dx are plain arrays, got {way}")
    if (way.units or way.normed) and d % max(UNIT, SLICE):
        raise ValueError(f"x in unit order or of a norm has K in multiples of {max(UNIT, SLICE)}, got {d}")
    if way.normed and plan.m > MOST_NORMED:
        raise ValueError(f"x of a norm has up to {MOST_NORMED} rows, got {plan.m}")
    if way.joins and (plan.swiglu or len(r) != 1 or r[0] % SLICE):
        raise ValueError(f"one weight joins the residual stream, of N in multiples of {SLICE}; got {r}")
    if way.gives_units and (not (plan.swiglu or way.joins) or r[0] % UNIT):
        raise ValueError(f"a norm's x or swiglu's result goes out in unit order, N in multiples of {UNIT}; got {r}")
