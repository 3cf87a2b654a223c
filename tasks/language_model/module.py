"""A module around a causal language model with adapters: what both language tasks share.

Loading, training mode, scoring of responses, checkpoints without the frozen base, generation and
export. Objectives and constraints are the task's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pl_pointwise import PointwiseModule
from pl_pointwise.data import PADDING
from pl_pointwise.model_card import write_card

from .conversations import ConversationEncoder
from .generation import Answers, Generation, generate_answers
from .loading import (
    Attention,
    Dtype,
    Lora,
    load_language_model,
    load_tokenizer,
    merged_weights,
)
from .reference import ReferenceCache, base_of, belongs_to_adapter, caching_problem
from .scoring import ResponseScorer, ResponseStatistics, ScoringPath

USAGE = """
from {package} import {kind}
from transformers import AutoTokenizer

name = "PATH OR NAME OF THIS REPOSITORY"
model, tokenizer = {kind}.from_pretrained(name), AutoTokenizer.from_pretrained(name)
"""


class LanguageModelModule(PointwiseModule):
    """A causal language model with LoRA adapters; the reference is the model without them.

    A subclass calls :meth:`load_policy` in ``__init__``, after the base class's, and scores with
    :meth:`score`. Batches are those of batch.py.
    """

    host_keys: tuple[str, ...] = ("index", "prompt_lengths", "response_lengths")

    default_template: str | None = None
    """The chat template of a model whose tokenizer brings none; None refuses such a model."""

    def load_policy(
        self,
        model_name: str,
        *,
        lora: Lora | Mapping[str, Any],
        dtype: Dtype,
        attention: Attention | None,
        quantize_4bit: bool,
        gradient_checkpointing: bool,
        revision: str | None,
        scoring_path: ScoringPath | Literal["auto"],
        reference_cache: str | None,
        generation: Generation | Mapping[str, Any],
        chat_template: str | None = None,
        merge_on_export: bool = False,
    ) -> None:
        """Load the model; the arguments are :class:`SafetyModule`'s."""
        if merge_on_export and quantize_4bit:
            raise ValueError(
                "merge_on_export: adapters cannot be merged into weights of 4 bits without loss. "
                "Set quantize_4bit or merge_on_export to false."
            )
        self.model_name, self.revision = model_name, revision
        self.chat_template, self.merge_on_export = chat_template, merge_on_export
        # Mappings are from a checkpoint's hyperparameters.
        self.lora = Lora(**lora) if isinstance(lora, Mapping) else lora
        generation = Generation(**generation) if isinstance(generation, Mapping) else generation
        self.generation = generation
        self.scoring_path, self.reference_cache = scoring_path, reference_cache
        with torch.random.fork_rng(devices=[]):
            # New adapters depend on the run's seed alone, not on what was drawn before.
            torch.default_generator.manual_seed(torch.initial_seed())
            model = load_language_model(
                model_name,
                lora=self.lora,
                dtype=dtype,
                attention=attention,
                quantize_4bit=quantize_4bit,
                gradient_checkpointing=gradient_checkpointing,
                revision=revision,
            )
        assert isinstance(model, PeftModel)
        # Loaded in evaluation mode, and Lightning keeps the mode it finds.
        self.model = model.train()
        self.scorer = ResponseScorer(model, scoring_path)
        self._encoder: ConversationEncoder | None = None

    def on_fit_start(self) -> None:
        """Once a fit: training mode, the comparison of scoring paths, the reference's cache."""
        super().on_fit_start()
        self.train()
        self.scorer.path = self.scoring_path
        if self.reference_cache is None or self.scorer.cache is not None:
            return
        problem = caching_problem(self.model)
        if problem:
            rank_zero_warn(problem)
            return
        folder = None if self.reference_cache == "memory" else self.reference_cache
        self.scorer.cache = ReferenceCache(self.model, folder)

    def score(self, batch: Mapping[str, Any], reference: bool | Tensor) -> ResponseStatistics:
        """Log-likelihoods of all responses, and the divergence from the reference if asked for."""
        return self.scorer(batch, reference)

    # Checkpoints: what is trained, and nothing of the frozen base ---------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        kept = self._kept()
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: state[name] for name in state if name in kept}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Takes a checkpoint's state, which holds the adapters only, and a whole one.

        Raises:
            RuntimeError: with ``strict``, an adapter weight that is missing, or one too many.
        """
        found = super().load_state_dict(state_dict, strict=False, assign=assign)
        missing = sorted(self._kept().intersection(found.missing_keys))
        problems = [f"missing {name}" for name in missing]
        problems += [f"unexpected {name}" for name in found.unexpected_keys]
        if strict and problems:
            raise RuntimeError(
                f"The checkpoint does not fit this model's adapters: {', '.join(problems[:4])}"
                f"{f' and {len(problems) - 4} more' if len(problems) > 4 else ''}. Load it with "
                "the model and the lora settings it was trained with."
            )
        return found

    def _kept(self) -> set[str]:
        """Names, in the state, of what is trained or belongs to the adapters."""
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        prefix = "model."
        adapters = {
            prefix + name
            for name in self.model.state_dict()
            if belongs_to_adapter(self.model, name)
        }
        return trained | adapters

    # Generation and export ------------------------------------------------------------------------

    @property
    def encoder(self) -> ConversationEncoder:
        """The model's own tokenizer and chat template."""
        if self._encoder is None:
            tokenizer = load_tokenizer(
                self.model_name,
                revision=self.revision,
                chat_template=self.chat_template,
                default_template=self.default_template,
            )
            self._encoder = ConversationEncoder(tokenizer)
        return self._encoder

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.encoder.tokenizer

    def generate(
        self, prompt_ids: Tensor, prompt_lengths: Tensor, *, reference: bool = False
    ) -> Answers:
        """An answer to each prompt, generated as ``generation`` says; see generation.py.

        Args:
            prompt_ids: padded on the right, (B, P).
            prompt_lengths: (B,).
            reference: let the reference answer, the model with its adapters off.
        """
        rows = zip(prompt_ids.tolist(), prompt_lengths.tolist(), strict=True)
        prompts = [ids[:length] for ids, length in rows]
        return generate_answers(
            self.model, self.encoder, prompts, self.generation, reference=reference
        )

    def export(self, path: str | Path) -> Path:
        """Save model, tokenizer and model card as a folder.

        The adapter, which `peft.AutoPeftModelForCausalLM` loads; with ``merge_on_export`` the whole
        model, which `AutoModelForCausalLM` loads and another run takes as its `model_name`.
        """
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        if self.merge_on_export:
            base_of(self.model).save_pretrained(path, state_dict=merged_weights(self.model))
        else:
            self.model.active_peft_config.revision = self.revision  # of the base
            self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)
        write_card(
            self,
            path,
            library_name="transformers" if self.merge_on_export else "peft",
            pipeline_tag="text-generation",
            base_model=self.model_name,
            usage=USAGE.format(
                package="transformers" if self.merge_on_export else "peft",
                kind="AutoModelForCausalLM" if self.merge_on_export else "AutoPeftModelForCausalLM",
            ),
        )
        return path


def real_rows(batch: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(row, index) of the rows of a batch that do not only fill it."""
    pairs = enumerate(batch["index"].tolist())
    return [(row, index) for row, index in pairs if index != PADDING]
