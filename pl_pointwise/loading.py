"""An exported model in one line, with what it was required to do."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .errors import DataError, printable

if TYPE_CHECKING:
    from .module import PointwiseModule

CERTIFICATE = Path("certificate") / "certificate.json"


def load(
    name: str | Path,
    *,
    revision: str | None = None,
    quiet: bool = False,
    module_class: type[PointwiseModule] | None = None,
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
        print(required_of(folder))
    config = _mapping_in(folder / "config.json")
    is_text = "model_type" in config or (folder / "adapter_config.json").is_file()
    if module_class is not None or not is_text:
        return _module_in(folder, module_class)
    if "sentence_transformers" in config:
        from sentence_transformers import CrossEncoder

        _require_torch_modules(folder)
        return CrossEncoder(
            str(folder), trust_remote_code=False, model_kwargs={"use_safetensors": True}
        )
    from .tasks.language_model.loading import load_language_model, load_tokenizer

    return load_language_model(str(folder)), load_tokenizer(str(folder))


def _module_in(folder: Path, kind: type[PointwiseModule] | None) -> PointwiseModule:
    """The module of a task that exports no text model, from the checkpoint of its certificate."""
    from .export import refuse_foreign_names, shipped_class

    checkpoint = folder / "certificate" / "model.ckpt"
    if not checkpoint.is_file():
        raise DataError(
            f"{folder}: there is no language model, no re-ranker and no certificate with a "
            "checkpoint. Its README.md may say how to read it."
        )
    kind = kind or shipped_class(checkpoint)
    if kind is None:
        raise DataError(
            f"{folder} is of a task of its author's own, whose class is not imported from a "
            "folder's word. Give it, load(…, module_class=YourModule), or read its README.md."
        )
    refuse_foreign_names(checkpoint)
    module = kind.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True)
    return module.eval()


def required_of(folder: Path) -> str:
    """What an exported folder's certificate says, a line a requirement."""
    if not (folder / CERTIFICATE).is_file():
        return f"{folder}: no certificate. What it does on new inputs was not tested."
    try:
        found = certificate_in(folder)
    except DataError as error:
        return str(error)
    lines = [f"{each['text']}: {each.get('seen', 'certified')}" for each in found["requirements"]]
    since = f", since {found['date']}" if "date" in found else ""
    sure = f"{100 * found['confidence']:g} %"
    first = f"{folder}: its certificate.json says, with {sure} confidence{since}"
    last = "Whether this is so, and of these weights, pl-pointwise check and monitor measure again."
    return "\n  ".join([first, *lines, last])


def certificate_in(folder: Path) -> dict[str, Any]:
    """Returns an exported folder's certificate, its texts without control characters.

    Raises:
        DataError: there is none, or none that can be read.
    """
    path = folder / CERTIFICATE
    try:
        found = _printable(json.loads(path.read_text("utf-8")))
        texts = [each["text"] for each in found["requirements"]]
        sound = 0 < found["confidence"] < 1 and all(isinstance(text, str) for text in texts)
    except (ValueError, LookupError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise DataError(
            f"{path} is damaged, or no certificate. Copy the folder again from where it is whole, "
            "or write it again by pl-pointwise compare --require."
        )
    return found


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {printable(key): _printable(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_printable(entry) for entry in value]
    return printable(value) if isinstance(value, str) else value


def _require_torch_modules(folder: Path) -> None:
    """Refuses what sentence-transformers would call by its name, functions of torch among them."""
    for path in folder.rglob("*.json"):  # Of the parts that modules.json names too.
        if path.name in ("config.json", "config_sentence_transformers.json"):
            texts = re.findall(r'"(torch\.[^"]*)"', json.dumps(_mapping_in(path)))
            for module, _, name in (text.rpartition(".") for text in texts):
                found = getattr(sys.modules.get(module), name, None)
                if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
                    raise DataError(
                        f"{path} names {printable(f'{module}.{name}')}, which is no module of "
                        "torch, and is not called. Export the model again."
                    )


def _mapping_in(path: Path) -> dict[str, Any]:
    """A model's config.json; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DataError(f"{path} is damaged. Copy the folder again from where it is whole.")
    return found
