"""A model that is an adapter, as the start of a run: PEFT's folders, TRL's, and our own export.

It is merged into its base when it is loaded, so that the run starts from the model that the adapter
was trained to be. Read from safetensors only; no code of a folder runs.
"""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import cached_file, find_adapter_config_file

from .models import loading, model_source, pretrained

WEIGHTS = "adapter_model.safetensors"
_WHOLE = ("model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True)
class SavedAdapter:
    """A trained adapter in a folder, or in a hub repository that is in the cache by now."""

    name: str  # as the user gives it
    folder: Path
    config: PeftConfig

    @property
    def base(self) -> str:
        """What it was trained on: a folder, a name on the hub, or again an adapter."""
        return str(self.config.base_model_name_or_path)

    @property
    def base_revision(self) -> str | None:
        """Of the base on the hub."""
        return self.config.revision

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shapes of its weights by PEFT's names."""
        with safe_open(self.folder / WEIGHTS, "pt") as weights:
            names = weights.keys()
            return {name: weights.get_slice(name).get_shape() for name in names}

    def load_base(self, load: Any) -> PreTrainedModel:
        """``load(base, revision)``, the base; an error also names the adapter."""
        try:
            base: PreTrainedModel = load(self.base, self.base_revision)
        except (OSError, ValueError) as error:
            raise type(error)(
                f"{self.name} is an adapter of {self.base}, which cannot be loaded: {error} "
                'Put the base there, or name its place as "base_model_name_or_path" in '
                "adapter_config.json."
            ) from error
        return base

    def put_on(self, base: PreTrainedModel, *, trainable: bool = False) -> PeftModel:
        """The base with the adapter, which stays apart from it.

        Raises:
            ValueError: it does not fit the base, or adds tokens instead of changing weights.
        """
        # Prefix and prompt tuning: nothing that could be merged into weights.
        if self.config.is_prompt_learning:
            raise ValueError(
                f"{self.name}: an adapter of type {self.config.peft_type.value} writes tokens in "
                "front of every input and changes no weight. Start from its base, or from a LoRA."
            )
        self._grow_vocabulary(base)
        with loading(self.name), warnings.catch_warnings():
            # Else layers of another model would keep an adapter that does nothing.
            warnings.filterwarnings("error", "Found missing adapter keys")
            # PEFT warns of every adapter on a head that is tied, which merged_model() handles.
            warnings.filterwarnings("ignore", ".*tie_word_embeddings")
            adapted = PeftModel.from_pretrained(
                base, str(self.folder), is_trainable=trainable
            )
        assert isinstance(adapted, PeftModel)
        return adapted

    def merged_into(self, base: PreTrainedModel) -> PreTrainedModel:
        """The base with the adapter in its weights, all of them trainable."""
        merged = merged_model(self.put_on(base))
        # Left behind, it would be taken for an adapter that is still there.
        merged.__dict__.pop("peft_config", None)
        low = {
            weight.dtype for weight in merged.parameters() if weight.dtype.itemsize < 4
        }
        rounded = f", rounded to {', '.join(map(str, low))}" if low else ""
        rank_zero_info(
            f"{self.name} is an adapter: {self.base} is loaded with it merged in{rounded}."
        )
        return merged.requires_grad_(True)

    def _grow_vocabulary(self, base: PreTrainedModel) -> None:
        """Gives the base the rows that the adapter was trained with, where it saved them whole."""
        embeddings, head = base.get_input_embeddings(), base.get_output_embeddings()
        paths = {
            path
            for path, part in base.named_modules()
            if part is embeddings or part is head
        }
        endings = tuple(f".{path}.weight" for path in paths)
        # A run that added tokens saved embeddings and head whole, with more rows than the base.
        rows = [
            shape[0] for name, shape in self.shapes.items() if name.endswith(endings)
        ]
        if rows and rows[0] != len(embeddings.weight):
            base.resize_token_embeddings(rows[0], mean_resizing=False)


def saved_adapter(name: str, revision: str | None = None) -> SavedAdapter | None:
    """The adapter of a folder or hub repository; None where the name is of a whole model.

    Raises:
        OSError: its weights are no safetensors.
        ValueError: there is an adapter and a whole model.
    """
    source = model_source(name)
    with loading(name):
        config = find_adapter_config_file(source, revision=revision)
        # No adapter_config.json, so it is a whole model.
        if config is None:
            return None
        weights = repository_file(source, WEIGHTS, revision)
        whole = [file for file in _WHOLE if repository_file(source, file, revision)]
        # A merged model that kept the file with the settings.
        if whole and weights is None:
            return None
        if whole:
            raise ValueError(
                f"{name} has an adapter and the whole model ({whole[0]}). Take out the adapter's "
                "two files if it is merged already, or the model's."
            )
        if weights is None:
            raise OSError(
                f"{name} is an adapter and has no {WEIGHTS}; others may run code. Save it again "
                "with save_pretrained."
            )
        folder = Path(config).parent
        return SavedAdapter(name, folder, PeftConfig.from_pretrained(str(folder)))


def repository_file(source: str, file: str, revision: str | None = None) -> str | None:
    """The path of a file of a folder or hub repository; None where there is none."""
    path: str | None = cached_file(
        source,
        file,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return path


def whole_model(
    loader: Any, name: str, revision: str | None = None, **options: Any
) -> Any:
    """What ``loader`` makes of a whole model; settings of an adapter beside it are not read."""
    if find_adapter_config_file(model_source(name), revision=revision):
        # Else it loads the adapter itself, unmerged: the place where transformers looks for it.
        options["adapter_kwargs"] = {"subfolder": "none"}
    return pretrained(loader, name, revision=revision, use_safetensors=True, **options)


def merged_model(model: PeftModel) -> PreTrainedModel:
    """The base on the CPU with adapters merged into it; ``model`` stays as it is.

    What no adapter changes shares its memory with ``model`` where that is on the CPU too. Weights
    in half precision are merged in float32 and rounded once.
    """
    memo: dict[int, Any] = {id(buffer): buffer.cpu() for buffer in model.buffers()}
    # What the memo holds is shared and not copied: a base of many GB stands in memory once.
    for weight in model.parameters():
        memo[id(weight)] = nn.Parameter(weight.detach().cpu(), requires_grad=False)
    copy = deepcopy(model, memo)
    dtypes = list[tuple[nn.Module, str, torch.dtype]]()
    for part in copy.modules():
        # Merged in place, and tied weights one by one.
        if isinstance(part, BaseTunerLayer):
            layer = part.get_base_layer()
            for name, weight in list(layer.named_parameters(recurse=False)):
                wide = torch.promote_types(weight.dtype, torch.float32)
                dtypes.append((layer, name, weight.dtype))
                copied = weight.detach().to(wide, copy=True)
                setattr(layer, name, nn.Parameter(copied, requires_grad=False))
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Input and output embeddings are no longer tied"
        )
        merged = copy.base_model.merge_and_unload(adapter_names=[model.active_adapter])
    assert isinstance(merged, PreTrainedModel)
    # Of a layer that stands twice the first is right.
    for layer, name, dtype in reversed(dtypes):
        weight = getattr(layer, name)
        # Rounded once, after all adapters of the layer are in.
        if weight.dtype != dtype:
            setattr(
                layer,
                name,
                nn.Parameter(weight.detach().to(dtype), requires_grad=False),
            )
    head = merged.get_output_embeddings()
    if head is not None and getattr(
        model.get_base_model().config, "tie_word_embeddings", False
    ):
        embeddings = merged.get_input_embeddings()
        # Else some readers take one of the two for both.
        tied = torch.equal(embeddings.weight, head.weight)
        if tied:
            head.weight = embeddings.weight
        merged.config.tie_word_embeddings = tied
    return merged
