"""The list of hazards: broken rules that wrong bytes alone may not show."""

from __future__ import annotations

from typing import Any

from .ptx_ir import Instruction


class HazardLog:
    """Appends to the caller's list: one message, with a count, per kind and pair of PTX lines."""

    def __init__(self, messages: list[str], kernel: str = "") -> None:
        self.messages = messages
        self._kernel = kernel
        self._found: dict[tuple[str, int, int], list[int]] = {}

    def report(
        self,
        kind: str,
        ins: Instruction | None,
        cta: Any,
        detail: str,
        *,
        who: str = "",
        other: Instruction | None = None,
    ) -> None:
        """`who` broke the rule at `ins`, or raced there with what another thread did at `other`."""
        key = (kind, ins.line if ins else 0, other.line if other else 0)
        if (found := self._found.get(key)) is not None:
            found[1] += 1
            return
        self._found[key] = [len(self.messages), 1]
        parts = [f"{kind}: {detail}" + (f" at {other.where}" if other else "")]
        if ins is not None:
            parts.append(ins.where)
        parts.append(f"{who} of CTA {cta.index}" if who else f"CTA {cta.index}")
        if self._kernel:
            parts.append(f"kernel {self._kernel}")
        self.messages.append("; ".join(parts))

    def close(self) -> None:
        """Write how often each hazard was met."""
        for at, count in self._found.values():
            if count > 1:
                self.messages[at] += f" ({count} times)"
        self._found.clear()
