"""Files that are there whole or not at all, and what they hold as a digest."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Completely or not at all, whenever the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")  # Every rank may write.
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)  # Of a disk that is full.


def digest_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()
