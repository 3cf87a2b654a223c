"""Every trainer that the mix-in goes before, with a tiny model: rows of the table of doors."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, logsigmoid, softplus
from transformers import Trainer, TrainingArguments

from pl_pointwise import Constraint, Pointwise, PointwiseLoss
from pl_pointwise.trainer import PointwiseTrainerMixin

STATED = Pointwise(alpha=0.8, dual_lr=1.0)
"""Micro-batches equal a batch then; else Λ is measured on the first of them."""
QUESTIONS = [f"how long is river {number}" for number in range(16)]
ANSWERS = [
    f"it runs {'very ' * (number % 3)}far, {7 * number} km" for number in range(16)
]


@dataclass(frozen=True)
class Run:
    """How a door trains: 16 rows, 4 a step, 2 epochs."""

    double: bool = False
    stated: bool = False
    pieces: int = 1  # Micro-batches.
    ranks: int = 1
    bf16: bool = False
    compiled: bool = False
    rows: int = 16
    saves: bool = False
    dies_at: int | None = None  # Within the saving of that step.
    resumes: bool | str = False  # True: from the last whole checkpoint.

    @property
    def size(self) -> int:
        """Rows of a micro-batch on a rank."""
        return 4 // self.pieces // self.ranks

    @property
    def formulation(self) -> Pointwise:
        return STATED if self.stated else Pointwise()

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Kind:
    """A trainer, what it trains, and its terms.

    Attributes:
        make: of a folder the trainer's class, that of its arguments, and its options with
            "model" and all rows as "train_dataset".
    """

    make: Callable[[Path], tuple[type, type, dict[str, Any]]]
    terms: Callable[[Any, Any, dict[str, Any]], tuple[Tensor, Tensor]]
    at_most: float
    rate: float = 0.05
    settings: tuple[tuple[str, Any], ...] = ()


# The rows and models -----------------------------------------------------------------------------


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor, labels: Any = None, **_: Any) -> Any:
        return {"logits": self.layers(x)[:, 0]}


def regression(_: Path) -> tuple[type, type, dict[str, Any]]:
    from datasets import Dataset

    x = torch.randn(16, 3)
    rows = Dataset.from_dict({"x": x.tolist(), "labels": (x.sum(1) + 1).tolist()})
    return Trainer, TrainingArguments, {"model": Regression(), "train_dataset": rows}


def of_regression(
    trainer: Any, model: Any, inputs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    dtype = next(model.parameters()).dtype
    found = model(inputs["x"].to(dtype))["logits"].to(dtype)
    return found.square(), (found - inputs["labels"]).abs()


def llama(head: str) -> tuple[nn.Module, Any]:
    import transformers

    from tests.tasks.conftest import build_tokenizer

    tokenizer = build_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        num_attention_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
        initializer_range=0.2,
        **sizes,
    )
    return getattr(transformers, head)(config), tokenizer


def answers(_: Path) -> tuple[type, type, dict[str, Any]]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = llama("LlamaForCausalLM")
    rows = Dataset.from_dict({"prompt": QUESTIONS, "completion": ANSWERS})
    options = {"model": model, "processing_class": tokenizer, "train_dataset": rows}
    return SFTTrainer, SFTConfig, options


def log_likelihood(model: Any, inputs: dict[str, Any], mask: Tensor) -> Tensor:
    """Mean over the tokens of a mask (B, T)."""
    ids, mask = inputs["input_ids"], mask[:, 1:]
    found = model(input_ids=ids, attention_mask=inputs["attention_mask"]).logits
    found = found.to(next(model.parameters()).dtype)
    each = found[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return (each * mask).sum(1) / mask.sum(1)


def of_answers(
    trainer: Any, model: Any, inputs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    whole = log_likelihood(model, inputs, inputs["attention_mask"])
    return -whole, -log_likelihood(model, inputs, inputs["labels"] != -100)


def preferences(name: str) -> Any:
    from datasets import Dataset

    worse = [answer[::-1] for answer in ANSWERS]
    return Dataset.from_dict(
        {"prompt": QUESTIONS, "chosen": ANSWERS, "rejected": worse}
    )


def pairs(_: Path) -> tuple[type, type, dict[str, Any]]:
    from trl import DPOConfig, DPOTrainer

    model, tokenizer = llama("LlamaForCausalLM")
    options = {
        "model": model,
        "ref_model": copy.deepcopy(model),
        "processing_class": tokenizer,
    }
    return DPOTrainer, DPOConfig, options | {"train_dataset": preferences("DPO")}


def of_pairs(trainer: Any, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    mask = inputs["completion_mask"]
    chosen, rejected = log_likelihood(model, inputs, mask).chunk(2)
    with torch.no_grad():
        reference = trainer.ref_model.to(chosen.dtype)
        before, against = log_likelihood(reference, inputs, mask).chunk(2)
    return -logsigmoid(chosen - before - rejected + against), -chosen


def rewards(_: Path) -> tuple[type, type, dict[str, Any]]:
    from trl import RewardConfig, RewardTrainer

    model, tokenizer = llama("LlamaForSequenceClassification")
    options = {"model": model, "processing_class": tokenizer}
    return (
        RewardTrainer,
        RewardConfig,
        options | {"train_dataset": preferences("Reward")},
    )


def of_rewards(
    trainer: Any, model: Any, inputs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    found = model(**given).logits[:, 0].to(next(model.parameters()).dtype)
    chosen, rejected = found.chunk(2)
    return softplus(rejected - chosen), (chosen + rejected - 1).abs()


BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
    "num_labels": 1,
}


def save_bert(folder: Path, head: str) -> Path:
    import transformers

    from tests.tasks.reranker.conftest import save_tiny_tokenizer

    path = save_tiny_tokenizer(folder / head)
    size = len(transformers.PreTrainedTokenizerFast.from_pretrained(path))
    model = getattr(transformers, head)(
        transformers.BertConfig(vocab_size=size, **BERT)
    )
    model.save_pretrained(path)
    return path


def likeness(first: str, second: str) -> Any:
    from datasets import Dataset

    labels = [0.5 * (number % 3) for number in range(16)]
    return Dataset.from_dict({first: QUESTIONS, second: ANSWERS, "label": labels})


def embeddings(folder: Path) -> tuple[type, type, dict[str, Any]]:
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    path = save_bert(folder, "BertModel")
    modules = [Transformer(str(path)), Pooling(BERT["hidden_size"])]
    options = {"model": SentenceTransformer(modules=modules, device="cpu")}
    options["train_dataset"] = likeness("question", "answer")
    return SentenceTransformerTrainer, SentenceTransformerTrainingArguments, options


def of_embeddings(
    trainer: Any, model: Any, inputs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    features, labels = trainer.collect_features(inputs)
    dtype = next(model.parameters()).dtype
    first, second = (model(each)["sentence_embedding"].to(dtype) for each in features)
    return first.square().mean(1), (cosine_similarity(first, second) - labels).abs()


def scores(folder: Path) -> tuple[type, type, dict[str, Any]]:
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import (
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
    )

    path = save_bert(folder, "BertForSequenceClassification")
    model = CrossEncoder(str(path), device="cpu", local_files_only=True)
    options = {"model": model, "train_dataset": likeness("query", "passage")}
    return CrossEncoderTrainer, CrossEncoderTrainingArguments, options


def of_scores(
    trainer: Any, model: Any, inputs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    texts = [*zip(inputs["query"], inputs["passage"], strict=True)]
    features = trainer.model.preprocess(texts)
    found = model(features)["scores"].view(-1).to(next(model.parameters()).dtype)
    return found.square(), (found - inputs["label"]).abs()


OF_TRL = (("max_length", None), ("gradient_checkpointing", False))
KINDS = {
    "Trainer": Kind(regression, of_regression, at_most=0.2),
    "SFTTrainer": Kind(answers, of_answers, at_most=3.0, rate=0.2, settings=OF_TRL),
    "DPOTrainer": Kind(pairs, of_pairs, at_most=3.0, rate=0.2, settings=OF_TRL),
    "RewardTrainer": Kind(
        rewards, of_rewards, at_most=0.2, rate=0.005, settings=OF_TRL
    ),
    "SentenceTransformerTrainer": Kind(embeddings, of_embeddings, at_most=0.1),
    "CrossEncoderTrainer": Kind(
        # DDP does not find the scores in what a CrossEncoder returns, and takes all for unused.
        scores,
        of_scores,
        at_most=0.1,
        settings=(("ddp_find_unused_parameters", False),),
    ),
}


# A run, and a plain loop over the batches that it saw --------------------------------------------


def constrained_class(base: type, kind: Kind) -> type:
    class Constrained(PointwiseTrainerMixin, base):  # type: ignore[misc, valid-type]
        def terms(self, model: Any, inputs: dict[str, Any]) -> tuple[Any, ...]:
            objective, values = kind.terms(self, model, inputs)
            return objective, {"fit": values}

        def compute_loss(
            self, model: Any, inputs: Any, *args: Any, **options: Any
        ) -> Any:
            self.seen.append((self.state.global_step, copy.deepcopy(dict(inputs))))
            return super().compute_loss(model, inputs, *args, **options)

    return Constrained


def arguments(folder: Path, run: Run, kind: Kind) -> dict[str, Any]:
    found = {
        "output_dir": str(folder),
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": kind.rate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": run.size,
        "gradient_accumulation_steps": run.pieces,
        "num_train_epochs": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "steps" if run.saves else "no",
        "save_steps": 2,
        "logging_strategy": "no",
        "bf16": run.bf16,
        "torch_compile": run.compiled,
        **dict(kind.settings),
    }
    if run.compiled:
        found["torch_compile_backend"] = "aot_eager"
    return found


def train(name: str, folder: Path, run: Run) -> dict[str, Any]:
    kind = KINDS[name]
    torch.manual_seed(0)
    base, of_arguments, options = kind.make(folder)
    options["model"] = options["model"].to(run.dtype)
    fresh = copy.deepcopy(options["model"])
    options["train_dataset"] = options["train_dataset"].select(range(run.rows))
    trainer = constrained_class(base, kind)(
        args=of_arguments(**arguments(folder / "run", run, kind)),
        constraints={"fit": Constraint(at_most=kind.at_most)},
        formulation=run.formulation,
        **options,
    )
    trainer.seen = []
    if run.dies_at is not None:
        dies_within_saving(trainer, run.dies_at)
    resumed: Any = run.resumes
    if isinstance(resumed, str):
        resumed = str(folder / "run" / resumed)
    trainer.train(resume_from_checkpoint=resumed or None)
    found = outcome(trainer.model, trainer.constrained)
    if run.ranks == 1 and not run.resumes:
        found["replayed"] = replayed(trainer, fresh, kind, run)
    return found


def dies_within_saving(trainer: Any, step: int) -> None:
    """The weights are there, λ is not."""
    save = trainer._save_multipliers

    def save_or_die(folder: Path) -> None:
        if trainer.state.global_step == step:
            die()
        save(folder)

    trainer._save_multipliers = save_or_die


def outcome(model: nn.Module, loss: PointwiseLoss) -> dict[str, Any]:
    weights = [weight.detach().clone() for weight in model.parameters()]
    return {"weights": weights, "multipliers": loss.multipliers["fit"].clone()}


def replayed(trainer: Any, model: nn.Module, kind: Kind, run: Run) -> dict[str, Any]:
    """Plain PyTorch over the batches that the trainer saw."""
    constraints = {"fit": Constraint(at_most=kind.at_most)}
    loss = PointwiseLoss(constraints, run.formulation, samples=run.rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=kind.rate)
    model.train()
    # As Accelerate does it: each forward pass by itself.
    model.forward = torch.autocast("cpu", torch.bfloat16, enabled=run.bf16)(
        model.forward
    )
    for _, of_step in groupby(trainer.seen, key=lambda each: each[0]):
        window = [inputs for _, inputs in of_step]
        optimizer.zero_grad()
        for inputs in window:
            given = copy.deepcopy(inputs)
            index = given.pop("index")
            objective, values = trainer.terms(model, given)
            (loss(objective, values, index) / len(window)).backward()
        optimizer.step()
        loss.step()
    return outcome(model, loss)
