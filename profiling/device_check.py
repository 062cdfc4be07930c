"""All there is to learn on a rented GPU, the most important first, until the minutes are over.

    python -m profiling.device_check --minutes N --out DIR

Fills DIR with summary.md, which is up to date after every step, and a log and results for each. In
this order: doctor, demo, the GPU tests by importance, a short benchmark, Nsight Compute and Systems
where they are installed, the backward beside one that stores its probabilities, the whole
benchmark. A step that fails does not stop the next; one that runs too long is stopped, and so is
the last when the minutes are over.

Exit status: 0, 1 where a step failed, 2 where nothing can run here; the summary says what to carry.
Needs nothing but Python until it knows what is missing. Run it from the root of the project.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from hopperflash.profiler import tools

ROOT = Path(__file__).parents[1]
OK, FAILED, CANNOT = 0, 1, 2
GRACE = 10.0  # seconds between asking a step to end and ending it
WORTHWHILE = 15.0  # a step is not begun with less left

_COMMAND = (sys.executable, "-m", "hopperflash")
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
# What the field measures.
_SIZES = ("--batch=4", "--seqlen=4096", "--heads=16", "--kv-heads=16", "--head-dim=128")


@dataclass(frozen=True)
class Step:
    """One subprocess, and the seconds that it may take, at most a `share` of all there are.

    `missing` says why it cannot run here.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    share: float = 1.0
    missing: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a step, and what it said last.

    "TOO LONG" is past its own limit, "cut off" past its share or the end; "left out" is no fault.
    """

    step: Step
    result: str
    seconds: float
    said: str

    @property
    def failed(self) -> bool:
        return self.result in ("FAILED", "TOO LONG")


@dataclass
class Summary:
    """The first thing to read of the folder, rewritten whenever something is known."""

    folder: Path
    minutes: float
    facts: list[str]
    outcomes: list[Outcome] = field(default_factory=list)
    waiting: list[Step] = field(default_factory=list)
    verdict: str = "running"

    def write(self) -> None:
        lines = ["# Device check", "", f"**{self.verdict}**", ""]
        lines += [f"- {fact}" for fact in self.facts]
        if self.outcomes or self.waiting:
            lines += ["", "| step | result | seconds | last words |", "| --- | --- | ---: | --- |"]
        for number, outcome in enumerate(self.outcomes, 1):
            name, seconds = outcome.step.name, f"{outcome.seconds:.0f}"
            shown = f"[{name}]({_log_name(number, outcome.step)})" if outcome.seconds else name
            said = outcome.said.replace("|", "\\|")
            lines.append(f"| {shown} | {outcome.result} | {seconds} | {said} |")
        lines += [f"| {step.name} | waiting | | |" for step in self.waiting]
        path = self.folder / "summary.md"
        partial = path.with_suffix(".part")
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
        partial.replace(path)


def steps(out: Path) -> list[Step]:
    """By importance: whether it works, whether it is right, how fast it is, and why."""
    tests = ROOT / "tests" / "gpu"
    kernels = str(tests / "test_kernels.py")
    short = ("--head-dims=128", "--seqlens=1024,16384", "--against=sdpa-cudnn,fa3", "--l2=cold")
    found = [
        Step("doctor", (*_COMMAND, "doctor"), 120),
        Step("demo", (*_COMMAND, "demo", "--backward"), 180),
        _tests("forward", out, kernels, "-k", "forward", limit=600),
        _tests("backward", out, kernels, "-k", "backward", limit=900),
        _tests("other-kernels", out, kernels, "-k", "not forward and not backward", limit=900),
        _bench("bench-short", out, *short, limit=240),
        _tests("runtime", out, str(tests / "test_runtime.py"), limit=300),
        *_profiles(out),
        _stored_vs_recomputed(out),
        _tests("torch-integration", out, str(tests / "test_torch_integration.py"), limit=300),
        _bench("bench", out, limit=1800),
    ]
    known = {
        kernels,
        *(str(tests / f"test_{name}.py") for name in ("runtime", "torch_integration")),
    }
    rest = sorted(str(path) for path in tests.glob("test_*.py") if str(path) not in known)
    return [*found, *(_tests(Path(path).stem, out, path, limit=600) for path in rest)]


def _tests(name: str, out: Path, *arguments: str, limit: float) -> Step:
    """pytest in one process: workers would share the GPU and its memory."""
    report = f"--junitxml={out / f'tests-{name}.xml'}"
    return Step(f"tests-{name}", (*_PYTEST, "-n", "0", report, *arguments), limit, share=0.2)


def _bench(name: str, out: Path, *options: str, limit: float) -> Step:
    files = (f"--json={out / f'{name}.json'}", f"--html={out / f'{name}.html'}")
    return Step(name, (*_COMMAND, "bench", "--device=cuda", *options, *files), limit)


def _profiles(out: Path) -> list[Step]:
    """Each pass under Nsight Compute, with all of its sections; both under Nsight Systems."""
    found = []
    for tool, direction in (("ncu", "forward"), ("ncu", "backward"), ("nsys", "both")):
        name = f"{tool}-{direction}"
        options = ("--all-sections",) if tool == "ncu" else ()
        file = f"--out={out / f'{name}.{tool}-rep'}"
        command = (*_COMMAND, "profile", tool, f"--direction={direction}", *_SIZES, *options, file)
        missing = "" if tools.find(tool) else tools.absent(tool)
        found.append(Step(name, command, 240, missing=missing))
    return found


def _stored_vs_recomputed(out: Path) -> Step:
    """The experiment of docs/stored_vs_recomputed.md, with DRAM's bytes where ncu may count."""
    module = ("-m", "profiling.stored_vs_recomputed", "--device=cuda", f"--write={out}")
    options = () if tools.obstacles("ncu", counters=True) else ("--ncu",)
    return Step("stored-vs-recomputed", (sys.executable, *module, *options), 300)


