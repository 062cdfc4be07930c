"""Register file of a CTA and the views that a gang of threads has of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_DTYPES = {
    "h": ("h", np.uint16), "e": ("h", np.int16),
    "u": ("u", np.uint32), "i": ("u", np.int32), "f": ("u", np.float32),
    "q": ("q", np.uint64), "l": ("q", np.int64), "d": ("q", np.float64),
    "p": ("p", np.bool_),
}  # fmt: skip
_BANKS: dict[str, Any] = {"h": np.uint16, "u": np.uint32, "q": np.uint64, "p": np.bool_}


class RegisterFile:
    """One array [rows, threads] per register width."""

    def __init__(self, rows: dict[str, int], threads: int) -> None:
        self.threads = threads
        self.banks: dict[str, NDArray[Any]] = {
            bank: np.zeros((max(1, rows.get(bank, 0)), threads), dtype)
            for bank, dtype in _BANKS.items()
        }
        self.gangs: dict[tuple[int, int], Gang] = {}

    def poison(self) -> None:
        """Fill with all-one bits, so that reading an unwritten register shows as NaN."""
        for bank, array in self.banks.items():
            array.fill(False if bank == "p" else np.iinfo(array.dtype).max)

    def gang(self, lo: int, hi: int) -> Gang:
        gang = self.gangs.get((lo, hi))
        if gang is None:
            gang = self.gangs[lo, hi] = Gang(self, lo, hi)
        return gang


class Rows(dict[int, NDArray[Any]]):
    """Register rows of one gang, made on first use."""

    __slots__ = ("matrix",)

    def __init__(self, matrix: NDArray[Any]) -> None:
        super().__init__()
        self.matrix = matrix

    def __missing__(self, row: int) -> NDArray[Any]:
        view: NDArray[Any] = self.matrix[row]
        self[row] = view
        return view


class Gang:
    """Views of the threads [lo, hi) of a CTA: u[3] is row 3 as uint32, U the whole matrix."""

    cta: Any

    def __init__(self, file: RegisterFile, lo: int, hi: int) -> None:
        self.lo, self.hi, self.n = lo, hi, hi - lo
        self.every = np.arange(hi - lo)
        self.lanes = np.arange(lo, hi) & 31
        self.threads = np.arange(lo, hi, dtype=np.uint32)
        self.first_warp, self.last_warp = lo >> 5, (hi - 1) >> 5
        self.rows: dict[str, Rows] = {}
        for view, (bank, dtype) in _DTYPES.items():
            matrix: NDArray[Any] = file.banks[bank][:, lo:hi].view(dtype)
            setattr(self, view.upper(), matrix)
            self.rows[view] = Rows(matrix)
            setattr(self, view, self.rows[view])
        self.special: dict[str, Any] = {}
