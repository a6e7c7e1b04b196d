"""Tiles of the wide kernel whose D several CTAs have split: each adds up its part of the rows, through the L2.

Where the last wave of tiles does not fill the GPU, `parts` CTAs compute a tile together (see WideConfig.split). Part q
adds up the q-th part of the tile's eights of rows. When its sums are complete it stores those of the other parts' rows
to global memory, as wgmma leaves them in registers, 512 contiguous bytes a warp; they stay in the L2. When all parts
have, it loads its own rows' sums of the others, which are in the same places of the same lanes, adds all parts in
order, its own in its turn, and stores the outputs. Warpgroups do this apart from each other:

  sums    float32 [split tiles][2 warpgroups][parts][m_tile / 8 eights of rows][128 threads][4]
  sync    uint32 [split tiles][2 warpgroups], two of wide_spare.py, and one that is no counter

The CTAs wait for each other, so all must be resident, which make_plan and variants.py see to, and two such kernels must
not run at the same time. A counter counts parts that have stored, and then parts that have seen that all have: the
last of those clears it.
"""

from . import ptx as p
from . import ptx_memory as mem
from .wide_plan import TILE, WidePlan

EIGHT_BYTES = 8 * TILE // 2 * 4  # of a warpgroup's sums of eight rows


class SplitTiles:
    """What a multiplying warp does with a split tile. The CTA's class sets the attributes before."""

    plan: WidePlan

    def add_up(self, unit, acc, group, first_row, way_out):
        """The tile's outputs from this part's sums `acc` and the others'."""
        plan = self.plan
        if plan.config.promote and not plan.totals_in_registers:
            # In a variant whose warps went on with another tile while one of them was at its fence, totals in memory
            # were lost. So nobody is at one while the other warpgroup may have any.
            self.both_sync()
        tile = p.add(p.mul(p.sub(unit.item, plan.items - plan.split_items), plan.config.share), self.rank)
        place = p.add(p.mul(tile, 2), group)
        counter = mem.offset(self.counters, p.mul(place, 4))
        stride = plan.config.m_tile // 8 * EIGHT_BYTES
        at = mem.offset(mem.wide_offset(self.sums, place, unit.parts * stride), p.mul(p.and_(self.tid, 127), 16))
        places = [mem.offset(at, p.i32(q * stride)) for q in range(unit.parts)]
        for part in range(unit.parts):  # a branch each: which registers are its own must be known

            def one(part=part):
                mine = self.eights(unit.rows, part)
                own_row = p.add(first_row, 8 * mine.start)
                fetched = self.fetch_rows(own_row, 8 * len(mine), way_out)
                self.leave_sums(part, places, acc)
                self.await_parts(counter, unit.parts, group)
                total = self.all_parts(part, places, acc)
                # its answer comes while rows are stored
                seen_by = mem.count_if(self.is_first_of_group(), counter)
                self.store_rows(total, group, own_row, way_out, fetched)
                # every part has stored and seen that all have
                p.when(p.eq(seen_by, 2 * unit.parts - 1), lambda: mem.store_global_b32(counter, p.i32(0)))

            p.when(p.eq(unit.part, part), one)

    def eights(self, rows: int, part: int) -> range:
        """The eights of a tile's rows that a part adds up."""
        begin, end = (rows // 8 * q // self.plan.parts for q in (part, part + 1))
        return range(begin, end)

    def leave_sums(self, part: int, places, acc):
        for other in range(len(places)):
            if other != part:
                for i in self.eights(2 * len(acc), other):
                    mem.store_global_f32x4(places[part], acc[4 * i : 4 * i + 4], i * EIGHT_BYTES)

    def await_parts(self, counter, parts: int, group):
        self.group_sync(group)

        def wait():
            mem.fence()
            mem.count(counter)
            mem.wait_for_at_least(counter, p.i32(parts))

        p.when(self.is_first_of_group(), wait)
        self.group_sync(group)

    def is_first_of_group(self):
        return p.eq(p.and_(self.tid, 127), 0)

    def all_parts(self, part: int, places, acc) -> list:
        """Sums of this part's rows over all parts."""
        mine = self.eights(2 * len(acc), part)
        sums = [
            acc[4 * mine.start : 4 * mine.stop]
            if q == part
            else [v for i in mine for v in mem.load_fresh_f32x4(at, i * EIGHT_BYTES)]
            for q, at in enumerate(places)
        ]
        return p.total(sums)