def check(todo: Sequence[Step], summary: Summary, deadline: float) -> int:
    """Runs the steps until `deadline` of `time.monotonic`; the exit status."""
    waiting, stopped, whole = list(todo), False, deadline - time.monotonic()
    while waiting:
        step = waiting.pop(0)
        summary.waiting = [step, *waiting]
        summary.verdict = f"running {step.name}"
        summary.write()
        left = deadline - time.monotonic()
        number = len(summary.outcomes) + 1
        if step.missing:
            outcome = Outcome(step, "left out", 0.0, step.missing)
        elif stopped or left < WORTHWHILE:
            outcome = Outcome(step, "left out", 0.0, "no time left")
        else:
            try:
                limit = min(step.limit, step.share * whole, left - GRACE)
                outcome = run(step, summary.folder / _log_name(number, step), limit)
            except KeyboardInterrupt:
                outcome, stopped = Outcome(step, "cut off", 0.0, "interrupted"), True
        summary.outcomes.append(outcome)
        print(
            f"{outcome.result:<9} {step.name} ({outcome.seconds:.0f} s) {outcome.said}", flush=True
        )
    failed = [outcome.step.name for outcome in summary.outcomes if outcome.failed]
    ran = [outcome for outcome in summary.outcomes if outcome.result == "ok"]
    summary.waiting = []
    summary.verdict = f"{len(ran)} of {len(todo)} steps ok" + (
        f"; failed: {', '.join(failed)}" if failed else ""
    )
    summary.write()
    return FAILED if failed else OK


def run(step: Step, log: Path, limit: float) -> Outcome:
    """One step for `limit` seconds; when it is over, so are all processes that it started."""
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
            result = "ok" if status == 0 else "FAILED"
        except subprocess.TimeoutExpired:
            result = "TOO LONG" if limit == step.limit else "cut off"
        finally:
            _end(process)
    seconds = time.monotonic() - begin
    text = log.read_text(errors="replace")
    for sign, advice in tools.ADVICE.items():
        if sign in text:
            meaning = "FAILED" if sign in tools.FAULTS else "left out"
            return Outcome(step, meaning, seconds, advice)
    return Outcome(step, result, seconds, last_words(text))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Also what the step has started: it has a process group of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_words(text: str) -> str:
    """The last line that says something, without pytest's rule around it."""
    lines = [line.strip("= ") for line in text.splitlines() if line.strip(" =-")]
    return lines[-1][:160] if lines else ""


