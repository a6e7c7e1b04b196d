"""Products of wgmma that an emulated warp has under way: until it has waited for them they may still read.

What they read of shared memory must not be written meanwhile, nor must registers. A loop's code stands once, so what is
decoded at one place of its body lies in the same registers in every turn.
"""


class Overwritten(AssertionError):
    """Something writes what is still read: the copy engine where a load or a product is under way, or a warp to the
    registers of such a product."""


class Products:
    """Those of all warps of a machine, in the namespace `p` of its instructions."""

    def __init__(self, machine, p):
        self.machine = machine
        self.groups = {}  # by warp, as committed, the last one open: what each product reads, as (bytes, places)
        self.path = {}  # by warp, its place in the program: the how manieth at each level of loops and branches
        self.found = {}  # of an array that was decoded, by identity, the place
        self.decoded = {}  # by warp and place the last ones, which keep their identities
        self._follow(p)
        p.wgmma_half = self._reading(p.wgmma_half)
        p.wgmma_commit = lambda: self._of_warp().append([])
        p.wgmma_wait = self.wait

        def finish(acc):
            assert not self._of_warp()[-1], "products that are in no group"
            self.wait(0)
            return acc

        p.wgmma_finish = finish

    def _of_warp(self):
        return self.groups.setdefault(self.machine.now, [[]])

    def wait(self, pending: int):
        groups = self._of_warp()
        del groups[: max(0, len(groups) - 1 - pending)]

    def check_copy(self, cta: int, first: int, end: int):
        """A copy to these bytes of a CTA's shared memory."""
        for warp, groups in self.groups.items():
            reads = [place for group in groups for place, _ in group]
            if warp.cta == cta and any(start < end and first < stop for start, stop in reads):
                raise Overwritten

    def _reading(self, wgmma):
        def call(acc, a, descriptor):
            start, rows = int(descriptor[0][0]), 2 * len(acc)
            first = start & -128  # the rows that it reads a part of
            places = {self.found[id(words)] for words in a if id(words) in self.found}
            self._of_warp()[-1].append(((first, first + 128 * rows), places))
            return wgmma(acc, a, descriptor)

        return call

    def decoding(self, f):
        """`f`, an instruction or several that write registers of a product."""

        def call(*args, **options):
            warp, place = self.machine.now, self._next()
            if any(place in places for group in self._of_warp() for _, places in group):
                raise Overwritten
            made = f(*args, **options)
            for old in self.decoded.pop((warp, place), []):
                del self.found[id(old)]
            arrays = made if isinstance(made, list) else [made]
            self.decoded[warp, place] = arrays
            self.found |= {id(words): place for words in arrays}
            return made

        return call

    # ---- places in the program ---------------------------------------------------------------------------------------

    def _next(self):
        path = self.path.setdefault(self.machine.now, [0])
        path[-1] += 1
        return tuple(path)

    def _within(self, body):
        """A loop's body or a branch, which has a place whether it runs or not."""
        *outer, number = self._next()
        path = self.path[self.machine.now]

        def run(*args):
            after = path[len(outer)]
            path[len(outer) :] = [number, 0]
            made = body(*args)
            path[len(outer) :] = [after]
            return made

        return run

    def _follow(self, p):
        for_range, if_values, if_else = p.for_range, p.if_values, p.if_else

        def followed_loop(lower, upper, step, carries, body):
            return for_range(lower, upper, step, carries, self._within(body))

        def followed_values(cond, body, otherwise):
            return if_values(cond, self._within(body), otherwise)

        def followed_branches(cond, body, otherwise):
            if_else(cond, self._within(body), self._within(otherwise))

        p.for_range, p.if_values, p.if_else = followed_loop, followed_values, followed_branches
        p.when = lambda cond, body: followed_branches(cond, body, lambda: None)
