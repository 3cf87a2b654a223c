"""Files that are there whole or not at all, what they hold as a digest, the folder of a run."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from stat import S_ISREG

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from .errors import TrainingError

PART, WRITTEN = ".export.part", ".pl-pointwise-export"
MODEL_FILES = "model*.safetensors* adapter_model.safetensors chat_template.jinja"
MODEL_FILES += " config.json adapter_config.json generation_config.json"
"""What would make another model of an export if it stayed from an earlier one."""


def write_whole(path: Path, text: str) -> None:
    """Completely or not at all, whenever the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")  # Every rank may write.
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)  # Of a disk that is full.


def free_path(folder: Path, name: str, ending: str = "") -> Path:
    """The first of NAME, NAME-1, … in a folder that is not there."""
    paths = (folder / f"{name}{f'-{n}' if n else ''}{ending}" for n in count())
    return next(path for path in paths if not path.exists())


def run_root(trainer: Trainer) -> Path:
    """The logger's folder of this run; without a logger the root folder. To be called on all ranks.

    W&B and MLflow have one folder for all runs; this run's, with its checkpoints, is NAME/VERSION.
    """
    place, logger = Path(trainer.log_dir or trainer.default_root_dir), trainer.logger
    if logger is None or isinstance(logger, (TensorBoardLogger, CSVLogger)):
        return place
    name, version = logger.name, logger.version
    if name is not None and version is not None:
        place /= f"{name}/{version if isinstance(version, str) else f'version_{version}'}"
    return Path(trainer.strategy.broadcast(str(place)))


def digest_now(path: str | Path) -> str | None:
    """The SHA-256 of a file's bytes, in hex; None where there is no file.

    A file is read again only once it was written.
    """
    path = os.path.expanduser(path)
    with suppress(OSError, ValueError):
        found = os.stat(path)
        if S_ISREG(found.st_mode):
            return _digest(path, found.st_mtime_ns, found.st_size)
    return None


@cache
def _digest(path: str, written: int, size: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
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
    changed = [
        f"{name} differs"
        for name, digest in digests.items()
        if {"..", "/"} & {*Path(name).parts} or _digest_if_allowed(folder / name) != digest
    ]
    if others:
        there = files_of_an_export(folder) if digests else _model_files(folder)
        added = sorted(there.difference(digests, NOT_LISTED))
        allowed = [path.absolute() for path in besides]
        added = [name for name in added if (folder / name).absolute() not in allowed]
        changed += [f"{name} differs: it was not there" for name in added]
    if not changed:
        return ""
    more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"the files are not those that were certified: {changed[0]}{more}"


NOT_LISTED = {"certificate/certificate.json", "certificate/monitor.json"}
"""What the certificate does not list: itself, and what came after it."""


def files_of_an_export(folder: Path) -> set[str]:
    """The files in and below a folder, but texts for people and hidden ones, by relative name."""
    found = set[str]()
    for path in folder.rglob("*"):
        inside = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        if not hidden and path.suffix != ".md" and not path.is_dir():
            found.add(inside.as_posix())
    return found


def _digest_if_allowed(path: Path) -> str | None:
    digest = digest_now(path)
    if digest is None:
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
            if S_ISREG(path.stat().st_mode):  # Or no leave to look into the folder.
                path.open("rb").close()
    return digest


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
    if card.is_file() and "\n- pl-pointwise\n" in card.read_text("utf-8", errors="replace"):
        return
    inside = {each.name for each in folder.iterdir()} - {PART} if folder.is_dir() else set()
    inside -= _earlier_export(folder)
    if folder.is_file() or (inside if written is None else inside.intersection(written)):
        raise TrainingError(
            f"{folder} has files that are not of an earlier export. Name another folder, or move "
            "them."
        )


def _earlier_export(folder: Path) -> set[str]:
    """The names that an earlier export without a card wrote into a folder."""
    try:
        found = (folder / WRITTEN).read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return set()
    return {WRITTEN, *found}


def _model_files(folder: Path) -> set[str]:
    return {each.name for pattern in MODEL_FILES.split() for each in folder.glob(pattern)}


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
        names = {each.name for each in new.iterdir()}
        check_export_folder(folder, names)
        for old in _model_files(folder) - names:
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
