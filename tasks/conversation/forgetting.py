"""How likely an answer to forget is to be, and what a model has forgotten and kept.

The metrics are those of TOFU (Maini et al., "TOFU: A Task of Fictitious Unlearning for LLMs", 2024,
arXiv 2401.06121, and its code, locuslab/tofu), over the records of a data set. For a question's
right answer in other words ã (role paraphrase, else the answer itself) and its wrong answers â
(role wrong), with s̄ the mean log-likelihood of an answer's tokens, the truth ratio is

    R = exp(mean of s̄(â) − s̄(ã)),

the geometric mean of P(â)^(1/|â|), as in the code; the paper prints the arithmetic one.

    forget_quality  the p-value of Kolmogorov's and Smirnov's test between the R of the records to
                    forget and those of the model that they are to be like (data.forget_like); where
                    either is not known, between the s̄ of the answers and what these are to be
    truth_ratio     the mean of min(R, 1/R) of the records to forget: 1 where right answers are as
                    likely as wrong ones
    probability     the mean of e^s̄ of the answers to keep
    rouge           how much of them greedy answers say, the mean of ROUGE-L's recall, unstemmed
    truth           the mean of max(0, 1 − R) of the records to keep
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.text import rouge_score
from torchmetrics.utilities import dim_zero_cat

from pl_pointwise.errors import DataError
from pl_pointwise.evaluation import MeanBySample
from pl_pointwise.extras import needs
from pl_pointwise.task import Metrics
from pl_pointwise.tasks.language_model.conversations import ConversationEncoder
from pl_pointwise.tasks.language_model.encoded import EncodedResponses
from pl_pointwise.tasks.language_model.loading import load_language_model, load_tokenizer
from pl_pointwise.tasks.language_model.records import Response
from pl_pointwise.tasks.language_model.roles import collate_rows, mean_over
from pl_pointwise.tasks.language_model.scoring import ResponseScorer

from .records import MEASURED, ROLES


def add_targets(
    encoded: EncodedResponses, like: str | None, encoder: ConversationEncoder, name: str
) -> None:
    """Gives every answer to forget without ``around`` the s̄ that the model ``like`` has of it.

    And those of its record by which it is measured. name: the model that is trained.
    """

    def is_open(response: Response) -> bool:
        return response.role == "forget" and response.tolerance is None

    places = [i for i, each in enumerate(encoded.records) if any(map(is_open, each.responses))]
    if not places:
        return
    if like is None:
        raise DataError(
            f"{encoded.records[places[0]].where}: an answer to forget has no around, how likely a "
            "token of it is to be (mean log-likelihood). Give the number, or a model that never "
            "learned the answer as data.forget_like; to make it unlikely and no more, role avoid."
        )
    if like == name or Path(like).resolve() == Path(name).resolve():
        raise DataError(
            f"forget_like={like}: it is the model that is trained, so there is nothing to forget. "
            "Name the one that has learned the answers: --model.init_args.policy.model_name "
            "results/keep/export."
        )
    theirs = load_tokenizer(like, default_template="{{ messages }}").get_vocab()
    if theirs != encoder.tokenizer.get_vocab():
        raise DataError(
            f"forget_like={like}: it has another vocabulary than {name}. Name a model of the same "
            "kind, as it was before it learned the answers."
        )
    rank_zero_info(f"Records to forget as likely as {like} has them: {len(places):,}.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_language_model(like, lora=None).eval().requires_grad_(False).to(device)
    scorer = ResponseScorer(model, "plain")
    for start in range(0, len(places), 4):
        some = places[start : start + 4]
        batch = collate_rows([encoded[place] | {"index": place} for place in some], ROLES)
        tensors = {n: each.to(device) for n, each in batch.items() if isinstance(each, Tensor)}
        with torch.no_grad():
            means = scorer(tensors, reference=False).mean_log_likelihood.tolist()
        for place, of_record in zip(some, means, strict=True):
            record = encoded.records[place]
            responses = list(record.responses)
            for column, each in enumerate(responses):
                if is_open(each) or each.role in MEASURED:
                    responses[column] = replace(each, tolerance=round(of_record[column], 4))
            encoded.records[place] = replace(record, responses=tuple(responses))


# Metrics ------------------------------------------------------------------------------------------


class ForgetQuality(Metric):
    """The p-value: near 1 where two samples cannot be told apart, near 0 where they can."""

    likelihoods: list[Tensor]
    ratios: list[Tensor]
    full_state_update = False
    higher_is_better = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("likelihoods", [], dist_reduce_fx="cat")
        self.add_state("ratios", [], dist_reduce_fx="cat")

    def update(self, likelihoods: Tensor, ratios: Tensor) -> None:
        """For answers (n, 2) and records (m, 2): s̄ and log R, and what they are to be."""
        self.likelihoods.append(likelihoods.detach().float())
        self.ratios.append(ratios.detach().float())

    def compute(self) -> Tensor:
        with needs("compare", "forget_quality"):
            from scipy.stats import ks_2samp
        ratios = dim_zero_cat(self.ratios)
        found = ratios if len(ratios) else dim_zero_cat(self.likelihoods)
        values, targets = found.T.cpu().numpy()
        return torch.tensor(float(ks_2samp(values, targets).pvalue), device=found.device)


def forgetting_metrics() -> Metrics:
    """The metrics above, by name, but rouge."""
    means = {name: MeanBySample(True) for name in ("probability", "truth", "truth_ratio")}
    return {"forget_quality": ForgetQuality(), **means}


def log_truth_ratio(means: Tensor, of: Mapping[str, Tensor]) -> Tensor:
    """log R of records by s̄ of their responses, (B, R) → (B,); of: see :func:`add_forgetting`."""
    answers = of["forget"] | of["keep"]
    right = torch.where(of["paraphrase"].any(1, keepdim=True), of["paraphrase"], answers)
    return mean_over(means, of["wrong"]) - mean_over(means, right)


def add_forgetting(
    metrics: Mapping[str, Metric],
    index: Tensor,
    means: Tensor,
    targets: Tensor,
    of: Mapping[str, Tensor],
) -> None:
    """Adds a batch to all of these metrics but what greedy answers say.

    index: (B,). means, targets: (B, R), s̄ and what it is to be, NaN where nothing says.
    of: by role which responses are of it, (B, R) bool.
    """

    def add(name: str, rows: Tensor, values: Tensor) -> None:
        if rows.any():
            metrics[name].update(index[rows], values[rows])

    ratio, judged = log_truth_ratio(means, of), of["wrong"].any(1)
    forget, keep = of["forget"].any(1), of["keep"].any(1)
    if forget.any():
        pairs = torch.stack([means, targets], -1)[of["forget"]]
        ratios = torch.stack([ratio, log_truth_ratio(targets, of)], -1)[judged & forget]
        metrics["forget_quality"].update(pairs, ratios[ratios.isfinite().all(1)])
    add("truth_ratio", judged & forget, (-ratio.abs()).exp())
    add("probability", keep, mean_over(means.exp(), of["keep"]))
    add("truth", judged & keep, (1 - ratio.exp()).clamp(min=0))


def rouge_recall(answer: str, right: str) -> float:
    """The part of the right answer's words in the longest subsequence that both have."""

    def normalise(text: str) -> str:
        return re.sub(r"\W+", " ", text.lower())

    found = rouge_score(answer, right, normalizer=normalise, rouge_keys="rougeL")
    return float(found["rougeL_recall"])
