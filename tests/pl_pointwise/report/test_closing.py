"""The closing table: counted by hand at every door, and what it makes of a run that failed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from pl_pointwise import Average, Constraint, Penalty, Pointwise, PointwiseLoss
from pl_pointwise.lagrangian.prices import Step
from pl_pointwise.report.closing import closing_of
from pl_pointwise.report.closing_table import Closing, Conditions, HeldOut
from pl_pointwise.report.history import History
from tests.pl_pointwise.toy import Toy, ToyData, ToyRows, trainer

ROWS = ToyRows(9)


class LastVisits(Callback):
    """The largest violation and the objective of each sample in the last step that had it."""

    def __init__(self) -> None:
        self.worst: dict[str, dict[int, float]] = {}
        self.objective: dict[int, float] = {}
        self.start: float | None = None

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        measured = module.measured
        if self.start is None:
            self.start = float(measured.objective[measured.masks["objective"]].mean())
        for row, index in enumerate(measured.index.tolist()):
            if measured.masks["objective"][row]:
                self.objective[index] = float(measured.objective[row])
            for name, violation in measured.judged.items():
                kept = measured.masks[name][row].tolist()
                values = (
                    violation[row].abs()
                    if module.constraints[name].equals
                    else violation[row]
                )
                found = [v for v, k in zip(values.tolist(), kept, strict=True) if k]
                if found:
                    self.worst.setdefault(name, {})[index] = max(found)


def closed(
    module: Toy, rows: ToyRows = ROWS, **options: Any
) -> tuple[Closing, LastVisits]:
    counted = LastVisits()
    runner = trainer(**{"max_epochs": 2, "callbacks": [counted], **options})
    runner.fit(module, ToyData(rows, batch_size=4))
    assert module.closing is not None
    return module.closing, counted


@pytest.mark.parametrize(
    "formulation", [Pointwise(), Average(), Penalty(weight=1.0), None]
)
@pytest.mark.parametrize("partial", [False, True])
def test_the_numbers_are_those_of_the_last_visits(formulation, partial) -> None:
    module = Toy(formulation, partial=partial)
    closing, counted = closed(module, ToyRows(23, partial=partial))
    assert (closing.steps, closing.epochs) == (12, 2)
    assert closing.objective[0] == pytest.approx(counted.start)
    mean = sum(counted.objective.values()) / len(counted.objective)
    assert closing.objective[1] == pytest.approx(mean, rel=1e-5)
    assert closing.objective[2] is None
    for row in closing.rows:
        worst = sorted(counted.worst[row.name].values())
        assert row.of == len(worst)
        assert row.violated == sum(v > 0 for v in worst)
        constraint = module.constraints[row.name]
        assert row.worst == pytest.approx(constraint.value_at(worst[-1]), rel=1e-5)
        below = constraint.value_at(torch.tensor(worst).quantile(0.95).item())
        assert row.most == pytest.approx(below, rel=1e-5)
        pointwise = formulation is not None and formulation.scope == "sample"
        table = module.multipliers[row.name] if pointwise else None
        assert row.multipliers == (
            None if table is None else int((table > 0).any(1).sum())
        )
        if isinstance(formulation, Average):
            assert row.multiplier == pytest.approx(
                float(module.multipliers[row.name].max())
            )


@pytest.fixture
def messages() -> Iterator[logging.Logger]:
    """Lightning's own messages, on."""
    noise = logging.getLogger("lightning.pytorch")
    before = noise.level
    noise.setLevel(logging.INFO)
    yield noise
    noise.setLevel(before)


def test_held_out_samples_stand_beside_those_of_training(
    messages: Any, capsys: Any
) -> None:
    module = Toy(Pointwise(), {"fit": Constraint(at_most=0.1)})
    data = ToyData(ROWS, batch_size=4)
    data.datasets["val"] = ToyRows(5, seed=3)
    trainer(max_epochs=2, limit_val_batches=1.0, num_sanity_val_steps=0).fit(
        module, data
    )
    (row,) = module.closing.rows
    worst = module.evaluated["val"]["fit"].worst()
    assert (row.held_violated, row.held_of) == (int((worst > 0).sum()), 5)
    assert row.held_worst == pytest.approx(0.1 + float(worst.max()))
    shown = capsys.readouterr().out
    assert str(module.closing) in shown
    assert "held out" in shown


def test_without_lightnings_messages_only_what_calls_for_an_answer_is_said(
    messages: logging.Logger, caplog: Any, capsys: Any
) -> None:
    """As in ``compare``, which has a table of its own."""
    messages.setLevel(logging.ERROR)
    with caplog.at_level(logging.WARNING, logger="pl_pointwise"):
        closed(Toy(Pointwise(), {"fit": Constraint(at_most=1e3)}))
    assert "fit never acted" in caplog.text
    assert "requirement" not in capsys.readouterr().out


# What it says ------------------------------------------------------------------------------------


