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

from ..errors import DataError, printable
from ..identity.files import changed_files, digest_now
from ..identity.models import another_base, digest_of_model, is_a_base
from ..printing import say

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
    folder = _folder_of(name, revision)
    if not quiet:
        say(required_of(folder))
    config = _mapping_in(folder / "config.json")
    # transformers writes the one with a model and PEFT the other with an adapter.
    is_text = "model_type" in config or (folder / "adapter_config.json").is_file()
    _require_base(folder)
    # No other library knows the folder: the module itself is in its certificate.
    if module_class is not None or not is_text:
        return _module_in(folder / "certificate" / "model.ckpt", module_class).eval()
    if "sentence_transformers" in config:
        from sentence_transformers import CrossEncoder

        _require_torch_modules(folder)
        return CrossEncoder(
            str(folder), trust_remote_code=False, model_kwargs={"use_safetensors": True}
        )
    from ..tasks.language_model.model.loading import load_exported, load_tokenizer

    return load_exported(str(folder)), load_tokenizer(str(folder))


def _folder_of(name: str | Path, revision: str | None) -> Path:
    """The folder of this name, or where the hub's repository of this name was downloaded to."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    text = str(name)
    # No name on the hub has these.
    if text.startswith(("/", ".", "~")) or text.count("/") > 1:
        raise FileNotFoundError(
            f"{name}: no such folder. Give an export, or a name on the hub."
        )
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(text, revision=revision))


def _require_base(folder: Path) -> None:
    """Refuses an adapter whose base is not the one that the certificate is of."""
    adapter = _mapping_in(folder / "adapter_config.json")
    certified = None
    with suppress(DataError):  # What is wrong with the certificate is said already.
        certified = _mapping_in(folder / CERTIFICATE).get("base")
    if not adapter or not isinstance(certified, dict) or not certified:
        return
    name = str(adapter.get("base_model_name_or_path"))
    revision = adapter.get("revision")
    now = digest_of_model(name, revision if isinstance(revision, str) else None)
    if now is None and not name.startswith(("/", ".")) and not Path(name).exists():
        # Of the hub, and not here yet: its revision stands in adapter_config.json.
        return
    if now is None or not any(is_a_base(str(was), [now]) for was in certified.values()):
        raise DataError(another_base(folder, printable(name, 80)))


def _module_in(checkpoint: Path, kind: type[Any] | None) -> Any:
    """The module of a checkpoint, of this class, or of the one that ships and that it names."""
    from .command import class_of, refuse_foreign_names

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
        certificate = certificate_in(folder)
    except DataError as error:
        return f"{printable(error)} What it does on new inputs was not tested."
    since = certificate.get("date", "some day")
    sure = f"{100 * certificate['confidence']:g} % confidence, since {since}"
    lines = [f"{folder}: its certificate.json says, with {sure}"]
    for requirement in certificate["requirements"]:
        lines.append(f"{requirement['text']}: {requirement.get('seen', 'certified')}")
    lines.append(
        "pl-pointwise check and monitor measure whether this is so, of these weights."
    )
    return "\n  ".join(map(printable, lines))


def certificate_in(
    folder: Path, others: bool = True, besides: Collection[Path] = ()
) -> dict[str, Any]:
    """Returns an exported folder's certificate.

    others, besides: as of :func:`~pl_pointwise.identity.files.changed_files`.

    Raises:
        DataError: there is none, it cannot be read, or a file is not as it was certified.
    """
    path = folder / CERTIFICATE
    if not path.is_file():
        raise DataError(
            f"{folder}: there is no certificate, as compare --require writes it."
        )
    certificate = _mapping_in(path)
    if not _is_whole(certificate):
        raise DataError(f"{path} {DAMAGED}")
    files = certificate.get("files", {})
    config = folder / CONFIG
    if files and CONFIG not in files and config.is_file():
        # An earlier version listed it not.
        files = {**files, CONFIG: digest_now(config)}
    changed = changed_files(folder, files, others, besides)
    if changed:
        raise DataError(f"{folder}: {changed}. Take the folder as it was written.")
    return certificate


def _is_whole(certificate: dict[str, Any]) -> bool:
    """Whether a certificate has what is read of it, in the types that are expected."""
    try:
        texts = [requirement["text"] for requirement in certificate["requirements"]]
        confident = 0 < certificate["confidence"] < 1
    except (LookupError, TypeError):
        return False
    are_texts = bool(texts) and all(isinstance(text, str) for text in texts)
    return are_texts and isinstance(certificate.get("files", {}), dict) and confident


def _require_torch_modules(folder: Path) -> None:
    """Refuses what sentence-transformers would call by its name, functions of torch among them."""
    # Of the parts that modules.json names too.
    for path in folder.rglob("config*.json"):
        for name in re.findall(r'"(torch\.[^"]*)"', json.dumps(_mapping_in(path))):
            module, _, kind = name.rpartition(".")
            named = getattr(sys.modules.get(module), kind, None)
            if not (isinstance(named, type) and issubclass(named, torch.nn.Module)):
                raise DataError(
                    f"{path} names {name}, no module of torch: it is not called."
                )


def _mapping_in(path: Path) -> dict[str, Any]:
    """What a JSON file maps names to; empty where there is none."""
    try:
        content = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        if isinstance(content, dict):
            return content
    except (ValueError, RecursionError):
        # No JSON, or nested without an end: as if no mapping.
        pass
    raise DataError(f"{path} {DAMAGED}")
