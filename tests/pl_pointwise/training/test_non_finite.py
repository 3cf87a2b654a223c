"""A value that is not finite reaches neither λ nor the weights, and is named.

Masking it in the loss is not enough: inf · 0 in the backward pass is NaN, and one bad record would
turn the whole model into NaN. The step is the one without that sample, with the denominators of
the whole batch. Its twin here is the same sample made neutral: it carries every term, at values
that are constant, with an objective of 0 and violations of 0.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pl_pointwise import Average, Pointwise, Tilted
from pl_pointwise.data import IndexedDataset
from pl_pointwise.errors import TrainingError
from tests.pl_pointwise.toy import (
    CONSTRAINTS,
    FORMULATIONS,
    KINDS,
    Seen,
    Toy,
    ToyData,
    ToyRows,
    assert_same_run,
    fit,
    lost,
    multipliers_of,
    stack,
    trainer,
    weights_of,
)

CLEAN, NEUTRAL, OBJECTIVE_NAN, OBJECTIVE_INF, FIT_MINUS_INF, PAIR_NAN, GRADIENT_NAN = (
    range(7)
)


class Defective(ToyRows):
    """Rows of which some have a defect, by index."""

    def __init__(
        self, count: int, defects: dict[int, int], partial: bool = False
    ) -> None:
        super().__init__(count, seed=5, partial=partial)
        self.defects = defects
        self.fingerprint = "the same data, whatever breaks"

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        row = super().__getitem__(position)
        return {**row, "defect": torch.tensor(self.defects.get(position, CLEAN))}


class Fragile(Toy):
    """The toy, whose values break in the given way; the break is part of the graph."""

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        values, defect = super().objective(outputs, batch).clone(), batch["defect"]
        values[defect == NEUTRAL] = 0.0
        values[defect == OBJECTIVE_NAN] *= torch.nan
        values[defect == OBJECTIVE_INF] /= 0.0
        at = defect == GRADIENT_NAN
        values[at] = values[at] + (0 * outputs[at]).sqrt()
        return values

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        values, defect = super().constraint_values(outputs, batch), batch["defect"]
        fit, pair = values["fit"].clone(), values["pair"].clone()
        fit[defect == NEUTRAL] = CONSTRAINTS["fit"].at_most
        pair[defect == NEUTRAL] = CONSTRAINTS["pair"].at_least
        fit[defect == FIT_MINUS_INF] = (0 * fit[defect == FIT_MINUS_INF]).log()
        pair[defect == PAIR_NAN, 1] *= torch.nan
        return {"fit": fit, "pair": pair}


@pytest.mark.parametrize(
    ("name", "kind", "micro_batch_size"),
    [
        *((name, PAIR_NAN, 3) for name in FORMULATIONS),
        *((name, FIT_MINUS_INF, None) for name in KINDS),
        ("pointwise", OBJECTIVE_NAN, None),
        ("average augmented", OBJECTIVE_INF, 3),
    ],
)
def test_step_is_the_one_without_the_sample_with_the_original_denominators(
    name: str, kind: int, micro_batch_size: int | None
) -> None:
    formulation = FORMULATIONS[name]
    bad = fit(
        Fragile(formulation, micro_batch_size=micro_batch_size), Defective(7, {3: kind})
    )
    twin = fit(Fragile(formulation), Defective(7, {3: NEUTRAL}))
    assert_same_run(bad, twin)
    assert torch.isfinite(weights_of(bad)).all()
    assert lost(bad) == (3, 0)  # once in each of three epochs
    assert bad.trainer.global_step == 6


@pytest.mark.parametrize("kind", [OBJECTIVE_NAN, FIT_MINUS_INF, PAIR_NAN])
@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_the_unit_of_an_adaptive_alpha_is_that_without_the_sample(
    kind: int, micro_batch_size: int | None
) -> None:
    """Else one bad record in every batch leaves a constraint without any force, in silence."""
    units = []
    for defect in (kind, NEUTRAL):
        module = Fragile(
            Pointwise(), micro_batch_size=micro_batch_size, learning_rate=1e-3
        )
        fit(module, Defective(8, {3: defect}), batch_size=8, epochs=1)
        assert lost(module) == (int(defect == kind), 0)
        states = module._lagrangian.units.state_dict()["states"]
        units.append([states[name][key] for name in states for key in ("unit", "size")])
    assert units[0] == pytest.approx(units[1], rel=1e-6)


@pytest.mark.parametrize("options", [{"order": "dual_first"}, {"primal_steps": 2}, {}])
def test_several_bad_samples_of_a_batch(options: Any) -> None:
    defects = {1: OBJECTIVE_NAN, 2: PAIR_NAN, 5: FIT_MINUS_INF}
    formulation = FORMULATIONS["by name"]
    bad = fit(Fragile(formulation, **options), Defective(8, defects), batch_size=8)
    twin_rows = Defective(8, dict.fromkeys(defects, NEUTRAL))
    assert_same_run(bad, fit(Fragile(formulation, **options), twin_rows, batch_size=8))
    assert lost(bad)[0] == 9


def test_multiplier_of_a_sample_left_out_keeps_its_value() -> None:
    """The sample was fine for an epoch and has a multiplier; a NaN then must not move it."""
    rows = Defective(6, {})
    module = fit(Fragile(Pointwise(alpha=1.0, dual_lr=1.0)), rows, epochs=2)
    before = multipliers_of(module)
    sample = int(before["pair"].max(1).values.argmax())
    assert before["pair"][sample].max() > 0.1
    rows.defects = {sample: PAIR_NAN}
    fit(module, rows, epochs=1, batch_size=6)
    stayed = {n: (module.multipliers[n] == table).all(1) for n, table in before.items()}
    assert stayed["pair"][sample]
    assert stayed["fit"][sample]
    assert not stayed["fit"].all()


def test_bad_value_that_is_not_carried_does_not_matter() -> None:
    """Where a sample has no such term, a task may return anything that has no gradient."""
    rows = Defective(7, {3: PAIR_NAN}, partial=True)
    rows.has["pair"][3] = False
    clean = Defective(7, {}, partial=True)
    clean.has["pair"][3] = False

    class Constant(Fragile):
        def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
            values = Toy.constraint_values(self, outputs, batch)
            hole = (batch["defect"] == PAIR_NAN)[:, None]
            return values | {"pair": torch.where(hole, torch.nan, values["pair"])}

    found = fit(Constant(Pointwise(), partial=True), rows)
    assert lost(found) == (0, 0)
    assert_same_run(found, fit(Constant(Pointwise(), partial=True), clean))


def test_bad_value_that_is_not_carried_but_has_a_gradient_says_where_to_look(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A mean over no tokens, say: membership masks the 0/0 itself, but not its gradient."""
    rows = Defective(4, {3: FIT_MINUS_INF}, partial=True)
    rows.has["fit"][3] = False
    module = Fragile(Pointwise(), partial=True)
    start = weights_of(module)
    with pytest.raises(TrainingError, match="were skipped"):
        fit(module, rows)
    assert torch.equal(weights_of(module), start)
    assert "membership() masks" in caplog.text


