"""Probabilities and score gradients rebuilt from the log-sum-exp, in (keys, queries) views.

Source: FlashAttention-2, arXiv 2307.08691, algorithm 2.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32

from .softmax import Scales, scaled_exp2


@cute.jit
def probabilities(
    acc_St_mn: cute.Tensor,  # S^T in, P^T out
    tScSt_mn: cute.Tensor,  # coordinates (key, query) of the same elements
    sLSE: cute.Tensor,  # (tile_m,) fp32, base 2
    scale_log2: Float32,
):
    """P^T = 2^(scale_log2 S^T - LSE log2 e); a query's LSE is read where it is used."""
    for c in cutlass.range_constexpr(cute.size(acc_St_mn, mode=[1])):
        lse_log2 = sLSE[tScSt_mn[0, c][1]]
        for r in cutlass.range_constexpr(cute.size(acc_St_mn, mode=[0])):
            acc_St_mn[r, c] = scaled_exp2(acc_St_mn[r, c], scale_log2, -lse_log2)


@cute.jit
def score_gradients(
    acc_Pt_mn: cute.Tensor,
    acc_dPt_mn: cute.Tensor,  # dP^T in, dS^T out
    tScSt_mn: cute.Tensor,
    sLSE: cute.Tensor,  # (tile_m,) fp32, base 2
    sDelta: cute.Tensor,  # (tile_m,) fp32
    scales: Scales,
    capped: Constexpr[bool],
):
    """dS^T = P^T (dP^T - delta), and through a cap: (1 - t^2) times that, t being the tanh.

    t is had back from P = 2^(log2 t - LSE), which costs a logarithm but no register. Where P is so
    small that it is 0, so is the gradient: |t| <= 1 bounds what the logarithm makes of it.
    """
    to_tanh = cute.arch.rcp_approx(scales.log2)
    for c in cutlass.range_constexpr(cute.size(acc_dPt_mn, mode=[1])):
        delta = sDelta[tScSt_mn[0, c][1]]
        lse_log2 = sLSE[tScSt_mn[0, c][1]]
        for r in cutlass.range_constexpr(cute.size(acc_dPt_mn, mode=[0])):
            gradient = acc_Pt_mn[r, c] * (acc_dPt_mn[r, c] - delta)
            if cutlass.const_expr(capped):
                t = (cute.math.log2(acc_Pt_mn[r, c], fastmath=True) + lse_log2) * to_tanh
                gradient = gradient * cute.arch.fmax(1.0 - t * t, Float32(0.0))
            acc_dPt_mn[r, c] = gradient
