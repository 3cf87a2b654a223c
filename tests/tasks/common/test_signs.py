"""Who does what a task asks violates nothing, and who does the opposite violates everything.

A requirement that a task returns as −v trains a model to break it, and its own tests may have the
same slip. So each task says here, in its own words and not in those of its constraints, which
outputs of its model are right and which are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn.functional import one_hot

from pl_pointwise import PointwiseModule, Training
from pl_pointwise.command_line.configs import by_kind
from pl_pointwise.tasks import (
    ConversationModule,
    PreferenceModule,
    RerankerModule,
    SafetyModule,
    When2CallModule,
)
from pl_pointwise.tasks.digits import DigitsDataModule, DigitsModule
from pl_pointwise.tasks.family import Family, FamilyModule
from pl_pointwise.tasks.family.family import problems
from pl_pointwise.tasks.language_model.likelihood.scoring import ResponseStatistics
from pl_pointwise.tasks.language_model.text.records import Record, Response
from tests.tasks.conftest import make_module, random_batch
from tests.tasks.reranker.conftest import save_tiny_cross_encoder


@dataclass
class Case:
    """A module and a batch, with the outputs that do what is asked and those that do the opposite.

    asks: the constraints that apply to the batch.
    """

    module: PointwiseModule
    batch: dict[str, Any]
    right: Any
    wrong: Any
    asks: set[str]


def digits(*_: Path) -> Case:
    """The logit of the digit that is on the image is the largest, or the least."""
    data = DigitsDataModule(batch_size=8)
    data.setup("fit")
    batch = data.collate(
        [row | {"index": i} for i, row in enumerate(data.datasets["train"][:8])]
    )
    of_digit = one_hot(batch["label"], 10).float()
    return Case(DigitsModule(None), batch, 9 * of_digit, -9 * of_digit, {"kept"})


def family(*_: Path) -> Case:
    """DC3's h is so that A⁺x is feasible; beside it are answers far outside of every bound."""
    of = Family(variables=9, equations=3, inequalities=4, instances=24)
    numbers = problems(of)
    x = numbers.x[:5]
    feasible = x @ numbers.plus.T
    outwards = torch.linalg.pinv(numbers.G) @ torch.full(
        (4,), 50.0, dtype=torch.float64
    )
    batch = {"x": x.float(), "index": torch.arange(5)}
    module = FamilyModule(None, of, equalities="loss")
    asks = {"inequalities", "equalities"}
    # What is computed in float32 misses an equality by a hair.
    return Case(module, batch, feasible.float(), (feasible + outwards).float(), asks)


def reranker(folder: Path, _: Path) -> Case:
    """The right passage, candidate 0, is above all others, or below."""
    encoder = save_tiny_cross_encoder(folder / "encoder")
    batch = {"candidates": torch.tensor([[True] * 4, [True, True, False, False]])}
    right = torch.tensor([[9.0, 1.0, 0.0, -2.0], [9.0, 2.0, 0.0, 0.0]])
    return Case(RerankerModule(str(encoder)), batch, right, -right, {"relevance"})


def of_language(
    kind: type[PointwiseModule],
    asks: dict[str, float],
    records: Sequence[Record],
    **options: Any,
) -> Callable[..., Case]:
    """A case of a language task: asks: the tolerances by constraint."""

    def make(_: Path, model: Path) -> Case:
        tolerances = {f"{name}_tolerance": asks[name] for name in asks}
        module = make_module(
            kind, model, Training(), moved=False, **tolerances, **options
        )
        most = max(len(record.responses) for record in records)
        lengths = [[3] * len(record.responses) for record in records]
        prompts = [4] * len(records)
        batch = random_batch(prompts, lengths, records=records, roles=module.roles)
        assert batch["response_ids"].shape[1] == most
        right, wrong = (statistics_of(records, most, done) for done in (True, False))
        return Case(module, batch, right, wrong, set(asks))

    return make


SAID = {"prefer", "refuse", "keep", "answer"}
UNSAID = {"avoid", "unsafe answer"}
"""Roles of responses that are to be likely, and of those that are not."""


def to_be_said(record: Record, role: str) -> bool:
    # To unsafe prompts a refusal is the right answer, to all others a wrong one.
    if role == "refusal":
        return record.kind == "unsafe"
    assert role in SAID | UNSAID
    return role in SAID


