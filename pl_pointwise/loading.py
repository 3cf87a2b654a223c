"""An exported model in one line, with what it was required to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .files import changed_files

CERTIFICATE = Path("certificate") / "certificate.json"


def load(name: str | Path, *, revision: str | None = None, quiet: bool = False) -> Any:
    """Load what ``module.export`` or ``compare --require`` wrote, and print its certificate.

    From safetensors only, and no code of the folder runs. A certificate is the word of whoever
    exported the model; ``pl-pointwise check`` and ``monitor`` measure again.

    Args:
        name: the folder, or a repository on the hub that holds one.
        revision: on the hub.
        quiet: whether to print nothing.

    Returns:
        A re-ranker's `sentence_transformers.CrossEncoder`; else (model, tokenizer), the model with
        an exported adapter merged into its base.

    Raises:
        FileNotFoundError: a path where there is no folder.
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
    config = folder / "config.json"
    if config.is_file() and "sentence_transformers" in json.loads(config.read_text("utf-8")):
        from sentence_transformers import CrossEncoder

        return CrossEncoder(
            str(folder), trust_remote_code=False, model_kwargs={"use_safetensors": True}
        )
    from .tasks.language_model.loading import load_language_model, load_tokenizer

    return load_language_model(str(folder)), load_tokenizer(str(folder))


def required_of(folder: Path) -> str:
    """What an exported folder's certificate says, a line a requirement."""
    path = folder / CERTIFICATE
    if not path.is_file():
        return f"{folder}: no certificate. What it does on new inputs was not tested."
    found = json.loads(path.read_text("utf-8"))
    if changed := changed_files(folder, found.get("files", {})):
        return f"{folder}: {changed}. What it does on new inputs was not tested."
    lines = [
        f"{each['text']}: {each.get('seen', 'certified')}, on samples that had chosen nothing"
        for each in found["requirements"]
    ]
    since = f", since {found['date']}" if "date" in found else ""
    sure = f"{100 * found['confidence']:g} %"
    return "\n  ".join([f"{folder}: certified with {sure} confidence{since}", *lines])
