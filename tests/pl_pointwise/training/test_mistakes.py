"""A beginner's slips, each with an error that names cause and remedy instead of torch's own."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from pl_pointwise import Constraint, Pointwise, PointwiseDataModule, PointwiseModule
from pl_pointwise.errors import DataError, TrainingError
from tests.pl_pointwise.toy import trainer


class Line(PointwiseModule):
    """A line through points, all as it should be."""

    def __init__(self, formulation: Any = None) -> None:
        constraints = {"fit": Constraint(at_most=0.1)}
        super().__init__(formulation=formulation, constraints=constraints)
        self.net = torch.nn.Linear(2, 1)

    def forward(self, batch: Any) -> Any:
        return self.net(batch["x"])[:, 0]

    def objective(self, outputs: Any, batch: Any) -> Any:
        return outputs.square()

    def constraint_values(self, outputs: Any, batch: Any) -> Any:
        return {"fit": (outputs - batch["y"]).abs()}


class OfTensor(Line):
    def forward(self, x: Any) -> Any:
        return self.net(x)[:, 0]


class OfTensorBySize(Line):
    def forward(self, x: Any) -> Any:
        return self.net(x.view(-1, 2))[:, 0]


class SilentObjective(Line):
    def objective(self, outputs: Any, batch: Any) -> Any:
        outputs.square()


class SilentValues(Line):
    def constraint_values(self, outputs: Any, batch: Any) -> Any:
        {"fit": (outputs - batch["y"]).abs()}


class SilentForward(Line):
    def forward(self, batch: Any) -> Any:
        self.net(batch["x"])


class OwnConstraints(Line):
    def __init__(self) -> None:
        super().__init__()
        self.constraints = {"mine": Constraint(at_most=1.0)}


class Judged(Line):
    def __init__(self, trained: Constraint, judged: Constraint) -> None:
        PointwiseModule.__init__(
            self,
            formulation=Pointwise(),
            constraints={"fit": trained},
            evaluation_constraints={"fit": judged},
        )
        self.net = torch.nn.Linear(2, 1)


class OwnError(Line):
    """An error of the task's own that is none of these."""

    def forward(self, batch: Any) -> Any:
        raise TypeError("no dict of mine")


def rows(count: int = 6, dtype: Any = np.float32) -> list[dict[str, Any]]:
    drawn = np.random.default_rng(0).normal(size=(count, 3)).astype(dtype)
    return [{"x": row[:2], "y": row[2]} for row in drawn]


class Points(PointwiseDataModule):
    def __init__(self, given: Any) -> None:
        super().__init__(batch_size=3)
        self.datasets = {"train": given}


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            OfTensor,
            r"forward\(self, x\) of OfTensor was given the whole batch, a dict of x, y, in",
        ),
        (OfTensorBySize, r'write forward\(self, batch\), .* such as batch\["x"\]'),
        (
            SilentForward,
            r"forward\(\) of SilentForward returned None, .*return missing",
        ),
    ],
)
def test_a_forward_pass_of_another_form_says_what_it_is_given(
    module: Any, said: str, validates: bool
) -> None:
    data = Points(rows())
    runner = trainer(max_epochs=1)
    if validates:
        data.datasets["val"] = rows()
    with pytest.raises(TrainingError, match=said):
        runner.validate(module(), data) if validates else runner.fit(module(), data)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (SilentObjective, r"objective\(\) is None: .*Is its return missing"),
        (SilentValues, r"constraint_values\(\) returned None: is its return missing"),
    ],
)
def test_a_forgotten_return_is_asked_for(module: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trainer(max_epochs=1).fit(module(Pointwise()), Points(rows()))


def test_rows_of_numpy_say_which_dtype_they_need() -> None:
    with pytest.raises(
        TrainingError, match=r'batch\["x"\] is in float64, .*torch.float32'
    ):
        trainer(max_epochs=1).fit(Line(), Points(rows(dtype=np.float64)))
    trainer(max_epochs=1, limit_val_batches=0).fit(
        Line().double(), Points(rows(dtype=np.float64))
    )


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(TypeError, match=r"^no dict of mine$"):
        trainer(max_epochs=1).fit(OwnError(), Points(rows()))


def test_an_attribute_in_the_place_of_the_constraints_is_refused() -> None:
    said = "self.constraints of OwnConstraints was set .* declared 'fit'.*Name your attribute"
    with pytest.raises(TrainingError, match=said):
        trainer(max_epochs=1).fit(OwnConstraints(), Points(rows()))


def test_the_base_constructor_takes_its_arguments_by_position_too() -> None:
    class ByPosition(Line):
        def __init__(self, formulation: Any) -> None:
            PointwiseModule.__init__(
                self, formulation, {"fit": Constraint(at_most=0.1)}
            )
            self.net = torch.nn.Linear(2, 1)

    module = ByPosition(Pointwise())
    trainer(max_epochs=1).fit(module, Points(rows()))
    assert module.multipliers["fit"].shape == (6, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "the data set 'train' is empty: give it at least one row"),
        (
            iter(()),
            "the data set 'train' is a tuple_iterator, whose rows have no positions",
        ),
    ],
)
def test_a_data_set_without_rows_says_so(given: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        trainer(max_epochs=1).fit(Line(), Points(given))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_epochs": 0}, "max_epochs is 0, so the weights are as they were"),
        ({"max_epochs": 1, "limit_train_batches": 0}, "limit_train_batches is 0"),
    ],
)
def test_a_fit_of_no_step_says_which_option_asked_for_none(
    options: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="pl_pointwise"):
        trainer(**options).fit(Line(), Points(rows()))
    assert f"No step was taken: {said}" in caplog.text


def test_a_trainer_that_fits_the_same_module_again_says_that_it_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Lightning alone says "stopped", as of a fit that took all its steps."""
    module, runner = Line(), trainer(max_epochs=2)
    with caplog.at_level(logging.WARNING, logger="pl_pointwise"):
        runner.fit(module, Points(rows()))
        assert "No step was taken" not in caplog.text
        runner.fit(module, Points(rows()))
    assert "this Trainer has fitted before" in caplog.text
    assert "max_epochs is 2, and 2 are done. Make a new Trainer" in caplog.text


@pytest.mark.parametrize(
    ("trained", "judged", "warned"),
    [
        (Constraint(at_most=0.2), Constraint(at_most=0.1), True),
        (Constraint(at_most=0.1), Constraint(at_most=0.1), False),
        (Constraint(at_most=0.1), Constraint(at_most=0.2), False),
        (Constraint(at_least=-0.1), Constraint(at_least=-0.02), True),
        (Constraint(at_least=-0.02), Constraint(at_least=-0.1), False),
        (Constraint(at_least=0.0, at_most=2.0), Constraint(at_least=0.5), True),
        (Constraint(at_least=0.0, at_most=2.0), Constraint(at_most=1.0), True),
        (Constraint(equals=0.0), Constraint(at_least=-0.1, at_most=0.1), False),
    ],
)
def test_a_bound_that_is_looser_in_training_than_in_evaluation_is_told(
    trained: Constraint,
    judged: Constraint,
    warned: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A page's command ended with "0 of 2 violated" in fit and "1 (2)" in test."""
    module = Judged(trained, judged)
    with caplog.at_level(logging.WARNING, logger="pl_pointwise"):
        trainer(max_epochs=1).fit(module, Points(rows()))
    assert ("fit is trained to be" in caplog.text) == warned
