"""Every kind of constraint is told wherever constraints are.

Numbers of KINDS that a formula takes the size of are best below 0, where a forgotten |…| shows.
A new kind is a line of ``KINDS``, one of ``MISSED`` and, if a field of it is new, one of ``WORDS``.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pl_pointwise import Constraint, Formulation, Pointwise
from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.evaluation import ViolationsBySample
from pl_pointwise.plain import from_plain, plain
from pl_pointwise.report.closing import closing_of
from pl_pointwise.report.history import History
from tests.pl_pointwise.toy import Toy, ToyRows, fit

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "at most": Constraint(at_most=0.25),
    "at least": Constraint(at_least=0.25),
    "interval": Constraint(at_least=-0.75, at_most=0.25),
    "equality": Constraint(equals=0.25),
    "but for a share": Constraint(at_most=0.25, share=0.2),
}
WORDS = {
    "at_most": "≤ 0.25",
    "at_least": "≥ ",
    "equals": "= 0.25",
    "share": "but for 20 %",
}
"""By field what ``in_words`` says of it, wherever it is set in ``KINDS``."""
FIRST = ("at_most", "at_least", "equals", "each_sample", "share")
"""The fields in the order in which they may be given without their names."""
OF_GROUPS = {"each_sample"}  # tests/pl_pointwise/test_groups.py
VALUES = torch.tensor([-1.0, -0.75, 0.0, 0.25, 1.5])
MISSED = {
    "at most": [False, False, False, False, True],
    "at least": [True, True, True, False, False],
    "interval": [True, False, False, False, True],
    "equality": [True, True, True, False, True],
    "but for a share": [False, False, False, False, True],
}
"""Which of the values violate, by what the bounds mean."""


def set_fields(constraint: Constraint) -> dict[str, Any]:
    """The fields that are not as they are by default."""
    values = {
        field.name: getattr(constraint, field.name) for field in fields(Constraint)
    }
    defaults = {field.name: field.default for field in fields(Constraint)}
    return {name: v for name, v in values.items() if v != defaults[name]}


def test_every_field_of_a_constraint_is_in_a_kind_and_on_a_page() -> None:
    used = set[str]()
    for constraint in KINDS.values():
        used |= set(set_fields(constraint))
    pages = ("docs/problem.md", "docs/formulations.md")
    told = "".join((ROOT / page).read_text("utf-8") for page in pages)
    for field in fields(Constraint):
        assert field.default is not MISSING, (
            f"{field.name}: give it a default that changes nothing, at the end of the fields."
        )
        assert field.name in used | OF_GROUPS, (
            f"{field.name}: add a constraint that sets it to KINDS, and which of VALUES it misses "
            "to MISSED."
        )
        assert field.name in {*WORDS, *OF_GROUPS}, (
            f"{field.name}: say it in Constraint.in_words, and add to WORDS what that says."
        )
        assert f"{field.name}=" in told, (
            f"{field.name}: add Constraint({field.name}=…) to the table of docs/problem.md."
        )
        assert field.name in (Constraint.__doc__ or ""), (
            f"{field.name}: say in the docstring of Constraint what it means."
        )
    assert list(MISSED) == list(KINDS)


def test_fields_that_may_be_given_without_their_names_stay_where_they_are() -> None:
    names = tuple(field.name for field in fields(Constraint))
    assert names[: len(FIRST)] == FIRST, (
        "Constraint(0.5) is at_most=0.5: put a new field at the end of the fields."
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [torch.ones(2), "a", math.nan, math.inf])
def test_a_number_of_a_bound_that_is_none_is_refused(kind: str, wrong: Any) -> None:
    given = set_fields(KINDS[kind])
    for name in given:
        try:
            Constraint(**given | {name: wrong})
        except ValueError as refused:
            error: Exception | None = refused
        except Exception as other:
            error = other
        else:
            error = None
        assert isinstance(error, ValueError), (
            f"Constraint({name}={wrong!r}) ends in {error!r}: have __post_init__ look at its type, "
            "then whether it is finite, before it compares, and refuse it with the remedy."
        )


def bounds_alone() -> set[str]:
    """The kinds that are another kind with a field more are left out."""
    return {kind for kind in KINDS if kind != "but for a share"}


def test_without_a_bound_each_kind_is_named_as_a_remedy() -> None:
    with pytest.raises(ValueError, match="needs a bound") as refused:
        Constraint()
    for kind in bounds_alone():
        assert any(
            f"{name}=" in str(refused.value) for name in set_fields(KINDS[kind])
        ), f"Constraint() ends in {refused.value}: name {kind} there too."


@pytest.mark.parametrize(("one", "other"), combinations(KINDS, 2))
def test_two_bounds_at_once_are_both_held_or_refused(one: str, other: str) -> None:
    first, second = set_fields(KINDS[one]), set_fields(KINDS[other])
    # An interval has another number in the place of a lower bound's.
    if any(first[name] != second[name] for name in {*first} & {*second}):
        return
    try:
        both = Constraint(**first | second)
    except ValueError:
        return
    violation = both.violation(VALUES)
    columns = violation[:, None] if violation.dim() == 1 else violation
    missed = [a or b for a, b in zip(MISSED[one], MISSED[other], strict=True)]
    assert (columns.amax(dim=1) > 0).tolist() == missed, (
        f"{both.description()} is accepted, and one of the two is not held: refuse it in "
        "Constraint.__post_init__, with the remedy."
    )


@pytest.mark.parametrize("kind", KINDS)
def test_words_and_description_show_every_field(kind: str) -> None:
    constraint = KINDS[kind]
    for name, value in set_fields(constraint).items():
        assert WORDS[name] in constraint.in_words(), (
            f"Constraint.in_words says nothing of {name}."
        )
        assert f"{name}={value!r}" in constraint.description()
    assert from_plain(Constraint, plain(constraint)) == constraint


@dataclass(frozen=True)
class Wider(Constraint):
    """As of a later version."""

    of_a_later_version: float | None = None


def test_a_field_that_is_not_set_stands_in_no_description() -> None:
    """Or a new one would make every earlier run one of other bounds.

    Checkpoints, certificates and the records of `compare` hold these very words.
    """
    words = {
        "at most": "Constraint(at_most=0.25, at_least=None, equals=None)",
        "at least": "Constraint(at_most=None, at_least=0.25, equals=None)",
        "interval": "Constraint(at_most=0.25, at_least=-0.75, equals=None)",
        "equality": "Constraint(at_most=None, at_least=None, equals=0.25)",
    }
    for kind, kept in words.items():
        assert KINDS[kind].description() == kept, (
            "Constraint.description: leave a new field out where it is not set."
        )
    kept = words["at most"].removeprefix("Constraint")
    assert Wider(at_most=0.25).description() == f"Wider{kept}"
    later = Wider(at_most=0.25, of_a_later_version=0.5)
    assert "of_a_later_version=0.5" in later.description()


class Bounded(Toy):
    """A task whose bound is an option, as of a user who writes it in a configuration."""

    def __init__(self, formulation: Formulation | None, bound: Constraint) -> None:
        super().__init__(formulation, {"fit": bound})


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_says_every_kind(kind: str, tmp_path: Path) -> None:
    model = {
        "class_path": f"{__name__}.Bounded",
        "init_args": {
            "formulation": {"class_path": "Pointwise"},
            "bound": set_fields(KINDS[kind]),
        },
    }
    rows = {"class_path": "tests.pl_pointwise.line_task.LineData"}
    config = tmp_path / "own.yaml"
    config.write_text(yaml.safe_dump({"model": model, "data": rows}))
    quiet = ["--trainer.logger", "false", "--trainer.accelerator", "cpu"]
    found = PointwiseCLI(["--config", str(config), *quiet], run=False).model
    assert found.constraints == {"fit": KINDS[kind]}


@pytest.mark.parametrize("kind", KINDS)
def test_violations_are_where_the_bounds_are_missed(kind: str) -> None:
    constraint = KINDS[kind]
    violation = constraint.violation(VALUES)
    columns = violation[:, None] if violation.dim() == 1 else violation
    assert columns.shape == (len(VALUES), constraint.sides), (
        "Constraint.sides: 2 where violation() has two columns for a value, else 1."
    )
    outside, _ = constraint.outside(columns, torch.ones_like(columns, dtype=torch.bool))
    assert (outside[:, 0] > 0).tolist() == MISSED[kind], (
        f"Constraint.violation: above 0 where a value violates, of {VALUES.tolist()}."
    )
    residual = constraint.residual(VALUES)
    torch.testing.assert_close(constraint.reported(residual), violation)
    # Else only the distance is known.
    if constraint.sides == 1 and not constraint.is_equality:
        at = [constraint.value_at(v) for v in violation.tolist()]
        torch.testing.assert_close(torch.tensor(at), VALUES)


@pytest.mark.parametrize("kind", KINDS)
def test_several_values_of_a_sample_are_judged_as_each_alone(kind: str) -> None:
    """(B, K) → (B, sides·K): the upper sides of all values, then the lower ones."""
    constraint = KINDS[kind]
    values = torch.stack([VALUES, VALUES.flip(0), VALUES - 0.5], dim=1).double()
    violation = constraint.violation(values)
    assert violation.shape == (5, 3 * constraint.sides), (
        "Constraint.violation: of values (B, K) it is (B, sides·K), torch.cat of the sides."
    )
    assert violation.dtype == values.dtype, (
        "Constraint.violation: keep the type of the values."
    )
    outside, _ = constraint.outside(
        violation, torch.ones_like(violation, dtype=torch.bool)
    )
    for column in range(3):
        alone = constraint.violation(values[:, column])
        sides = alone[:, None] if alone.dim() == 1 else alone
        torch.testing.assert_close(violation[:, column::3], sides)
        torch.testing.assert_close(outside[:, column], sides.amax(dim=1))
    if constraint.sides == 2:
        high = constraint.violation(torch.tensor([1e6]))
        assert high[0, 0] > 0 > high[0, 1], (
            "Constraint.violation: the upper side's columns come first."
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_and_its_closing_table_know_the_kind(kind: str) -> None:
    module = fit(Toy(Pointwise(), {"fit": KINDS[kind]}).double(), ToyRows(12), epochs=1)
    table = module.multipliers["fit"]
    assert table.shape == (12, KINDS[kind].sides)
    assert bool(table.min() < 0) <= KINDS[kind].is_equality  # Signs are an equality's.
    assert module.closing is not None
    (row,) = module.closing.rows
    assert (row.bound, row.of) == (KINDS[kind].in_words(), 12)


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_counts_each_value_once(kind: str) -> None:
    constraint = KINDS[kind]
    violation = constraint.violation(VALUES)
    columns = violation[:, None] if violation.dim() == 1 else violation
    outside, mask = constraint.outside(
        columns, torch.ones_like(columns, dtype=torch.bool)
    )
    collected = ViolationsBySample()
    collected.add(torch.arange(len(VALUES)), outside, mask)
    assert (collected.samples().worst() > 0).tolist() == MISSED[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_history_reads_the_kind(kind: str) -> None:
    history = History({"fit": KINDS[kind]}, len(VALUES))
    history.last["fit"][:] = KINDS[kind].outside(
        KINDS[kind].violation(VALUES[:, None]).reshape(len(VALUES), -1),
        torch.ones(len(VALUES), KINDS[kind].sides, dtype=torch.bool),
    )[0][:, 0]
    (row,) = closing_of(history, {}, {}).rows
    assert (row.bound, row.violated) == (KINDS[kind].in_words(), sum(MISSED[kind]))
