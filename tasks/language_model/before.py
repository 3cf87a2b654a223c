"""What a model answered before training, and what became of it.

With adapters the starting model is at hand at any time: the same weights, adapters off. Where all
weights are trained it is there before the first step alone; a few of its answers are kept then, and
stand in the checkpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from pl_pointwise.task import Notes

from .data import EncodedResponses
from .likelihood.scoring import ResponseStatistics, reference_problem
from .model.generation import Generation, generate_ids
from .text.conversations import ConversationEncoder
from .text.records import Record

ANSWERS_BEFORE = "answers before"
"""What checkpoints keep of the starting model where all weights are trained, by prompt."""
ASKED = 16
"""The most prompts that are answered before and after a fit."""
LONGEST = 24
"""The most tokens of these answers; one that begins otherwise is another text."""


def as_reference(statistics: ResponseStatistics) -> ResponseStatistics:
    """Statistics of the starting model: it is its own reference, at no distance."""
    return replace(
        statistics,
        kl=statistics.log_likelihood.new_zeros(statistics.log_likelihood.shape),
        reference_log_likelihood=statistics.log_likelihood,
        reference_mean_log_likelihood=statistics.mean_log_likelihood,
    )


@dataclass(frozen=True)
class Watched:
    """Prompts whose answers are to stay as they are."""

    records: list[Record]
    prompts: list[list[int]]  # their token ids
    of: Counter[str]  # by role, how many the data set has

    @classmethod
    def chosen(cls, dataset: EncodedResponses, roles: Sequence[str]) -> Watched:
        """The first ones of a data set with an answer of these roles, in an order by digests.

        That order has nothing to do with the file's, and is the same on all ranks.
        """
        kept = [
            i for i, record in enumerate(dataset.records) if kept_role(record, roles)
        ]
        counts = Counter(kept_role(dataset.records[i], roles) for i in kept)
        some = sorted(kept, key=lambda i: dataset.records[i].prompt)[:ASKED]
        records = [dataset.records[i] for i in some]
        return cls(records, [dataset[i]["prompt"].tolist() for i in some], counts)

    def answers(
        self,
        model: nn.Module,
        encoder: ConversationEncoder,
        settings: Generation,
        reference: bool = False,
    ) -> list[list[int]]:
        """The beginning of the greedy answer to each, as token ids."""
        # generate() takes no empty batch.
        if not self.prompts:
            return []
        greedy = Generation(max_new_tokens=min(LONGEST, settings.max_new_tokens))
        ends = sorted(encoder.end_ids)
        return generate_ids(model, self.prompts, greedy, ends=ends, reference=reference)

    def changed(
        self, before: Sequence[Sequence[int]], now: Sequence[Sequence[int]]
    ) -> str:
        """By role how many answers are other texts now, as one sentence; "" for none."""
        asked, other = Counter[str](), Counter[str]()
        for record, old, new in zip(self.records, before, now, strict=True):
            role = kept_role(record, list(self.of))
            asked[role] += 1
            other[role] += list(old) != list(new)
        counts = [
            f"{other[role]:,} of {count:,} {NAMES.get(role, f'{role} answers')}"
            for role, count in asked.items()
            if other[role]
        ]
        if not counts:
            return ""
        tried = (
            " that were tried" if sum(asked.values()) < sum(self.of.values()) else ""
        )
        remedies = [
            REMEDIES[role] for role in asked if other[role] and role in REMEDIES
        ]
        remedy = f": {'; '.join(remedies)}" if remedies else ""
        return f"{' and '.join(counts)}{tried} are other texts now than before training{remedy}."


class Started(Protocol):
    """What the answers before training need of a module."""

    model: Any
    generation: Generation
    trainer: Any

    @property
    def encoder(self) -> ConversationEncoder:
        """Of texts."""

    @property
    def kept_roles(self) -> Sequence[str]:
        """Of answers that are to stay."""


def remember_answers(module: Started, samples: EncodedResponses, notes: Notes) -> None:
    """Before the first step where no adapters are: later the starting model is gone."""
    first = not module.trainer.global_step and not module.trainer.fast_dev_run
    if not first or reference_problem(module.model) is None:
        return
    watched = Watched.chosen(samples, module.kept_roles)
    with module.trainer.precision_plugin.forward_context():
        answers = watched.answers(module.model, module.encoder, module.generation)
    prompts = [record.prompt for record in watched.records]
    notes.kept[ANSWERS_BEFORE] = dict(zip(prompts, answers, strict=True))


def sentence_of_changes(
    module: Started, samples: EncodedResponses, notes: Notes
) -> str:
    """How many answers that are to stay are other texts now than before training; "" if none."""
    watched = Watched.chosen(samples, module.kept_roles)
    remembered = notes.kept.get(ANSWERS_BEFORE, {})
    with module.trainer.precision_plugin.forward_context():
        if reference_problem(module.model) is None:
            before = watched.answers(
                module.model, module.encoder, module.generation, reference=True
            )
        elif all(record.prompt in remembered for record in watched.records):
            before = [remembered[record.prompt] for record in watched.records]
        else:  # Resumed from a checkpoint that does not have them.
            return ""
        now = watched.answers(module.model, module.encoder, module.generation)
    return watched.changed(before, now)


NAMES = {"keep": "answers to keep", "answer": "answers to benign prompts"}
REMEDIES = {
    "reference": "give more of them, best the model's own, or keep them with role keep",
    "keep": "a KL budget does not keep the wording; lower keep_tolerance, or take keep/greedy and "
    "train until greedy/violated is 0",
    "answer": "give more benign prompts, or lower the learning rate",
}


def kept_role(record: Record, roles: Sequence[str]) -> str:
    """The first of some roles that the record has an answer of; "" if it has to change."""
    # Its prompt has an answer to learn or forget, so the old one has to go.
    if not CHANGED.isdisjoint(record.roles):
        return ""
    return next((role for role in roles if role in record.roles), "")


def wanted_columns(record: Record, kept_roles: Sequence[str]) -> list[int]:
    """Which responses of a record say what the answer is to be; if none does, what is to stay."""
    asked = [i for i, role in enumerate(record.roles) if role in WANTED]
    kept = kept_role(record, kept_roles)
    return asked or [i for i, role in enumerate(record.roles) if kept and role == kept]


WANTED = frozenset({"prefer", "refuse", "learn"})
"""Roles of answers that the model is to give."""
CHANGED = WANTED | {"forget"}
"""Roles of answers by which the model's own is to become another."""


def place_of(record: Record) -> dict[str, Any]:
    """{file, line} of a record; {file} where it has no line of its own."""
    file, _, number = record.where.rpartition(", ")
    last = number.rpartition(" ")[2]
    # Of the hub, "DATA SET, split, record 3", or of a record made by hand.
    if not file or not last.isdigit():
        return {"file": record.where}
    return {"file": file, "line": int(last)}
