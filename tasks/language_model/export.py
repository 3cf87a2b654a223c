"""Export of a policy: its adapter, or the whole model, with tokenizer and model card."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch.utilities import rank_zero_info
from peft import PeftModel

from pl_pointwise.model_card import write_card

from .adapters import merged_weights, saved_adapter
from .reference import base_of, is_adapted

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
    path.mkdir(parents=True, exist_ok=True)
    if not isinstance(model, PeftModel):
        whole = True
        model.save_pretrained(path)
    elif not whole and saved_adapter(module.model_name, module.revision):
        whole = True  # An adapter file can name a base, but not two adapters.
        rank_zero_info(
            f"{module.model_name} is an adapter itself, so the whole model is exported, with "
            "both adapters merged into it."
        )
    if isinstance(model, PeftModel) and whole:
        base = base_of(model)
        base.save_pretrained(path, state_dict=merged_weights(model))
        if any(map(is_adapted, (base.get_input_embeddings(), base.get_output_embeddings()))):
            config = deepcopy(base.config)
            config.tie_word_embeddings = False  # Else some readers take one of the two for both.
            config.save_pretrained(path)
    elif isinstance(model, PeftModel):
        model.active_peft_config.revision = module.revision  # of the base
        model.save_pretrained(path)
    module.tokenizer.save_pretrained(path)
    package = "transformers" if whole else "peft"
    kind = "AutoModelForCausalLM" if whole else "AutoPeftModelForCausalLM"
    write_card(
        module,
        path,
        library_name=package,
        pipeline_tag="text-generation",
        base_model=module.model_name,
        usage=USAGE.format(package=package, kind=kind),
    )
    return path
