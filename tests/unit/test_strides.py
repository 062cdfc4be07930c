"""Views of any strides: only what kernels cannot address is copied, and the plan says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hopperflash

SHAPES = {
    "q": (2, 24, 4, 64),
    "k": (2, 40, 2, 64),
    "v": (2, 40, 2, 64),
    "dout": (2, 24, 4, 64),
    "out": (2, 24, 4, 64),
    "dq": (2, 24, 4, 64),
}
# Views, and why kernels cannot address them; None where they can.
VIEWS = {
    "heads first": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), None),
    "batch last": (lambda x: x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3), None),
    "part of a row": (lambda x: torch.cat([x, x, x], -1)[..., 64:128], None),
    "every other row": (lambda x: torch.repeat_interleave(x, 2, dim=1)[:, ::2], None),
    "head_dim not last": (lambda x: x.transpose(2, 3).contiguous().transpose(2, 3), "last stride"),
    "every other element": (
        lambda x: torch.repeat_interleave(x, 2, dim=3)[..., ::2],
        "last stride 2",
    ),
    "an odd row": (
        lambda x: torch.cat([x, x[..., :1]], -1)[..., :64],
        "65 not a positive multiple",
    ),
    "odd address": (
        lambda x: x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x),
        "base address aligned to 2 bytes",
    ),
    "half a vector": (
        lambda x: x.new_empty(x.numel() + 4)[4:].view(x.shape).copy_(x),
        "base address aligned to 8 bytes",
    ),
}
READ_ONLY = {
    "one head for all": (lambda x: x[:, :, :1].expand(x.shape), "0 not a positive multiple"),
    "one number": (lambda x: x[:1, :1, :1, :1].expand(x.shape), "last stride 0"),
}


def operands() -> dict[str, Tensor]:
    """Every tensor of a backward."""
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    return {**tensors, "lse": torch.randn(2, 4, 24)}


def plan_of(tensors: dict[str, Tensor], arch: str, direction: str):
    names = {"forward": ("q", "k", "v", "out"), "backward": (*SHAPES, "lse")}[direction]
    return hopperflash.make_plan(
        **{name: tensors[name] for name in names}, arch=arch, direction=direction
    )


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("view", [*VIEWS, *READ_ONLY])
def test_only_what_kernels_cannot_address_is_copied(view, direction, arch):
    make, reason = {**VIEWS, **READ_ONLY}[view]
    names = {"forward": ("q", "k", "v", "out"), "backward": tuple(SHAPES)}[direction]
    written = {"forward": ("out",), "backward": ("dq",)}[direction]
    for name in names:
        if name in written and view in READ_ONLY:
            continue
        tensors = operands()
        tensors[name] = make(tensors[name])
        plan = plan_of(tensors, arch, direction)
        copies, others = plan.copies, plan.copies_back
        if name in written:
            copies, others = others, copies
        assert others == ()
        assert [copy.operand for copy in copies] == ([] if reason is None else [name])
        assert all(reason in copy.reason for copy in copies)


def test_statistics_are_copied_where_rows_are_not_consecutive():
    tensors = operands()
    for lse, copied in (
        (torch.randn(2, 24, 4).transpose(1, 2), ["lse"]),
        (torch.randn(4, 2, 24).transpose(0, 1), []),
        (torch.randn(2, 4, 25)[..., 1:], []),
        (torch.randn(1, 1, 1).expand(2, 4, 24), ["lse"]),
    ):
        plan = plan_of({**tensors, "lse": lse}, "sm_90a", "backward")
        assert [copy.operand for copy in plan.copies] == copied


def test_explain_names_the_copy():
    tensors = operands()
    k = VIEWS["every other element"][0](tensors["k"])
    text = hopperflash.explain(tensors["q"], k, tensors["v"], arch="sm_80")
    assert "copies     k: last stride 2, cp.async wants 1" in text
    rows = hopperflash.explain(
        *(x[0] for x in (tensors["q"], k, tensors["v"])),
        arch="sm_90a",
        cu_seqlens_q=torch.tensor([0, 24]),
        cu_seqlens_k=torch.tensor([0, 40]),
    )
    assert "copies     k: last stride 2, TMA wants 1" in rows


def test_a_negated_view_is_read_with_its_sign():
    tensors = operands()
    results = [
        hopperflash.flash_attn_func(*operand)
        for operand in (
            (torch._neg_view(tensors["q"]), tensors["k"], torch._neg_view(tensors["v"])),
            (-tensors["q"], tensors["k"], -tensors["v"]),
        )
    ]
    assert torch.equal(*results)
