"""What a base model is, as a digest: for what depends on it, as results and certificates do.

A base in a folder is its files, but texts for people and hidden ones; of the hub it is the commit
that is in the cache.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .files import digest_now, files_of_an_export

OF_MODELS = ("config.json", "adapter_config.json", "modules.json")
"""What a folder that is a model holds."""
MOST_ADAPTERS = 3
"""Adapters above one another; more is a circle."""


def digest_of_source(name: str, revision: str | None = None) -> str | None:
    """The digest of what a text names, now: a file, a folder with a model, a model of the hub.

    None: of nothing of the kind.
    """
    of_file = digest_now(name)
    return of_file if of_file is not None else digest_of_model(name, revision)


def digest_of_model(
    name: str, revision: str | None = None, depth: int = 0
) -> str | None:
    """As :func:`digest_of_source`, of a folder with a model or a model of the hub alone.

    depth: how many adapters stand above it.
    """
    try:
        folder = _folder_of(name)
    except (OSError, ValueError, RuntimeError):  # Too long, with a NUL, of no user.
        return None
    if folder is None:
        return _commit_of(name, revision)
    # A folder of data that a configuration names is no model.
    if not any((folder / file).is_file() for file in OF_MODELS):
        return None
    lines = []
    for file in sorted(files_of_an_export(folder)):
        lines.append(f"{file} {digest_now(folder / file)}")
    lines += _digest_below(folder, depth)
    return f"folder {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()}"


def _digest_below(folder: Path, depth: int) -> list[str]:
    """The digest of the base of an adapter, which is of the model as its own files are."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        name = str(config["base_model_name_or_path"])
        revision = config.get("revision")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []  # No adapter.
    if depth > MOST_ADAPTERS:
        return []
    return [f"base {digest_of_model(name, _text_or_none(revision), depth + 1)}"]


def _text_or_none(value: Any) -> str | None:
    """A revision, which a file or a configuration may give as anything."""
    return value if isinstance(value, str) else None


def _folder_of(name: str) -> Path | None:
    """The folder that a text names: a path, or ``package:NAME/inside`` of an installed package."""
    if not name.startswith("package:"):
        folder = Path(name).expanduser()
        return folder if folder.is_dir() else None
    package, _, inside = name.removeprefix("package:").partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None:
        return None
    for root in spec.submodule_search_locations or []:
        if (Path(root) / inside).is_dir():
            return Path(root) / inside
    return None


def _commit_of(name: str, revision: str | None) -> str | None:
    """The commit of a model of the hub that the cache has; asks no network."""
    # No name on the hub, as any other text of a configuration.
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    for file in OF_MODELS:
        cached = try_to_load_from_cache(name, file, revision=revision)
        # Otherwise the cache has no such file, or a note that the hub has none.
        if isinstance(cached, str):
            # …/snapshots/COMMIT/FILE is how the cache lays its files out.
            folders = Path(cached).parts
            commit = folders[folders.index("snapshots") + 1]
            return f"commit {commit} of {revision}" if revision else f"commit {commit}"
    return None


def is_as_it_was(name: str, was: str) -> bool:
    """Whether what a text names has this digest of :func:`digest_of_source` now."""
    revision = re.fullmatch(r"commit \w+ of (.+)", was)
    return digest_of_source(name, revision[1] if revision else None) == was


def bases_of(model: Any) -> dict[str, str]:
    """The folders and models of the hub that a configuration's model names, with their digests."""
    digests: dict[str, str | None] = {}

    def look(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for entry in value:
                look(entry)
        if not isinstance(value, Mapping):
            return
        revision = _text_or_none(value.get("revision"))
        for entry in value.values():
            if isinstance(entry, str):
                digests.setdefault(entry, digest_of_model(entry, revision))
            else:
                look(entry)

    look(model)
    return {name: digest for name, digest in digests.items() if digest is not None}


def is_a_base(was: str, now: Iterable[str]) -> bool:
    """Whether a base of a certificate is among these; of the hub by the commit alone."""
    return was.split(" of ")[0] in {digest.split(" of ")[0] for digest in now}


def another_base(folder: Path, name: str) -> str:
    """The error of a folder whose base model is another one than it was certified with."""
    return (
        f"{folder}: its base model {name} is not here, or not the one that was certified: other "
        "weights, tokenizer or template make another model. Put the base back as it was, or take "
        "the revision that was certified."
    )
