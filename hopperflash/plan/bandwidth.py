"""Shared-memory traffic of a Hopper tile beside its tensor-core work, in clocks of one SM.

wgmma m64nNk16 multiplies in N / 2 clocks and reads 32 N bytes of B from shared memory, and 2048 of
A unless A is in registers; every warpgroup reads for itself. Shared memory moves 128 bytes a clock,
what TMA fills and stores included.
"""

from __future__ import annotations

from dataclasses import dataclass

from hopperflash.plan.config import WGMMA_ROWS, BackwardConfig, ForwardConfig, POperand

BYTES_PER_CLOCK = 128
WGMMA_DEPTH = 16
_A_BYTES = WGMMA_ROWS * WGMMA_DEPTH * 2
_B_BYTES = WGMMA_DEPTH * 2  # a column
_FP32 = 4


@dataclass(frozen=True)
class Gemm:
    """A product (rows, columns, depth) whose columns warpgroups split into `shares`."""

    name: str
    rows: int
    columns: int
    depth: int
    a_in_registers: bool = False
    shares: int = 1

    @property
    def _instructions(self) -> int:
        return self.rows // WGMMA_ROWS * self.shares * (self.depth // WGMMA_DEPTH)

    @property
    def tensor_clocks(self) -> int:
        """Clocks of the tensor cores."""
        return self._instructions * (self.columns // self.shares) // 2

    @property
    def bytes_read(self) -> int:
        """Bytes of both operands from shared memory."""
        a = 0 if self.a_in_registers else _A_BYTES
        return self._instructions * (a + _B_BYTES * (self.columns // self.shares))


@dataclass(frozen=True)
class TileTraffic:
    """One step of a kernel's loop: its GEMMs, and the other bytes through shared memory."""

    gemms: tuple[Gemm, ...]
    others: tuple[tuple[str, int], ...]

    @property
    def tensor_clocks(self) -> int:
        """Clocks of the tensor cores."""
        return sum(gemm.tensor_clocks for gemm in self.gemms)

    @property
    def shared_bytes(self) -> int:
        """Bytes read from and written to shared memory."""
        return sum(g.bytes_read for g in self.gemms) + sum(size for _, size in self.others)

    @property
    def shared_clocks(self) -> int:
        """Clocks of shared memory; the larger of both clocks bounds the step."""
        return self.shared_bytes // BYTES_PER_CLOCK


def tile_traffic(config: ForwardConfig | BackwardConfig, itemsize: int) -> TileTraffic:
    """A key block of a forward tile, or a query block of a backward tile."""
    if isinstance(config, ForwardConfig):
        return _forward(config, itemsize)
    return _backward(config, itemsize)


def _forward(config: ForwardConfig, itemsize: int) -> TileTraffic:
    c = config
    shared_P = c.p_operand is POperand.SHARED
    return TileTraffic(
        (
            Gemm("S = Q K^T", c.tile_m, c.tile_n, c.head_dim),
            Gemm("O += P V", c.tile_m, c.head_dim_v, c.tile_n, a_in_registers=not shared_P),
        ),
        (
            ("K and V from TMA", c.tile_n * (c.head_dim + c.head_dim_v) * itemsize),
            ("P stored", c.tile_m * c.tile_n * itemsize if shared_P else 0),
        ),
    )


def _backward(config: BackwardConfig, itemsize: int) -> TileTraffic:
    """S^T and dP^T always have keys as rows: only dS then crosses shared memory, for dQ. With
    queries as rows both P and dS would, for dV and dK."""
    c = config
    m, n, d, dv = c.tile_m, c.tile_n, c.head_dim, c.head_dim_v
    in_registers, shares = c.p_operand is POperand.REGISTERS, c.key_shares
    gemms = [Gemm("S^T = K Q^T", n, m, d, shares=shares)]
    gemms += [Gemm("dP^T = V dO^T", n, m, dv, shares=shares)]
    if c.needs("dv"):
        gemms += [Gemm("dV += P^T dO", n, dv, m, in_registers, shares)]
    if c.needs("dk"):
        gemms += [Gemm("dK += dS^T Q", n, d, m, in_registers, shares)]
    if c.needs("dq"):
        gemms += [Gemm("dQ = dS K", m, d, n, shares=c.query_shares)]
    dS_crosses = c.needs("dq") or not in_registers
    return TileTraffic(
        tuple(gemms),
        (
            ("Q and dO from TMA", m * (d + dv) * itemsize),
            ("dS stored", m * n * itemsize if dS_crosses else 0),
            ("P stored", 0 if in_registers else m * n * itemsize),
            ("dQ stored, and read by TMA", 2 * m * d * _FP32 if c.needs("dq") else 0),
        ),
    )
