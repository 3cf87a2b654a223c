"""What a model is made of beside its own weights and data: a base model, and code of one's own.

Both are digested for what depends on them: results of runs, certificates, uses of samples. A base
in a folder is its files, but texts for people and hidden ones; of the hub it is the commit that is
in the cache. Code of one's own is the source file of a class, with the files of one's own that it
imports; what is installed, and this package, is not.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection

from .files import digest_now, files_of_an_export

PACKAGE = Path(__file__).parent
LIBRARIES = {"site-packages", "dist-packages"}
OF_MODELS = ("config.json", "adapter_config.json", "modules.json")
"""What a folder that is a model holds."""


def digest_of_source(name: str, revision: str | None = None) -> str | None:
    """The digest of what a text names, now: a file, a folder with a model, a model of the hub.

    None: of nothing of the kind.
    """
    if (of_file := digest_now(name)) is not None:
        return of_file
    return digest_of_model(name, revision)


def digest_of_model(name: str, revision: str | None = None, depth: int = 0) -> str | None:
    """As :func:`digest_of_source`, of a folder with a model or a model of the hub alone.

    depth: how many adapters stand above it.
    """
    try:
        folder = _folder_of(name)
    except (OSError, ValueError, RuntimeError):  # Too long, with a NUL, of no user.
        return None
    if folder is None:
        return _commit_of(name, revision)
    if not any((folder / each).is_file() for each in OF_MODELS):
        return None
    names = sorted(files_of_an_export(folder))
    parts = [f"{each} {digest_now(folder / each)}" for each in names]
    parts += _below(folder, depth)
    return f"folder {hashlib.sha256(chr(10).join(parts).encode()).hexdigest()}"


def _below(folder: Path, depth: int) -> list[str]:
    """The digest of the base of an adapter, which is of the model as its own files are."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        name, revision = str(config["base_model_name_or_path"]), config.get("revision")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
    if depth > 3:  # A circle.
        return []
    of = revision if isinstance(revision, str) else None
    return [f"base {digest_of_model(name, of, depth + 1)}"]


def _folder_of(name: str) -> Path | None:
    if name.startswith("package:"):
        package, _, inside = name.removeprefix("package:").partition("/")
        spec = find_spec(package) if package.isidentifier() else None
        roots = (spec.submodule_search_locations if spec else None) or []
        return next((path for root in roots if (path := Path(root) / inside).is_dir()), None)
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else None


def _commit_of(name: str, revision: str | None) -> str | None:
    """The commit of a model of the hub that the cache has; asks no network."""
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    for file in OF_MODELS:
        found = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(found, str):
            parts = Path(found).parts
            of = f" of {revision}" if revision else ""
            return f"commit {parts[parts.index('snapshots') + 1]}{of}"
    return None


def is_as_it_was(name: str, was: str) -> bool:
    """Whether what a text names has this digest of :func:`digest_of_source` now."""
    revision = re.fullmatch(r"commit \w+ of (.+)", was)
    return digest_of_source(name, revision[1] if revision else None) == was


def bases_of(model: Any) -> dict[str, str]:
    """The folders and models of the hub that a configuration's model names, with their digests."""
    found: dict[str, str | None] = {}

    def look(value: Any) -> None:
        if isinstance(value, Mapping):
            revision = value.get("revision")
            for entry in value.values():
                if isinstance(entry, str):
                    of = revision if isinstance(revision, str) else None
                    found.setdefault(entry, digest_of_model(entry, of))
                else:
                    look(entry)
        elif isinstance(value, (list, tuple)):
            for entry in value:
                look(entry)

    look(model)
    return {name: digest for name, digest in found.items() if digest is not None}


def is_a_base(was: str, now: Iterable[str]) -> bool:
    """Whether a base of a certificate is among these; of the hub by the commit alone."""
    return was.split(" of ")[0] in {digest.split(" of ")[0] for digest in now}


def another_base(folder: Path, name: str) -> str:
    return (
        f"{folder}: its base model {name} is not here, or not the one that was certified: other "
        "weights, tokenizer or template make another model. Put the base back as it was, or take "
        "the revision that was certified."
    )


def own_code(objects: Iterable[Any]) -> dict[str, str]:
    """The digests of the source files of one's own behind these objects' classes, by path."""
    waiting = [kind.__module__ for each in objects for kind in type(each).__mro__]
    found, seen = dict[str, str](), set[str]()
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if name in seen or module is None:
            continue
        seen.add(name)
        path = _own_file(module)
        if path is None:
            continue
        digest = digest_now(path)
        if digest is not None:
            found[str(path)] = digest
        for value in vars(module).values():
            of = value.__name__ if isinstance(value, ModuleType) else _module_of(value)
            waiting += [of] if isinstance(of, str) else []
    return dict(sorted(found.items()))


def _module_of(value: Any) -> str | None:
    is_code = inspect.isclass(value) or inspect.isfunction(value)
    return getattr(value, "__module__", None) if is_code else None


def _own_file(module: ModuleType) -> Path | None:
    """The source file of a module that is neither installed nor of this package."""
    file = getattr(module, "__file__", None)
    if module.__name__.partition(".")[0] in (__package__, *sys.stdlib_module_names) or not file:
        return None
    path = Path(file)
    return None if LIBRARIES.intersection(path.parts) else path.absolute()


def digest_of_code(files: Mapping[str, str]) -> str | None:
    """One digest of source files, wherever they lie; None of no files."""
    if not files:
        return None
    parts = sorted(f"{Path(path).name} {digest}" for path, digest in files.items())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def files_read(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the SHA-256 of the files that a run's data and model name, by path as it is given."""
    found: dict[str, str | None] = {}
    parts = [config.get("data"), config.get("model")]
    apply_to_collection(parts, str, lambda text: found.setdefault(text, digest_now(text)))
    return {path: digest for path, digest in found.items() if digest is not None}
