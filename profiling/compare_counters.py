"""What our kernels and flash-attn-4's move and multiply, counted in the emulator; no GPU is needed.

    python -m profiling.compare_counters [--peer FILE] [--docs DIR] [--head-dims 64,192/128]
        [--seqlen 8192]

Writes `counters.md`. With --peer flash-attn-4's counts are kept in that file and read from there
the next time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple, get_args

from hopperflash.problem import Direction
from profiling.compare_sass import ALL_HEAD_DIMS, HEAD_DIMS, MASKS, head_dims_of, name_of
from profiling.counters import Head, PassCount, count_ours, from_json

SEQLEN = 8192
# Of the whole problem: 16,384 tokens, and as many heads as 2048 of all their dims hold.
BATCH, HIDDEN = 2, 2048


class Pair(NamedTuple):
    """One direction of one head on both sides."""

    ours: PassCount
    peer: PassCount

    @property
    def head(self) -> Head:
        return self.ours.head

    @property
    def name(self) -> str:
        head = self.head
        return f"{name_of(head.head_dim, head.head_dim_v)} {head.mask.kind.value}"

    @property
    def bytes_ratio(self) -> float:
        """Bytes of ours over the peer's."""
        return self.ours.bytes / self.peer.bytes

    @property
    def copies(self) -> int:
        """Heads of all batch entries of the whole problem."""
        return BATCH * (HIDDEN // self.head.head_dim)


def heads(head_dims: Sequence[tuple[int, int]] = HEAD_DIMS, seqlen: int = SEQLEN) -> list[Head]:
    """All cases, forward first."""
    return [
        Head(direction, *dims, mask, seqlen)
        for direction, dims, mask in product(get_args(Direction), head_dims, MASKS.values())
    ]


def compare(chosen: Sequence[Head], peers: Sequence[PassCount]) -> Iterator[Pair]:
    """Every case counted here, beside the peer's counts."""
    of_head = {found.head: found for found in peers}
    for head in chosen:
        pair = Pair(count_ours(head), of_head[head])
        print(f"{head.direction} {pair.name}: {pair.bytes_ratio:.4f} of the bytes", flush=True)
        yield pair


def peer_counts(
    head_dims: Sequence[tuple[int, int]], seqlen: int, kept: Path | None
) -> list[PassCount]:
    """flash-attn-4's counts: from a file that has these cases, or counted in a process of its own,
    and kept in it."""
    chosen = set(heads(head_dims, seqlen))
    if kept is not None and kept.exists():
        found = [from_json(record) for record in json.loads(kept.read_text())]
        if chosen <= {each.head for each in found}:
            return found
    with tempfile.TemporaryDirectory(prefix="hopperflash-") as folder:
        out = kept or Path(folder, "peer.json")
        dims = ",".join(name_of(*dims) for dims in head_dims)
        command = [sys.executable, "-m", "profiling.peer_counters", str(seqlen), dims, str(out)]
        subprocess.run(command, check=True)
        return [from_json(record) for record in json.loads(out.read_text())]


def main() -> None:
    from profiling.counters_report import write

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--docs", type=Path, default=Path("docs/performance"))
    parser.add_argument("--head-dims", type=head_dims_of, default=ALL_HEAD_DIMS)
    parser.add_argument("--seqlen", type=int, default=SEQLEN)
    arguments = parser.parse_args()
    peers = peer_counts(arguments.head_dims, arguments.seqlen, arguments.peer)
    pairs = list(compare(heads(arguments.head_dims, arguments.seqlen), peers))
    print(write(pairs, arguments.docs))


if __name__ == "__main__":
    main()
