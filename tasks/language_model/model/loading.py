"""Loading a causal language model for fine-tuning, and a tokenizer that can chat.

Any model that ``AutoModelForCausalLM`` knows loads, from a folder or the hub, and any adapter of
such a model, which becomes part of its weights; from safetensors only and without running code
that comes with it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pl_pointwise.tasks.common.models import loading, model_source

from .adapters import (
    Lora,
    add_lora,
    base_of_adapter,
    check_merging,
    repository_file,
    with_saved_adapter,
)
from .policy import Policy


def load_language_model(
    policy: Policy | str, lora: Lora | None = None
) -> PreTrainedModel | PeftModel:
    """The model of a policy or name, with fresh adapters if given; then only they are trainable.

    A PEFT adapter of this name is merged into its base. Fresh adapters are in float32 even on a
    base in half precision; with ``merge_on_export``, and on an adapter, those that cannot be merged
    are refused.
    """
    own = Policy(policy) if isinstance(policy, str) else policy
    name, revision, dtype = own.model_name, own.revision, own.dtype
    with loading(name):
        base = base_of_adapter(name, revision)
        if base and own.quantize_4bit:
            raise ValueError(
                f"{name} is an adapter, which cannot be merged into weights of 4 bits without "
                "loss. Export it merged (merge_on_export), or set quantize_4bit to false."
            )
        source, of_base = base or (name, revision)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_source(source),
            revision=of_base,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=own.attention,
            quantization_config=_four_bits() if own.quantize_4bit else None,
            use_safetensors=True,
            trust_remote_code=False,
        )
        if base:
            model = with_saved_adapter(model, name, revision)
    if own.quantize_4bit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if own.gradient_checkpointing:
        checkpoint_gradients(model)
    if lora is not None:
        names = set(model.state_dict())
        adapted = add_lora(model, lora)
        if own.merge_on_export or base:
            check_merging(adapted, names, lora)
        return adapted
    return model


def checkpoint_gradients(model: PreTrainedModel) -> None:
    """Non-reentrant, as the other kind loses the gradient where a layer's input needs none."""
    # Renamed in newer versions of transformers.
    older = getattr(model, "gradient_checkpointing_enable", None)
    enable = getattr(model, "activation_checkpointing_enable", older)
    assert enable is not None
    enable({"use_reentrant": False})


def load_tokenizer(
    name: str,
    *,
    revision: str | None = None,
    chat_template: str | None = None,
    default_template: str | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; a :class:`~.conversations.ConversationEncoder` checks it."""
    with loading(name):
        base = base_of_adapter(name, revision)
        if base and not repository_file(name, "tokenizer_config.json", revision):
            name, revision = base
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model_source(name), revision=revision, trust_remote_code=False
        )
    if chat_template is not None and chat_template.endswith(".jinja"):
        chat_template = Path(chat_template).read_text(encoding="utf-8")
    tokenizer.chat_template = chat_template or tokenizer.chat_template or default_template
    return tokenizer


def _four_bits() -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
