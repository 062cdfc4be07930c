"""README and docs/: links lead somewhere, commands are executed, what they print is current."""

from __future__ import annotations

import ast
import re
from itertools import product
from pathlib import Path

import pytest

from tests.support import documents
from tests.support.documents import COMMANDS, PAGES, ROOT, Elsewhere, NotRun, Run, run_command

README = ROOT / "README.md"
LINK = re.compile(r"\]\(([^)\s]+)\)")
FOLDERS = ("hopperflash", "kernels", "tests", "profiling", "docs")
ALL = documents.all_commands()


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def links(page: Path) -> list[str]:
    """Targets within the repository."""
    found = LINK.findall(documents.prose(page))
    return [target for target in found if not re.match(r"https?:", target)]


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings."""
    headings = re.findall(r"^#+ (.*)$", documents.prose(page), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in kept}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name(page)}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{name(page)}: {target}"


def test_every_page_and_picture_is_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    ahead = [README]
    while ahead:
        page = ahead.pop()
        if page not in reached:
            reached.add(page)
            paths = (target.partition("#")[0] for target in links(page)) if page in PAGES else ()
            ahead += [(page.parent / path).resolve() for path in paths if path]
    files = {path for path in (ROOT / "docs").rglob("*") if path.is_file()}
    assert files - reached == set()


def test_the_index_lists_every_page() -> None:
    listed = {ROOT / "docs" / target for target in links(ROOT / "docs" / "README.md")}
    pages = {page for page in PAGES if (ROOT / "docs") in page.parents}
    assert pages - listed == {ROOT / "docs" / "README.md"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_are_named_exist(page: Path) -> None:
    """`kernels/sm90/fwd/{load,mma}.py` too."""
    for found in re.findall(r"`((?:" + "|".join(FOLDERS) + r")/[\w/{},.]*)`", page.read_text()):
        parts = [part.split(",") for part in re.split(r"[{}]", found)]
        for choice in product(*parts):
            assert (ROOT / "".join(choice)).exists(), f"{name(page)}: {found}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_say_what_they_are(page: Path) -> None:
    for block in documents.blocks(page):
        assert block.language in documents.LANGUAGES, str(block)


def test_every_command_is_accounted_for() -> None:
    """A new one is executed by the tests below, or names who does it or why nobody."""
    unknown = [f"{c.place}: {c.text}" for c in ALL.values() if c.text not in COMMANDS]
    assert unknown == []
    assert [text for text in COMMANDS if text not in ALL] == []


def test_others_execute_what_they_are_said_to() -> None:
    for text, how in COMMANDS.items():
        if isinstance(how, Elsewhere):
            file, _, function = how.by.partition("::")
            source = (ROOT / file).read_text()
            assert (f"def {function}(" if function else text) in source, how.by
        if isinstance(how, NotRun):
            assert len(how.reason) > 5, text


def test_python_is_accounted_for() -> None:
    """Programs by the name of their file; examples by page."""
    for page in PAGES:
        for program in documents.programs(page):
            test = documents.PROGRAMS[name(page)]
            assert program.removesuffix(".py") in (ROOT / test).read_text(), (test, program)
        if documents.examples(page):
            assert name(page) in documents.EXAMPLES


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_blocks_are_python(page: Path) -> None:
    for block in documents.python_blocks(page):
        ast.parse(block.text, str(block))


def test_there_are_exactly_two_set_up_commands() -> None:
    found = [b.text for b in documents.blocks(README) if "pip install" in b.text]
    assert found == ["pip install . && hopperflash demo\n", "pip install '.[test]' && pytest\n"]


def test_targets_exist() -> None:
    """Each with a recipe; a machine may have no make."""
    targets = set(re.findall(r"^([\w-]+):\n\t", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {text.split()[1] for text in ALL if text.startswith("make ")}
    assert len(asked) > 5 and asked <= targets


@pytest.mark.parametrize("text", [c.text for c in ALL.values() if c.output is not None])
def test_what_is_printed_is_current(text: str) -> None:
    """If not: `make docs`."""
    assert documents.printed(ALL[text]) == ALL[text].output


@pytest.mark.parametrize(
    "text",
    [t for t, how in COMMANDS.items() if isinstance(how, Run) and not how.emulated],
)
def test_command_runs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = COMMANDS[text]
    assert isinstance(how, Run)
    run_command(ALL[text], how, tmp_path, monkeypatch)
