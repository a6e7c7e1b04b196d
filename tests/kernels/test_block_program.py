"""The block kernel's program run in NumPy (see emulator.py) against float64 products."""

import dataclasses

import emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_weights import normal, random_matrix, tiny_layer

from pallas_kernels import between_attentions, between_attentions_reference, block_kernel, compiling_for
from pallas_kernels.block import RESIDENT
from pallas_kernels.block_kernel import Operands, Weight
from pallas_kernels.block_plan import PIECES, Part, make_block_plan
from pallas_kernels.counters import first_counters
from pallas_kernels.hidden import hidden_parts
from pallas_kernels.operands import number

EPS = 1e-6


def parts_of(D, F, heads, kv, ranks=(16, 32, 16, 48), biased=False, whole=True):
    """The parts of a layer; `ranks` of o, gate and up, down, and q, k, v."""
    o, gate, down, q = ranks
    parts = (
        Part(heads, (D,), (o,), (False,), joins=True),
        Part(D, (F, F), (gate, gate), (False, False), paired=True, normed=True),
        Part(F, (D,), (down,), (False,), joins=True, scaled=True),
        Part(D, (heads, kv, kv), (q, q, 0), (biased,) * 3, normed=True),
    )
    return parts if whole else parts[:3]


class Case:
    """Operands of a call and what it should write; `given` parts of o's x A^T come with x, of one twice as large, and
    the first norm is `times` as large."""

    def __init__(self, m, parts, D, ctas, warps, depth=3, seed=0, dtype="bfloat16", given=0, times=1):
        self.rng, self.parts, self.m, self.dtype = np.random.default_rng(seed), parts, m, dtype
        parts = dataclasses.replace(parts[0], given=given), *parts[1:]
        self.plan = make_block_plan(m, D, parts, ctas, warps, depth)
        self.x, self.residual = self.normal(m, parts[0].k), self.rng.standard_normal((m, D)).astype(np.float32)
        made = [[self.weight(part, w) for w in range(len(part.n))] for part in parts]
        self.dense = [[dense for dense, _ in group] for group in made]
        self.weights = tuple(tuple(weight for _, weight in group) for group in made)
        sizes = [times, 1][: sum(part.joins for part in parts[:-1])]
        self.norms = tuple(size * self.rng.uniform(0.5, 1.5, D).astype(np.float32) for size in sizes)
        hidden = None
        if given:
            hidden = np.array(hidden_parts(*map(jnp.asarray, (2 * self.x, self.weights[0][0].a)), given))
            panels = hidden.reshape(*hidden.shape[:3], 8, 4, 2, 2)  # g t half row
            rows = np.arange(8 * hidden.shape[2]).reshape(-1, 1, 4, 1, 2)
            panels[np.broadcast_to(rows >= m, panels.shape)] = np.nan  # attention leaves them as they were
        sync = first_counters(self.plan.sync_words)
        self.operands = Operands(self.x, self.residual, self.weights, self.norms, sync, hidden)

    def normal(self, *shape, scale=1.0):
        return (self.rng.standard_normal(shape) * scale).astype(self.dtype)

    def weight(self, part, w):
        k, n, rank = part.k, part.n[w], part.ranks[w]
        matrix = random_matrix(self.rng, n, k, 1.0, 0x20, 0x40, self.dtype)
        size = np.float32(matrix.values.std() * k**0.5)  # as global scale it keeps the size of what is multiplied
        bias = self.rng.standard_normal(n).astype(np.float32) if part.biased[w] else None
        lora = (None,) * 3
        if rank:
            lora = self.normal(rank, k, scale=k**-0.5), self.normal(n, rank), number(0.5)
        made = Weight(np.asarray(matrix.weight.data), number(size), bias, *lora)
        return matrix.values / np.float64(size), made

    def products(self, i, x):
        ys = []
        for dense, weight in zip(self.dense[i], self.weights[i], strict=True):
            y = x @ dense.T
            if weight.a is not None:
                scaling = 1.0 if i == 0 and self.operands.hidden is not None else 0.5
                y = y + scaling * (x @ weight.a.astype(np.float64).T) @ weight.b.astype(np.float64).T
            ys.append(y if weight.bias is None else y + weight.bias)
        return ys

    def expected(self):
        residual, norms, x, found = self.residual.astype(np.float64), list(self.norms), self.x.astype(np.float64), {}
        for i, part in enumerate(self.parts):
            ys = self.products(i, x)
            if part.joins:
                residual = found[f"residual{i}"] = residual + ys[0]
                if norms:
                    x = residual / np.sqrt((residual**2).mean(-1, keepdims=True) + EPS) * norms.pop(0)
            elif part.paired:
                x = ys[0] / (1 + np.exp(-ys[0])) * ys[1]
                self.largest = np.abs(x).max()
            else:
                found |= {f"y{w}": y for w, y in enumerate(ys)}
        return found

    def error(self, written):
        """Largest difference to the truth, in units of its root mean square."""
        errors = [
            np.abs(written[name].astype(np.float64) - true).max() / np.sqrt((true**2).mean())
            for name, true in self.expected().items()
        ]
        return np.max(errors)  # NaN if any is

    def run(self, **options):
        return emulator.run_block(self.plan, EPS, self.operands, **options)


