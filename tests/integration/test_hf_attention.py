"""The registered functions by themselves: masks, dtypes, and everything they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hopperflash
from hopperflash import UnsupportedProblem

transformers = pytest.importorskip(
    "transformers", reason="comes with the extra 'integration': pip install '.[integration]'"
)
from transformers import masking_utils  # noqa: E402

from hopperflash.integrations import hf  # noqa: E402

BATCH, TOKENS = 2, 6
PADDED = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()


class Layer(nn.Module):
    """As much of an attention layer as is looked at."""

    def __init__(self, dtype: torch.dtype = torch.float16, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.project = nn.Linear(2, 2, dtype=dtype)


def operands(queries: int = TOKENS, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    """q, k and v with heads before rows."""
    return [torch.randn(BATCH, h, n, 16, dtype=dtype) for h, n in ((4, queries), (2, 6), (2, 6))]


def attention(layer: nn.Module, given: list[Tensor], mask: Tensor | None = None, **options: Any):
    out, weights = hf.attention_forward(layer, *given, mask, **options)
    assert weights is None
    return out


def plain(given: list[Tensor], **options: Any) -> Tensor:
    return hopperflash.flash_attn_func(*(x.transpose(1, 2) for x in given), **options)


def mask_of(create: str, **inputs: Any) -> Tensor | None:
    """What `transformers.masking_utils` gives a model whose attention is ours."""
    config = transformers.MistralConfig(sliding_window=3, attn_implementation=hf.NAME)
    names = {"attention_mask": None, "cache": None, "position_ids": None, **inputs}
    if create.startswith("create_bidirectional"):
        del names["position_ids"]
    embeds = torch.zeros(BATCH, TOKENS, 8)
    return getattr(masking_utils, create)(config, embeds, **names)


def test_options_mean_what_transformers_means() -> None:
    given = operands()
    causal, full = Layer(), Layer(is_causal=False)
    assert torch.equal(attention(causal, given), plain(given, causal=True))
    assert torch.equal(attention(full, given), plain(given))
    assert torch.equal(attention(causal, given, is_causal=False), plain(given))
    assert torch.equal(
        attention(causal, given, sliding_window=3), plain(given, causal=True, window_size=(2, 0))
    )
    assert torch.equal(attention(full, given, sliding_window=3), plain(given, window_size=(2, 2)))
    assert torch.equal(
        attention(full, given, scaling=0.5, softcap=2.0),
        plain(given, softmax_scale=0.5, softcap=2.0),
    )
    one = [given[0][:, :, :1], *given[1:]]
    assert torch.equal(attention(causal, one), plain(one))


def test_keywords_that_do_not_change_attention_pass() -> None:
    given = operands()
    passing = {"use_cache": True, "output_attentions": False, "head_mask": None, "layer_idx": 3}
    assert torch.equal(attention(Layer(), given, **passing), plain(given, causal=True))


@pytest.mark.parametrize("way", ["keyword", "variable"])
def test_deterministic(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(hf, "flash_attn_func", lambda q, k, v, **o: seen.append(o) or q)
    given = operands()
    attention(Layer(), given)
    if way == "variable":
        monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
    attention(Layer(), given, **({"deterministic": True} if way == "keyword" else {}))
    assert [options["deterministic"] for options in seen] == [False, True]


def test_padded_queries() -> None:
    """Causal rows of padding are 0; without alignment they are computed, as cross-attention's."""
    given = operands()
    out = attention(Layer(), given, PADDED)
    assert out[0, :2].count_nonzero() == 0
    assert torch.equal(out[1:], plain([x[1:] for x in given], causal=True))
    kept = [given[0][:1], *(x[:1, :, 2:] for x in given[1:])]
    assert torch.equal(attention(Layer(is_causal=False), given, PADDED)[:1], plain(kept))


def test_a_mask_of_fewer_keys_than_a_static_cache_holds() -> None:
    given = operands(queries=4)
    held = [given[0], *(x[:, :, :4] for x in given[1:])]
    found = attention(Layer(), given, torch.ones(BATCH, 4).bool())
    assert torch.equal(found, plain(held, causal=True))


