"""Export of a policy: its adapter, or the whole model, with tokenizer and model card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch.utilities import rank_zero_info
from peft import PeftModel
from transformers import AutoModelForCausalLM

from pl_pointwise.files import replaced_folder
from pl_pointwise.model_card import write_card
from pl_pointwise.tasks.common.models import check_weights

from .adapters import merged_model, saved_adapter

if TYPE_CHECKING:
    from .module import LanguageModelModule

USAGE = """
from {package} import {kind}
from transformers import AutoTokenizer

name = "PATH OR NAME OF THIS REPOSITORY"
model, tokenizer = {kind}.from_pretrained(name), AutoTokenizer.from_pretrained(name)
"""


def export_policy(module: LanguageModelModule, path: Path) -> Path:
    """Writes the folder; see ``LanguageModelModule.export``."""
    model, whole = module.model, module.policy.merge_on_export
    if not isinstance(model, PeftModel):
        whole = True
    elif not whole and saved_adapter(module.model_name, module.revision):
        whole = True  # An adapter file can name a base, but not two adapters.
        rank_zero_info(
            f"{module.model_name} is an adapter itself, so the whole model is exported, with "
            "both adapters merged into it."
        )
    package = "transformers" if whole else "peft"
    kind = "AutoModelForCausalLM" if whole else "AutoPeftModelForCausalLM"
    with replaced_folder(path) as folder:
        if whole:
            merged = merged_model(model) if isinstance(model, PeftModel) else model
            merged.save_pretrained(folder)
            check_weights(AutoModelForCausalLM, folder)
        else:
            model.active_peft_config.revision = module.revision  # of the base
            model.save_pretrained(folder)
        module.tokenizer.save_pretrained(folder)
        write_card(
            module,
            folder,
            library_name=package,
            pipeline_tag="text-generation",
            base_model=module.model_name,
            usage=USAGE.format(package=package, kind=kind),
        )
    return path
