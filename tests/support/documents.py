"""What README and docs/ show: their links, their commands, their programs, and who executes each.

A fenced block without a language, or in bash or console, holds commands: one on each line, or one
behind a "$ " with what it prints. `text` holds anything else. So a command that is not listed below
is found by `tests/unit/test_documents.py`. `python -m tests.support.documents` prints anew what
commands behind a "$ " print.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hopperflash.bench import timing
from hopperflash.cli.main import app

ROOT = Path(__file__).parents[2]
_TOP = tuple(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))
PAGES = (*_TOP, *sorted((ROOT / "docs").rglob("*.md")))
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_SHELLS = ("", "bash", "console")
LANGUAGES = (*_SHELLS, "python", "text", "mermaid")
_INLINE = re.compile(
    r"`((?:hopperflash|python|pytest|pip|make|pre-commit|compute-sanitizer|[A-Z_]+=[^\s`]+) [^`]+)`"
)
_VARIABLE = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A line for a shell; `output` is what the page says that it prints, if it does."""

    text: str
    place: str
    output: str | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Set in front of it."""
        words = [word for word in shlex.split(self.text) if _VARIABLE.match(word)]
        return dict(word.split("=", 1) for word in words)

    @property
    def words(self) -> list[str]:
        return [word for word in shlex.split(self.text) if not _VARIABLE.match(word)]


@dataclass(frozen=True)
class Run:
    """Executed as it stands, but for options at its end that make it short: the last one counts.

    Of variables, /shared stands for a folder of the test.
    """

    short: str = ""
    emulated: bool = False  # compiles or emulates


@dataclass(frozen=True)
class Elsewhere:
    """Executed by a test, "file::function", or literally by a script of CI."""

    by: str


@dataclass(frozen=True)
class NotRun:
    """Why nobody executes it here."""

    reason: str


def blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        line = text[: found.start()].count("\n") + 1
        yield Block(page, line, found[2], found[3])


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def commands(page: Path) -> Iterator[Command]:
    """Those of blocks and those between backticks."""
    for block in blocks(page):
        if block.language not in _SHELLS:
            continue
        if block.text.startswith("$ "):
            first, _, output = block.text[2:].partition("\n")
            yield Command(first, str(block), output or None)
            continue
        for line in block.text.splitlines():
            yield Command(re.sub(r"\s+# .*", "", line).strip(), str(block))
    for found in _INLINE.finditer(prose(page)):
        text = " ".join(found[1].split())
        yield Command(text, str(page.relative_to(ROOT)))


def all_commands() -> dict[str, Command]:
    """By their text, each once; one whose output is shown comes first."""
    found: dict[str, Command] = {}
    for page in PAGES:
        if page.name == "CHANGELOG.md":  # names commands, shows none
            continue
        for command in commands(page):
            known = found.get(command.text)
            if known is None or (known.output is None and command.output is not None):
                found[command.text] = command
    return found


def programs(page: Path) -> dict[str, str]:
    """Python blocks whose first line is a comment with their file's name, by that name."""
    named = (re.match(r"# ([\w.]+\.py)\n", block.text) for block in python_blocks(page))
    texts = (block.text for block in python_blocks(page))
    return {name[1]: text for name, text in zip(named, texts, strict=True) if name}


def write_programs(page: Path, folder: Path) -> None:
    """Each under its name."""
    for name, text in programs(page).items():
        (folder / name).write_text(text)


