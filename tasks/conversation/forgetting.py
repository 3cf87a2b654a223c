"""How likely an answer to forget is to be, and how well a model has forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from lightning.pytorch.utilities import rank_zero_info
from scipy.stats import ks_2samp
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.language_model.conversations import ConversationEncoder
from pl_pointwise.tasks.language_model.encoded import EncodedResponses
from pl_pointwise.tasks.language_model.loading import load_language_model, load_tokenizer
from pl_pointwise.tasks.language_model.records import Record, Response
from pl_pointwise.tasks.language_model.roles import collate_rows
from pl_pointwise.tasks.language_model.scoring import ResponseScorer

SCORED_AT_ONCE = 4
"""Samples."""


def add_targets(
    encoded: EncodedResponses, like: str | None, encoder: ConversationEncoder, roles: Sequence[str]
) -> None:
    """Gives every answer to forget without ``around`` the s̄ that the model ``like`` has of it.

    Raises:
        DataError: there is such an answer and no model, or one that reads other tokens.
    """
    open_ = [place for place, record in enumerate(encoded.records) if _lacks_target(record)]
    if not open_:
        return
    if like is None:
        raise DataError(
            f"{encoded.records[open_[0]].where}: an answer to forget has no around, how likely a "
            "token of it is to be (mean log-likelihood). Give the number, or a model that never "
            "learned the answer as data.forget_like; to make it unlikely and no more, role avoid."
        )
    other = load_tokenizer(like, default_template="{{ messages }}").get_vocab()
    if other != encoder.tokenizer.get_vocab():
        raise DataError(
            f"forget_like={like}: its tokenizer has another vocabulary ({len(other):,} tokens for "
            f"{len(encoder.tokenizer.get_vocab()):,}), so its numbers are of other tokens. Name a "
            "model with the tokenizer of the one that is trained."
        )
    rank_zero_info(f"{len(open_):,} answers to forget are to be as likely as {like} has them.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_language_model(like, lora=None).eval().requires_grad_(False).to(device)
    scorer = ResponseScorer(model, "plain")
    for start in range(0, len(open_), SCORED_AT_ONCE):
        places = open_[start : start + SCORED_AT_ONCE]
        batch = collate_rows([encoded[place] | {"index": place} for place in places], roles)
        tensors = {n: each.to(device) for n, each in batch.items() if isinstance(each, Tensor)}
        with torch.no_grad():
            means = scorer(tensors, reference=False).mean_log_likelihood.tolist()
        for place, of_record in zip(places, means, strict=True):
            record = encoded.records[place]
            responses = [
                replace(each, tolerance=round(mean, 4)) if _is_open(each) else each
                for each, mean in zip(record.responses, of_record, strict=False)
            ]
            encoded.records[place] = replace(record, responses=tuple(responses))


class ForgetQuality(Metric):
    """Whether forgotten answers are as likely as they are to be, as a sample: the p-value.

    Of Kolmogorov's and Smirnov's test of two samples, the s̄ of the answers and what they are to
    be: near 1 where they cannot be told apart, near 0 where they can. TOFU (Maini et al., 2024)
    has the same test on the ratio of altered answers' probabilities to the right one's.
    """

    values: list[Tensor]
    targets: list[Tensor]
    full_state_update = False
    higher_is_better = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")
        self.add_state("targets", [], dist_reduce_fx="cat")

    def update(self, values: Tensor, targets: Tensor) -> None:
        """values, targets: (n,) of as many answers."""
        self.values.append(values.detach().float())
        self.targets.append(targets.detach().float())

    def compute(self) -> Tensor:
        values, targets = dim_zero_cat(self.values), dim_zero_cat(self.targets)
        found = ks_2samp(values.cpu().numpy(), targets.cpu().numpy()).pvalue
        return torch.tensor(float(found), device=values.device)


def _is_open(response: Response) -> bool:
    return response.role == "forget" and response.tolerance is None


def _lacks_target(record: Record) -> bool:
    return any(_is_open(each) for each in record.responses)
