"""What stands beside Q, K and V: results, their cotangents, memory that results are written to."""

from __future__ import annotations

from collections.abc import Iterator

from hopperflash.problem.problem import AttnProblem, OperandFacts


def expected_facts(problem: AttnProblem) -> dict[str, tuple[tuple[int, ...], str]]:
    """(shape, dtype) by name, of packed sequences as a batch of one."""
    p = problem
    rows_q, rows_k = (p.batch, p.seqlen_q, p.heads_q), (p.batch, p.seqlen_k, p.heads_k)
    output = ((*rows_q, p.head_dim_v), p.dtype.value)
    statistic = ((p.batch, p.heads_q, p.seqlen_q), "float32")
    return {
        "out": output,
        "dout": output,
        "lse": statistic,
        "dlse": statistic,
        "dq": ((*rows_q, p.head_dim), p.dtype.value),
        "dk": ((*rows_k, p.head_dim), p.dtype.value),
        "dv": ((*rows_k, p.head_dim_v), p.dtype.value),
    }


def misfits(problem: AttnProblem, name: str, facts: OperandFacts) -> Iterator[str]:
    """Where a tensor is not what the problem makes it."""
    shape, dtype = expected_facts(problem)[name]
    leading = 1 if problem.is_packed else 0
    for what, found, wanted in (
        ("shape", facts.shape[leading:], shape[leading:]),
        ("dtype", facts.dtype.removeprefix("torch."), dtype),
        ("device", facts.device, problem.device),
    ):
        if found != wanted:
            yield f"{name} has {what} {found}: give {wanted}"


def overlap(name: str, facts: OperandFacts) -> Iterator[str]:
    """Why memory cannot be written to: elements that share it."""
    reach = 0
    for stride, length in sorted(zip(facts.strides, facts.shape, strict=True)):
        if length > 1 and 0 not in facts.shape:
            if stride <= reach:
                yield (
                    f"{name} has strides {facts.strides} for shape {facts.shape}: its elements"
                    " share memory, give each its own"
                )
                return
            reach += stride * (length - 1)
