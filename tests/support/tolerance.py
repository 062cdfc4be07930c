"""The one assertion by which results are accepted; the rule itself is `hopperflash.tolerance`."""

from __future__ import annotations

from torch import Tensor

from hopperflash.tolerance import Deviation, tolerance

__all__ = ["assert_close", "tolerance"]


def assert_close(
    out: Tensor,
    ref: Tensor,
    low: Tensor,
    *,
    factor: float = 2.0,
    terms: Tensor | None = None,
    name: str = "out",
) -> Deviation:
    """Fails with the numbers where `out` is further from `ref` than the rule allows.

    `low` is the materialised formula in the input dtype. `factor` is 2, or 3 where softcap or
    sinks are on; `terms` as in `tolerance`. Returns the measured deviation for reports.
    """
    deviation = tolerance(out, ref, low, factor=factor, terms=terms)
    if not deviation.ok:
        raise AssertionError(_describe(deviation, out, ref, low, name))
    return deviation


def _describe(deviation: Deviation, out: Tensor, ref: Tensor, low: Tensor, name: str) -> str:
    lines = [f"{name} {tuple(out.shape)} {out.dtype} is not close to the reference"]
    if deviation.first_mismatch is not None:
        first = deviation.first_mismatch
        lines.append(
            f"  non-finite elements differ at {deviation.nonfinite_mismatches} of {out.numel()}; "
            f"first at {first}: {float(out[first])} instead of {float(ref[first])}"
        )
    for kind, error, bound in (
        ("max", deviation.max_error, deviation.max_bound),
        ("rms", deviation.rms_error, deviation.rms_bound),
    ):
        relation = "<=" if error <= bound else "> "
        lines.append(f"  {kind} error {error:.3e} {relation} bound {bound:.3e}")
    if deviation.worst is not None:
        worst = deviation.worst
        lines.append(
            f"  worst at {worst}: {float(out[worst]):.6g}, reference {float(ref[worst]):.6g}, "
            f"low precision {float(low[worst]):.6g}"
        )
    return "\n".join(lines)
