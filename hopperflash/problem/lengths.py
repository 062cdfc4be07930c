"""Where packed sequences begin and end: what those tensors say without their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hopperflash.problem.problem import OperandFacts

CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k")
SEQUSED = ("seqused_q", "seqused_k")
LENGTHS = (*CU_SEQLENS, *SEQUSED)


def packed_lengths(
    lengths: Mapping[str, OperandFacts], device: str
) -> tuple[int | None, list[str]]:
    """The number of sequences, and every reason against these tensors."""
    reasons = [
        f"{name} is missing: give (sequences + 1,) int32 offsets"
        for name in CU_SEQLENS
        if name not in lengths
    ]
    for name, facts in lengths.items():
        if len(facts.shape) != 1:
            reasons.append(f"{name} has shape {facts.shape}: give one dimension")
        if facts.dtype != "int32":
            reasons.append(f"{name} is {facts.dtype}: give int32 or int64")
        if facts.device != device:
            reasons.append(f"{name} is on {facts.device}, q on {device}: give all on one device")
    if reasons:
        return None, reasons
    counts = {name: lengths[name].shape[0] - 1 for name in CU_SEQLENS}
    counts |= {name: lengths[name].shape[0] for name in SEQUSED if name in lengths}
    sequences = counts[CU_SEQLENS[0]]
    if min(counts.values()) < 0:
        reasons.append("cu_seqlens_q and cu_seqlens_k hold one offset more than sequences: not 0")
    elif any(count != sequences for count in counts.values()):
        found = ", ".join(f"{name} {count}" for name, count in counts.items())
        reasons.append(f"numbers of sequences differ ({found}): give one number")
    return sequences, reasons


def offset_reasons(name: str, offsets: Sequence[int], total: int) -> list[str]:
    """What is wrong with the values of `cu_seqlens`, where they can be looked at."""
    reasons = []
    if offsets and (offsets[0] < 0 or offsets[-1] > total):
        reasons.append(f"{name} goes from {offsets[0]} to {offsets[-1]}: stay within [0, {total}]")
    descending = [i for i in range(len(offsets) - 1) if offsets[i] > offsets[i + 1]]
    if descending:
        i = descending[0]
        reasons.append(f"{name} descends from {offsets[i]} to {offsets[i + 1]} at sequence {i}")
    return reasons


def used_reasons(name: str, used: Sequence[int], offsets: Sequence[int]) -> list[str]:
    """What is wrong with the values of `seqused`, where they can be looked at."""
    return [
        f"{name} is {count} at sequence {i}: stay within its {end - begin} rows"
        for i, (count, begin, end) in enumerate(zip(used, offsets, offsets[1:], strict=False))
        if not 0 <= count <= end - begin
    ][:1]
