"""Small decoders of every kind, against their eager attention in fp32.

The rule is that of `hopperflash.tolerance`, with eager attention in fp16 as the plain formula.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hopperflash
from tests.support.tolerance import assert_close

transformers = pytest.importorskip(
    "transformers", reason="comes with the extra 'integration': pip install '.[integration]'"
)
import hopperflash.integrations.hf  # noqa: E402 - registers "hopperflash"

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,  # scores that matter
    "pad_token_id": 0,
}
WINDOW = 5
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SMALL, sliding_window=WINDOW)
    ),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            **SMALL,
            sliding_window=WINDOW,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=3.0,
        )
    ),
}
TOKENS = 12
LENGTHS = (12, 5, 9)


class Trio:
    """One model three times: in fp32 with eager attention, in fp16 with it, and in fp16 as ours."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.factor = 3.0 if name == "gemma2" else 2.0  # softcap
        model = MODELS[name]().eval()
        self.ref = self._of(model, "eager", torch.float32)
        self.low = self._of(model, "eager", torch.float16)
        self.ours = self._of(model, "hopperflash", torch.float16)

    @staticmethod
    def _of(model: nn.Module, attention: str, dtype: torch.dtype) -> nn.Module:
        same = copy.deepcopy(model).half().to(dtype)  # the same values in either dtype
        same.set_attn_implementation(attention)
        return same

    def check(self, compute: Any) -> None:
        """`compute(model)` gives a tensor."""
        ours, ref, low = (compute(model) for model in (self.ours, self.ref, self.low))
        assert_close(ours, ref, low, factor=self.factor)


def padded(side: str) -> tuple[Tensor, Tensor]:
    """Token ids and mask (batch, TOKENS)."""
    ids = torch.randint(1, 97, (len(LENGTHS), TOKENS))
    place, lengths = torch.arange(TOKENS), torch.tensor(LENGTHS)[:, None]
    mask = place < lengths if side == "right" else place >= TOKENS - lengths
    return ids * mask, mask.long()


def positions_of(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def stepwise(model: nn.Module, ids: Tensor, mask: Tensor, steps: list[int]) -> Tensor:
    """Logits of real tokens (tokens, vocabulary), computed so many at a time with a KV cache."""
    parameters = inspect.signature(model.model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"  # transformers 4 had the latter
    cache, position, logits = transformers.DynamicCache(config=model.config), 0, []
    positions = positions_of(mask)
    for count in steps:
        now = slice(position, position + count)
        position += count
        with torch.no_grad():
            result = model(
                input_ids=ids[:, now],
                attention_mask=mask[:, :position],
                position_ids=positions[:, now],
                use_cache=True,
                **{name: cache},
            )
        logits.append(result.logits)
    return torch.cat(logits, dim=1)[mask.bool()]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_a_padded_batch(name: str, side: str) -> None:
    ids, mask = padded(side)
    Trio(name).check(lambda model: stepwise(model, ids, mask, [TOKENS]))


@pytest.mark.parametrize("name", MODELS)
def test_token_by_token_and_in_chunks(name: str) -> None:
    """Queries are the last of the keys: one, or some, and of a window only what it still holds."""
    trio = Trio(name)
    for ids, mask in (
        padded("left"),
        (padded("left")[0].clamp(min=1), torch.ones(3, TOKENS).long()),
    ):
        for steps in ([4] + [1] * 8, [3, 4, 5]):
            trio.check(lambda model, s=steps, i=ids, m=mask: stepwise(model, i, m, s))


def test_padding_in_the_middle() -> None:
    """Prompts padded right, and tokens generated behind their padding."""
    ids, mask = padded("right")
    ids = torch.cat([ids, torch.randint(1, 97, (3, 3))], dim=1)
    mask = torch.cat([mask, torch.ones(3, 3).long()], dim=1)
    Trio("llama").check(lambda model: stepwise(model, ids, mask, [TOKENS, 1, 1, 1]))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_packed_by_position_ids(name: str, use_cache: bool, batch: int) -> None:
    """Documents do not see one another; eager honours that only without a cache."""
    ids = torch.randint(1, 97, (batch, TOKENS))
    positions = torch.tensor([[*range(7), *range(4), 0], [*range(1), *range(8), *range(3)]])[:batch]

    def logits(model: nn.Module) -> Tensor:
        cached = use_cache and model.config._attn_implementation == "hopperflash"
        with torch.no_grad():
            return model(input_ids=ids, position_ids=positions, use_cache=cached).logits

    Trio(name).check(logits)


def test_packed_by_offsets() -> None:
    """As data collators that flatten hand them over."""
    ids = torch.randint(1, 97, (1, TOKENS))
    positions = torch.tensor([[*range(7), *range(5)]])
    offsets = torch.tensor([0, 7, 12])

    def logits(model: nn.Module) -> Tensor:
        packed = {}
        if model.config._attn_implementation == "hopperflash":
            packed = {f"cu_seq_lens_{side}": offsets for side in "qk"}
            packed |= {f"max_length_{side}": 7 for side in "qk"}
        with torch.no_grad():
            return model(input_ids=ids, position_ids=positions, use_cache=False, **packed).logits

    Trio("llama").check(logits)


@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_of_a_padded_batch(side: str) -> None:
    ids, mask = padded(side)
    # The first token of a sequence would be predicted from padding.
    labels = ids.masked_fill((positions_of(mask) == 0) | (mask == 0), -100)

    def gradients(model: nn.Module) -> Tensor:
        model.zero_grad()
        positions = positions_of(mask)
        model(
            input_ids=ids, attention_mask=mask, position_ids=positions, labels=labels
        ).loss.backward()
        return torch.cat([x.grad.flatten() for x in model.parameters()])

    Trio("llama").check(gradients)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generate(name: str, cache: str) -> None:
    """transformers' own loop, its masks and caches; a cache of fixed size holds unfilled keys."""
    ids, mask = padded("left")
    tokens = torch.randint(1, 97, (len(LENGTHS), 4)).tolist()

    def logits(model: nn.Module) -> Tensor:
        result = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=4,
            do_sample=False,
            prefix_allowed_tokens_fn=lambda row, seen: [tokens[row][len(seen) - TOKENS]],
            cache_implementation=cache,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert result.sequences[:, TOKENS:].tolist() == tokens
        return torch.stack(result.logits, dim=1)

    Trio(name).check(logits)


@pytest.mark.emulated
@pytest.mark.xdist_group("fp16-64")
def test_decoding_by_the_hopper_kernels() -> None:
    """A left-padded prompt and two more tokens, through GQA, a window and the KV cache."""
    ids, mask = padded("left")
    with hopperflash.emulate("sm_90a") as run:
        Trio("mistral").check(lambda model: stepwise(model, ids, mask, [TOKENS - 2, 1, 1]))
    forwards = [x for x in run.launches if x.kernel_name.startswith("hopperflash_fwd_sm90_float16")]
    assert len(forwards) == 2 * 3
    assert run.hazards == []