def test_gradient_that_is_not_finite_skips_the_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """sqrt(0) is finite and its gradient is not: no value gives the sample away."""
    module = Fragile(Pointwise(alpha=1.0, dual_lr=1.0))
    start = weights_of(module)
    with pytest.raises(TrainingError, match="All 1 steps of epoch 0 were skipped"):
        fit(module, Defective(4, {2: GRADIENT_NAN}))
    assert torch.equal(weights_of(module), start)
    assert all(not table.any() for table in module.multipliers.values())
    assert lost(module) == (0, 1)
    assert (
        "Step skipped (train, epoch 0, step 0): the norm of the gradient is nan"
        in caplog.text
    )


def test_skipped_step_leaves_the_other_steps_alone() -> None:
    """Neither weights, multipliers, windows nor global_step count a step that was not taken."""
    seen = Seen()
    rows = Defective(12, {4: GRADIENT_NAN})
    options = {"primal_steps": 2}
    module = fit(
        Fragile(FORMULATIONS["by name"], **options), rows, epochs=1, callbacks=[seen]
    )
    assert (lost(module)[1], module.trainer.global_step) == (1, 2)
    twin = Fragile(FORMULATIONS["by name"], **options)
    others = [i for _, batch in seen.batches if 4 not in batch for i in batch]
    data = ToyData(Defective(12, {}), order=others, batch_size=4)
    trainer(limit_train_batches=2).fit(twin, data)
    assert_same_run(module, twin)