@pytest.mark.parametrize("m, D, F, heads, ctas, warps, ranks, slices", [
    (8, 256, 512, 512, 6, 2, (16, 32, 16, 48), {1, 2}),  # K of o and down in two slices, two CTAs have no share of them
    (3, 512, 256, 256, 2, 3, (0, 0, 0, 0), {1}),
    (16, 512, 512, 512, 6, 2, (16, 32, 16, 48), {1}),
    (11, 768, 1280, 512, 6, 3, (16, 32, 16, 48), {1, 2}),  # cuts of two quads and of one; a pair has no share of down
])  # fmt: skip
def test_a_layers_parts(m, D, F, heads, ctas, warps, ranks, slices):
    case = Case(m, parts_of(D, F, heads, 16, ranks, biased=m in (3, 11)), D, ctas, warps)
    assert {part.slices for part in case.plan.parts} == slices
    first, second = case.run(calls=2)  # the second finds the counters as the first left them
    assert case.error(first) < 0.04
    for name in case.expected():
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.parametrize("m, ctas, ranks", [
    (8, 4, (128, 64, 0, 128)),  # several units of A a CTA, of more pieces than registers hold; 64 and 32 ranks at once
    (3, 2, (16, 64, 0, 96)),
])  # fmt: skip
def test_many_ranks(monkeypatch, m, ctas, ranks):
    monkeypatch.setattr(Part, "lora_turns", lambda self, chunks: chunks)  # as few parts of K as there can be
    case = Case(m, parts_of(1280, 256, 1280 if m == 8 else 256, 16, ranks), 1280, ctas, 2)
    assert max(part.most_pieces for part in case.plan.parts) > PIECES
    assert any(part.lora_units > part.groups for part in case.plan.parts)
    assert {part.together(tiles, 1) for part in case.plan.parts for tiles in part.rank_tiles if tiles > 1} & {2, 3, 4}
    first, second = case.run(calls=2)
    assert case.error(first) < 0.04
    for name in case.expected():
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.parametrize("m, D, F, ctas, slow", [
    (8, 256, 512, 6, {(2, 0), (2, 1)}),  # adds nothing to the slice that its pair reads, which leaves its x alone
    (8, 256, 512, 6, {(0, 0), (1, 1)}),
    (11, 768, 1280, 6, {(4, 0), (5, 1)}),  # without a share of down
])  # fmt: skip
def test_who_comes_late(m, D, F, ctas, slow):
    case = Case(m, parts_of(D, F, 512, 16), D, ctas, 2)
    first, second = case.run(calls=2, slow=slow)
    assert case.error(first) < 0.04
    for name in case.expected():
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.parametrize("m, given, whole, dtype", [(3, 0, True, jnp.bfloat16), (5, 2, False, jnp.float16)])
def test_the_public_call_gives_the_program_what_it_reads(monkeypatch, m, given, whole, dtype):
    monkeypatch.setitem(RESIDENT, 1, 6)
    monkeypatch.setattr(block_kernel, "build", lambda plan, eps, dtype: lambda of: emulator.run_block(plan, eps, of)[0])
    rng, layer = np.random.default_rng(m), tiny_layer(24, whole, dtype)
    x, residual = normal(rng, m, 512, dtype=dtype), normal(rng, m, 256)
    norms = [1 + normal(rng, 256, size=0.1) for _ in range(1 + whole)]
    a = jnp.pad(layer.o.lora[0], ((0, 8), (0, 0)))
    hidden = hidden_parts(2 * x, a, given) if given else None  # of another x: it is not made again
    operands = x, residual, layer, norms, EPS, False, hidden
    with compiling_for(90):
        made = between_attentions(*operands)
    for found, true in zip(*map(jax.tree.leaves, (made, between_attentions_reference(*operands))), strict=True):
        found, true = (np.asarray(v, np.float64) for v in (found, true))
        assert found.shape == true.shape and np.abs(found - true).max() < 0.04 * np.sqrt((true**2).mean())


