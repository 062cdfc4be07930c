"""A small GPT over characters, its attention left open, and text that the standard library has."""

from __future__ import annotations

from collections.abc import Callable
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v (batch, seqlen, heads, head_dim) to the output of causal attention, like them."""

HEADS, WIDTH, LAYERS = 2, 64, 2


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, seqlen, _ = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, seqlen, 3, HEADS, WIDTH // HEADS)
        out = self.attention(*qkv.unbind(dim=2))
        x = x + self.proj(out.reshape(batch, seqlen, WIDTH))
        return x + self.mlp(self.norm_mlp(x))


class SmallGpt(nn.Module):
    """Logits (batch, seqlen, characters)."""

    def __init__(self, characters: int, seqlen: int, attention: Attention) -> None:
        super().__init__()
        self.tokens, self.positions = (nn.Embedding(n, WIDTH) for n in (characters, seqlen))
        self.blocks = nn.Sequential(*(Block(attention) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.tokens(tokens) + self.positions(places)))


def text() -> Tensor:
    """Characters of the reference of Python's statements, as numbers from 0 on."""
    characters = "".join(topics[name] for name in sorted(topics))[:200_000]
    alphabet = {character: i for i, character in enumerate(sorted(set(characters)))}
    return torch.tensor([alphabet[character] for character in characters])


def train(
    attention: Attention,
    *,
    steps: int,
    batch: int,
    seqlen: int,
    compiled: Callable[[nn.Module], Callable[[Tensor], Tensor]] = lambda model: model,
) -> list[float]:
    """The loss of every step, in bf16 autocast; equal arguments begin equally."""
    torch.manual_seed(0)
    data = text()
    model = SmallGpt(int(data.max()) + 1, seqlen, attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run, losses = compiled(model), []
    for _ in range(steps):
        begin = torch.randint(len(data) - seqlen - 1, (batch, 1)) + torch.arange(seqlen + 1)
        inputs, targets = data[begin[:, :-1]], data[begin[:, 1:]]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = run(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