def run_program(folder: Path, *words: str) -> str:
    """What Python prints, in a process of its own beside the programs; fails where it does."""
    path = os.pathsep.join([str(ROOT), str(folder)])
    environment = {**os.environ, "PYTHONPATH": path, "CUTE_DSL_DUMP_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def examples(page: Path) -> list[Block]:
    """Python blocks that stand by themselves."""
    return [b for b in python_blocks(page) if not re.match(r"# [\w.]+\.py\n", b.text)]


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


_BENCH = (
    "--tokens=32 --seqlens=16,32 --head-dims=16 --heads=2 --kv-heads=1 --milliseconds=1"
    " --warm-up=0 --device=cpu"
)
_SMALL = "--seqlen 128 --heads 1 --kv-heads 1 --head-dim 64"
_CI = Elsewhere(".ci/run")
_RECIPE = "its recipe runs what this suite or .ci/run runs"
_LONG = "runs for many minutes: marked slow, or for an idle machine"
_PART = "a part of this suite"
_REFERENCE = "names an option, not a call"

COMMANDS: dict[str, Run | Elsewhere | NotRun] = {
    # Set-up
    "pip install . && hopperflash demo": _CI,
    "pip install '.[test]' && pytest": _CI,
    "pip install '.[integration]'": _CI,
    "pytest tests/integration": _CI,
    "pip install '.[conformance]'": NotRun("its tests are skipped where it is not installed"),
    "pip install -e '.[conformance,profiling]'": NotRun("the same"),
    "pip install 'hopperflash[profiling]'": NotRun("the same"),
    "pre-commit install": NotRun("changes the checkout; its hooks are those of make lint and type"),
    # The command line
    "hopperflash demo": Elsewhere("tests/emulated/test_demo.py::test_default_demo_is_correct"),
    "hopperflash demo --backward": Run(_SMALL, emulated=True),
    "hopperflash doctor": Elsewhere("tests/emulated/test_doctor.py::test_everything_works_here"),
    "hopperflash explain": Run(),
    "hopperflash explain --seqlen 4096 --heads 32 --kv-heads 8": Run(),
    "hopperflash io": Run(),
    "hopperflash io --heads 32 --kv-heads 8 --seqlen 16384": Run(),
    "hopperflash compile": Elsewhere(
        "tests/compile/test_compile_command.py::test_prints_and_writes_a_kernel"
    ),
    "hopperflash compile --head-dim 64 --full": Run("--direction forward", emulated=True),
    "hopperflash emulate --json": Run(_SMALL, emulated=True),
    "hopperflash cache warm": Elsewhere(
        "tests/emulated/test_cache.py::test_the_warm_command_fills_the_cache_of_the_run"
    ),
    "hopperflash cache warm --head-dim 64,128 --dtype bf16 --mask causal,full": Run(
        "--head-dim 64 --mask causal --direction forward --heads 1 --jobs 1", emulated=True
    ),
    "HOPPERFLASH_CACHE_DIR=/shared/hopperflash hopperflash cache warm --head-dim 64": Run(
        "--mask causal --direction forward --dtype bf16 --heads 1 --jobs 1", emulated=True
    ),
    "hopperflash cache list": Run(),
    "hopperflash cache verify": Run(emulated=True),
    "hopperflash cache clear --stale": Run(),
    "hopperflash bench": Run(_BENCH),
    "hopperflash bench --html bench.html --json bench.json": Run(_BENCH),
    "hopperflash bench --head-dims 128 --seqlens 4096,8192 --mask causal --direction forward": Run(
        _BENCH
    ),
    "hopperflash bench --against sdpa-cudnn,fa3 --l2 cold --heads 32 --kv-heads 8": Run(_BENCH),
    "hopperflash profile": Elsewhere(
        "tests/unit/cli/test_profile.py::test_a_profile_runs_and_is_read"
    ),
    "hopperflash profile ncu --batch 4 --seqlen 4096 --heads 16 --kv-heads 16": Run("--dry-run"),
    "hopperflash profile nsys --batch 4 --seqlen 4096 --heads 16 --kv-heads 16": Run("--dry-run"),
    "hopperflash profile iket --seqlen 4096 --direction forward": Run("--dry-run"),
    "hopperflash profile ncu --emulated --seqlen 256 --head-dim 64": Run(
        "--heads 1 --kv-heads 1 --direction forward", emulated=True
    ),
    "hopperflash profile target": Elsewhere(
        "tests/unit/cli/test_profile.py::test_the_target_runs_as_the_command_says"
    ),
    # Modules
    "python -m tests.support.problem_space": Elsewhere(
        "tests/unit/plan/test_problem_space.py::test_the_page_is_up_to_date"
    ),
    "python -m tests.support.coverage": Elsewhere(
        "tests/unit/emulator/test_coverage.py::test_the_page_is_up_to_date"
    ),
    "python -m profiling.roles_page": Elsewhere(
        "tests/emulated/test_docs_roles.py::test_the_page_and_its_pictures_are_current"
    ),
    "python -m profiling.stored_vs_recomputed --write docs": Run(
        "--lengths 64 --repeat 1 --limit 1 --emulate 64 --device cpu", emulated=True
    ),
    "python -m profiling.peer_tiles": Run(),
    "python -m profiling.schedules": Run(),
    "python -m profiling.search --head-dim 128 --mask causal --direction forward": Run(
        "--limit 1 --jobs 1 --head-dim 64", emulated=True
    ),
    "python -m profiling.search --head-dim 256 --mask causal --direction forward --limit 5": Run(
        "--limit 1 --jobs 1 --head-dim 64", emulated=True
    ),
    "python -m profiling.search --check": NotRun(_LONG),
    "python -m profiling.search --check --write && ruff format": NotRun(
        "writes into the package; tests/unit/test_search.py has its parts"
    ),
    "python -m profiling.compare_counters": NotRun("needs flash-attn-4; " + _LONG),
    "python -m profiling.emulator_bench": Run("--seqlen 128 --repeat 1", emulated=True),
    "python -m profiling.compare_sass": NotRun("needs flash-attn-4; " + _LONG),
    "python -m profiling.device_check --minutes 30 --out device-check": Elsewhere(
        "tests/unit/test_device_check.py::test_without_a_gpu_it_says_so_and_leaves_a_summary"
    ),
    "python -m tests.support.mutation_report": NotRun(_LONG),
    "python -m tests.support.hazard_cost": Run("--repeat 1", emulated=True),
    # On a GPU
    "HOPPERFLASH_CACHE=off HOPPERFLASH_LOG=info hopperflash demo": Elsewhere(
        "tests/emulated/test_docs_debugging.py::test_the_log_says_what_is_compiled_and_why"
    ),
    "compute-sanitizer --tool memcheck python repro.py": NotRun("needs a GPU"),
    "CUDA_LAUNCH_BLOCKING=1 python repro.py": NotRun("needs a GPU"),
    # Tests and checks
    **{
        f"make {target}": NotRun(_RECIPE)
        for target in (
            "install", "lint", "type", "unit", "compile", "emulated", "integration", "gpu", "ci",
            "docs", "docs-slow",
        )
    },
    "pytest -m slow": NotRun(_LONG),
    "pytest -n": NotRun(_REFERENCE),
    "pytest": _CI,
    "pytest tests/unit": NotRun(_PART),
    "pytest tests/gpu": NotRun(_PART + "; skipped without a GPU"),
    "pytest -n 0 tests/emulated/test_bands.py": NotRun(_PART),
    "pytest tests/compile/test_sm80_configs.py -m slow": NotRun(_LONG),
    "pytest -m slow tests/emulated/test_public_kernels.py --cutlass-examples"
    " .../examples/python/CuTeDSL": NotRun("needs a clone of CUTLASS"),
}  # fmt: skip

# Who executes python blocks: those named after files, and examples, by page.
PROGRAMS = {
    "docs/emulator.md": "tests/emulated/test_docs_emulator.py",
    "docs/debugging.md": "tests/emulated/test_docs_debugging.py",
}
EXAMPLES = {
    "README.md": "tests/emulated/test_documents.py",
    "docs/runtime.md": "tests/emulated/test_documents.py",
    "docs/debugging.md": "tests/emulated/test_documents.py",
    "docs/integrations.md": "tests/unit/integrations/test_torch.py, and for Hugging Face"
    " tests/integration/test_transformer.py",
}


def run_command(command: Command, how: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, in a folder of its own."""
    (folder / "docs").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(timing, "FLUSH_BYTES", 1 << 12)
    for variable, value in command.variables.items():
        monkeypatch.setenv(variable, value.replace("/shared", str(folder)))
    program, *words = [*command.words, *shlex.split(how.short)]
    if program == "hopperflash":
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
    else:
        assert program == "python", command.text
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    for file in re.findall(r"\w+\.(?:html|json)\b", command.text):
        assert (folder / file).stat().st_size > 0


def printed(command: Command) -> str:
    """What a `hopperflash` command prints."""
    result = CliRunner().invoke(app, command.words[1:])
    if result.exit_code:
        raise RuntimeError(f"{command.place}: {command.text}\n{result.output}")
    return result.stdout


def main() -> None:
    """Prints anew what pages show behind a "$ "."""
    for page in PAGES:
        for command in commands(page):
            if command.output is not None:
                text = page.read_text()
                page.write_text(text.replace(command.output, printed(command)))


if __name__ == "__main__":
    main()
