"""Loops of a SASS listing, and what a thread executes in one pass through each.

The compiler moves the waiting part of a barrier's try_wait behind the kernel's end, from where it
jumps back: not every backward branch closes a loop. So loops are the cycles of the control flow.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

from hopperflash.analysis.pipes import Pipe, pipe_of
from hopperflash.analysis.sass import SassInstruction, SassListing

_TARGET = re.compile(r"\.L_[\w$]+")
_ENDS = ("EXIT", "RET", "BRX", "JMX", "KILL")
_TENSOR = ("HGMMA", "HMMA")


@dataclass(frozen=True)
class Loop:
    """The code from a loop's first address to the branch that closes it, without inner loops.

    Waits that the compiler put elsewhere are left out; `conditional` instructions are those that
    some way through the loop avoids.
    """

    instructions: tuple[SassInstruction, ...]
    conditional: int

    @property
    def begin(self) -> int:
        return self.instructions[0].address

    @property
    def end(self) -> int:
        return self.instructions[-1].address

    @cached_property
    def pipes(self) -> Counter[Pipe]:
        """Instructions per thread by pipe."""
        return Counter(pipe_of(instruction.opcode) for instruction in self.instructions)

    @cached_property
    def _opcodes(self) -> Counter[str]:
        return Counter(instruction.opcode for instruction in self.instructions)

    def count(self, *prefixes: str) -> int:
        """Instructions whose opcode starts with the dotted parts of one of `prefixes`."""
        return sum(
            number
            for opcode, number in self._opcodes.items()
            if any(opcode == p or opcode.startswith(p + ".") for p in prefixes)
        )

    @property
    def tensor_instructions(self) -> list[SassInstruction]:
        """Tensor-core instructions in order."""
        return [i for i in self.instructions if i.opcode.split(".")[0] in _TENSOR]

    @property
    def tensor_shapes(self) -> Counter[str]:
        """How often each shape of tensor-core work occurs, such as `64x128x16`."""
        return Counter(i.opcode.split(".")[1] for i in self.tensor_instructions)

    @property
    def exponentials(self) -> int:
        return self.count("MUFU.EX2")

    @property
    def masks(self) -> int:
        """Selects, one a score where scores are masked, and the few that guard a row's maximum."""
        return self.count("FSEL")

    @property
    def spills(self) -> int:
        """Local loads and stores."""
        return self.count("LDL", "STL")

    @property
    def warpgroup_syncs(self) -> int:
        """Fences and waits (WARPGROUP)."""
        return self.count("WARPGROUP")

    @property
    def serialised(self) -> bool:
        """Whether a wgmma stands alone between fences and waits: ptxas does not let those of a GEMM
        follow each other. A GEMM of depth 16, which has but one, looks the same."""
        kinds = [i.opcode.split(".")[0] for i in self.instructions]
        steps = [kind for kind in kinds if kind in ("WARPGROUP", "HGMMA")]
        # A GEMM may begin at the end of the loop's code.
        start = steps.index("WARPGROUP") if "WARPGROUP" in steps else 0
        runs = groupby(steps[start:] + steps[:start])
        return any(kind == "HGMMA" and len(list(run)) == 1 for kind, run in runs)


def loops_of(listing: SassListing) -> list[Loop]:
    """Every loop of a kernel, in the order of their addresses."""
    return _Flow(listing).loops()


def tensor_loops(listing: SassListing) -> list[Loop]:
    """The loops with tensor-core work of their own."""
    return [loop for loop in loops_of(listing) if loop.tensor_instructions]


class _Flow:
    """The control flow of a listing: blocks by number, and where each leads."""

    def __init__(self, listing: SassListing) -> None:
        code = listing.instructions
        index = {instruction.address: number for number, instruction in enumerate(code)}
        targets = {
            number: [index[listing.labels[label]] for label in _TARGET.findall(i.operands)]
            for number, i in enumerate(code)
            if i.opcode.split(".")[0] in ("BRA", "BRX", "JMP")
        }
        starts = {0} | {target for found in targets.values() for target in found}
        starts |= {
            number + 1
            for number, i in enumerate(code)
            if (number in targets or i.opcode.split(".")[0] in _ENDS) and number + 1 < len(code)
        }
        bounds = [*sorted(starts), len(code)]
        self._code = code
        self._blocks = [range(a, b) for a, b in pairwise(bounds)]
        number_of = {block.start: number for number, block in enumerate(self._blocks)}
        self._next: list[list[int]] = []
        for number, block in enumerate(self._blocks):
            last = block[-1]
            found = [number_of[target] for target in targets.get(last, [])]
            # A second predicate may stand among the operands: `@P0 BRA P1, label`.
            unconditional = not code[last].predicate and "," not in code[last].operands
            leaves = last in targets or code[last].opcode.split(".")[0] in _ENDS
            if not (leaves and unconditional) and number + 1 < len(self._blocks):
                found.append(number + 1)
            self._next.append(found)

    def loops(self) -> list[Loop]:
        bodies: dict[int, set[int]] = {}
        latches: dict[int, set[int]] = {}
        for source, header in self._back_edges():
            latches.setdefault(header, set()).add(source)
            bodies.setdefault(header, set()).update(self._between(header, source))
        loops = []
        for header, body in bodies.items():
            inner = set().union(
                *(other for start, other in bodies.items() if start != header and start in body)
            )
            loops.append(self._loop(header, body, body - inner, latches[header]))
        return sorted(loops, key=lambda loop: loop.begin)

    def _loop(self, header: int, body: set[int], own: set[int], latches: set[int]) -> Loop:
        # In line are the blocks up to the branch that closes the loop.
        own = {block for block in own if header <= block <= max(latches)}
        needed = {b for b in own if b == header or not self._avoids(header, b, body, latches)}
        instructions = tuple(self._code[n] for b in sorted(own) for n in self._blocks[b])
        always = sum(len(self._blocks[block]) for block in needed)
        return Loop(instructions, len(instructions) - always)

    def _back_edges(self) -> list[tuple[int, int]]:
        """Edges to a block that the walk is still in: those that close a loop."""
        found: list[tuple[int, int]] = []
        seen, open_blocks = {0}, {0}
        stack = [(0, iter(self._next[0]))]
        while stack:
            block, following = stack[-1]
            successor = next(following, None)
            if successor is None:
                open_blocks.discard(block)
                stack.pop()
            elif successor in open_blocks:
                found.append((block, successor))
            elif successor not in seen:
                seen.add(successor)
                open_blocks.add(successor)
                stack.append((successor, iter(self._next[successor])))
        return found

    @cached_property
    def _previous(self) -> list[list[int]]:
        previous: list[list[int]] = [[] for _ in self._blocks]
        for number, following in enumerate(self._next):
            for successor in following:
                previous[successor].append(number)
        return previous

    def _between(self, header: int, source: int) -> set[int]:
        """Blocks that reach `source` without passing `header`."""
        found, waiting = {header, source}, [source]
        while waiting:
            block = waiting.pop()
            if block == header:
                continue
            new = [p for p in self._previous[block] if p not in found]
            found.update(new)
            waiting += new
        return found

    def _avoids(self, header: int, block: int, body: set[int], latches: set[int]) -> bool:
        """Whether a way from `header` to the end of the loop leaves `block` out."""
        seen, waiting = {header}, [header]
        while waiting:
            here = waiting.pop()
            if here in latches and here != block:
                return True
            new = [n for n in self._next[here] if n in body and n not in seen and n != block]
            seen.update(new)
            waiting += new
        return False
