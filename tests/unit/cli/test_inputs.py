"""Operands of the demo: drawn at random or read from a file."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from hopperflash.cli.inputs import random_inputs, read_inputs
from hopperflash.cli.options import SizeOptions, Sizes
from hopperflash.errors import InvalidArgument

SIZES = Sizes.of(SizeOptions(seqlen=16, seqlen_k=24, head_dim=8))


def saved(path, metadata=None, **tensors):
    save_file(
        tensors or dict(zip("qkv", random_inputs(SIZES, 0).operands, strict=True)), path, metadata
    )
    return path


def test_random_inputs_depend_on_the_seed_alone():
    first, again, other = (random_inputs(SIZES, seed) for seed in (0, 0, 1))
    assert torch.equal(first.q, again.q)
    assert not torch.equal(first.q, other.q)
    assert first.q.shape == (1, 16, 2, 8)
    assert first.k.shape == first.v.shape == (1, 24, 1, 8)
    assert first.q.dtype == torch.bfloat16


def test_a_file_gives_back_what_was_saved(tmp_path):
    drawn = random_inputs(SIZES, 3)
    read = read_inputs(saved(tmp_path / "x", q=drawn.q, k=drawn.k, v=drawn.v), None)
    for mine, theirs in zip(read.operands, drawn.operands, strict=True):
        assert torch.equal(mine, theirs)
    assert read.causal


@pytest.mark.parametrize(
    ("metadata", "option", "causal"),
    [("false", None, False), ("True", None, True), ("true", False, False), ("huh", True, True)],
)
def test_the_option_overrides_the_metadata(tmp_path, metadata, option, causal):
    path = saved(tmp_path / "x", {"causal": metadata})
    assert read_inputs(path, option).causal is causal


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(InvalidArgument, match=r"cannot read .*missing"):
        read_inputs(tmp_path / "missing", None)
    (tmp_path / "text").write_text("not safetensors")
    with pytest.raises(InvalidArgument, match=r"cannot read .*text"):
        read_inputs(tmp_path / "text", None)
    with pytest.raises(InvalidArgument, match=r"cannot read"):
        read_inputs(tmp_path, None)


def test_missing_tensors_are_named(tmp_path):
    path = saved(tmp_path / "x", q=torch.zeros(1), other=torch.zeros(1))
    with pytest.raises(InvalidArgument, match=r"lacks tensors k, v:\n- found other, q"):
        read_inputs(path, None)


def test_metadata_must_be_a_boolean(tmp_path):
    with pytest.raises(InvalidArgument, match="metadata causal is 'maybe'"):
        read_inputs(saved(tmp_path / "x", {"causal": "maybe"}), None)
