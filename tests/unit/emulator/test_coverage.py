"""docs/emulator_coverage.md says what is true of the opcode tables."""

from __future__ import annotations

import pytest

from hopperflash.emulator.decode import Op
from hopperflash.emulator.errors import UnknownInstruction
from hopperflash.emulator.operations import EFFECTS, decode
from tests.support.coverage import FAMILIES, PAGE, REFUSED, render
from tests.support.ptx import kernel_of


def decoded(text: str) -> list[list[Op]]:
    return [decode(instruction) for instruction in kernel_of(text + ";").instructions]


@pytest.mark.parametrize("example", [e for family in FAMILIES for e in family.examples])
def test_examples_are_decoded(example: str) -> None:
    assert all(decoded(example))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnknownInstruction, match="PTX line"):
        decoded(REFUSED[name])


def test_every_table_entry_has_an_example() -> None:
    opcodes = [e.split()[0] for family in FAMILIES for e in family.examples]
    missing = [
        entry for entry in EFFECTS if not any(f"{o}.".startswith(f"{entry}.") for o in opcodes)
    ]
    # Calls and branches need more than one line: see test_calls.py and test_machine.py.
    assert set(missing) <= {"call.vprintf", "call.__assertfail", "bra"}


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "run python -m tests.support.coverage"
