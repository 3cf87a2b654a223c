"""Training steps equal the algorithm re-derived by hand, for every formulation and option.

The hand-written loop (by_hand.py) shares no line with the package. Samples carry different terms
and different numbers of pairs, the last batch of an epoch is smaller, and plain SGD in float64
shows any wrong factor. Each case also has to have learnt something, on every branch of its ψ.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from pl_pointwise import Constraint, CVaR, Pointwise, Relaxed, Tilted
from tests.pl_pointwise.by_hand import Outcome, run
from tests.pl_pointwise.table import Rule, rule_of
from tests.pl_pointwise.toy import (
    FORMULATIONS,
    PAIRS,
    Seen,
    Toy,
    ToyData,
    ToyRows,
    multipliers_of,
    trainer,
    weights_of,
)

Case = tuple[Any, dict[str, Rule | None]]
DECLARED = FORMULATIONS | {
    # η > 2α, so that the projection onto λ ≥ 0 is needed.
    "pointwise projected": Pointwise(alpha=0.3, dual_lr=1.2),
    "tail by name": {
        "fit": Tilted(tilt=1.7, dual_lr=0.5),
        "pair": CVaR(level=0.6, threshold_lr=0.05, dual_lr=0.5),
    },
    "one of two": {"fit": None, "pair": Pointwise(alpha=0.8, dual_lr=1.2)},
}


def case_of(declared: Any) -> Case:
    by_name = (
        declared if isinstance(declared, dict) else {"fit": declared, "pair": declared}
    )
    return declared, {
        name: rule_of(formulation) for name, formulation in by_name.items()
    }


CASES = {name: case_of(declared) for name, declared in DECLARED.items()}
ONE_SIDED = {"fit": (-0.8, None), "pair": (None, 0.2)}
INTERVALS = {"fit": (0.3, -0.2), "pair": (0.4, 0.4)}  # the second an equality
OPTIONS = {
    "simultaneous": {},
    "dual first": {"order": "dual_first"},
    "two steps": {"primal_steps": 2},
}
LEARNING_RATE = 0.05
# Batches of 4, 4 and 3, stopped in the fourth epoch: windows of 2 steps cross the epochs, and the
# last stays open.
STEPS, EPOCHS = 11, 4
SIZES = [4, 4, 3, 4, 4, 3, 4, 4, 3, 4, 4]


def constraints(bounds: Any) -> dict[str, Constraint]:
    return {
        n: Constraint(at_most=upper, at_least=lower)
        for n, (upper, lower) in bounds.items()
    }


def train(
    formulation: Any, bounds: Any, rows: ToyRows, **options: Any
) -> tuple[Toy, list[tuple[int, list[int]]]]:
    """The module trained by the Trainer, and the batches it saw."""
    seen = Seen()
    partial = not all(bool(mask.all()) for mask in rows.has.values())
    module = Toy(
        formulation,
        constraints(bounds),
        partial=partial,
        learning_rate=LEARNING_RATE,
        **options,
    )
    trainer(max_epochs=EPOCHS, max_steps=STEPS, callbacks=[seen]).fit(
        module, ToyData(rows, batch_size=4)
    )
    return module, seen.batches


def assert_same(module: Toy, expected: Outcome) -> None:
    torch.testing.assert_close(weights_of(module), expected.weights, rtol=0, atol=1e-6)
    assert module.multipliers.keys() == expected.multipliers.keys()
    for name, table in multipliers_of(module).items():
        assert table.dtype == torch.float32
        torch.testing.assert_close(
            table.double(), expected.multipliers[name], rtol=0, atol=1e-6, msg=name
        )
    for name, learned in module.thresholds.items():
        assert learned.dtype == torch.float32
        by_hand = torch.stack(expected.thresholds[name]).squeeze()
        torch.testing.assert_close(
            learned.double(), by_hand, rtol=0, atol=1e-6, msg=name
        )
        assert (by_hand.abs() > 0.01).any(), name


def assert_learnt(expected: Outcome, rules: dict[str, Rule | None]) -> None:
    start = run(ToyRows(1), [], {}, ONE_SIDED, learning_rate=0.0).weights
    assert (expected.weights - start).abs().max() > 0.01
    for name, table in expected.multipliers.items():
        assert (table > 0.01).any(), name


@pytest.mark.parametrize(
    ("bounds", "options"),
    [(ONE_SIDED, {}), *((INTERVALS, options) for options in OPTIONS.values())],
    ids=["one-sided", *OPTIONS],
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_steps_equal_the_algorithm_by_hand(
    case: Case, bounds: Any, options: Any
) -> None:
    formulation, rules = case
    rows = ToyRows(11, seed=5, partial=True)
    module, batches = train(formulation, bounds, rows, **options)
    assert [len(batch) for _, batch in batches] == SIZES
    expected = run(rows, batches, rules, bounds, learning_rate=LEARNING_RATE, **options)
    assert_same(module, expected)
    assert_learnt(expected, rules)


def test_steps_equal_the_algorithm_by_hand_when_everyone_carries_everything() -> None:
    formulation, rules = CASES["tail by name"]
    rows = ToyRows(11, seed=6)
    module, batches = train(formulation, ONE_SIDED, rows)
    assert_same(
        module, run(rows, batches, rules, ONE_SIDED, learning_rate=LEARNING_RATE)
    )


def test_every_branch_of_every_formulation_was_compared() -> None:
    """Two steps from λ = 0 reach only v > 0, and a wrong branch passes unseen."""
    reached: Counter[str] = Counter()
    batches = [(epoch, batch) for epoch in range(EPOCHS) for batch in BATCHES]
    for name, (_, rules) in CASES.items():
        outcome = run(
            ToyRows(11, seed=5, partial=True),
            batches,
            rules,
            ONE_SIDED,
            learning_rate=0.05,
        )
        for branch in ("active", "inactive", "capped", "projected", "above", "below"):
            reached[f"{name}: {branch}"] = outcome.branches[branch]
    wanted = {
        "average augmented": ["active"],
        "cvar": ["above", "below"],
        "cvar augmented": ["active", "above", "below"],
        "pointwise": ["active", "inactive"],
        "pointwise projected": ["active", "inactive", "projected"],
        "relaxed": ["active", "inactive"],
        "relaxed linear": ["active", "inactive", "capped"],
        "pointwise standard": ["projected"],
        "relaxed standard": ["projected"],
    }
    missing = [
        f"{n}: {b}"
        for n, branches in wanted.items()
        for b in branches
        if not reached[f"{n}: {b}"]
    ]
    assert not missing


BATCHES = [[0, 5, 7, 2], [9, 10, 1, 3], [4, 8, 6]]


def test_gradient_is_clipped_to_the_norm() -> None:
    rows = ToyRows(11, seed=5, partial=True)
    formulation, rules = CASES["pointwise"]
    module, batches = train(formulation, ONE_SIDED, rows, gradient_clip_val=0.5)
    expected = run(
        rows, batches, rules, ONE_SIDED, learning_rate=LEARNING_RATE, clip=0.5
    )
    assert_same(module, expected)
    free = run(rows, batches, rules, ONE_SIDED, learning_rate=LEARNING_RATE)
    assert (expected.weights - free.weights).abs().max() > 0.01  # the bound was active


def test_column_that_a_sample_no_longer_carries_keeps_its_multiplier() -> None:
    """A negative that is dropped from a query: its v reads 0, and at v = 0 a relaxed λ decays."""
    rows = ToyRows(6, seed=5)
    rows.fingerprint = "the same data"  # type: ignore[attr-defined]
    module = Toy(
        Relaxed(alpha=1.0, beta=1.0, dual_lr=0.5),
        partial=True,
        learning_rate=LEARNING_RATE,
    )
    trainer(max_epochs=3).fit(module, ToyData(rows, batch_size=6))
    before = multipliers_of(module)["pair"]
    dropped = (before > 0.01) & (torch.arange(PAIRS) == 1)
    assert dropped.any()
    rows.has["pair"] = ~dropped
    trainer(max_epochs=1).fit(module, ToyData(rows, batch_size=6))
    after = module.multipliers["pair"]
    assert torch.equal(after[dropped], before[dropped])
    moved = (before > 0.01) & ~dropped
    assert (after[moved] != before[moved]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"primal_steps": 2, "order": "dual_first"}, "no meaning"),
        ({"formulation": {"fit": Pointwise(), "Pair": Pointwise()}}, "Pair"),
        ({"formulation": {"fit": Pointwise()}}, "lacks 'pair'"),
        ({"constraints": {"objective": Constraint(at_most=1)}}, "objective"),
        ({"constraints": {"a/b": Constraint(at_most=1)}}, "without a slash"),
    ],
)
def test_bad_options_are_refused_at_construction(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Toy(**options)