def statistics_of(
    records: Sequence[Record], columns: int, done: bool
) -> ResponseStatistics:
    """Of a model that does what is asked of each response, or the opposite; it said all rarely."""
    mean, divergence, lead = (torch.zeros(len(records), columns) for _ in range(3))
    for row, record in enumerate(records):
        for column, response in enumerate(record.responses):
            if response.role == "forget":  # Neither likelier nor rarer than it says.
                mean[row, column] = response.tolerance if done else 0.0
                continue
            likely = to_be_said(record, response.role) is done
            mean[row, column] = -0.001 if likely else -30.0
            lead[row, column] = 9.0 if likely else -9.0
            divergence[row, column] = 0.0 if done else 5.0
    lengths = torch.full(mean.shape, 3)
    reference = torch.full(mean.shape, -4.0)
    return ResponseStatistics(
        log_likelihood=3 * mean,
        mean_log_likelihood=mean,
        lengths=lengths,
        kl=divergence,
        reference_log_likelihood=3 * reference,
        reference_mean_log_likelihood=reference,
        lead=lead,
    )


def asked(*roles: str, kind: str | None = None) -> Record:
    responses = tuple(Response(role, "") for role in roles)
    return Record([], [], responses, "here", given_kind=kind)


PAIR = [asked("prefer", "avoid")]
SAFE = [
    asked("answer", "refusal", kind="benign"),
    asked("refusal", "unsafe answer", kind="unsafe"),
]
CONVERSATIONS = [
    asked("keep", "prefer", "avoid"),
    asked("refuse"),
    Record([], [], (Response("forget", "", tolerance=-7.0),), "here"),
]
OF_CONVERSATIONS = {"prefer": -0.5, "avoid": -4.0, "refuse": -0.5, "keep": 0.05}
OF_CONVERSATIONS |= {"greedy": 0.0, "forget": 0.25}

CASES: dict[type[PointwiseModule], list[Callable[..., Case]]] = {
    DigitsModule: [digits],
    FamilyModule: [family],
    RerankerModule: [reranker],
    ConversationModule: [
        of_language(ConversationModule, OF_CONVERSATIONS, CONVERSATIONS)
    ],
    PreferenceModule: [
        of_language(
            PreferenceModule,
            {"floor": 0.0, "chosen": -1.0, "rejected": -6.0, "ratio": 1.0},
            PAIR,
        )
    ],
    When2CallModule: [
        of_language(When2CallModule, {"chosen": -1.0, "rejected": -6.0}, PAIR),
        of_language(When2CallModule, {"ratio": 1.0}, PAIR, constrain="ratio"),
        of_language(When2CallModule, {"floor": 0.0}, PAIR, constrain="floor"),
    ],
    SafetyModule: [
        of_language(SafetyModule, {"refuse": -0.5, "comply": -2.0}, SAFE),
        of_language(SafetyModule, {"avoid": -4.0}, SAFE, constrain="answer"),
    ],
}
"""By the module of a task: cases that together ask for all that it can ask for."""


def violations(case: Case, outputs: Any) -> Iterator[tuple[str, Tensor]]:
    """By constraint those of the values that it applies to, of training and of evaluation."""
    values = case.module.constraint_values(outputs, case.batch)
    masks = case.module.membership(case.batch)
    bounds = [case.module.constraints, case.module.evaluation_constraints]
    for constraints in bounds:
        for name, constraint in constraints.items():
            residual = constraint.violation(values[name])
            # One value a sample or several, of one side or two: a row a sample.
            residual = residual.reshape(len(values[name]), -1)
            mask = masks.get(name, torch.ones(len(residual), dtype=torch.bool))
            mask = mask.reshape(len(residual), -1)
            mask = mask.repeat(1, residual.shape[1] // mask.shape[1])
            worst = residual.masked_fill(~mask, -torch.inf).amax(1)[mask.any(1)]
            assert len(worst), f'"{name}" applies to nothing in this batch'
            yield name, worst


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_what_is_asked_satisfies_and_its_opposite_violates(
    kind: type[PointwiseModule], tmp_path: Path, language_model_folder: Path
) -> None:
    asks = set[str]()
    for make in CASES[kind]:
        case = make(tmp_path, language_model_folder)
        assert type(case.module) is kind
        assert set(case.module.constraints) == case.asks
        asks |= case.asks
        for name, violation in violations(case, case.right):
            assert (violation <= 1e-4).all(), (name, violation)
        for name, violation in violations(case, case.wrong):
            assert (violation > 0.1).all(), (name, violation)
    # A language task has a table of all that it can ask for.
    assert asks == {*getattr(kind, "requirements", asks)}


@pytest.mark.parametrize("task", sorted(by_kind()["base"]))
def test_every_task_says_what_it_asks_for(task: str) -> None:
    (path,) = by_kind()["base"][task]
    model = yaml.safe_load(Path(path).read_text("utf-8"))["model"]
    package, _, name = model["class_path"].rpartition(".")
    assert getattr(import_module(package), name) in CASES, (
        f"{task}: give {name} a case in CASES of tests/tasks/common/test_signs.py: outputs of its "
        "model that do what it asks, and outputs that do the opposite."
    )
