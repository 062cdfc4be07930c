"""DTensor: attention split over heads and batch by two processes equals that of one."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import hopperflash

RANKS = 2


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def in_every_process(rank: int, port: int, work: Any) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    try:
        work()
    finally:
        dist.destroy_process_group()


def qkv(heads_k: int, *rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same in every process."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(*rows, heads, dim, generator=generator).bfloat16()
        for heads, dim in ((2 * heads_k, 16), (heads_k, 16), (heads_k, 24))
    )
    return q, k, v


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = hopperflash.flash_attn_func(q, k, v, causal=True, return_lse=True)
    return out.float().sin().sum() + lse.sum()


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    offsets = torch.tensor([0, 7, 20], dtype=torch.int32)
    if type(q) is not Tensor:
        from torch.distributed.tensor import Replicate, distribute_tensor

        offsets = distribute_tensor(offsets, q.device_mesh, [Replicate()])
    return hopperflash.flash_attn_varlen_func(q, k, v, offsets, offsets, 13, 13).float().sin().sum()


def check_dtensors() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (RANKS,))
    for loss, rows, head_dim in ((dense, (2, 20), 2), (packed, (20,), 1)):
        splits = [(2, Shard(head_dim), Shard(head_dim)), (2, Replicate(), Replicate())]
        # Three key heads cannot be shared evenly, so they are gathered first.
        splits.append((3, Shard(head_dim), Replicate()))
        if loss is dense:
            splits.append((3, Shard(0), Shard(0)))
        for heads_k, given, kept in splits:
            whole = [x.requires_grad_() for x in qkv(heads_k, *rows)]
            want = torch.autograd.grad(loss(*whole), whole)
            parts = [distribute_tensor(x.detach(), mesh, [given]).requires_grad_() for x in whole]
            for wanted in (parts, parts[1:]):
                got = torch.autograd.grad(loss(*parts), wanted)
                for one, other in zip(got, want[-len(got) :], strict=True):
                    torch.testing.assert_close(one.full_tensor(), other)
            out = hopperflash.flash_attn_func(*parts) if loss is dense else None
            if out is not None:
                assert out.placements == (kept,), (given, out.placements)


@pytest.mark.skipif(not dist.is_available(), reason="torch has no torch.distributed")
def test_sharded_attention_equals_that_of_one_process() -> None:
    mp.spawn(in_every_process, args=(free_port(), check_dtensors), nprocs=RANKS)
