"""Targets by name and by capability."""

from __future__ import annotations

import pytest

from hopperflash.errors import InvalidArgument
from hopperflash.plan import ARCHS, arch_of, arch_of_capability


@pytest.mark.parametrize("name", ["sm_90a", "sm90a", "sm_90", "sm90", "SM90"])
def test_spellings_of_hopper(name):
    assert arch_of(name).name == "sm_90a"


def test_unknown_name_lists_the_known():
    with pytest.raises(InvalidArgument, match=r"'sm_75'.*sm_80.*sm_90a"):
        arch_of("sm_75")


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_every_target_is_found_by_its_name(arch):
    assert arch_of(arch.name) is arch
    if arch.name != "cpu":
        assert arch_of_capability(arch.compute_capability) is arch


def test_unknown_capability_names_what_was_found():
    with pytest.raises(InvalidArgument, match=r"7\.5.*sm_80"):
        arch_of_capability((7, 5))
    with pytest.raises(InvalidArgument, match=r"0\.0"):
        arch_of_capability((0, 0))


def test_limits():
    assert arch_of("sm_90a").smem_bytes_per_block == 232448
    assert arch_of("sm_80").smem_bytes_per_block == 166912
    assert arch_of("sm_86").smem_bytes_per_block == 101376


def test_only_hopper_has_wgmma():
    assert [arch.name for arch in ARCHS if "wgmma" in arch.features] == ["sm_90a"]
