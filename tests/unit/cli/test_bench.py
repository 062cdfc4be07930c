"""`hopperflash bench`: FLOPs by hand, wrong results refused, peers named, its JSON and its page."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from hopperflash import api
from hopperflash.bench import clocks, judge, timing
from hopperflash.bench import implementations as bench_of
from hopperflash.bench.cases import Grid, Shape
from hopperflash.bench.clocks import ClockReader, Clocks
from hopperflash.bench.html import page
from hopperflash.bench.implementations import NAMES, OURS, Implementation, implementations
from hopperflash.bench.judge import Judge, Operands
from hopperflash.bench.run import Benchmark, Settings, benchmark
from hopperflash.bench.timing import Effort, Spread, Timer
from hopperflash.cli.bench import ON_A_CPU
from hopperflash.cli.main import app
from hopperflash.problem import DType

SHAPE = Shape(2, 24, 4, 2, 16, True, DType.BFLOAT16)
EFFORT = Effort(timed=1e-4, warm_up=0.0, least=3)
SMALL = ("--tokens=32", "--seqlens=16,32", "--head-dims=16", "--heads=2", "--milliseconds=1")
FAST = (*SMALL, "--warm-up=0")


@pytest.fixture(autouse=True)
def _small_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "FLUSH_BYTES", 1 << 12)


def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    out = api.flash_attn_func(q, k, v, causal=causal)
    assert isinstance(out, Tensor)
    return out


def run(*contenders: tuple[str, Any], direction: str = "forward") -> Benchmark:
    listed = [Implementation(name, attend) for name, attend in contenders]
    settings: Any = Settings("cpu", (direction,), ("cold", "warm"), EFFORT)
    return benchmark([SHAPE], listed, settings)


@pytest.mark.parametrize(
    ("causal", "direction", "flops"),
    [
        # 4 * 16384 * 16384 * 128 of each of 16 heads.
        (False, "forward", 2_199_023_255_552),
        (True, "forward", 1_099_511_627_776),
        (False, "backward", 5_497_558_138_880),
        (True, "backward", 2_748_779_069_440),
    ],
)
def test_flops_by_hand(causal, direction, flops) -> None:
    shape = Shape(1, 16384, 16, 4, 128, causal, DType.BFLOAT16)
    assert shape.flops(direction) == flops


def test_shapes_are_those_of_the_field() -> None:
    grid = Grid((64, 128, 256), (512, 16384), (False,), DType.FLOAT16, tokens=16384)
    sizes = [(one.head_dim, one.seqlen, one.batch, one.heads) for one in grid.shapes()]
    assert sizes == [
        (64, 512, 32, 32),
        (64, 16384, 1, 32),
        (128, 512, 32, 16),
        (128, 16384, 1, 16),
        (256, 512, 32, 8),
        (256, 16384, 1, 8),
    ]
    (one,) = replace(grid, head_dims=(64,), seqlens=(512,), batch=3, heads=8, kv_heads=2).shapes()
    assert (one.batch, one.heads, one.kv_heads) == (3, 8, 2)


def off_by_one_row(out: Tensor) -> Tensor:
    """The last row of the last head of the last entry is that of the row before."""
    return torch.cat([out[:, :-1], torch.cat([out[:, -1:, :-1], out[:, -2:-1, -1:]], 2)], 1)


@pytest.mark.parametrize("spoil", [off_by_one_row, lambda out: out + float("nan"), lambda out: 0])
def test_a_wrong_result_is_never_timed(spoil) -> None:
    calls = 0

    def wrong(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        out = spoil(ours(*arguments))
        return out if isinstance(out, Tensor) else torch.zeros(2, 24, 4, 8)

    found = run((OURS, wrong), ("peer", ours))
    mine, peer, _, _ = found.rows
    assert calls == 1
    assert (mine.status, mine.seconds) == ("WRONG", None)
    assert "O is off by" in mine.why or "shapes differ" in mine.why
    assert found.failures == [found.rows[0], found.rows[2]]
    assert peer.status == "timed"
    assert peer.seconds is not None and peer.seconds.samples >= 3


def test_a_wrong_gradient_is_never_timed() -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return ours(q, k.detach() + 0.9 * (k - k.detach()), v, causal)

    assert not run((OURS, wrong)).failures
    found = run((OURS, wrong), ("peer", ours), direction="backward")
    mine, peer, _, _ = found.rows
    assert mine.status == "WRONG"
    assert "dK is off by" in mine.why
    assert "dQ" not in mine.why
    assert peer.status == "timed"
    assert sorted(peer.errors) == ["dK", "dQ", "dV"]


def test_a_peers_error_is_the_peers() -> None:
    def breaks(*arguments: Any) -> Tensor:
        raise RuntimeError("No available kernel.\nAborting execution.")

    found = run(("peer", breaks), ("other", lambda *arguments: 2 * ours(*arguments)))
    assert [row.status for row in found.rows[:2]] == ["refused", "WRONG"]
    assert found.rows[0].why == "RuntimeError: No available kernel."
    assert not found.failures
    assert [row.status for row in run((OURS, breaks)).failures] == ["failed", "failed"]


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_the_same_in_blocks(monkeypatch, causal) -> None:
    shape = replace(SHAPE, causal=causal)
    operands = Operands.random(shape, "cpu", 0)
    whole = Judge(shape, operands, gradients=True)._parts
    monkeypatch.setattr(judge, "BLOCK", 7 * shape.seqlen * 2)
    blocks = Judge(shape, operands, gradients=True)._parts
    assert list(whole) == [(0, 0), (1, 1)]
    for corner, references in whole.items():
        for name, one in references.items():
            torch.testing.assert_close(blocks[corner][name].ref, one.ref)


def test_a_cold_call_finds_its_cache_overwritten() -> None:
    timer, seen = Timer("cpu"), []

    def call() -> None:
        seen.append(int(timer._buffer.sum()))
        timer._buffer.fill_(1)

    timer._buffer.zero_()
    assert all(seconds > 0.0 for seconds in timer.sample(call, "warm", 2))
    timer.sample(call, "cold", 2)
    assert seen == [0, 1024, 0, 0]


@pytest.mark.parametrize(
    ("cache", "order"),
    [
        ("cold", ["overwritten", "start", "call", "end"]),
        ("warm", ["overwritten", "call", "start", "call", "end"]),
    ],
)
def test_events_stand_around_one_call(monkeypatch, cache, order) -> None:
    """Also a warm call is queued while the GPU overwrites the buffer, and finds its operands."""
    seen: list[str] = []
    names = iter(["start", "end"] * 2)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.name = next(names)

        def record(self) -> None:
            seen.append(self.name)

        def elapsed_time(self, end: Event) -> float:
            assert seen[-1] == "synchronised"
            return 2.5  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("synchronised"))
    timer = Timer("cpu")
    timer._on_gpu = True
    timer._buffer = SimpleNamespace(zero_=lambda: seen.append("overwritten"))  # type: ignore[assignment]
    assert timer.sample(lambda: seen.append("call"), cache, 2) == [2.5e-3, 2.5e-3]
    assert seen == [*order, *order, "synchronised"]


def test_calls_take_turns_and_none_counts_before_it_is_warm() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    turns: list[str] = []
    found = timing.measure(calls, "warm", EFFORT, Timer("cpu"), turns.append)
    assert turns == ["a", "b"] * timing.TURNS
    counted = found["a"].samples
    assert order.count("a") >= counted + 2 * timing.TURNS
    assert "".join(order).count("ab") == timing.TURNS


def test_a_peer_may_return_the_lse_too(monkeypatch) -> None:
    """As FlashAttention-3 and -4 do."""

    def with_lse(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return ours(q, k, v, causal), torch.zeros(1)

    modules = {"flash_attn_interface": SimpleNamespace(flash_attn_func=with_lse)}
    monkeypatch.setattr(bench_of.importlib, "import_module", modules.__getitem__)
    fa3, fa4 = implementations(("fa3", "fa4"), "cuda")
    assert fa4.absent == "KeyError: 'flash_attn.cute'"
    found = run((OURS, ours), ("fa3", fa3.attend))
    assert [row.status for row in found.rows] == ["timed"] * 4


def test_the_spread_is_of_deciles() -> None:
    spread = Spread.of([float(i) for i in range(100, -1, -1)])
    assert spread == Spread(101, 10.0, 50.0, 90.0)


def nvml(**answers: Any) -> SimpleNamespace:
    """The module of nvidia-ml-py, on a GPU that slows down."""
    mhz = iter([1980, 1980, 1755, 1410])
    known = {
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetClockInfo": lambda _, kind: next(mhz) if kind == 1 else 2619,
        "nvmlDeviceGetTemperature": lambda *_: 61,
        "nvmlDeviceGetPowerUsage": lambda _: 650_400,
    }
    return SimpleNamespace(**{**known, **answers})


def test_clocks_are_noted_where_they_can_be_asked(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="u"))
    monkeypatch.setattr(clocks.importlib, "import_module", lambda name: nvml())
    reader = ClockReader("cuda")
    assert reader.absent == ""
    for name in ("a", "b", "a"):
        reader.note(name)
    assert reader.take("a") == Clocks((1410, 1980), (2619, 2619), (61, 61), (650, 650))
    assert reader.take("a") is None

    def refuse() -> None:
        raise RuntimeError("Driver Not Loaded")

    monkeypatch.setattr(clocks.importlib, "import_module", lambda name: nvml(nvmlInit=refuse))
    reader = ClockReader("cuda")
    reader.note("a")
    assert reader.absent == "NVML refuses: Driver Not Loaded"
    assert reader.take("a") is None


def test_peers_that_are_not_installed_say_so() -> None:
    absent = {one.name: one.absent for one in implementations(NAMES, "cuda") if not one.attend}
    for name, module in (("fa2", "flash_attn"), ("fa3", "flash_attn_interface")):
        try:
            __import__(module)
        except ImportError:
            assert module in absent[name]
    on_cpu = [one.name for one in implementations(NAMES, "cpu") if one.attend]
    assert on_cpu == [OURS, "sdpa-flash", "sdpa-math"]


def bench(*options: str) -> Any:
    return CliRunner().invoke(app, ["bench", *FAST, *options])


def test_a_machine_without_a_gpu_is_told_loudly(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    result = bench("--device=cpu", "--mask=causal", "--l2=warm", f"--json={path}")
    assert result.exit_code == 0, result.stderr
    assert result.output.count(ON_A_CPU) == 1
    assert ON_A_CPU in result.stdout
    for words in ("fa3 is not here", "clocks are not noted", "GFLOP/s", "causal: half of either"):
        assert words in result.stdout
    found = json.loads(path.read_text())
    assert found["ok"] is True
    assert found["absent"]["sdpa-cudnn"] == "has no kernel for CPU tensors"
    row = found["rows"][0]
    assert (row["implementation"], row["shape"]["seqlen"], row["shape"]["batch"]) == (OURS, 16, 2)
    assert row["flops"] == 2 * 2 * 4 * 16 * 16 * 16 / 2
    assert row["flops_per_second"] == row["flops"] / row["seconds"]["median"]
    assert row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]


def test_a_wrong_result_ends_the_command_with_1(monkeypatch) -> None:
    compute = api.flash_attn_func
    monkeypatch.setattr(api, "flash_attn_func", lambda *x, **options: 1.1 * compute(*x, **options))
    result = bench("--device=cpu", "--direction=forward", "--against=sdpa-math", "--json=-")
    assert result.exit_code == 1
    assert "WRONG: hopperflash, forward, batch 2, seqlen 16" in result.stderr
    assert result.stderr.count(ON_A_CPU) == 1
    found = json.loads(result.stdout)
    assert found["ok"] is False
    timed = {row["implementation"] for row in found["rows"] if row["seconds"] is not None}
    assert timed == {"sdpa-math"}


class Tags(HTMLParser):
    """Whether every tag is closed by its own, and what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [name for name, _ in attrs if name in ("src", "href", "data")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_shows_all(tmp_path: Path) -> None:
    path = tmp_path / "bench.html"
    result = bench("--device=cpu", "--direction=forward", f"--html={path}")
    assert result.exit_code == 0, result.stderr
    text = path.read_text()
    tags = Tags()
    tags.feed(text)
    assert (tags.open, tags.fetched) == ([], [])
    assert "http" not in text and "url(" not in text and "@import" not in text
    plots = text.split("<svg")[1:]
    assert len(plots) == 2 * 2  # masks, states of the cache
    for plot in plots:
        svg = ElementTree.fromstring("<svg" + plot.split("</svg>")[0] + "</svg>")
        assert len(svg.findall("g/polyline")) == 3
        assert len(svg.findall("g/circle")) == 3 * 2
    assert text.count("<tr>") == 1 + 3 * 2 * 2 * 2
    assert ON_A_CPU.split(":")[0] in text


def test_the_page_says_what_is_wrong_and_escapes_it() -> None:
    def breaks(*arguments: Any) -> Tensor:
        raise RuntimeError("<b>no</b>")

    text = page(run((OURS, lambda *x: 2 * ours(*x)), ("peer", breaks)), ["<fact>"])
    assert "2 of hopperflash&#39;s rows" in text or "2 of hopperflash's rows" in text
    assert "&lt;b&gt;no&lt;/b&gt;" in text and "<b>" not in text
    assert "&lt;fact&gt;" in text
    assert text.count("WRONG:") == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--direction=up", "--l2=hot"), "--direction is 'up': give forward, backward or both"),
        (("--direction=up", "--l2=hot"), "--l2 is 'hot': give cold, warm or both"),
        (("--device=tpu",), "--device is 'tpu'"),
        (("--head-dims=12,300",), "head dim 12: give multiples of 8"),
        (("--head-dims=x",), "--head-dims is 'x': give numbers"),
        (("--seqlens=0",), "seqlen 0: give lengths from 1 on"),
        (("--kv-heads=3",), "2 heads of 16 over 3 key heads"),
        (("--against=fa5",), "no implementation is called fa5"),
    ],
)
def test_refused(options: tuple[str, ...], words: str) -> None:
    result = bench("--device=cpu", *options) if "--device=tpu" not in options else bench(*options)
    assert result.exit_code == 2
    assert words in result.stderr
