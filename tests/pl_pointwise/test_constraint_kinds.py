"""Every kind of constraint is told wherever constraints are; a new field has to be in ``KINDS``."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch

from pl_pointwise import Constraint, Pointwise
from pl_pointwise.evaluation import ViolationsBySample
from pl_pointwise.plain import from_plain, plain
from pl_pointwise.report.closing import closing_of
from pl_pointwise.report.history import History
from tests.pl_pointwise.toy import Toy, ToyRows, fit

KINDS = {
    "at most": Constraint(at_most=0.25),
    "at least": Constraint(at_least=0.25),
    "interval": Constraint(at_least=-0.75, at_most=0.25),
    "equality": Constraint(equals=0.25),
    "but for a share": Constraint(at_most=0.25, share=0.2),
}
BOUNDS = ("at_most", "at_least", "equals")
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


def test_every_field_of_a_constraint_is_in_a_kind() -> None:
    used = set[str]()
    for constraint in KINDS.values():
        used |= {
            f.name
            for f in fields(constraint)
            if getattr(constraint, f.name) is not None
        }
    assert used | OF_GROUPS == {field.name for field in fields(Constraint)}


@pytest.mark.parametrize("kind", KINDS)
def test_words_and_description_show_every_bound(kind: str) -> None:
    constraint = KINDS[kind]
    for name in BOUNDS:
        bound = getattr(constraint, name)
        if bound is not None:
            assert f"{bound:g}" in constraint.in_words()
            assert f"{name}={bound!r}" in constraint.description()
    if constraint.share is not None:
        assert "20 %" in constraint.in_words()
        assert "share=0.2" in constraint.description()
    else:
        # Files of earlier versions hold what repr said of the three bounds there were.
        listed = ", ".join(f"{name}={getattr(constraint, name)!r}" for name in BOUNDS)
        assert constraint.description() == f"Constraint({listed})"
    assert from_plain(Constraint, plain(constraint)) == constraint


@dataclass(frozen=True)
class Wider(Constraint):
    """As of a later version."""

    within: float | None = None


def test_a_field_that_is_not_set_stands_in_no_description() -> None:
    """Or a new one would make every earlier run one of other bounds."""
    kept = KINDS["at most"].description().removeprefix("Constraint")
    assert Wider(at_most=0.25).description() == f"Wider{kept}"
    assert "within=0.5" in Wider(at_most=0.25, within=0.5).description()


@pytest.mark.parametrize("kind", KINDS)
def test_violations_are_where_the_bounds_are_missed(kind: str) -> None:
    constraint = KINDS[kind]
    violation = constraint.violation(VALUES)
    columns = violation[:, None] if violation.dim() == 1 else violation
    assert columns.shape == (len(VALUES), constraint.sides)
    outside, _ = constraint.outside(columns, torch.ones_like(columns, dtype=torch.bool))
    assert (outside[:, 0] > 0).tolist() == MISSED[kind]
    residual = constraint.residual(VALUES)
    torch.testing.assert_close(constraint.reported(residual), violation)
    # Else only the distance is known.
    if constraint.sides == 1 and not constraint.is_equality:
        at = [constraint.value_at(v) for v in violation.tolist()]
        torch.testing.assert_close(torch.tensor(at), VALUES)


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
