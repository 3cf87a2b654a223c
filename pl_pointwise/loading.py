"""An exported model in one line, with what it was required to do."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from .errors import DataError, printable
from .files import changed_files, digest_now
from .identity import another_base, digest_of_model, is_a_base
from .printing import say

CERTIFICATE = Path("certificate") / "certificate.json"
CONFIG = "certificate/config.yaml"
DAMAGED = "is damaged. Copy the folder again from where it is whole, or export again."


def load(
    name: str | Path,
    *,
    revision: str | None = None,
    quiet: bool = False,
    module_class: type[Any] | None = None,
) -> Any:
    """Load what ``module.export`` or ``compare --require`` wrote, and print its certificate.

    From safetensors only, and no code of the folder runs. A certificate is the word of whoever
    exported the model; ``pl-pointwise check`` and ``monitor`` measure again.

    Args:
        name: the folder, or a repository on the hub that holds one.
        revision: on the hub.
        quiet: whether to print nothing.
        module_class: of a task of your own, whose module ``certificate/model.ckpt`` holds.

    Returns:
        A re-ranker's `sentence_transformers.CrossEncoder`; of ``digits`` or a task of your own, the
        module; else (model, tokenizer), the model with an exported adapter merged into its base.

    Raises:
        FileNotFoundError: a path where there is no folder.
        DataError: files that are damaged or would run code; no ``module_class`` of your own task.
        TrainingError: a checkpoint that cannot be read, or that names foreign classes.

    >>> model, tokenizer = load("results/keep/export")  # doctest: +SKIP
    >>> load("./nowhere")
    Traceback (most recent call last):
    FileNotFoundError: ./nowhere: no such folder. Give an export, or a name on the hub.
    """
    folder, text = Path(name), str(name)
    if not folder.is_dir():
        if text.startswith(("/", ".", "~")) or text.count("/") > 1:
            raise FileNotFoundError(
                f"{name}: no such folder. Give an export, or a name on the hub."
            )
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(text, revision=revision))
    if not quiet:
        say(required_of(folder))
    config = _mapping_in(folder / "config.json")
    is_text = "model_type" in config or (folder / "adapter_config.json").is_file()
    _require_base(folder)
    if module_class is not None or not is_text:
        return _module_in(folder / "certificate" / "model.ckpt", module_class).eval()
    if "sentence_transformers" in config:
        from sentence_transformers import CrossEncoder

        _require_torch_modules(folder)
        return CrossEncoder(
            str(folder), trust_remote_code=False, model_kwargs={"use_safetensors": True}
        )
    from .tasks.language_model.model.loading import load_exported, load_tokenizer

    return load_exported(str(folder)), load_tokenizer(str(folder))


def _require_base(folder: Path) -> None:
    """Refuses an adapter whose base is not the one that the certificate is of."""
    adapter = _mapping_in(folder / "adapter_config.json")
    certified = None
    with suppress(DataError):  # What is wrong with the certificate is said already.
        certified = _mapping_in(folder / CERTIFICATE).get("base")
    if not adapter or not isinstance(certified, dict) or not certified:
        return
    name, revision = str(adapter.get("base_model_name_or_path")), adapter.get("revision")
    now = digest_of_model(name, revision if isinstance(revision, str) else None)
    if now is None and not name.startswith(("/", ".")) and not Path(name).exists():
        return  # Of the hub, and not here yet: its revision stands in adapter_config.json.
    if now is None or not any(is_a_base(str(was), [now]) for was in certified.values()):
        raise DataError(another_base(folder, printable(name, 80)))


def _module_in(checkpoint: Path, kind: type[Any] | None) -> Any:
    from .export import class_of, refuse_foreign_names

    if not checkpoint.is_file():
        raise DataError(
            f"{checkpoint.parents[1]}: there is no language model, no re-ranker and no "
            "certificate/model.ckpt. Its README.md may say how to read it."
        )
    refuse_foreign_names(checkpoint)
    kind = kind or class_of(str(checkpoint), [])
    return kind.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True)


def required_of(folder: Path) -> str:
    """What an exported folder's certificate says, a line a requirement."""
    try:
        found = certificate_in(folder)
    except DataError as error:
        return f"{printable(error)} What it does on new inputs was not tested."
    sure = f"{100 * found['confidence']:g} % confidence, since {found.get('date', 'some day')}"
    lines = [
        f"{folder}: its certificate.json says, with {sure}",
        *(f"{each['text']}: {each.get('seen', 'certified')}" for each in found["requirements"]),
        "pl-pointwise check and monitor measure whether this is so, of these weights.",
    ]
    return "\n  ".join(map(printable, lines))


def certificate_in(
    folder: Path, others: bool = True, besides: Collection[Path] = ()
) -> dict[str, Any]:
    """Returns an exported folder's certificate; others, besides: as of ``files.changed_files``.

    Raises:
        DataError: there is none, it cannot be read, or a file is not as it was certified.
    """
    path = folder / CERTIFICATE
    if not path.is_file():
        raise DataError(f"{folder}: there is no certificate, as compare --require writes it.")
    found = _mapping_in(path)
    try:
        texts, files = [each["text"] for each in found["requirements"]], found.get("files", {})
        whole = texts and all(isinstance(text, str) for text in texts) and isinstance(files, dict)
        whole = whole and 0 < found["confidence"] < 1
    except (LookupError, TypeError):
        whole = False
    if not whole:
        raise DataError(f"{path} {DAMAGED}")
    if files and CONFIG not in files:  # Of an earlier version, which listed it not.
        config = folder / CONFIG
        files = {**files, CONFIG: digest_now(config)} if config.is_file() else files
    if changed := changed_files(folder, files, others, besides):
        raise DataError(f"{folder}: {changed}. Take the folder as it was written.")
    return found


def _require_torch_modules(folder: Path) -> None:
    """Refuses what sentence-transformers would call by its name, functions of torch among them."""
    for path in folder.rglob("config*.json"):  # Of the parts that modules.json names too.
        for name in re.findall(r'"(torch\.[^"]*)"', json.dumps(_mapping_in(path))):
            module, _, kind = name.rpartition(".")
            found = getattr(sys.modules.get(module), kind, None)
            if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
                raise DataError(f"{path} names {name}, no module of torch: it is not called.")


def _mapping_in(path: Path) -> dict[str, Any]:
    """What a JSON file maps names to; empty where there is none."""
    try:
        found = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        if isinstance(found, dict):
            return found
    except (ValueError, RecursionError):
        pass
    raise DataError(f"{path} {DAMAGED}")
