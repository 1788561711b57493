"""Folders that live as long as a process: owned under a lock that the kernel drops with it.

Whoever is killed cleans up nothing, so whoever comes next does it for him: a folder that nobody
owns any more is an orphan.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ORPHAN_AGE_S = 60.0
"""A younger folder may be on its way between being made and being owned."""


def own_folder(folder: Path) -> int | None:
    """Own an existing folder until the returned descriptor is closed; None where it is owned."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def empty_folder(folder: Path, ours: Callable[[Path], bool]) -> None:
    """Delete the entries that are ours; those of somebody else stay."""
    for path in folder.iterdir():
        if ours(path):
            path.unlink(missing_ok=True)


def remove_folder(folder: Path, ours: Callable[[Path], bool]) -> None:
    """Delete what is ours in a folder, and the folder if nothing else is in it."""
    with suppress(OSError):
        empty_folder(folder, ours)
        folder.rmdir()


def remove_orphans(parent: Path, prefix: str, ours: Callable[[Path], bool]) -> None:
    """Remove the folders `prefix`* of processes that are gone."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # somebody else's, or somebody else was quicker
            if time.time() - folder.stat().st_mtime < ORPHAN_AGE_S:
                continue
            descriptor = own_folder(folder)
            if descriptor is not None:
                remove_folder(folder, ours)
                os.close(descriptor)
