"""What the policy of a language task is, and the loading of its model and tokenizer.

Any model that ``AutoModelForCausalLM`` knows loads, from a folder or the hub, from safetensors only
and without running code that comes with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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

from pl_pointwise.errors import DataError, printable
from pl_pointwise.tasks.common.models import loading, model_source, pretrained

from ..likelihood.scoring import ScoringMethod
from ..text.conversations import ConversationEncoder
from .adapters import UNMERGEABLE, Lora, add_lora, merged_model
from .generation import Generation

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["sdpa", "eager", "flash_attention_2", "flex_attention"]


@dataclass
class Policy:
    """A causal language model that is trained; as it was before, it is the reference policy.

    Args:
        model_name: the model: a name on the hub, a folder, or ``package:NAME/FOLDER``.
        revision: of the model on the hub.
        chat_template: instead of the tokenizer's own, a template or the path of a .jinja file.
        template_arguments: the chat template's arguments besides the conversation, such as
            {enable_thinking: false}.
        lora: the adapters; "default" takes the task's. Given in part, the options left out are
            those of :class:`~.adapters.Lora`, not the task's. None, or "none", trains all
            weights; then there is no reference.
        dtype: of the base's weights; "auto" is that of the files, and without adapters float32.
        attention: attention implementation; None leaves the choice to transformers.
        quantize_4bit: hold the base in 4 bits (needs bitsandbytes).
        gradient_checkpointing: compute layers again in the backward pass, for less memory.
        scoring_method: "auto" takes the fastest way to log-likelihoods that agrees with the plain
            one on the first batch of training; a name takes that method.
        reference_cache: None computes the reference in every step; "memory" keeps its hidden states
            at response positions for later epochs (2 bytes × hidden size per token), each rank its
            own.
        generation: how prompts are answered; "default" takes the task's, and given in part it is as
            with ``lora``.
        merge_on_export: export the whole model, with its adapters merged into it, as in any case
            where no adapters are trained.
    """

    model_name: str
    revision: str | None = None
    chat_template: str | None = None
    template_arguments: dict[str, Any] | None = None
    lora: Lora | Literal["default", "none"] | None = "default"
    dtype: Dtype = "auto"
    attention: Attention | None = None
    quantize_4bit: bool = False
    gradient_checkpointing: bool = False
    scoring_method: ScoringMethod | Literal["auto"] = "auto"
    reference_cache: Literal["memory"] | None = None
    generation: Generation | Literal["default"] = "default"
    merge_on_export: bool = False

    def __post_init__(self) -> None:
        # Mappings are from a checkpoint's hyperparameters.
        if isinstance(self.lora, Mapping):
            self.lora = Lora(**self.lora)
        if self.lora == "none":  # The command line cannot put null in the place of options.
            self.lora = None
        if isinstance(self.generation, Mapping):
            self.generation = Generation(**self.generation)
        if self.quantize_4bit and (self.lora is None or self.merge_on_export):
            raise ValueError(
                "policy.quantize_4bit: weights of 4 bits cannot be trained themselves, nor "
                "adapters be merged into them. Set lora, and merge_on_export to false."
            )


def load_language_model(
    policy: Policy | str, lora: Lora | None = None
) -> PreTrainedModel | PeftModel:
    """The model of a policy or name, with fresh adapters if given; then only they are trainable.

    Adapters are in float32 even on a base in half precision; with ``merge_on_export``, those that
    cannot be merged are refused, and so is a model that is itself an adapter.
    """
    own = Policy(policy) if isinstance(policy, str) else policy
    name, revision, dtype = own.model_name, own.revision, own.dtype
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    with loading(name):
        if find_adapter_config_file(model_source(name), revision=revision):
            raise ValueError(
                f"{name} is an adapter. Give the whole model: its export with merge_on_export, or "
                f"AutoPeftModelForCausalLM.from_pretrained({name!r}).merge_and_unload(), saved."
            )
    model: PreTrainedModel = pretrained(
        AutoModelForCausalLM,
        name,
        revision=revision,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        attn_implementation=own.attention,
        quantization_config=four_bits if own.quantize_4bit else None,
        use_safetensors=True,
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
            model = merged_model(whole_adapter(load_language_model(base), folder))
    assert isinstance(model, PreTrainedModel)
    return model


def whole_adapter(base: PreTrainedModel | PeftModel, folder: str) -> PeftModel:
    """The base with the adapter of a folder; where PEFT warns that tensors are missing, an error,
    as the base alone would stand in for them.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        try:
            found: PeftModel = PeftModel.from_pretrained(base, folder)
        except UserWarning as error:
            raise DataError(
                f"{folder}: adapter_model.safetensors lacks tensors of the adapter "
                f"({printable(error, 200)}). Copy the folder again from where it is whole."
            ) from None
    return found


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
