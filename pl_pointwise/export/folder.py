"""The folder of an export: refused if it is something else, and replaced as a whole."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import TrainingError
from ..files import write_whole
from ..identity.files import model_files

PART = ".export.part"
"""Where an export is written until it is complete."""
WRITTEN = ".pl-pointwise-export"
"""The names that an export wrote, where it wrote no card by which to know it."""


def share_modes(folder: Path) -> None:
    """Gives every file the mode of a new one: safetensors lets its owner alone read weights."""
    probe = folder / ".mode"
    probe.touch()
    usual = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o777 | usual)


def check_export_folder(folder: Path, written: Collection[str] | None = None) -> None:
    """Refuses a folder of something else than an earlier export, by its model card.

    written: only if files of these names would be replaced; None is any file.
    """
    if (folder / "certificate").exists():
        raise TrainingError(
            f"{folder} is the certified model of a comparison. Name another folder, or move it."
        )
    card = folder / "README.md"
    if card.is_file() and "\n- pl-pointwise\n" in card.read_text(
        "utf-8", errors="replace"
    ):
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    foreign = names - {PART} - _earlier_export(folder)
    if written is not None:
        foreign = foreign.intersection(written)
    if folder.is_file() or foreign:
        raise TrainingError(
            f"{folder} has files that are not of an earlier export. Name another folder, or move "
            "them."
        )


def _earlier_export(folder: Path) -> set[str]:
    """The names that an earlier export without a card wrote into a folder."""
    try:
        names = (folder / WRITTEN).read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return set()
    return {WRITTEN, *names}


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Where to export to: once complete, its files take the place of those in ``folder``.

    Until then an earlier export is as it was; what is no export's stays.
    """
    part = folder / PART  # Beside it there may be another disk, or no leave to write.
    shutil.rmtree(part, ignore_errors=True)  # Of an export that was killed.
    part.mkdir(parents=True)
    try:
        new = part / folder.name
        yield new
        share_modes(new)
        names = {path.name for path in new.iterdir()}
        check_export_folder(folder, names)
        # A shard or an adapter of an earlier export would be loaded with the new files.
        for old in model_files(folder) - names:
            (folder / old).unlink()
        for name in names:
            if (folder / name).is_dir():
                shutil.rmtree(folder / name)
            (new / name).replace(folder / name)
        if "README.md" not in names:  # By which the next export would know the folder.
            write_whole(folder / WRITTEN, "\n".join(sorted(names)))
    finally:
        shutil.rmtree(part, ignore_errors=True)
        with suppress(OSError):  # Of an export that failed; else it is not empty.
            folder.rmdir()