def history(
    values: list[list[float]], bound: Constraint, objective: float = 1.0
) -> History:
    """Of a loop whose samples, one a step in each epoch, have these values by epoch."""
    constrained = PointwiseLoss({"fit": bound}, None, samples=len(values[0]))
    weight = torch.ones((), requires_grad=True)
    for epoch in values:
        for index, value in enumerate(epoch):
            ell = weight * torch.tensor([value])
            constrained(
                weight * torch.tensor([objective]), {"fit": ell}, torch.tensor([index])
            )
            constrained.step()
    constrained.history.read()
    return constrained.history


AT_MOST = Constraint(at_most=1.0)


@pytest.mark.parametrize(
    ("values", "formulation", "conditions", "words"),
    [
        ([[2.0] * 4] * 20, Pointwise(), {}, ["Nothing moved in 80 steps"]),
        (
            [[2.0] * 4] * 20,
            Pointwise(),
            {"rate": 1e-9},
            ["The learning rate 1e-09 is likely too s"],
        ),
        (
            [[2.0], [3.0]],
            Pointwise(),
            {"longer": "raise max_epochs"},
            ["2 steps in all are too few"],
        ),
        (
            [[2.0]],
            Pointwise(),
            {},
            ["1 step in all is too few to meet a bound: train longer."],
        ),
        (
            [[3.0] * 4, [2.0] * 4] * 10,
            Pointwise(),
            {},
            ["fit is violated by every sample: its b"],
        ),
        ([[0.5] * 4] * 20, Pointwise(), {}, ["fit never acted"]),
        ([[0.5] * 4] * 20, Penalty(weight=1.0), {}, []),
        ([[0.5] * 4] * 20, None, {}, []),
        (
            [[2.0] * 4] * 20,
            Pointwise(),
            {"growth": 500.0, "rate": 10.0},
            ["The learning rate 10 is"],
        ),
        (
            [[2.0] * 4, [500.0] * 4] * 20,
            Pointwise(),
            {},
            ["likely too high: the violations of fit"],
        ),
        (
            [[0.5, 2.0] * 2] * 20,
            Pointwise(),
            {"skipped": 3, "left_out": 1},
            ["left samples out 1 time and skipped 3 steps whole"],
        ),
        (
            [[0.5, 0.9] * 2] * 20,
            Pointwise(),
            {"of_task": ["Answers changed."]},
            ["", "Answers ch"],
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_the_likelier_cause_is_named(values, formulation, conditions, words) -> None:
    formulations = {} if formulation is None else {"fit": formulation}
    closing = closing_of(
        history(values, AT_MOST), formulations, {}, conditions=Conditions(**conditions)
    )
    assert len(closing.sentences) <= 3
    for sentence, word in zip(closing.sentences, words, strict=False):
        assert word in sentence
    assert len(closing.sentences) >= len(words)
    if not words:
        assert not closing.sentences


def test_what_holds_in_training_alone_is_said() -> None:
    """`keep` ended so: three of thirteen violated, and all of those held out, in every epoch."""
    found = history([[0.5, 2.0, 0.5, 0.4], [0.5, 1.2, 0.5, 0.4]] * 20, AT_MOST)
    held_out = HeldOut({"fit": AT_MOST}, {"fit": torch.tensor([0.5, 0.7])}, 2.0, step=8)
    closing = closing_of(found, {}, {}, held_out=held_out)
    assert any(
        "Held out, fit is violated by 2 of 2 (worst 1.7)" in s
        for s in closing.sentences
    )
    assert "Held out: measured at step 8 of 160." in str(closing)
    level = HeldOut({"fit": AT_MOST}, {"fit": torch.tensor([-1.0, -0.7, 0.1, -0.2])})
    assert not any(
        "Held out" in s for s in closing_of(found, {}, {}, held_out=level).sentences
    )


def test_fit_says_by_how_much_a_rate_too_high_made_the_weights_grow() -> None:
    module = Toy(Pointwise(), learning_rate=30.0)
    start = torch.cat(
        [weight.detach().flatten() for weight in module.parameters()]
    ).norm()
    closing, _ = closed(module)
    now = torch.cat(
        [weight.detach().flatten() for weight in module.parameters()]
    ).norm()
    assert now > 30 * start
    assert f"the weights are {now / start:,.0f} times as large as at the start" in str(
        closing
    )


def test_what_the_requirements_cost_is_said() -> None:
    found = history([[0.5, 0.6]] * 20, AT_MOST)
    found.objective = torch.full((2,), 3.0)
    assert closing_of(found, {}, {}).sentences == [
        "The objective rose from 1 to 3: that is what the requirements cost. A looser bound costs "
        "less."
    ]
    grown = closing_of(found, {}, {}, conditions=Conditions(growth=1e5, rate=1e5))
    assert grown.sentences[0].startswith(
        "The learning rate 100000 is likely too high: the weights"
    )


def test_a_distance_from_the_start_that_grows_is_no_fault() -> None:
    """A KL to the starting model is 0, or dropout's noise, in the first step."""
    found = history([[0.5, 0.6]] * 20, AT_MOST, objective=3e-4)
    found.objective = torch.full((2,), 0.25)
    assert closing_of(found, {}, {}).sentences == []


def test_samples_that_no_step_had_are_counted() -> None:
    constrained = PointwiseLoss({"fit": AT_MOST}, None, samples=10)
    weight = torch.ones((), requires_grad=True)
    for _ in range(20):  # The place in the batch instead of that in the training set.
        constrained(weight.expand(2), {"fit": weight.expand(2)}, torch.tensor([0, 1]))
        constrained.step()
    (said,) = constrained.report().not_trained
    assert said.startswith(
        "8 of 10 training samples were in no step, which had 40 rows in all. The"
    )


def test_a_constraint_that_no_sample_has_is_said() -> None:
    class Nobody(Toy):
        def membership(self, batch: Any) -> dict[str, Tensor]:
            return {"fit": torch.zeros(len(batch["index"]), dtype=torch.bool)}

    closing, _ = closed(Nobody(Pointwise(), {"fit": Constraint(at_most=0.0)}))
    assert "fit applied to no sample: membership() leaves all out" in str(closing)
    closing, _ = closed(Nobody(Pointwise()))  # Beside another one: as a role of none.
    assert "no sample" not in str(closing)


class Same(Toy):
    """A model that is its own reference: the objective is 0, and everything holds."""

    start = 1.0

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - outputs.detach() * self.start) ** 2


@pytest.mark.parametrize(
    ("start", "bound", "warns"), [(1, 9.0, True), (1, -9.0, False), (0, 9.0, False)]
)
def test_a_start_at_the_optimum_is_a_warning(start, bound, warns, caplog) -> None:
    """``fit --config forget`` with one model in both places: training could only do harm."""
    module = Same(Pointwise(), {"fit": Constraint(at_most=bound)})
    module.start = start
    with caplog.at_level(logging.WARNING, logger="pl_pointwise"):
        closed(module)
    assert ("The first batch has nothing to learn" in caplog.text) == warns


# A loop, and a resumed run -----------------------------------------------------------------------


def test_a_loop_reports_as_the_module_does() -> None:
    """The same batches give the same table."""
    module = Toy(Pointwise(), {"fit": Constraint(at_most=0.1)})
    closing, _ = closed(module)
    twin = Toy(Pointwise(), {"fit": Constraint(at_most=0.1)})
    constrained = PointwiseLoss(
        twin.constraints, Pointwise(), samples=len(ROWS), parameters=twin.parameters()
    )
    for step in closing_steps(module):
        constrained.history.unread.append(Step(step, {}, {}))
    report = constrained.report(held_out={"fit": torch.tensor([0.05, 0.3])})
    assert report.rows[0].violated == closing.rows[0].violated
    assert report.objective[:2] == pytest.approx(closing.objective[:2])
    assert (report.rows[0].held_violated, report.rows[0].held_of) == (1, 2)
    assert report.rows[0].held_worst == pytest.approx(0.3)


def closing_steps(module: Toy) -> list[Any]:
    steps: list[Any] = []

    class Kept(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            steps.append(module.measured)

    again = Toy(Pointwise(), {"fit": Constraint(at_most=0.1)})
    trainer(max_epochs=2, callbacks=[Kept()]).fit(again, ToyData(ROWS, batch_size=4))
    return steps


@pytest.mark.parametrize("stop", [{"max_epochs": 1}, {"max_steps": 4}])
def test_a_resumed_run_has_the_table_of_one_that_was_not_stopped(
    tmp_path: Any, stop: Any
) -> None:
    whole, _ = closed(Toy(Pointwise()), max_epochs=3)
    first = trainer(max_epochs=3, **stop) if "max_steps" in stop else trainer(**stop)
    first.fit(Toy(Pointwise()), ToyData(ROWS, batch_size=4))
    first.save_checkpoint(tmp_path / "half.ckpt")
    module = Toy(Pointwise())
    trainer(max_epochs=3).fit(
        module, ToyData(ROWS, batch_size=4), ckpt_path=tmp_path / "half.ckpt"
    )
    assert module.closing == whole


def test_a_checkpoint_without_a_history_makes_no_claim_about_its_start(
    tmp_path: Any,
) -> None:
    """Of an older version: what the first step measured is not known."""
    runner = trainer(max_epochs=1)
    runner.fit(Toy(Pointwise()), ToyData(ROWS, batch_size=4))
    runner.save_checkpoint(tmp_path / "old.ckpt")
    checkpoint = torch.load(tmp_path / "old.ckpt", weights_only=True)
    del checkpoint["pl_pointwise"]["history"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    module = Toy(Pointwise())
    trainer(max_epochs=3).fit(
        module, ToyData(ROWS, batch_size=4), ckpt_path=tmp_path / "old.ckpt"
    )
    assert module.closing.objective[0] is None
    assert module.closing.steps == 6
    assert module.closing.rows[0].of == 9
