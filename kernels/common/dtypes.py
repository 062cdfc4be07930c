"""The project's dtypes as DSL types."""

from __future__ import annotations

import cutlass

from hopperflash.problem.dtypes import DType

NUMERIC = {DType.FLOAT16: cutlass.Float16, DType.BFLOAT16: cutlass.BFloat16}
