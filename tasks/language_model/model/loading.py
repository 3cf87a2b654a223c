"""What the policy of a language task is, and the loading of its model and tokenizer.

Any model that ``AutoModelForCausalLM`` knows loads, from a folder or the hub, from safetensors only
and without running code that comes with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
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

from pl_pointwise.tasks.common.adapters import (
    repository_file,
    saved_adapter,
    whole_model,
)
from pl_pointwise.tasks.common.dropout import use_quick_dropout
from pl_pointwise.tasks.common.models import model_source, pretrained, require_causal

from ..likelihood.scoring import ScoringMethod
from ..text.conversations import ConversationEncoder
from .adapters import UNMERGEABLE, Lora, add_lora, continued
from .generation import Generation

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["sdpa", "eager", "flash_attention_2", "flex_attention"]


@dataclass
class Policy:
    """A causal language model that is trained; as it was before, it is the reference policy.

    Args:
        model_name: the model: a name on the hub, a folder, or ``package:NAME/FOLDER``. Of a PEFT
            adapter its base with the adapter merged into it, which is then the reference.
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
            where no adapters are trained, or where an adapter was merged into its base at the
            start.
        continue_adapter: train the adapter that ``model_name`` is on, a LoRA, instead of merging
            it and training a fresh one; ``lora`` is then not read. The reference is the adapter as
            it was, and the export an adapter of the same base.

    >>> from pl_pointwise.tasks import Lora, Policy
    >>> name = "HuggingFaceTB/SmolLM2-135M-Instruct"  # Or a folder; loaded when a run begins.
    >>> policy = Policy(name, lora=Lora(r=16), merge_on_export=True)
    >>> policy.scoring_method
    'auto'
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
    continue_adapter: bool = False

    def __post_init__(self) -> None:
        # Mappings are from a checkpoint's hyperparameters.
        if isinstance(self.lora, Mapping):
            self.lora = Lora(**self.lora)
        # The command line cannot put null in the place of options.
        if self.lora == "none":
            self.lora = None
        if isinstance(self.generation, Mapping):
            self.generation = Generation(**self.generation)
        # Weights of 4 bits have no gradient, and a merge would round each step's change away.
        if self.quantize_4bit and (self.lora is None or self.merge_on_export):
            raise ValueError(
                "policy.quantize_4bit: weights of 4 bits cannot be trained themselves, nor "
                "adapters be merged into them. Set lora, and merge_on_export to false."
            )
        # Contradicting wishes, of which one would be dropped in silence.
        if self.continue_adapter and self.lora is None:
            raise ValueError(
                "policy.continue_adapter: it trains the adapter, and lora: none all weights. Take "
                "one of the two."
            )


def load_language_model(
    policy: Policy | str, lora: Lora | None = None
) -> PreTrainedModel | PeftModel:
    """The model of a policy or name, with fresh adapters if given; then only they are trainable.

    Of an adapter its base, the adapter merged into it or, with ``continue_adapter``, trained on.
    Fresh adapters are in float32 even on a base in half precision; with ``merge_on_export``, those
    that cannot be merged are refused.
    """
    options = Policy(policy) if isinstance(policy, str) else policy
    adapter = saved_adapter(options.model_name, options.revision)
    if options.continue_adapter and adapter is None:
        raise ValueError(
            f"continue_adapter: {options.model_name} is a whole model, not an adapter. Leave it "
            "out; then a fresh adapter is trained."
        )
    if adapter is not None and options.continue_adapter:
        model = adapter.load_base(partial(_merged_base, options))
    else:
        model = _merged_base(options, options.model_name, options.revision)
    # PEFT's own preparation: the base frozen, what is not quantised in float32.
    if options.quantize_4bit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if options.gradient_checkpointing:
        checkpoint_gradients(model)
    trained: PreTrainedModel | PeftModel = model
    if adapter is not None and options.continue_adapter:
        check_mergeable(options, adapter.config)
        trained = continued(model, adapter)
    elif lora is not None:
        check_mergeable(options, lora.peft)
        trained = add_lora(model, lora)
    use_quick_dropout(trained)
    return trained


def _merged_base(policy: Policy, name: str, revision: str | None) -> PreTrainedModel:
    """The whole model of a name by the policy's options, an adapter merged into its base."""
    adapter = saved_adapter(name, revision)
    # PEFT dequantises, merges and rounds to 4 bits again: another model than was trained.
    if adapter is not None and policy.quantize_4bit:
        raise ValueError(
            f"{name} is an adapter, and is not merged into weights of 4 bits. Train it on with "
            "policy.continue_adapter, or set quantize_4bit to false."
        )
    if adapter is not None:
        return adapter.merged_into(adapter.load_base(partial(_merged_base, policy)))
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model: PreTrainedModel = whole_model(
        AutoModelForCausalLM,
        name,
        revision,
        dtype=policy.dtype if policy.dtype == "auto" else getattr(torch, policy.dtype),
        attn_implementation=policy.attention,
        quantization_config=four_bits if policy.quantize_4bit else None,
    )
    require_causal(model, name)
    return model


def check_mergeable(policy: Policy, options: Mapping[str, Any] | PeftConfig) -> None:
    """Refuses adapters that ``merge_on_export`` could not merge."""
    settings = options if isinstance(options, Mapping) else vars(options)
    added = sorted(name for name in UNMERGEABLE if settings.get(name))
    if policy.merge_on_export and added:
        raise ValueError(
            f"merge_on_export: adapters with lora.peft {', '.join(added)} cannot be merged. "
            "Leave such options out, or export the adapter alone."
        )


def load_exported(folder: str) -> PreTrainedModel:
    """The model of an export, an adapter merged into its base; from safetensors only."""
    model = load_language_model(folder)
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
    # A file; anything else is the template itself.
    if chat_template is not None and chat_template.endswith(".jinja"):
        chat_template = Path(chat_template).read_text(encoding="utf-8")
    tokenizer.chat_template = (
        chat_template or tokenizer.chat_template or default_template
    )
    return ConversationEncoder(tokenizer, template_arguments=template_arguments)


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; of an adapter that has none its base's."""
    adapter = saved_adapter(name, revision)
    if adapter is not None and not (adapter.folder / "tokenizer_config.json").is_file():
        has_one = repository_file(model_source(name), "tokenizer_config.json", revision)
        # TRL's adapters come with a tokenizer, PEFT's own without.
        if has_one is None:
            return load_tokenizer(adapter.base, adapter.base_revision)
    tokenizer: PreTrainedTokenizerBase = pretrained(
        AutoTokenizer, name, revision=revision
    )
    return tokenizer
