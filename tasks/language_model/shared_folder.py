"""A folder in memory that the ranks on one machine share, and that goes when the run ends."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

try:
    import fcntl
except ImportError:  # no such thing on this system, which then has no lock
    fcntl = None  # type: ignore[assignment]

MEMORY = Path("/dev/shm")
"""A file system in memory, on Linux."""
LEAST_FREE = 2**30
"""Below so many bytes, as in a container that was given the usual 64 MiB, it is not used."""

_PREFIX = "pl-pointwise-reference-"
_LOCK = "in-use"
_locks: dict[str, int] = {}


def shared_folder(owner: Any, world_size: int, local_rank: int) -> Path | None:
    """A new folder that all ranks on this machine get, or None where there is only one rank.

    Called by every rank. It is removed with the owner, at the latest with the process; one that a
    killed process left is removed by the next run's. Where ranks do not see each other's memory,
    on several machines, each machine has its own.

    owner: of the rank with local_rank 0, which makes it.
    """
    if world_size == 1:
        return None
    made = _new_folder(owner) if local_rank == 0 else None
    offered: list[str | None] = [None] * world_size
    torch.distributed.all_gather_object(offered, made)
    return next((Path(each) for each in offered if each is not None and os.path.isdir(each)), None)


def _new_folder(owner: Any) -> str:
    base = Path(tempfile.gettempdir())
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK):
        _remove_left_behind(MEMORY)
        if shutil.disk_usage(MEMORY).free >= LEAST_FREE:
            base = MEMORY
    _remove_left_behind(base)
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
    if fcntl is not None:
        _locks[folder] = handle = os.open(Path(folder) / _LOCK, os.O_CREAT | os.O_RDWR)
        fcntl.flock(handle, fcntl.LOCK_EX)
    weakref.finalize(owner, _remove, folder, os.getpid())
    return folder


def _remove(folder: str, pid: int) -> None:
    if os.getpid() != pid:  # a worker that was forked
        return
    shutil.rmtree(folder, ignore_errors=True)
    if folder in _locks:
        os.close(_locks.pop(folder))


def _remove_left_behind(base: Path) -> None:
    """Removes folders whose process is gone, and with it the lock."""
    if fcntl is None:
        return
    for folder in base.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # in use, or another user's
            if time.time() - folder.stat().st_mtime < 60:  # perhaps not locked yet
                continue
            handle = os.open(folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