@pytest.mark.parametrize("m, D, F, heads, ctas, warps, given", [
    (1, 512, 256, 512, 2, 2, 32),  # more parts than a warp adds at once
    (8, 256, 512, 512, 6, 2, 4),  # K of o in two slices
    (5, 768, 256, 768, 2, 2, 3),
    (11, 768, 512, 768, 6, 3, 12),  # two panels
])  # fmt: skip
def test_x_a_given(m, D, F, heads, ctas, warps, given):
    """And it is what is added, not made here."""
    case = Case(m, parts_of(D, F, heads, 16, (32, 16, 16, 16)), D, ctas, warps, given=given)
    first, second = case.run(calls=2)
    assert case.error(first) < 0.04 and "hidden0" not in first
    for name in case.expected():
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.parametrize("m, D", [(3, 256), (9, 512)])
def test_float16_is_eight_times_as_fine(m, D):
    case = Case(m, parts_of(D, D, D, 16, biased=True), D, 2, 2, dtype="float16")
    (written,) = case.run()
    assert case.error(written) < 0.04 / 8


@pytest.mark.parametrize("times", [1 / 32, 80])
def test_float16_holds_what_may_be_beyond_its_range(times):
    """silu(gate) * up, and then the residual stream, of which the next norm's x is not divided yet."""
    case = Case(3, parts_of(256, 256, 256, 16), 256, 2, 2, dtype="float16", times=times)
    (written,) = case.run()
    assert case.error(written) < 0.04 / 8
    largest = np.abs(written["residual2"]).max()
    assert (min(case.largest, largest) > 65504) == (times > 1)


def test_behind_the_last_layer_and_the_order_of_the_warps():
    case = Case(2, parts_of(256, 256, 256, 16, whole=False), 256, 2, 1)
    (expected,) = case.run(seed=1)
    assert case.error(expected) < 0.04
    (again,) = case.run(seed=2)
    np.testing.assert_array_equal(again["residual2"], expected["residual2"])


@pytest.mark.parametrize("name", ["fence", "copy_wait"])
def test_the_emulator_sees_what_nobody_waits_for(monkeypatch, name):
    """What other CTAs cannot see yet; weights that have not landed."""
    case = Case(1, parts_of(256, 256, 256, 16, (0, 0, 0, 0), whole=False), 256, 2, 1)
    emulator.without(monkeypatch, name)
    (written,) = case.run()
    assert not case.error(written) < 0.04


def test_the_emulator_sees_sums_that_nobody_waits_for(monkeypatch):
    """Those that the other CTA of a pair sends, and this one's other warps leave."""
    case = Case(9, parts_of(512, 512, 512, 16, (0, 0, 0, 0), whole=False), 512, 2, 2)
    assert case.error(case.run()[0]) < 0.04
    emulator.without(monkeypatch, "barrier_wait_for_cluster")
    assert not case.error(case.run()[0]) < 0.04


def test_the_emulator_sees_a_cluster_that_nobody_waits_for(monkeypatch):
    """What one CTA copies to another that has no barrier yet."""
    emulator.without(monkeypatch, "cluster_wait", "make_ptx")
    with pytest.raises(KeyError):
        Case(2, parts_of(256, 256, 256, 16, (0, 0, 0, 0), whole=False), 256, 2, 1).run()


@pytest.mark.parametrize("few, many, D", [(1, 4, 256), (9, 12, 512)])
def test_a_row_does_not_depend_on_the_rows_beside_it(few, many, D):
    one, other = (Case(m, parts_of(D, D, D, 16, whole=False), D, 2, 2) for m in (few, many))
    rows = dataclasses.replace  # the same weights
    operands = other.operands._replace(x=other.x[:few], residual=other.residual[:few])
    alone = emulator.run_block(rows(other.plan, m=few), EPS, operands)[0]["residual2"]
    np.testing.assert_array_equal(alone, other.run()[0]["residual2"][:few])
    assert one.plan.parts == other.plan.parts