def obstacles() -> list[str]:
    """Why nothing can run here, and what to carry; empty where it can."""
    missing = []
    for requirement in requirements((ROOT / "pyproject.toml").read_text()):
        name = re.split(r"[\[<>=!~; ]", requirement)[0]
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(requirement)
    if missing:
        return [f"not installed: {', '.join(missing)}", *_carry(missing)]
    probe = "import torch; print(torch.cuda.is_available(), torch.version.cuda)"
    asked = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False
    )
    seen, _, cuda = asked.stdout.strip().partition(" ")
    if seen == "True":
        return []
    why = "this torch is built without CUDA" if cuda == "None" else "torch sees no CUDA device"
    if asked.returncode:
        why = f"torch does not import: {(asked.stderr.splitlines() or ['it says nothing'])[-1]}"
    return [
        f"no GPU to check: {why}",
        "`hopperflash doctor` names the command that mends a mismatch; `hopperflash demo` and"
        " `pytest` run the same kernels in the emulator, on any machine",
    ]


def _carry(missing: Sequence[str]) -> list[str]:
    """How what is missing gets here, with a package index or without."""
    quoted = " ".join(f"'{one}'" for one in missing)
    kinds = (
        "manylinux_2_28",
        "manylinux_2_27",
        "manylinux_2_24",
        "manylinux_2_17",
        "manylinux2014",
    )
    platforms = " ".join(f"--platform {kind}_{platform.machine()}" for kind in kinds)
    version = ".".join(platform.python_version_tuple()[:2])
    return [
        f"with a package index: `{sys.executable} -m pip install '.[test]'`, which brings them",
        "without one, on a machine that has one: `pip download --only-binary=:all:"
        f" --python-version {version} {platforms} --dest wheels {quoted}`",
        f"then carry the folder wheels here: `{sys.executable} -m pip install --no-index"
        f" --find-links wheels {quoted}`",
    ]


def requirements(pyproject: str) -> list[str]:
    """What the package and its tests need, by pyproject.toml; Python 3.10 has no parser."""
    (block,) = re.findall(r"^dependencies = \[\n(.*?)^\]", pyproject, re.DOTALL | re.MULTILINE)
    (tests,) = re.findall(r"^test = \[\n(.*?)^\]", pyproject, re.DOTALL | re.MULTILINE)
    wanted = [one for one in re.findall(r'^  "(.*?)"', tests, re.MULTILINE) if "pytest" in one]
    return [*re.findall(r'^  "(.*?)"', block, re.MULTILINE), *wanted]


def machine() -> list[str]:
    """What a reader of the folder asks first."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    gpu = "name,driver_version,memory.total,clocks.max.sm,power.limit"
    return [
        f"{now}, {platform.platform()}, Python {platform.python_version()}",
        f"commit {_output('git', 'describe', '--always', '--dirty') or 'unknown: no git checkout'}",
        _output("nvidia-smi", f"--query-gpu={gpu}", "--format=csv,noheader") or "no nvidia-smi",
    ]


def _output(*command: str) -> str:
    try:
        found = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip().replace("\n", "; ")


def _log_name(number: int, step: Step) -> str:
    return f"{number:02}-{step.name}.log"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, required=True, help="in all, start to end")
    parser.add_argument("--out", type=Path, required=True, help="made if need be")
    chosen = parser.parse_args(arguments)
    out = chosen.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    summary = Summary(out, chosen.minutes, [*machine(), f"{chosen.minutes:g} minutes at most"])
    reasons = obstacles()
    if reasons:
        summary.verdict = "nothing can run here"
        summary.facts += reasons
        summary.write()
        print(*reasons, f"see {out / 'summary.md'}", sep="\n", file=sys.stderr)
        return CANNOT
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    status = check(steps(out), summary, begin + 60 * chosen.minutes)
    print(f"{summary.verdict}: see {out / 'summary.md'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
