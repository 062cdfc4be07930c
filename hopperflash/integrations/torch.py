"""PyTorch's own attention through hopperflash: SDPA, `varlen_attn`, `context_parallel`.

Importing this registers "hopperflash" with PyTorch and changes nothing; the user activates it:

    import hopperflash.integrations.torch
    torch.nn.attention.activate_flash_attention_impl("hopperflash")

docs/integrations.md says what is served.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.library import Library
from torch.nn.attention import register_flash_attention_impl

from hopperflash.errors import InvalidArgument, UnsupportedProblem
from hopperflash.integrations.aten import OPERATORS, Operator, Request
from hopperflash.runtime import emulation, preference
from hopperflash.runtime.log import logger

NAME = "hopperflash"

_ON_A_CPU = (
    "tensors on the CPU, outside of hopperflash.emulate and use_backend: PyTorch's own kernel is"
    " faster there"
)
# Set while one of the operators runs. What it calls is PyTorch's: a backend may use SDPA, and
# PyTorch's kernel of one operator calls another.
_RUNNING: ContextVar[bool] = ContextVar("hopperflash_aten_running", default=False)


@dataclass
class _Tally:
    """What happened to the operators' calls since the last activation."""

    served: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, operator: str) -> None:
        with self.lock:
            self.served[operator] += 1

    def fall_back(self, operator: str, reasons: Iterable[str]) -> None:
        with self.lock:
            new = [reason for reason in reasons if reason not in self.fallbacks]
            self.fallbacks.update(reasons)
        for reason in new:
            logger().warning(
                "aten::%s goes to PyTorch's own kernel: %s (said once;"
                " hopperflash.integrations.torch.fallbacks() counts)",
                operator,
                reason,
            )

    def clear(self) -> None:
        with self.lock:
            self.served.clear()
            self.fallbacks.clear()


_TALLY = _Tally()


def served() -> Counter[str]:
    """How many calls of each aten operator hopperflash computed since it was last activated."""
    with _TALLY.lock:
        return _TALLY.served.copy()


def fallbacks() -> Counter[str]:
    """How many calls went to PyTorch's own kernels since the last activation, by reason.

    A call counts once for each of its reasons.
    """
    with _TALLY.lock:
        return _TALLY.fallbacks.copy()


@dataclass
class Override:
    """The operators' kernels, which PyTorch's own replace again once this is removed."""

    library: Library | None

    def remove(self) -> None:
        self.library = None


def override_operators() -> Override:
    """Puts hopperflash in the place of PyTorch's kernels until the handle's `remove()`.

    `torch.nn.attention.activate_flash_attention_impl` calls it for the registered name; it may be
    registered under others too.
    """
    _TALLY.clear()
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # Overriding is what the user asked for.
        warnings.filterwarnings("ignore", "(?s).*previously registered kernel", UserWarning)
        # An older PyTorch may not have all of them.
        for operator in (x for x in OPERATORS if hasattr(torch.ops.aten, x.name)):
            for key in operator.keys:
                library.impl(  # type: ignore[no-untyped-call]
                    operator.name, _kernel(operator, key), key, with_keyset=True
                )
    return Override(library)


def _kernel(operator: Operator, key: str) -> Callable[..., Any]:
    """What the dispatcher calls for tensors of that key instead of PyTorch's own kernel."""
    schema = getattr(torch.ops.aten, operator.name).default._schema
    names = [argument.name for argument in schema.arguments]
    defaults = {x.name: x.default_value for x in schema.arguments if x.has_default_value()}
    own = _own_kernel(operator.name, key)

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if own is not None and _RUNNING.get():
            return own.call_boxed(keyset, *args, **kwargs)
        arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        reasons = () if own is None else _left_to_torch(arguments["query"].device)
        with _running():
            if not reasons:
                request = operator.request(arguments)
                try:
                    answer = _serve(request)
                except (InvalidArgument, UnsupportedProblem) as refused:
                    reasons = refused.reasons or (refused.headline,)
                else:
                    _TALLY.serve(operator.name)
                    return answer
                if own is None:
                    raise UnsupportedProblem(
                        f"aten::{operator.name} of {key} tensors is not computed by hopperflash,"
                        " and PyTorch has no kernel of its own:",
                        dict.fromkeys([*reasons, *request.every_reason()]),
                    )
            _TALLY.fall_back(operator.name, reasons)
            return own.call_boxed(keyset, *args, **kwargs)

    return kernel


@contextmanager
def _running() -> Iterator[None]:
    token = _RUNNING.set(True)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def _own_kernel(operator: str, key: str) -> Any:
    """PyTorch's kernel, to be captured before it is overridden; None where it has none."""
    name = f"aten::{operator}"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
        return None
    return torch.library.get_kernel(name, key)


def _left_to_torch(device: torch.device) -> tuple[str, ...]:
    asked = emulation.session_of(device) is not None or preference.preferred() is not None
    return () if device.type != "cpu" or asked else (_ON_A_CPU,)


def _serve(request: Request) -> Any:
    if request.reasons:
        raise UnsupportedProblem("not an argument of hopperflash:", request.reasons)
    # Autograd is done with the call: the operator's backward is another one.
    with torch.no_grad():
        return request.serve()


register_flash_attention_impl(NAME, register_fn=override_operators)
