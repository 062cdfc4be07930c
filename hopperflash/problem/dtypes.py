"""Element types of Q, K, V and O, named as torch names them."""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """A 16-bit floating-point type the tensor cores take."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return 2

    @classmethod
    def of(cls, name: str) -> DType | None:
        """The type called `name` ("float16", "torch.float16"), or None where it is not one."""
        try:
            return cls(name.removeprefix("torch."))
        except ValueError:
            return None
