"""Which files on disk may be executed: those that nobody else could have written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_ROOT = 0


def distrust(facts: os.stat_result, owners: frozenset[int]) -> str | None:
    """Why another user may have written a file or folder with these facts; None where not."""
    if facts.st_uid not in owners:
        return f"it belongs to user {facts.st_uid}"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"its mode {stat.filemode(facts.st_mode)} lets others write to it"
    return None


def unwritable(folder: Path) -> str | None:
    """Why nothing can be written to a folder, which need not exist yet; None where that works."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        return f"{place} is no folder"
    return None if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written to"


def own() -> frozenset[int]:
    """This user; and root, who may write anything anyway."""
    return frozenset({os.geteuid(), _ROOT})


def make_private(folder: Path) -> None:
    """Makes a folder that only this user reads and writes.

    Raises `PermissionError` if it exists and others can write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    reason = distrust(folder.stat(), own())
    if reason is not None:
        raise PermissionError(f"{folder} is not used: {reason}")
