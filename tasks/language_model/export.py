"""A trained language model as a folder: an adapter, or the whole model, with tokenizer and card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pl_pointwise import PointwiseModule
from pl_pointwise.export.folder import replaced_folder
from pl_pointwise.model_card import write_card
from pl_pointwise.tasks.common.models import check_weights

from .model.adapters import merged_model
from .model.loading import Policy
from .rounding import say_what_merging_changed

USAGE = """
from {package} import {kind}
from transformers import AutoTokenizer

name = "PATH OR NAME OF THIS REPOSITORY"
model, tokenizer = {kind}.from_pretrained(name), AutoTokenizer.from_pretrained(name)
"""

ADAPTER_NOTE = (
    "**This folder holds an adapter, and not the whole model**: it loads its base model too, from "
    "the name in `adapter_config.json`, which has to be there. One whole model is "
    "`model.merge_and_unload()`, saved, of the `model` below; or train with "
    "`--model.policy.merge_on_export true`."
)


def export_model(
    module: PointwiseModule,
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    policy: Policy,
    path: Path,
    *,
    whole: bool,
) -> None:
    """Saves the model of a module, its tokenizer and its card as a folder.

    Args:
        module: whose run the card tells of.
        model: its model.
        tokenizer: of the model, with its chat template.
        policy: how the model was loaded.
        path: the folder, which is replaced as a whole.
        whole: merge adapters into the model, instead of saving them alone.
    """
    package = "transformers"
    kind = "AutoModelForCausalLM"
    with replaced_folder(path) as folder:
        if isinstance(model, PeftModel) and not whole:
            package = "peft"
            kind = "AutoPeftModelForCausalLM"
            _save_adapter(model, policy, folder)
        else:
            _save_whole(module, model, folder)
        tokenizer.save_pretrained(folder)
        write_card(
            module,
            folder,
            library_name=package,
            pipeline_tag="text-generation",
            base_model=policy.model_name,
            note=ADAPTER_NOTE if package == "peft" else "",
            usage=USAGE.format(package=package, kind=kind),
        )


def _save_adapter(model: PeftModel, policy: Policy, folder: Path) -> None:
    if not policy.continue_adapter:  # Else it has that of its base.
        # Of the base: the branch may move on, the commit does not.
        commit = getattr(model.config, "_commit_hash", None)
        active: Any = model.active_peft_config
        active.revision = commit or policy.revision
    model.save_pretrained(folder, selected_adapters=[model.active_adapter])


def _save_whole(
    module: PointwiseModule, model: PreTrainedModel | PeftModel, folder: Path
) -> None:
    """Saves the model, adapters merged into it."""
    if isinstance(model, PeftModel):
        model = merged_model(model)
        say_what_merging_changed(module, model)
    model.save_pretrained(folder)
    # from_pretrained() fills what the files lack with random weights, and only warns.
    check_weights(AutoModelForCausalLM, folder)
