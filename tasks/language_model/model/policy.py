"""What the policy of a language task is: the model, what of it is trained, how it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..likelihood.scoring import ScoringMethod
from .adapters import Lora
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