def test_bad_samples_are_counted_logged_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = Defective(8, {1: OBJECTIVE_NAN, 6: PAIR_NAN, 7: FIT_MINUS_INF})
    with caplog.at_level(logging.WARNING):
        module = fit(Fragile(Pointwise()), rows, epochs=1, batch_size=8)
    named = [
        record.getMessage()
        for record in caplog.records
        if "Left out" in record.getMessage()
    ]
    # fit has the upper bound, so a value of −inf is a violation of −inf.
    pair, fitted = (
        'Constraint "pair": nan for sample 6 (',
        'Constraint "fit": -inf for sample 7 (',
    )
    for text in ("Objective: nan for sample 1 (", pair, fitted):
        assert any(text in message for message in named), (text, named)
    assert all("(train, epoch 0, step 0)" in m and "3 so far" in m for m in named)
    assert len(named) == 3
    logged = module.trainer.callback_metrics
    assert logged["running/left_out"] == 3
    assert logged["running/skipped_steps"] == 0
    assert torch.isfinite(logged["running/gradient_norm"])
    assert torch.isfinite(logged["running/objective"])


def test_a_value_that_breaks_when_the_step_is_computed_again_skips_it() -> None:
    """One more attempt is made, and no third."""

    class Worse(Fragile):
        passes = 0

        def objective(self, outputs: Tensor, batch: Any) -> Tensor:
            self.passes += 1
            values = super().objective(outputs, batch)
            return values * torch.nan if self.passes == 2 else values

    module = Worse(Pointwise(alpha=1.0, dual_lr=1.0))
    start = weights_of(module)
    with pytest.raises(TrainingError, match="All 1 steps of epoch 0 were skipped"):
        fit(module, Defective(8, {3: OBJECTIVE_NAN}), batch_size=8)
    assert torch.equal(weights_of(module), start)
    assert (module.passes, *lost(module)) == (2, 1, 1)
    assert not any(table.any() for table in module.multipliers.values())


def test_batch_of_bad_samples_only_is_skipped_and_the_rest_is_trained() -> None:
    rows = Defective(8, dict.fromkeys(range(4), OBJECTIVE_INF))
    module = Fragile(Average(alpha=1.0))
    trainer(max_epochs=2).fit(module, ToyData(rows, order=list(range(8)), batch_size=4))
    assert lost(module) == (8, 2)
    assert module.trainer.global_step == 2
    assert torch.isfinite(weights_of(module)).all()
    assert module.multipliers["pair"] > 0


def test_a_run_that_diverges_logs_a_few_lines_a_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two for each of eight samples hid what had come before."""
    module = Toy(Pointwise(alpha=1.0))
    with torch.no_grad():
        module.last.fill_(torch.nan)
    with pytest.raises(TrainingError, match="All 1 steps"):
        fit(module, ToyRows(12), batch_size=12, epochs=1)
    assert len(caplog.records) <= 5


def test_a_batch_of_no_row_is_skipped_by_every_statistic(caplog: Any) -> None:
    """Tilted looked for the largest of no violation."""

    def emptied(rows: Any) -> Any:
        batch = stack(rows)
        if 0 in batch["index"]:
            return batch
        return {key: value[:0] for key, value in batch.items()}

    module = Toy(Tilted(tilt=2.0, dual_lr=0.5))
    # A loader of one's own: a data module refuses a collate that leaves rows out.
    batches = DataLoader(IndexedDataset(ToyRows(12)), 4, collate_fn=emptied)
    trainer().fit(module, batches)
    assert lost(module) == (0, 2)
    assert "no sample of the batch is left" in caplog.text
