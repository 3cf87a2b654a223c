"""What files hold, as a digest: of one, of a folder with a model, of those that a run reads."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from stat import S_ISREG
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection

MODEL_FILES = (
    "model*.safetensors*",
    "adapter_model.safetensors",
    "chat_template.jinja",
    "config.json",
    "adapter_config.json",
    "generation_config.json",
)
"""What would make another model of an export if it stayed from an earlier one."""

NOT_LISTED = {"certificate/certificate.json", "certificate/monitor.json"}
"""What the certificate does not list: itself, and what came after it."""


def digest_now(path: str | Path) -> str | None:
    """The SHA-256 of a file's bytes, in hex; None where there is no file.

    A file is read again only once it was written.
    """
    path = os.path.expanduser(path)
    with suppress(OSError, ValueError):
        status = os.stat(path)
        # A pipe or a device named in a configuration would be read without an end.
        if S_ISREG(status.st_mode):
            return _digest(path, status.st_mtime_ns, status.st_size)
    return None


@cache
def _digest(path: str, written: int, size: int) -> str:
    """The digest of a file as it was written at this time, with this size: what is kept of it."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for part in iter(lambda: file.read(1 << 20), b""):
            digest.update(part)
    return digest.hexdigest()


def changed_files(
    folder: Path,
    digests: Mapping[str, str | None],
    others: bool = True,
    besides: Collection[Path] = (),
) -> str:
    """Which files of a folder are not those of the digests, as a sentence; "" if all are.

    Another file than those may make another model too, as an adapter or a map of special tokens
    does: any is named but texts for people, hidden ones, and what the certificate lists by itself.

    others: whether those too; besides: what may be there.

    Raises:
        PermissionError: a file that this user may not read, which is no other one.
    """
    changed = []
    for name, digest in digests.items():
        # A certificate is a stranger's word: what it names must not be looked for elsewhere.
        is_outside = not {"..", "/"}.isdisjoint(Path(name).parts)
        if is_outside or _digest_if_allowed(folder / name) != digest:
            changed.append(f"{name} differs")
    if others:
        changed += [
            f"{name} differs: it was not there"
            for name in _added_files(folder, digests, besides)
        ]
    if not changed:
        return ""
    more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"the files are not those that were certified: {changed[0]}{more}"


def _added_files(
    folder: Path, digests: Mapping[str, str | None], besides: Collection[Path]
) -> list[str]:
    """The files of a folder that the digests do not name, but those that may be there."""
    # A certificate that lists no file is of an early version, which any file would contradict.
    there = files_of_an_export(folder) if digests else model_files(folder)
    allowed = [path.absolute() for path in besides]
    added = sorted(there.difference(digests, NOT_LISTED))
    return [name for name in added if (folder / name).absolute() not in allowed]


def files_of_an_export(folder: Path) -> set[str]:
    """The files in and below a folder, but texts for people and hidden ones, by relative name."""
    names = set[str]()
    for path in folder.rglob("*"):
        inside = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        if not hidden and path.suffix != ".md" and not path.is_dir():
            names.add(inside.as_posix())
    return names


def model_files(folder: Path) -> set[str]:
    """The names of the :data:`MODEL_FILES` that are in a folder."""
    names = set[str]()
    for pattern in MODEL_FILES:
        names.update(path.name for path in folder.glob(pattern))
    return names


def _digest_if_allowed(path: Path) -> str | None:
    """The digest of a file; PermissionError where it, or its folder, may not be read."""
    digest = digest_now(path)
    if digest is None:
        with suppress(
            FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError
        ):
            if S_ISREG(path.stat().st_mode):  # Or no leave to look into the folder.
                path.open("rb").close()
    return digest


def files_read(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the SHA-256 of the files that a run's data and model name, by path as it is given."""
    digests: dict[str, str | None] = {}
    parts = [config.get("data"), config.get("model")]
    apply_to_collection(
        parts, str, lambda text: digests.setdefault(text, digest_now(text))
    )
    return {path: digest for path, digest in digests.items() if digest is not None}
