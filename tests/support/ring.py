"""`context_parallel` over processes on a CPU: each holds a part of the rows, keys go round."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

import hopperflash
from hopperflash.integrations.torch import served
from tests.support.cases import make_inputs
from tests.support.gradient_cases import BackwardCase, make_cotangents
from tests.support.torch_attention import activated

RANKS = 2
ROWS = 2  # the dimension of (batch, heads, rows, head_dim) that is split


def attend(rank: int, case: BackwardCase, folder: str) -> None:
    """One rank's forward and backward, in the emulator; rank 0 saves what all ranks found."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    given = [*make_inputs(case), make_cotangents(case).dout]
    buffers = [x.transpose(1, 2).contiguous() for x in given]
    parts = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[ROWS] * len(buffers))
    with activated(), hopperflash.emulate("sm_90a") as run, parts:
        q, k, v, dout = (DTensor.from_local(x, mesh, [Shard(ROWS)]) for x in buffers)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        # SDPA of CPU tensors takes an operator that `context_parallel` does not know.
        out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            *leaves, is_causal=case.causal, scale=case.softmax_scale
        )
        gradients = torch.autograd.grad(out, leaves, dout)
        found = [x.to_local().detach() for x in (out, *gradients)]
        whole: list[Tensor] = context_parallel_unshard(mesh, found, [ROWS] * len(found))
    if rank == 0:
        names = ("out", "dq", "dk", "dv")
        results = {name: x.transpose(1, 2) for name, x in zip(names, whole, strict=True)}
        facts = {"hazards": run.hazards, "launches": len(run.launches), "served": served()}
        torch.save({**results, **facts}, Path(folder) / "found.pt")
    dist.destroy_process_group()
