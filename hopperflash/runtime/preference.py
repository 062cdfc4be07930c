"""`use_backend`: inside it, calls go to one backend, whatever another could do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from hopperflash.plan import checked_name

_PREFERENCE: ContextVar[str | None] = ContextVar("hopperflash_backend", default=None)


def preferred() -> str | None:
    """The backend of the innermost `use_backend` block around this call, if there is one."""
    return _PREFERENCE.get()


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Compute every call inside with one backend, its backward too, for comparison.

    Code that `torch.compile` made asks when it runs, in its backward once more, which on a GPU has
    a thread of its own that no block reaches: give `backend=` there. A block inside of compiled
    code breaks its graph.

    Args:
        name: "sm90", "sm80" or "cpu". A call's own `backend` comes first.

    Raises:
        InvalidArgument: unknown backend. What it cannot compute is refused by the call.
    """
    token = _PREFERENCE.set(checked_name(name))
    try:
        yield
    finally:
        _PREFERENCE.reset(token)
