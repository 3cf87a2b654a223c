"""A module around a causal language model with adapters: what both language tasks share.

Loading, training mode, scoring of responses, checkpoints without the frozen base, generation and
export. Objectives and constraints are the task's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pl_pointwise import PointwiseModule
from pl_pointwise.data import PADDING

from .conversations import ConversationEncoder
from .language_model import Attention, Dtype, Lora, load_language_model, load_tokenizer
from .reference import ReferenceCache, belongs_to_adapter, caching_problem
from .responses import ResponseScorer, ResponseStatistics, ScoringPath


@dataclass
class Generation:
    """How an answer is generated.

    Args:
        max_new_tokens: the longest answer.
        sample: draw tokens instead of taking the likeliest.
        temperature: of the draws.
        top_k: tokens a draw may take; 0 for all.
    """

    max_new_tokens: int = 256
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 50


class LanguageModelModule(PointwiseModule):
    """A causal language model with LoRA adapters; the reference is the model without them.

    A subclass calls :meth:`load_policy` in ``__init__``, after the base class's, and scores with
    :meth:`score`. Batches are those of response_batch.py.
    """

    host_keys: tuple[str, ...] = ("index", "prompt_lengths", "response_lengths")

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
    ) -> None:
        """Load the model; the arguments are :class:`When2CallModule`'s."""
        self.model_name, self.revision = model_name, revision
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
            tokenizer = load_tokenizer(self.model_name, revision=self.revision)
            self._encoder = ConversationEncoder(tokenizer)
        return self._encoder

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.encoder.tokenizer

    def generate(self, prompt_ids: Tensor, prompt_lengths: Tensor) -> list[str]:
        """An answer to each prompt, without the token that ends it.

        prompt_ids: (B, P), padded on the right; prompt_lengths: (B,).
        """
        settings = self.generation
        stops = set(self.encoder.end_ids)
        own: Any = getattr(self.model.generation_config, "eos_token_id", None)
        stops.update(own if isinstance(own, list) else [] if own is None else [own])
        pad = self.tokenizer.pad_token_id
        pad = min(stops) if not isinstance(pad, int) else pad
        lengths = prompt_lengths.tolist()
        width = max(lengths)
        ids = prompt_ids.new_full((len(lengths), width), pad)  # padded on the left
        for row, length in enumerate(lengths):
            ids[row, width - length :] = prompt_ids[row, :length]
        shift = torch.tensor([width - length for length in lengths], device=ids.device)
        mask = torch.arange(width, device=ids.device) >= shift[:, None]
        drawing = {"temperature": settings.temperature, "top_k": settings.top_k}
        generated = self.model.generate(
            input_ids=ids,
            attention_mask=mask.long(),
            max_new_tokens=settings.max_new_tokens,
            do_sample=settings.sample,
            eos_token_id=sorted(stops),
            pad_token_id=pad,
            **(drawing if settings.sample else {"temperature": None, "top_p": None, "top_k": None}),
        )
        answers = []
        for row in generated[:, width:].tolist():
            end = next((place for place, token in enumerate(row) if token in stops), len(row))
            text = self.tokenizer.decode(row[:end], skip_special_tokens=False)
            assert isinstance(text, str)
            answers.append(text)
        return answers

    def export(self, path: str | Path) -> Path:
        """Save adapter and tokenizer as a folder that `peft.AutoPeftModelForCausalLM` loads."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        self.model.active_peft_config.revision = self.revision  # of the base
        self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)
        return path


def real_rows(batch: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(row, index) of the rows of a batch that do not only fill it."""
    pairs = enumerate(batch["index"].tolist())
    return [(row, index) for row, index in pairs if index != PADDING]
