"""Errors the emulator raises; every message names the PTX line where there is one."""

from __future__ import annotations


class EmulationError(RuntimeError):
    """A kernel did something that the emulated machine cannot or must not do."""


class UnknownInstruction(EmulationError):
    """The PTX holds an opcode, modifier or operand form that the emulator does not implement."""


class AddressError(EmulationError):
    """A memory access outside the registered regions, or a misaligned one."""


class BarrierError(EmulationError):
    """An mbarrier or named barrier was used against its rules."""


class DeadlockError(EmulationError):
    """No warp can make progress and no asynchronous work is left."""


class InvalidDescriptor(EmulationError, ValueError):
    """A tensor map or matrix descriptor holds values that the hardware refuses."""
