"""Named cases of packed sequences: ragged, empty, padded; each as `tests.support.drawn` runs it."""

from __future__ import annotations

from typing import Any

import torch

from hopperflash.plan.tiles import padded_head_dim
from hopperflash.problem import GRADIENTS
from tests.support.drawn import Drawn, Variant


def _case(
    *lengths: tuple[int, int],
    gaps: tuple[int, int, int] = (0, 0, 0),
    heads: tuple[int, int] = (1, 1),
    head_dims: tuple[int, int] = (64, 64),
    **options: Any,
) -> Drawn:
    window, softcap = options.get("window", (-1, -1)), options.get("softcap", 0.0)
    variant = Variant(
        dtype=options.get("dtype", torch.bfloat16),
        head_dim=padded_head_dim(head_dims[0]),
        head_dim_v=padded_head_dim(head_dims[1]),
        causal=options.get("causal", False),
        window=window != (-1, -1),
        softcap=softcap > 0,
        packed=True,
        deterministic=options.get("deterministic", False),
        gradients=GRADIENTS,
    )
    return Drawn(
        variant,
        lengths,
        gaps,
        *heads,
        *head_dims,
        window,
        softcap,
        layouts=("contiguous",) * 4,
        uses_lse=options.get("dlse", False),
        seed=0,
    )


PACKED_CASES: dict[str, Drawn] = {
    "one": _case((129, 200)),
    "ragged": _case((5, 5), (130, 130), (64, 64), (1, 1), causal=True, dlse=True),
    "empty anywhere": _case((0, 0), (70, 70), (0, 0), (0, 0), (30, 30), (0, 0)),
    "no queries": _case((0, 70), (30, 40), (0, 200), causal=True),
    "no keys": _case((70, 0), (30, 40), (200, 0), causal=True, dlse=True),
    "nothing but empty": _case((0, 0), (0, 0), gaps=(5, 0, 3)),
    "no sequence": _case(gaps=(5, 0, 3)),
    "padding": _case((65, 64), (3, 130), gaps=(7, 9, 20), causal=True),
    "more queries than keys": _case((200, 17), (1, 129), (129, 1), causal=True),
    "many": _case(*[(n, n) for n in (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7)], causal=True),
    "groups": _case((40, 90), (65, 20), heads=(2, 3), causal=True),
    "deterministic": _case((200, 300), (130, 10), causal=True, deterministic=True),
    "window": _case((200, 333), (100, 30), (0, 5), window=(40, 9), gaps=(0, 3, 0)),
    "window and cap": _case((129, 200), (65, 65), window=(63, 0), softcap=15.0, causal=True),
    "unequal head dims": _case((70, 129), (129, 30), head_dims=(192, 128), dtype=torch.float16),
}
