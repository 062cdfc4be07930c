"""What commands print, and how they end: results to stdout, progress and refusals to stderr."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from hopperflash.errors import HopperflashError

WRONG, REFUSED = 1, 2


def stdout() -> Console:
    """Made for each use: a stream that a test or a pipe put in place is the one written to."""
    return Console(highlight=False, soft_wrap=True)


def stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def exit_on_refusal() -> Iterator[None]:
    """Ends the program with the message of a `HopperflashError` instead of a traceback."""
    try:
        yield
    except HopperflashError as refused:
        stderr().print(str(refused), markup=False)
        raise typer.Exit(REFUSED) from None


def table(label: str, *columns: str) -> Table:
    """Numbers by column, under their names."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    found.add_column(label)
    for column in columns:
        found.add_column(column, justify="right")
    return found


def print_json(value: Any) -> None:
    """`as_json` on stdout."""
    sys.stdout.write(as_json(value))


def as_json(value: Any) -> str:
    """`value` as one JSON document; dataclasses become objects, sets sorted lists."""
    return json.dumps(value, default=_jsonable, indent=2) + "\n"


def _jsonable(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


class Stages:
    """Names what is being done: a bar on a terminal, one line per stage elsewhere."""

    def __init__(self, console: Console, bar: Progress | None) -> None:
        self._console = console
        self._bar = bar

    def enter(self, stage: str) -> None:
        """A new stage of unknown length."""
        if self._bar is None:
            self._console.print(stage, markup=False)
            return
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._bar.add_task(stage, total=None)

    def advance(self, done: int, total: int) -> None:
        """Progress within the stage."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[-1], completed=done, total=total)


@contextmanager
def stages() -> Iterator[Stages]:
    """Stages on stderr, erased at the end where that is a terminal."""
    console = stderr()
    if not console.is_terminal:
        yield Stages(console, None)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield Stages(console, bar)
