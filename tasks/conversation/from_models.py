"""What models say of records: answers to keep, and how likely those to forget are to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import report_skipped
from pl_pointwise.tasks.language_model.likelihood.scoring import ResponseScorer
from pl_pointwise.tasks.language_model.model.loading import load_language_model, load_tokenizer
from pl_pointwise.tasks.language_model.module import LanguageModelModule
from pl_pointwise.tasks.language_model.roles import collate_rows
from pl_pointwise.tasks.language_model.text.conversations import ConversationEncoder
from pl_pointwise.tasks.language_model.text.encoded import EncodedResponses
from pl_pointwise.tasks.language_model.text.records import Record, Response

from .records import ROLES

TOGETHER = 8  # Prompts that are answered in one batch.


def with_own_answers(records: Sequence[Record], module: LanguageModelModule) -> list[Record]:
    """The records, each answer of role keep as the module's reference writes it now.

    A record whose own answer is empty, or does not end within ``max_new_tokens``, is left out with
    a warning: nobody knows how it ends.
    """
    asked = [i for i, record in enumerate(records) if "keep" in record.roles]
    found: list[Record | None] = list(records)
    problems = list[str]()
    for start in range(0, len(asked), TOGETHER):
        some = asked[start : start + TOGETHER]
        prompts = [{"messages": records[i].messages, "tools": records[i].tools} for i in some]
        for i, answer in zip(some, module.answers_to(prompts, reference=True), strict=True):
            if answer["cut"] or not answer["answer"].strip():
                problems.append(
                    f"{records[i].where}: the model's own answer is empty or does not end within "
                    f"{module.generation.max_new_tokens:,} tokens: raise "
                    "policy.generation.max_new_tokens."
                )
                found[i] = None
                continue
            responses = [
                replace(each, answer=answer["answer"]) if each.role == "keep" else each
                for each in records[i].responses
            ]
            found[i] = replace(records[i], responses=tuple(responses))
    kept = len(asked) - len(problems)
    rank_zero_info(f"The model's own answers are kept of {kept:,} prompts.")
    if asked and not kept:
        raise DataError(problems[0])
    report_skipped("own_answers", problems, kept)
    return [record for record in found if record is not None]


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
            responses = [
                replace(each, tolerance=round(mean, 4)) if is_open(each) else each
                for each, mean in zip(record.responses, of_record, strict=False)
            ]
            encoded.records[place] = replace(record, responses=tuple(responses))
