"""Options of commands: a dataclass gives them, refusals end with a message and status 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from hopperflash.cli.options import SizeOptions, Sizes, command, flag
from hopperflash.errors import InvalidArgument
from hopperflash.problem import DType


@dataclass(frozen=True)
class Options:
    count: Annotated[int, flag("How many.")] = 3
    loud: Annotated[bool, flag("Loudly.", "--loud")] = False


def app_of(run) -> typer.Typer:
    app = typer.Typer()
    app.command()(command(Options)(run))
    return app


def test_fields_become_options_with_their_defaults():
    seen = []
    app = app_of(seen.append)
    for arguments in ([], ["--count", "5", "--loud"]):
        assert CliRunner().invoke(app, arguments).exit_code == 0
    assert seen == [Options(3, False), Options(5, True)]


def test_refusals_print_every_reason_and_exit_with_2():
    def run(options: Options) -> None:
        raise InvalidArgument("no:", ["first [reason]", "second"])

    result = CliRunner().invoke(app_of(run), [])
    assert result.exit_code == 2
    assert result.stderr == "no:\n- first [reason]\n- second\n"
    assert result.stdout == ""


@pytest.mark.parametrize(("heads", "kv_heads"), [(None, 1), (1, 1), (3, 3), (8, 4)])
def test_key_heads_default_to_a_divisor(heads, kv_heads):
    assert Sizes.of(SizeOptions(heads=heads)).heads_k == kv_heads


def test_default_sizes():
    assert Sizes.of(SizeOptions()) == Sizes(1, 512, 512, 2, 1, 128, DType.BFLOAT16, True)
