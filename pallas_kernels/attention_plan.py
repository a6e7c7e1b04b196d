"""How the decode attention kernel cuts its work: the configuration, and the shared memory that it needs."""

import dataclasses

from .block_plan import PANEL
from .layout import ROWS
from .stream_plan import RESIDENT, SMEM_LIMIT

KEYS = 16  # keys of a tile, the depth of one tensor-core step over them
HEAD_SIZES = (64, 128)
# Bytes of all prompts' keys and values up to which those of prompts and samples are read so that they leave the L2
# first. With more, which several CTAs may read at different times, that has not been measured.
READ_ONCE_PROMPTS = 1 << 24
MAX_GROUP = 8  # query heads of one key-value head: half of the 16 rows of a tensor-core tile


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """One cut of the work.

    Attributes:
      slots: samples whose queries share a tensor-core tile and read their common prompt together, 1 or 2.
      cluster: CTAs that split the context of a unit (those slots, one key-value head).
      warps: warps of a CTA, which split it further; a multiple of 4.
      depth: tiles of 16 keys in a warp's ring.
      units: units with a common prompt in a CTA, which read it from each other's rings. Of the warps each
        `units`-th has one unit's.
    """

    slots: int = 1
    cluster: int = 1
    warps: int = 8
    depth: int = 3
    units: int = 1


def check_heads(H: int, K: int, E: int) -> None:
    """Raises ValueError for numbers of heads and a head size that neither this kernel nor Triton's takes."""
    if E not in HEAD_SIZES:
        raise ValueError(f"head size {E}: the kernel takes {HEAD_SIZES}")
    if H % K or H // K > MAX_GROUP:
        raise ValueError(f"{H} query heads on {K} key-value heads: the kernel takes up to {MAX_GROUP} on each")


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """What a kernel is built for: shapes (letters as in attention_kernel.py), and places in shared memory, in bytes.

    Raises:
      ValueError: the kernel does not take the shape; names the constraint.
    """

    B: int
    H: int
    K: int
    E: int
    N: int
    P: int
    C: int
    has_norms: bool
    config: AttentionConfig
    key_bytes: int = 2  # of one number of a key in the cache: 2, or 1 (E4M3)
    value_bytes: int = 2
    in_units: bool = False  # whether outputs are in unit order (fragment_order.py)
    ranks: int = 0  # of A, by which the outputs are multiplied (attention_outputs.py)

    def __post_init__(self) -> None:
        c = self.config
        check_heads(self.H, self.K, self.E)
        if c.slots not in (1, 2) or self.B % (c.slots * c.units):
            raise ValueError(f"{c}: slots must be 1 or 2, and slots times units divide the samples, got B = {self.B}")
        if c.warps % 4 or not 4 <= c.warps <= 32 or c.depth < 2 or c.cluster not in RESIDENT:
            raise ValueError(f"{c}: warps must be 4, 8, .. 32, depth at least 2, cluster one of {list(RESIDENT)}")
        if c.warps % c.units:
            raise ValueError(f"{c}: each unit of a CTA has as many warps")
        if self.ranks % ROWS:
            raise ValueError(f"ranks must be a multiple of {ROWS}, got {self.ranks}")
        if self.ranks and c.units > 1:
            raise ValueError(f"{c}: with products with A a CTA has one unit, got {c.units}")
        if self.ranks and self.partial_bytes > self.a_at:
            raise ValueError(
                f"{c}: must have {self.partial_bytes} bytes before the last slot of a ring for products with A, got "
                f"{self.a_at}"
            )
        if self.total > SMEM_LIMIT:
            raise ValueError(f"{c} needs {self.total} bytes of shared memory; limit {SMEM_LIMIT}")

    @property
    def Q(self) -> int:
        return self.H // self.K

    @property
    def ctas(self) -> int:
        return self.B // self.samples * self.K * self.config.cluster

    @property
    def samples(self) -> int:
        """Of a CTA."""
        return self.config.slots * self.config.units

    @property
    def teams(self) -> int:
        """Of a CTA's warps: one warp of each unit, which read the same tiles of the prompt."""
        return self.config.warps // self.config.units

    @property
    def row_bytes(self) -> int:
        """Of queries, outputs, and new keys and values, which have 16 bits."""
        return 2 * self.E

    @property
    def tile_bytes(self) -> int:
        """Keys and values of one tile."""
        return KEYS * self.E * (self.key_bytes + self.value_bytes)

    @property
    def reads_once(self) -> bool:
        """Whether keys and values are copied so that they leave the L2 first."""
        return self.N * self.P * self.K * self.E * (self.key_bytes + self.value_bytes) <= READ_ONCE_PROMPTS

    @property
    def ring_bytes(self) -> int:
        """A warp's ring; its partial result takes the ring's place at the end."""
        return max(self.config.depth * self.tile_bytes, self.partial_bytes)

    @property
    def a_at(self) -> int:
        """The place of A in a ring, behind the warp's partial result."""
        return (self.config.depth - 1) * self.tile_bytes

    @property
    def early_ranks(self) -> int:
        """Of A, which a slot of the ring has room for."""
        return min(self.ranks, self.tile_bytes // self.row_bytes // ROWS * ROWS)

    @property
    def rows(self) -> int:
        """Queries of a unit."""
        return 8 * self.config.slots

    @property
    def owned_rows(self) -> int:
        """Rows of outputs that a CTA finishes, of those that it or its cluster computes."""
        return self.config.units * self.rows // self.config.cluster

    @property
    def panels(self) -> int:
        """Of 8 samples, as the block kernel has them."""
        return -(-self.B // PANEL)

    @property
    def partial_stride(self) -> int:
        return 4 * (self.E + 8)  # 8 more floats: then the 8 rows of a tile fall in different banks

    @property
    def partial_bytes(self) -> int:
        """Weighted sums [rows, E + 8], then maxima and sums of weights [2, rows], in float32."""
        return self.rows * self.partial_stride + 8 * self.rows

    @property
    def received_at(self) -> int:
        """Results of the cluster's CTAs, not in the place of rings: others may be done before this one."""
        return self.config.warps * self.ring_bytes

    @property
    def received_bytes(self) -> int:
        """Of all CTAs a share of the pairs of outputs, each pair's four float32."""
        return 16 * self.config.units * self.rows * self.E // 2 if self.config.cluster > 1 else 0

    @property
    def barrier_at(self) -> int:
        return self.received_at + self.received_bytes

    @property
    def outputs_at(self) -> int:
        """The CTA's outputs, for their products with A."""
        return self.barrier_at + 16

    @property
    def total(self) -> int:
        return self.outputs_at + (self.owned_rows * self.row_bytes if self.ranks else 0)
