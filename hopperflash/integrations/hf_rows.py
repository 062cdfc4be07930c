"""Which rows of padded (batch, rows, ...) tensors are sequences, read off a 2-D mask.

A mask is read once per model call, not once per layer, since reading waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hopperflash.errors import UnsupportedProblem
from hopperflash.padding import pad_input

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# What was read off a tensor that all layers are given; entries go when their tensor does.
_READ: MutableMapping[Tensor, dict[tuple[Any, ...], Any]] = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Rows:
    """One side of `flash_attn_varlen_func`; `indices` where rows have to be gathered first."""

    cu_seqlens: Tensor
    seqused: Tensor | None = None
    indices: Tensor | None = None

    def taken(self, x: Tensor) -> Tensor:
        """(total, ...) of (batch, rows, ...): a view where the memory allows, or gathered."""
        flat = x.flatten(0, 1)
        return flat if self.indices is None else flat.index_select(0, self.indices)

    def put_back(self, x: Tensor, batch: int, rows: int) -> Tensor:
        """(batch, rows, ...) of (total, ...); rows of no sequence are 0."""
        if self.indices is None:
            return x.view(batch, rows, *x.shape[1:])
        return pad_input(x, self.indices, batch, rows)


def _on_the_host(function: F) -> F:
    """Keeps torch.compile away from what depends on values."""
    apart: F = torch.compiler.disable(  # type: ignore[no-untyped-call]
        function, reason="masks and position_ids are read on the host: no fullgraph=True"
    )
    return apart


@_on_the_host
def rows_of(mask: Tensor, queries: int, aligned: bool) -> tuple[Rows, Rows]:
    """The rows of queries and of keys that a mask leaves.

    Args:
        mask: (batch, keys), 0 or False where padded. Tokens of a row attend to one another where
            their values are equal.
        queries: their number per batch row; they are the last ones of the keys' rows.
        aligned: whether the distance of a query to a key matters (causal, or a window). If not,
            padded queries are computed too: those of cross-attention have nothing to do with the
            mask.
    """
    return _once(mask, ("rows", queries, aligned), lambda: _rows_of(mask, queries, aligned))


@_on_the_host
def documents_of(position_ids: Tensor, batch: int) -> Tensor | None:
    """(batch, tokens) int32 document numbers where positions fall back; None where they never do.

    Args:
        position_ids: (batch or 1, tokens).
    """

    def read() -> Tensor | None:
        begins = position_ids.diff(dim=1) <= 0
        if not bool(begins.any()):
            return None
        numbers = 1 + torch.nn.functional.pad(begins.cumsum(1, dtype=torch.int32), (1, 0))
        return numbers.expand(batch, -1).contiguous()

    return _once(position_ids, ("documents", batch), read)


def _once(tensor: Tensor, what: tuple[Any, ...], read: Callable[[], T]) -> T:
    """The reading of a tensor, remembered until it changes or goes."""
    if tensor.is_inference():  # no version to compare
        return read()
    readings = _READ.setdefault(tensor, {})
    key = (*what, tensor._version)
    if key not in readings:
        readings[key] = read()
    found: T = readings[key]
    return found


def _rows_of(mask: Tensor, queries: int, aligned: bool) -> tuple[Rows, Rows]:
    batch, keys = mask.shape
    if aligned and queries > keys:
        raise UnsupportedProblem(
            f"{queries} queries, but a mask of {keys} tokens: give one that covers both"
        )
    documents = mask.int()
    counted = documents != 0
    begin, length = counted.int().argmax(dim=1), counted.sum(dim=1)
    place = torch.arange(keys, device=mask.device)
    run = (place >= begin[:, None]) & (place < (begin + length)[:, None])
    simple = bool((documents == documents.amax(dim=1, keepdim=True) * run).all()) if keys else True
    every_query = Rows(_int32(torch.arange(batch + 1, device=mask.device) * queries))
    if simple:
        rows_k = _in_place(begin, length, keys)
        if not aligned:
            return every_query, rows_k
        first = keys - queries
        begin_q, end_q = ((x - first).clamp(min=0) for x in (begin, begin + length))
        return (_in_place(begin_q, end_q - begin_q, queries), rows_k) if first else (rows_k, rows_k)
    if bool(((documents != documents.amax(dim=1, keepdim=True)) & counted).any()):
        if queries != keys:
            raise UnsupportedProblem(
                f"documents of {keys} tokens, but {queries} queries: packed documents cannot be"
                " continued from a KV cache"
            )
        rows = _gathered_documents(documents)
        return rows, rows
    rows_k = _gathered(counted)
    return _gathered(counted[:, keys - queries :]) if aligned else every_query, rows_k


def _in_place(begin: Tensor, length: Tensor, rows: int) -> Rows:
    """One run of rows per batch row, left where it is: rows behind it do not count."""
    firsts = begin + torch.arange(len(begin), device=begin.device) * rows
    end = firsts.new_full((1,), len(begin) * rows)
    return Rows(_int32(torch.cat([firsts, end])), _int32(length))


def _gathered(counted: Tensor) -> Rows:
    """One sequence per batch row, without its padding."""
    cu_seqlens = torch.nn.functional.pad(counted.sum(dim=1).cumsum(0), (1, 0))
    return Rows(_int32(cu_seqlens), indices=counted.flatten().nonzero().flatten())


def _gathered_documents(documents: Tensor) -> Rows:
    """One sequence per document, without the padding between them."""
    indices = documents.flatten().nonzero().flatten()
    row = indices // documents.shape[1]
    number = documents.flatten().index_select(0, indices)
    begins = torch.ones_like(number, dtype=torch.bool)
    begins[1:] = (row.diff() != 0) | (number.diff() != 0)
    total = indices.new_full((1,), len(indices))
    cu_seqlens = _int32(torch.cat([begins.nonzero().flatten(), total]))
    return Rows(cu_seqlens, indices=None if len(indices) == documents.numel() else indices)


def _int32(x: Tensor) -> Tensor:
    return x.to(torch.int32)