def test_fp32_between_half_weights_is_cast() -> None:
    given = operands(dtype=torch.float32)
    out = attention(Layer(torch.bfloat16), given)
    assert torch.equal(out, plain([x.bfloat16() for x in given], causal=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention(Layer(torch.float32), given), out)


REFUSALS = {
    "sinks": ({"s_aux": torch.zeros(4)}, "s_aux is given: attention sinks are not computed"),
    "bias": ({"position_bias": torch.zeros(1)}, "position_bias is given: it is added to the score"),
    "sparse": ({"indices": torch.zeros(1)}, "indices is given: a choice of keys"),
    "heads": ({"head_mask": torch.ones(4)}, "head_mask is given: heads are not masked"),
    "paged": ({"block_table": torch.zeros(1)}, "block_table is given: a paged KV cache"),
    "dropout": ({"dropout": 0.1}, "attention dropout is 0.1: there is none; set attention_dropout"),
    "weights": ({"output_attentions": True}, "output_attentions is set"),
    "4-D mask": ({"attention_mask": torch.zeros(2, 1, 6, 6)}, "attention_mask has shape (2, 1, 6,"),
    "long mask": ({"attention_mask": torch.ones(2, 7)}, "has shape (2, 7): give (2, keys), of at"),
    "half of the offsets": ({"cu_seq_lens_q": torch.tensor([0, 6])}, "and cu_seq_lens_k is missin"),
    "two ways": (
        {
            "cu_seq_lens_q": torch.tensor([0, 12]),
            "cu_seq_lens_k": torch.tensor([0, 12]),
            "attention_mask": PADDED,
        },
        "cu_seq_lens_q and a padding mask are given",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(name: str) -> None:
    keywords, reason = REFUSALS[name]
    with pytest.raises(UnsupportedProblem) as refused:
        hf.attention_forward(Layer(), *operands(), **{"attention_mask": None, **keywords})
    (found,) = refused.value.reasons
    assert reason in found


def test_all_that_is_refused_is_in_one_error() -> None:
    with pytest.raises(UnsupportedProblem, match="cannot compute this Layer") as refused:
        attention(
            Layer(torch.float32), operands(dtype=torch.float32), s_aux=torch.zeros(4), dropout=0.5
        )
    assert len(refused.value.reasons) == 3
    assert "load it with dtype=torch.bfloat16" in refused.value.reasons[-1]


def test_masks() -> None:
    for create in ("create_causal_mask", "create_sliding_window_causal_mask"):
        assert mask_of(create) is None
        assert mask_of(create, attention_mask=torch.ones(BATCH, TOKENS)) is None
        padded = mask_of(create, attention_mask=PADDED.long())
        assert padded is not None
        assert torch.equal(padded, PADDED)
        positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
        packed = mask_of(create, position_ids=positions)
        assert packed is not None
        assert packed.tolist() == [[1, 1, 1, 2, 2, 3], [1] * 6]
        assert packed.dtype == torch.int32
    for create in ("create_bidirectional_mask", "create_bidirectional_sliding_window_mask"):
        assert mask_of(create) is None
        assert mask_of(create, attention_mask=PADDED.long()) is not None


def test_a_static_cache_without_a_mask() -> None:
    """The keys it has not filled are left out."""
    cache = transformers.StaticCache(transformers.MistralConfig(), max_cache_len=20)
    mask = mask_of("create_causal_mask", cache=cache)
    assert mask is not None
    assert torch.equal(mask, torch.ones(BATCH, TOKENS).bool())


def test_masks_that_cannot_be_followed() -> None:
    def prefix(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        return kv < 3

    with pytest.raises(UnsupportedProblem, match="or_masks: neither causal"):
        mask_of("create_causal_mask", or_mask_function=prefix)
    with pytest.raises(UnsupportedProblem, match=r"prefix: neither causal"):
        mask_of("create_causal_mask", and_mask_function=prefix)
