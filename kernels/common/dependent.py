"""Programmatic dependent launch: a kernel starts while the one before it in the stream ends.

Its first instructions overlap with the last CTAs of that one, but memory that the other touches may
be neither read nor written before `wait_for_previous`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr


@cute.jit
def wait_for_previous(dependent: Constexpr[bool]):
    """Until the kernel before has ended and what it wrote is visible; then the next may start.

    By every thread, since each is ordered behind the other kernel by its own wait alone.
    """
    if cutlass.const_expr(dependent):
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
