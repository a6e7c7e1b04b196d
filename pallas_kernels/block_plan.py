"""How the block kernel (block_kernel.py) divides its matmuls among CTAs and warps, and its memory.

Letters: M rows, K inputs, N outputs, D hidden size; row tiles of 16 outputs and quads of 256 inputs as in layout.py. An
*item* is one quad of one row tile: 2304 bytes of weights, the step of the main loop. A *panel* is 8 rows of x, those of
a product of tensor cores.
"""

import dataclasses
import functools

from .layout import COLS, QUAD_BYTES, ROWS
from .stream_plan import SMEM_LIMIT

PANEL, MAX_ROWS = 8, 16
WARPS = 12
# With more of them decoding waits less for itself, but each has a shorter ring and fewer registers: measured, it pays
# where the streams are long (32B, 82 items a warp: 97.4 -> 92.6 us; 14B, 48: 63.5 -> 64.5).
MORE_WARPS, LONG_STREAM, MOST_RANKS = 16, 64, 64
SERVICE_WARPS = 4
# Items of a warp's ring: more, for which x of few rows leaves room, hold up what CTAs wait for between parts. Measured,
# us: 7 and 4, one row of 7B, 52.2 and 50.4; 4 and 3, 8 rows of 14B, 54.9 and 53.7.
MOST_ITEMS = 3
# At least, with one panel and with two: fewer have not run on a GPU.
LEAST_ITEMS = 3, 2
# Slices of K whose products with A are added afterwards, about: every CTA adds them all.
LORA_SLICES = 24
# Pieces of A, 16 ranks by so many columns, that a service warp has registers for while it waits for x; and parts of K
# whose products with A, 8 ranks each, it has under way together when it adds them.
PIECES, PIECE = 8, 32
BATCH = 16
# Tiles of B, 16 outputs by 16 ranks, that a compute warp holds through a part's products: four registers each. Measured
# with 128 ranks, us a layer: all held, 75.4, 4 held, 68.7 (8 rows of 7B); 96.3 and 85.7 (16 rows); 2 or none no better.
HELD_TILES = 4
# An exchange of sums between CTAs takes about as long as so many items of each.
EXCHANGE_ITEMS = 30
HEADER = 512  # barriers, 1 / rms of a panel's rows, and the warps' parts of it
# CTAs of a cluster, and the rows from which they share the copying of x: one row is sooner there without the other CTA.
PAIR, PAIRED_ROWS = 2, 2


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the kernel's matmuls, x W^T with one or several W.

    Attributes:
      k, n: inputs, and the outputs of each weight.
      ranks: LoRA's, of each weight, multiples of 16; 0 for none.
      biased: whether the weight has a bias.
      paired: two weights, gate and up, whose outputs are joined to silu(gate) * up.
      normed: x comes without its division by the root of the mean square, which is made up for at the end.
      joins: the output is added to the residual stream.
      scaled: x is what a paired part gives, kept in float16's range (float16_range.py).
      given: parts of x A^T that come with x; 0 where this kernel makes them.
      groups, slices, cuts: CTAs that share the row tiles, those that share K, and those of a pair that share a slice;
        each CTA is one of groups x slices x cuts.
    """

    k: int
    n: tuple[int, ...]
    ranks: tuple[int, ...]
    biased: tuple[bool, ...]
    paired: bool = False
    normed: bool = False
    joins: bool = False
    scaled: bool = False
    given: int = 0
    groups: int = 1
    slices: int = 1
    cuts: int = 1

    @property
    def quads(self) -> int:
        return self.k // COLS

    @property
    def tiles_of(self) -> tuple[int, ...]:
        return tuple(n // ROWS for n in self.n)

    @property
    def entries(self) -> int:
        """What CTAs share along N: row tiles, or pairs of them."""
        return self.tiles_of[0] if self.paired else sum(self.tiles_of)

    @property
    def most_entries(self) -> int:
        return -(-self.entries // self.groups)

    @property
    def most_finished(self) -> int:
        """Entries that a CTA finishes: with slices those of a group divide them."""
        return -(-self.most_entries // self.slices)

    @property
    def most_tiles(self) -> int:
        return self.most_entries * (2 if self.paired else 1)

    @property
    def most_quads(self) -> int:
        return -(-self.quads // self.slices // self.cuts)

    @property
    def most_items(self) -> int:
        return self.most_tiles * self.most_quads

    def fewest_items(self, ctas: int) -> int:
        """Of any of so many CTAs."""
        if self.groups * self.slices * self.cuts < ctas:
            return 0
        return self.entries // self.groups * (2 if self.paired else 1) * (self.quads // self.slices // self.cuts)

    @property
    def rank_tiles(self) -> tuple[int, ...]:
        return tuple(r // ROWS for r in self.ranks)

    @property
    def held_tiles(self) -> int:
        """Times 16 ranks of each weight whose B a warp asks for before a part's products."""
        return HELD_TILES // 2 if self.paired else HELD_TILES

    @property
    def late_tiles(self) -> range:
        """The others, of the weight that has most; their B comes after the products."""
        return range(self.held_tiles, max(self.rank_tiles, default=0))

    @functools.cached_property
    def lora_chunks(self) -> int:
        """Parts of a CTA's K in LoRA's first product: of what takes the fewest turns the most, since each is shorter
        then."""
        of_k = self.slices * self.cuts
        fewest = -(-self.most_quads * COLS // PIECE // (PIECES * SERVICE_WARPS))
        most = max(fewest, min(self.most_quads, LORA_SLICES // of_k))
        return min(range(most, 0, -1), key=self.lora_turns)

    def lora_turns(self, chunks: int) -> int:
        """How often a service warp waits for what it has asked for, with so many chunks: for pieces of A, then for
        products that it adds."""
        units = -(-sum(self.rank_tiles) * chunks // self.groups)
        loads = -(-self.pieces_in(chunks) // PIECES)
        halves = -(-self.slices * self.cuts * chunks // 2)
        added = [-(-2 * tiles // (SERVICE_WARPS * self.together(tiles, halves))) for tiles in self.rank_tiles]
        return units * loads + (sum(added) if self.paired else max(added, default=0)) * -(-halves // BATCH)

    @staticmethod
    def together(tiles: int, halves: int) -> int:
        """How many times 8 ranks a service warp adds at once, of an adapter that has twice `tiles` of them; a lane adds
        half of the parts of K."""
        turns, rest = divmod(2 * tiles, SERVICE_WARPS)
        return 1 if rest else max((n for n in range(1, BATCH // halves + 1) if turns % n == 0), default=1)

    def pieces_in(self, chunks: int) -> int:
        """Of a unit of LoRA's first product, for any service warp, with so many chunks."""
        return -(-self.most_quads * COLS // PIECE // (chunks * SERVICE_WARPS))

    @property
    def most_pieces(self) -> int:
        """Of any unit of LoRA's first product, for any service warp."""
        return self.pieces_in(self.lora_chunks)

    @property
    def lora_parts(self) -> int:
        return self.given or self.slices * self.cuts * self.lora_chunks

    @property
    def half_parts(self) -> int:
        """Of LoRA's first product, that a lane adds: the others belong to the other half of its warp."""
        return -(-self.lora_parts // 2)

    @property
    def lora_units(self) -> int:
        """CTAs' work in all of LoRA's first product, each 16 ranks and one part of K."""
        return 0 if self.given else self.lora_parts * sum(self.rank_tiles)


def divided(part: Part, ctas: int, most_quads: int) -> Part:
    """The part with the groups and slices that make the busiest CTA's share least, whose x has no more quads."""

    def with_slices(slices: int) -> Part:
        groups = min(ctas // part.cuts // slices, part.entries)
        if slices > 1 and part.cuts == 1:  # a pair of CTAs reads the same slice
            groups = groups // PAIR * PAIR
        return dataclasses.replace(part, slices=slices, groups=groups)

    ways = [with_slices(slices) for slices in range(1, min(ctas, part.quads) // part.cuts + 1)]
    # only sums that join the residual stream are added over slices
    ways = [way for way in ways if way.most_quads <= most_quads and (way.slices == 1 or (part.joins and way.groups))]
    if not ways:
        raise ValueError(f"K = {part.k} does not fit in {most_quads} quads of shared memory")
    return min(ways, key=lambda way: (way.most_items + EXCHANGE_ITEMS * (way.slices > 1), way.slices))


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """Sizes and places in memory of one kernel, in bytes unless named otherwise."""

    m: int
    hidden: int
    parts: tuple[Part, ...]
    ctas: int
    warps: int  # that compute
    depth: int  # items in a warp's ring

    @property
    def threads(self) -> int:
        return 32 * (self.warps + SERVICE_WARPS)

    @property
    def service_threads(self) -> int:
        return 32 * SERVICE_WARPS

    @property
    def panels(self) -> int:
        """With two, the CTAs of a pair share K, and each finishes the outputs of one panel."""
        return -(-self.m // PANEL)

    @property
    def cluster(self) -> int:
        """CTAs of a cluster. With one panel each copies a part of x to all of them."""
        return PAIR if self.m >= PAIRED_ROWS else 1

    @property
    def early_units(self) -> int:
        """Units of an item that a warp holds decoded while it waits for x: as many as registers have room for."""
        if self.panels > 1:
            return 0
        return 4 if self.warps == WARPS else 2

    @functools.cached_property
    def sums(self) -> int:
        """Places for the sums of a panel that a CTA's warps leave of one part. That of tile n by warp w is the (n +
        w)-th: a warp begins in the tile in which the one before it ends, or behind it, so no two have the same."""
        return max(part.most_tiles for part in self.parts) + self.warps - 1

    def most_holders(self, part: Part) -> int:
        """Warps of a CTA among which one of its tiles is shared, at most, from the first on that has items of it."""
        most = 0
        for quads in range(max(1, part.quads // part.slices // part.cuts), part.most_quads + 1):
            for entries in {part.most_entries, max(1, part.entries // part.groups)}:
                tiles = entries * (2 if part.paired else 1)
                warp_of = [((item + 1) * self.warps - 1) // (tiles * quads) for item in range(tiles * quads)]
                spans = [warp_of[(n + 1) * quads - 1] - warp_of[n * quads] + 1 for n in range(tiles)]
                most = max(most, *spans)
        return most

    @property
    def items_warp(self) -> int:
        return sum(-(-part.most_items // self.warps) for part in self.parts)

    @property
    def parts_at_first(self) -> int:
        """Parts whose items a warp may fetch before it has finished the first one."""
        ahead = 0
        for i, part in enumerate(self.parts[1:], 1):
            ahead += part.fewest_items(self.ctas) // self.warps
            if ahead >= self.depth - 1:
                return i + 1
        return len(self.parts)

    def x_stride(self, part: Part) -> int:
        return part.most_quads * COLS * 2 + 16  # 16 more: then 8 rows x 4 pieces of 16 bytes fall in different banks

    @property
    def table_at(self) -> int:
        return HEADER

    @property
    def sums_at(self) -> int:
        return self.table_at + -(-self.warps * self.items_warp * 8 // 16) * 16

    @property
    def h_at(self) -> int:
        return self.sums_at + self.panels * self.sums * 512

    @property
    def x_at(self) -> int:
        h = max(sum(part.rank_tiles) for part in self.parts) * PANEL * ROWS * 2
        products = 512 * (SERVICE_WARPS - 1) if any(part.lora_units for part in self.parts) else 0
        return self.h_at + max(h, products)

    @property
    def ring_at(self) -> int:
        x = max(self.m * self.x_stride(part) for part in self.parts)
        return self.x_at + -(-x // 128) * 128

    @property
    def total(self) -> int:
        return self.ring_at + self.warps * self.depth * QUAD_BYTES

    # ---- counters between CTAs: words of the `sync` array

    def arrived(self, part: int) -> int:
        """CTAs that have stored their outputs of a part; where the next part divides its K, see `stored`."""
        return 4 * part

    def multiplied(self, part: int) -> int:
        """Units of LoRA's first product that are stored."""
        return 4 * part + 2

    def summed(self, part: int) -> int:
        """The first of the counters, one for each group and panel, of slices whose sums are stored; each is followed by
        that of those who have seen it."""
        return 4 * len(self.parts) + 2 * self.panels * sum(p.groups for p in self.parts[:part] if p.slices > 1)

    def stored(self, part: int) -> int:
        """The first of the counters, one for each slice of a part's K, of the row tiles in it that are stored and of
        the CTAs that have stored theirs and read it; each is followed by that of those who have seen it."""
        return self.summed(len(self.parts)) + 2 * sum(p.slices for p in self.parts[1:part] if p.slices > 1)

    @property
    def sync_words(self) -> int:
        return self.stored(len(self.parts))


def make_block_plan(
    m: int, hidden: int, parts: tuple[Part, ...], ctas: int, warps: int | None = None, depth: int | None = None
) -> BlockPlan:
    """Raises ValueError naming the constraint when the kernel does not take the shape.

    Without `depth` the rings have MOST_ITEMS, which a CTA fetches while it waits for the others, or as many as fit;
    without `warps` there are as many as measured better.
    """
    if not 1 <= m <= MAX_ROWS:
        raise ValueError(f"M must be in 1..{MAX_ROWS}, got {m}")
    if ctas % PAIR:
        raise ValueError(f"CTAs come in pairs, got {ctas}")
    panels = -(-m // PANEL)
    for part in parts:
        if part.k % COLS or any(n % ROWS for n in part.n):
            raise ValueError(f"K must be a multiple of {COLS} and N of {ROWS}, got K = {part.k}, N = {part.n}")
        if part.k < panels * COLS:
            raise ValueError(f"K must be at least {panels * COLS} for {m} rows, got {part.k}")
        if any(r % ROWS for r in part.ranks):
            raise ValueError(f"ranks must be multiples of {ROWS}, got {part.ranks}")
        if part.paired and (len(part.n) != 2 or part.n[0] != part.n[1]):
            raise ValueError(f"gate and up must have the same outputs, got {part.n}")
        if part.joins and part.n != (hidden,):
            raise ValueError(f"what joins the residual stream must have {hidden} outputs, got {part.n}")
    parts = tuple(dataclasses.replace(part, cuts=panels) for part in parts)
    widest = max((part.most_quads for part in parts if not part.joins), default=1)
    parts = tuple(divided(part, ctas, widest) for part in parts)

    def with_warps(count: int, rows: int) -> BlockPlan:
        plan = BlockPlan(rows, hidden, parts, ctas, count, depth or 2)
        fits = (SMEM_LIMIT - plan.ring_at) // (count * QUAD_BYTES)
        least = LEAST_ITEMS[panels - 1]
        return plan if depth else dataclasses.replace(plan, depth=max(least, min(MOST_ITEMS, fits)))

    if warps is None:
        is_long = with_warps(WARPS, m).items_warp > LONG_STREAM
        few_ranks = all(rank <= MOST_RANKS for part in parts for rank in part.ranks)
        # asked for all rows of the panels: a row's sums, which are added by warps, must not depend on M
        more = with_warps(MORE_WARPS, panels * PANEL)
        has_room = more.depth > 2 and more.total <= SMEM_LIMIT
        warps = MORE_WARPS if is_long and few_ranks and has_room else WARPS
    plan = with_warps(warps, m)
    if plan.total > SMEM_LIMIT:
        raise ValueError(f"M = {m} with {parts} needs {plan.total} bytes of shared memory; limit {SMEM_LIMIT}")
    return plan
