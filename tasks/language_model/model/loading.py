"""Loading a causal language model for fine-tuning, and a tokenizer that can chat.

Any model that ``AutoModelForCausalLM`` knows loads, from a folder or the hub, from safetensors only
and without running code that comes with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import find_adapter_config_file

from pl_pointwise.tasks.common.models import loading, model_source, pretrained

from ..text.conversations import ConversationEncoder
from .adapters import UNMERGEABLE, Lora, add_lora, merged_model
from .policy import Policy


def load_language_model(
    policy: Policy | str, lora: Lora | None = None
) -> PreTrainedModel | PeftModel:
    """The model of a policy or name, with fresh adapters if given; then only they are trainable.

    Adapters are in float32 even on a base in half precision; with ``merge_on_export``, those that
    cannot be merged are refused, and so is a model that is itself an adapter.
    """
    own = Policy(policy) if isinstance(policy, str) else policy
    name, revision, dtype = own.model_name, own.revision, own.dtype
    with loading(name):
        source = model_source(name)
        if find_adapter_config_file(source, revision=revision):
            raise ValueError(
                f"{name} is an adapter. Give the whole model: its export with merge_on_export, or "
                f"AutoPeftModelForCausalLM.from_pretrained({name!r}).merge_and_unload(), saved."
            )
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source,
            revision=revision,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=own.attention,
            quantization_config=_four_bits() if own.quantize_4bit else None,
            use_safetensors=True,
            trust_remote_code=False,
        )
    if own.quantize_4bit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if own.gradient_checkpointing:
        checkpoint_gradients(model)
    if lora is not None:
        if own.merge_on_export and (added := sorted(n for n in UNMERGEABLE if lora.peft.get(n))):
            raise ValueError(
                f"merge_on_export: adapters with lora.peft {', '.join(added)} cannot be merged. "
                "Leave such options out, or export the adapter alone."
            )
        return add_lora(model, lora)
    return model


def load_exported(folder: str) -> PreTrainedModel:
    """The model of an export, an adapter merged into its base; from safetensors only."""
    if find_adapter_config_file(folder) is None:
        model = load_language_model(folder)
    else:
        with loading(folder):
            config = PeftConfig.from_pretrained(folder)
            if not (Path(folder) / "adapter_model.safetensors").is_file():
                raise OSError(f"{folder} has no adapter_model.safetensors; others may run code.")
            base = Policy(str(config.base_model_name_or_path), revision=config.revision)
            model = merged_model(PeftModel.from_pretrained(load_language_model(base), folder))
    assert isinstance(model, PreTrainedModel)
    return model


def checkpoint_gradients(model: PreTrainedModel) -> None:
    """Non-reentrant, as the other kind loses the gradient where a layer's input needs none."""
    # Renamed in newer versions of transformers.
    older = getattr(model, "gradient_checkpointing_enable", None)
    enable = getattr(model, "activation_checkpointing_enable", older)
    assert enable is not None
    enable({"use_reentrant": False})


def load_encoder(
    name: str,
    revision: str | None,
    chat_template: str | None,
    template_arguments: Mapping[str, Any] | None,
    default_template: str | None,
) -> ConversationEncoder:
    """The tokenizer of a model and its template, its own only where neither other is given."""
    tokenizer = load_tokenizer(name, revision)
    if chat_template is not None and chat_template.endswith(".jinja"):
        chat_template = Path(chat_template).read_text(encoding="utf-8")
    tokenizer.chat_template = chat_template or tokenizer.chat_template or default_template
    return ConversationEncoder(tokenizer, template_arguments=template_arguments)


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model."""
    tokenizer: PreTrainedTokenizerBase = pretrained(AutoTokenizer, name, revision=revision)
    return tokenizer


def _four_bits() -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
