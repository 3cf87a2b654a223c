"""The preference losses are TRL's on the same texts: log-likelihoods and formula in one.

TRL's trainers tokenise, run the model and compute the loss of one batch; here the same texts go
through our scoring and our loss. Responses have equal lengths, because TRL's CPO averages its
likelihood term over the tokens of a batch and ours per sample.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from pl_pointwise.tasks.language_model.likelihood.batch import collate_responses
from pl_pointwise.tasks.language_model.likelihood.preference_losses import (
    cpo_loss,
    dpo_loss,
    simpo_loss,
)
from pl_pointwise.tasks.language_model.likelihood.scoring import (
    ResponseScorer,
    ResponseStatistics,
)
from tests.tasks.conftest import build_model

trl = pytest.importorskip("trl")  # It needs Python 3.11.
cpo = pytest.importorskip("trl.experimental.cpo")

EXAMPLES = [
    {"prompt": "what is ice", "chosen": " cold", "rejected": " wind"},
    {"prompt": "who lives in the sea", "chosen": " fish", "rejected": " rain"},
    {"prompt": "why", "chosen": " snow", "rejected": " lake"},
]
SIDES = ("chosen", "rejected")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": len(EXAMPLES),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "max_length": 512,
    }


def scores(model: Any, prompts: list[list[int]], responses: Any) -> ResponseStatistics:
    """Our log-likelihoods, (3, 2): chosen, rejected, end token included."""
    with torch.no_grad():
        scorer = ResponseScorer(model.eval(), method="plain")
        return scorer(collate_responses(prompts, responses), reference=False)


def tokens(tokenizer: Any) -> tuple[list[list[int]], Any]:
    """Prompts and (chosen, rejected) of the examples."""
    prompts = [tokenizer(e["prompt"])["input_ids"] for e in EXAMPLES]
    responses = [
        [[*tokenizer(e[side])["input_ids"], tokenizer.eos_token_id] for side in SIDES]
        for e in EXAMPLES
    ]
    return prompts, responses


def tokens_of_cpo(batch: Any) -> tuple[list[list[int]], Any]:
    """The same from CPOTrainer's batch: it starts prompts with a BOS that DPOTrainer leaves out."""
    prompts, responses = [], []
    for row in range(len(EXAMPLES)):
        labels = [batch[f"{side}_labels"][row] for side in SIDES]
        prompts.append(
            batch["chosen_input_ids"][row][: int((labels[0] != -100).nonzero()[0])]
        )
        responses.append([kept[kept != -100].tolist() for kept in labels])
    return [prompt.tolist() for prompt in prompts], responses


def first_batch(trainer: Any) -> Any:
    return next(iter(trainer.get_train_dataloader()))


def assert_equal(theirs: Tensor, ours: Tensor) -> None:
    # the samples differ, so a wrong sign or pairing would show
    assert ours.std() > 1e-3
    torch.testing.assert_close(theirs.detach(), ours.mean(), rtol=1e-5, atol=1e-5)


def test_dpo_is_that_of_trl(tiny_tokenizer, settings) -> None:
    size = len(tiny_tokenizer)
    policy = build_model("llama", seed=0, vocab_size=size)
    reference = build_model("llama", seed=1, vocab_size=size)
    trainer = trl.DPOTrainer(
        model=policy,
        ref_model=reference,
        args=trl.DPOConfig(**settings, beta=0.1),
        train_dataset=Dataset.from_list(EXAMPLES),
        processing_class=tiny_tokenizer,
    )
    theirs = trainer.compute_loss(trainer.model.eval(), first_batch(trainer))
    own, ref = (
        scores(m, *tokens(tiny_tokenizer)).log_likelihood for m in (policy, reference)
    )
    assert_equal(theirs, dpo_loss(*(own - ref).unbind(1), beta=0.1))


@pytest.mark.parametrize("loss_type", ["sigmoid", "simpo"])
def test_cpo_and_simpo_are_those_of_trl(loss_type, tiny_tokenizer, settings) -> None:
    policy = build_model("llama", seed=0, vocab_size=len(tiny_tokenizer))
    alone = loss_type == "simpo"
    config = cpo.CPOConfig(
        **settings,
        loss_type=loss_type,
        beta=0.25,
        simpo_gamma=0.5,
        cpo_alpha=0.0 if alone else 1.0,
    )
    trainer = cpo.CPOTrainer(
        model=policy,
        args=config,
        train_dataset=Dataset.from_list(EXAMPLES),
        processing_class=tiny_tokenizer,
    )
    batch = first_batch(trainer)
    theirs, _ = trainer.get_batch_loss_metrics(trainer.model.eval(), batch)
    found = scores(policy, *tokens_of_cpo(batch))
    means = found.mean_log_likelihood.unbind(1)
    if alone:
        ours = simpo_loss(*means, beta=0.25, gamma=0.5)
    else:
        ours = cpo_loss(*found.log_likelihood.unbind(1), means[0], beta=0.25)
    assert_equal(theirs, ours)
