"""How likely an answer to forget is to be: as a model that never learned it has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.language_model.likelihood.scoring import ResponseScorer
from pl_pointwise.tasks.language_model.model.loading import load_language_model, load_tokenizer
from pl_pointwise.tasks.language_model.roles import collate_rows
from pl_pointwise.tasks.language_model.text.conversations import ConversationEncoder
from pl_pointwise.tasks.language_model.text.encoded import EncodedResponses
from pl_pointwise.tasks.language_model.text.records import Response

from .records import ROLES


def add_targets(
    encoded: EncodedResponses, like: str | None, encoder: ConversationEncoder, name: str
) -> None:
    """Gives every answer to forget without ``around`` the s̄ that the model ``like`` has of it.

    name: the model that is trained.
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
    theirs = load_tokenizer(like).get_vocab()
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
                if is_open(each):
                    responses[column] = replace(each, tolerance=round(of_record[column], 4))
            encoded.records[place] = replace(record, responses=tuple(responses))
