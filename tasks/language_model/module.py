"""A module around a causal language model: what the language tasks share.

Loading, training mode, scoring of responses, checkpoints without what is frozen, generation and
export. Objectives and constraints are the task's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pl_pointwise import PointwiseModule
from pl_pointwise.checkpoints import from_plain
from pl_pointwise.data import PADDING
from pl_pointwise.model_card import write_card
from pl_pointwise.own_hooks import part_of
from pl_pointwise.random_state import replayed_random_state
from pl_pointwise.step import pieces_of

from .adapters import Lora, merged_weights, saved_adapter
from .calls import is_valid_call
from .conversations import ConversationEncoder
from .frozen import frozen_reference, keep_reference
from .generation import Answers, Generation, generate_answers
from .loading import Dtype, load_language_model, load_tokenizer
from .policy import Policy
from .reference import ReferenceCache, base_of, belongs_to_adapter, caching_problem
from .refusals import is_refusal
from .scoring import ResponseScorer, ResponseStatistics

USAGE = """
from {package} import {kind}
from transformers import AutoTokenizer

name = "PATH OR NAME OF THIS REPOSITORY"
model, tokenizer = {kind}.from_pretrained(name), AutoTokenizer.from_pretrained(name)
"""


class LanguageModelModule(PointwiseModule):
    """A causal language model; the reference is the model without its adapters, or before training.

    A subclass calls :meth:`load_policy` in ``__init__``, after the base class's, and scores with
    :meth:`score`. Batches are those of batch.py.

    Attributes:
        policy: as it was given.
        lora, generation: the policy's, or the task's where it has "default".
        model_name, revision, chat_template, template_arguments: the policy's, which the data module
            takes over.
    """

    host_keys: tuple[str, ...] = ("index", "records", "prompt_lengths", "response_lengths")
    shared_objective = "kl"

    default_template: ClassVar[str | None] = None
    """The chat template of a model whose tokenizer brings none; None refuses such a model."""
    default_lora: ClassVar[Lora]
    """The task's adapters."""
    default_generation: ClassVar[Generation] = Generation()
    """How the task answers prompts."""

    def load_policy(self, policy: Policy | Mapping[str, Any]) -> None:
        """Load the model; a mapping is from a checkpoint's hyperparameters.

        Raises:
            ValueError: no policy, but perhaps the model's name.
        """
        policy = from_plain(Policy, policy)
        self.policy = policy
        self.lora = self.default_lora if policy.lora == "default" else policy.lora
        self.generation = self.default_generation
        if isinstance(policy.generation, Generation):
            self.generation = policy.generation
        self.model_name, self.revision = policy.model_name, policy.revision
        self.chat_template = policy.chat_template
        self.template_arguments = policy.template_arguments
        dtype: Dtype = policy.dtype
        if self.lora is None:
            dtype = _trainable_dtype(dtype)
        load = partial(
            _loaded,
            policy.model_name,
            seed=torch.initial_seed(),
            dtype=dtype,
            attention=policy.attention,
            quantize_4bit=policy.quantize_4bit,
            revision=policy.revision,
        )
        model = load(lora=self.lora, gradient_checkpointing=policy.gradient_checkpointing)
        if isinstance(model, PreTrainedModel):
            keep_reference(model, load)
        # Loaded in evaluation mode, and Lightning keeps the mode it finds.
        self.model = model.train()
        self.scorer = ResponseScorer(model, policy.scoring_method)
        self._encoder: ConversationEncoder | None = None
        self.register_state_dict_post_hook(_drop_frozen_base)

    @part_of("on_fit_start")
    def _prepare_fit(self) -> None:
        """Once a fit: training mode, the comparison of scoring methods, the reference's cache."""
        self.train()
        self.scorer.method = self.policy.scoring_method
        kept_in = self.policy.reference_cache
        if kept_in is None or self.scorer.cache is not None:
            return
        problem = caching_problem(self.model)
        if problem:
            rank_zero_warn(problem)
            return
        folder = None if kept_in == "memory" else kept_in
        self.scorer.cache = ReferenceCache(
            self.model, folder, counts_files=self.trainer.is_global_zero
        )

    @part_of("on_train_epoch_end")
    def _log_reference_cache(self) -> None:
        if self.scorer.cache is not None:
            self.log_dict(self.scorer.cache.report(self.trainer), sync_dist=True)

    @part_of("on_train_start")
    def _fill_cache(self) -> None:
        """Where all weights are trained: the cache in place of a second copy of them."""
        frozen, cache = frozen_reference(self.model), self.scorer.cache
        if frozen is None or cache is None:
            return
        with torch.no_grad(), replayed_random_state(self.device):
            for batch in self._batches_to_come(share=cache.folder is not None):
                self(batch)
                if self.scorer.method == "plain":
                    break  # It reads no cache.
        self.train()
        self.trainer.strategy.barrier()
        if self.scorer.method == "plain":
            return
        before = frozen.size
        frozen.release(self.model)
        rank_zero_info(
            f"The reference cache holds every sample. The copy of the weights is dropped, "
            f"{before / 2**20:,.0f} MiB, but for {frozen.size / 2**20:,.0f} MiB of the head."
        )

    def _batches_to_come(self, share: bool) -> Iterator[Mapping[str, Any]]:
        """All samples that this fit trains on, and then those it validates on, once each.

        share: this rank's part of them, where all ranks read what one has kept.
        """
        rank, ranks = (self.global_rank, self.trainer.world_size) if share else (0, 1)
        validation = self.trainer.val_dataloaders or []
        if not isinstance(validation, list):
            validation = [validation]
        for loader in (self.trainer.train_dataloader, *validation):
            self.train(loader is self.trainer.train_dataloader)
            dataset = loader.dataset
            size = self.training_settings.micro_batch_size or loader.batch_size or 1
            for start in range(rank * size, len(dataset), ranks * size):
                rows = [dataset[row] for row in range(start, min(start + size, len(dataset)))]
                batch = loader.collate_fn(rows)
                yield from pieces_of(self._apply_batch_transfer_handler(batch, self.device))

    def score(self, batch: Mapping[str, Any], reference: bool | Tensor) -> ResponseStatistics:
        """Log-likelihoods of all responses, and the divergence from the reference if asked for."""
        return self.scorer(batch, reference)

    # The state: what is trained, and nothing of the frozen base -----------------------------------

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Takes a checkpoint's state, which holds what is trained only, and a whole one.

        Raises:
            RuntimeError: with ``strict``, a trained weight that is missing, or one too many.
        """
        keys = super().load_state_dict(state_dict, strict=False, assign=assign)
        missing = sorted(self._trained_names().intersection(keys.missing_keys))
        problems = [f"missing {name}" for name in missing]
        problems += [f"unexpected {name}" for name in keys.unexpected_keys]
        if strict and problems:
            raise RuntimeError(
                f"The checkpoint does not fit what this model trains: {', '.join(problems[:4])}"
                f"{f' and {len(problems) - 4} more' if len(problems) > 4 else ''}. Load it with "
                "the model and the lora settings it was trained with."
            )
        return keys

    def _trained_names(self) -> set[str]:
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
            self._encoder = ConversationEncoder(
                tokenizer, template_arguments=self.template_arguments
            )
        return self._encoder

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.encoder.tokenizer

    def generate(
        self, prompt_ids: Tensor, prompt_lengths: Tensor, *, reference: bool = False
    ) -> Answers:
        """An answer to each prompt, generated as the policy says; see generation.py.

        Args:
            prompt_ids: padded on the right, (B, P).
            prompt_lengths: (B,).
            reference: let the reference answer, the model with its adapters off.
        """
        padded = zip(prompt_ids.tolist(), prompt_lengths.tolist(), strict=True)
        prompts = [ids[:length] for ids, length in padded]
        return generate_answers(
            self.model, self.encoder, prompts, self.generation, reference=reference
        )

    def answers_to(self, prompts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Answers to conversations outside any data set, generated as the policy says.

        prompts: {"messages": [{"role", "content"}], "tools": […]}, tools where there are any.
        Returns: {"answer", "refused", "cut"} of each, and "valid_call" where it has tools.
        """
        texts = [
            self.encoder.prompt(each["messages"], each.get("tools") or [], "a prompt to answer")
            for each in prompts
        ]
        ids = [prompt for prompt, _ in self.encoder.encode(texts, [[] for _ in texts])]
        answers = generate_answers(self.model, self.encoder, ids, self.generation)
        found = []
        for each, text, cut in zip(prompts, answers.texts, answers.cut, strict=True):
            row = {"answer": text, "refused": is_refusal(text), "cut": cut}
            if each.get("tools"):
                row["valid_call"] = is_valid_call(text, each["tools"])
            found.append(row)
        return found

    def export(self, path: str | Path) -> Path:
        """Save model, tokenizer and model card as a folder.

        The adapter, which `peft.AutoPeftModelForCausalLM` loads; or the whole model, which
        `AutoModelForCausalLM` loads, with ``merge_on_export``, without adapters, and where the base
        is itself an adapter on another. The card says which. Another run takes either kind as its
        `model_name`.
        """
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        if not isinstance(self.model, PeftModel):
            whole = True
            self.model.save_pretrained(path)
        elif whole := self._exports_whole():
            base_of(self.model).save_pretrained(path, state_dict=merged_weights(self.model))
        else:
            self.model.active_peft_config.revision = self.revision  # of the base
            self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)
        package = "transformers" if whole else "peft"
        kind = "AutoModelForCausalLM" if whole else "AutoPeftModelForCausalLM"
        write_card(
            self,
            path,
            library_name=package,
            pipeline_tag="text-generation",
            base_model=self.model_name,
            usage=USAGE.format(package=package, kind=kind),
        )
        return path

    def _exports_whole(self) -> bool:
        """Whether adapters are merged: an adapter file can name a base, but not two adapters."""
        if not self.policy.merge_on_export and saved_adapter(self.model_name, self.revision):
            rank_zero_info(
                f"{self.model_name} is an adapter itself, so the whole model is exported, with "
                "both adapters merged into it."
            )
            return True
        return self.policy.merge_on_export


def _loaded(name: str, seed: int, **options: Any) -> PreTrainedModel | PeftModel:
    """The model; what its files lack depends on the seed alone, not on what was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return load_language_model(name, **options)


def _trainable_dtype(dtype: Dtype) -> Dtype:
    """That of weights which are trained themselves."""
    if dtype in ("bfloat16", "float16"):
        rank_zero_warn(
            f"policy.lora=null with dtype: {dtype}: a step smaller than 1/256 of a weight is lost "
            'in rounding. Leave dtype "auto" for float32 weights, and set trainer.precision to '
            "bf16-mixed for the speed."
        )
    return "float32" if dtype == "auto" else dtype


def _drop_frozen_base(
    module: LanguageModelModule, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Leaves what is trained in the state: a hook, which no method of a subclass can replace."""
    names = {prefix + name for name in module._trained_names()}
    for name in [name for name in state if name.startswith(prefix) and name not in names]:
        del state[name]


def real_samples(batch: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(position in the batch, index) of the samples of a batch that do not only fill it."""
    pairs = enumerate(batch["index"].tolist())
    return [(row, index) for row, index in pairs if index != PADDING]
