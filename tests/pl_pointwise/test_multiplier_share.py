"""λ's share of the pull and its overshoot: by definition, over a run, and what a fit says of them.

That the figures of an epoch are those of its steps: tests/callbacks/test_dual_monitor.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pointwise import Average, Constraint, CVaR, Formulation, Penalty, Pointwise, Relaxed, Tilted
from pl_pointwise.errors import TrainingError
from pl_pointwise.multiplier_share import NUMBERS, TOGETHER, Pull, PullShares, pull_of
from tests.pl_pointwise.toy import At, Toy, ToyData, ToyRows, fit, trainer

ROWS = ToyRows(12)
OUT_OF_REACH = {"fit": Constraint(at_most=-3.0)}
IN_REACH = {"fit": Constraint(at_most=100.0)}


def figures(formulation: Formulation, violation: Any, multiplier: Any) -> dict[str, float]:
    """Of one column of entries."""
    v, m = (torch.tensor(values)[:, None] for values in (violation, multiplier))
    return pull_of(formulation, v, m, torch.ones_like(v, dtype=torch.bool)).figures()


@pytest.mark.parametrize(
    ("formulation", "violation", "multiplier", "share", "overshoot"),
    [
        # λ/(λ + 2αv) of one that violates.
        (Pointwise(alpha=0.5), [2.0], [1.0], 1 / 3, 0),
        # Satisfied: pulled by λ alone, with λ + 2αv; the third is not pulled at all.
        (Pointwise(alpha=0.5), [2.0, -1.0, -9.0], [1.0, 3.0, 3.0], (1 + 2) / 5, 2 / 5),
        (Pointwise(alpha=None), [2.0, -1.0], [1.0, 3.0], 1, 3 / 4),
        (Average(alpha=0.5), [2.0], [1.0], 1 / 3, 0),
        (Tilted(tilt=2.0, alpha=0.5), [2.0], [1.0], 1 / 3, 0),
        (CVaR(alpha=0.5), [-1.0], [3.0], 1, 1),
        # A relaxation scales the pull by β/(α+β), of all entries alike.
        (Relaxed(alpha=0.5, beta=0.1), [2.0, -1.0], [1.0, 3.0], 3 / 5, 2 / 5),
        # Or caps it: at β = 2.5 the first is pulled with 2.5, with 2 of it without λ.
        (Relaxed(alpha=0.5, beta=2.5, cost="linear"), [2.0, -1.0], [1.0, 3.0], 2.5 / 4.5, 2 / 4.5),
        # Of an equality either way: λ + 2αv is 3; −3 by λ alone; and λ 1 against a pull of −2.
        (Pointwise(alpha=0.5).for_equality(), [2.0, 1.0, -3.0], [1.0, -4.0, 1.0], 4 / 8, 3 / 8),
    ],
)
def test_share_and_overshoot_by_hand(
    formulation: Formulation, violation: Any, multiplier: Any, share: float, overshoot: float
) -> None:
    found = figures(formulation, violation, multiplier)
    assert found == pytest.approx({"share": share, "overshoot": overshoot})


def test_only_carried_entries_count_and_without_any_pull_there_is_no_share() -> None:
    v, m = torch.tensor([[2.0, 5.0]]), torch.tensor([[1.0, 9.0]])
    found = pull_of(Pointwise(alpha=0.5), v, m, torch.tensor([[True, False]]))
    assert found == Pull(1, total=3, of_multipliers=1, on_multiplied=3, distance=2)
    assert figures(Pointwise(), [-1.0, -2.0], [0.0, 1.0]) == {}


def test_a_formulation_of_ones_own_is_measured_by_its_own_slope() -> None:
    class Cubic(Pointwise):
        def lagrangian(self, violation: Tensor, multiplier: Tensor) -> Tensor:
            return multiplier * violation + violation.relu() ** 3

    assert figures(Cubic(), [2.0], [3.0])["share"] == pytest.approx(3 / (3 + 12))

    class Constant(Pointwise):
        def lagrangian(self, violation: Tensor, multiplier: Tensor) -> Tensor:
            return multiplier

    assert figures(Constant(), [2.0], [3.0]) == {}


def test_the_multiplier_that_pulled_is_the_new_one_where_the_dual_step_comes_first() -> None:
    """With η = 2α, λ after the first visit is the 2αv of that visit: half of the pull then."""
    options: dict[str, Any] = {"epochs": 1, "batch_size": 12}
    formulation = Pointwise(alpha=0.5, dual_lr=1.0)
    first = fit(Toy(formulation, OUT_OF_REACH, order="dual_first"), ROWS, **options)
    assert first.pull_shares.figures()["fit"]["share"] == pytest.approx(0.5)
    last = fit(Toy(formulation, OUT_OF_REACH), ROWS, **options)
    assert last.pull_shares.figures()["fit"] == {"share": 0.0, "overshoot": 0.0}


def test_alpha_that_grows_is_that_of_each_epoch() -> None:
    """A visit of all samples an epoch, η = 0, λ = 1 everywhere: 1/(1 + 2α·v) by the α of now."""
    module = Toy(Pointwise(alpha=0.5, dual_lr=0.0, alpha_growth=3.0), OUT_OF_REACH)
    module.learning_rate = 0.0
    module.multipliers.set("fit", 1.0)
    fit(module, ROWS, epochs=3, batch_size=5)
    with torch.no_grad():
        v = module(ToyData(ROWS).collate([ROWS[i] for i in range(12)])) + 3.0
    wanted = 12 / float((1 + 2 * 4.5 * v).sum())
    assert module.pull_shares.figures()["fit"]["share"] == pytest.approx(wanted, rel=1e-5)


def test_more_entries_than_are_looked_at_together_give_the_same_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert TOGETHER > 3 * 12 * 3
    module = Toy(Relaxed(alpha=0.8, beta=1.7, dual_lr=0.9), partial=True)
    rows = ToyRows(12, partial=True)
    at_once = fit(module, rows).pull_shares.figures()
    monkeypatch.setattr("pl_pointwise.multiplier_share.TOGETHER", 1)
    module = Toy(Relaxed(alpha=0.8, beta=1.7, dual_lr=0.9), partial=True)
    step_by_step = fit(module, rows).pull_shares.figures()
    for name, found in at_once.items():
        assert found == pytest.approx(step_by_step[name], rel=1e-12)


# What a fit says at its end ---------------------------------------------------------------------


def said(caplog: pytest.LogCaptureFixture) -> str:
    found = [r.getMessage() for r in caplog.records if "of the pull" in r.getMessage()]
    return "\n".join(found)


def test_multipliers_that_carried_next_to_nothing_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = fit(Toy(Pointwise(alpha=1.0, dual_lr=1e-3), OUT_OF_REACH), ROWS, epochs=4)
    share = module.pull_shares.figures()["fit"]["share"]
    assert 0 < share < 0.05
    message = said(caplog)
    assert message.count("\n") == 0
    assert 'The multipliers of "fit" carried at most' in message
    assert f"{100 * share:.2g} %" in message
    assert "each of 4 epochs" in message
    assert "η = 2α; 2·alpha is 2" in message


@pytest.mark.parametrize(
    ("formulation", "constraints", "options"),
    [
        (Pointwise(alpha=1.0, dual_lr=2.0), OUT_OF_REACH, {}),  # They work.
        (Pointwise(alpha=1.0, dual_lr=0.0), OUT_OF_REACH, {}),  # A squared hinge on purpose.
        (Pointwise(alpha=1.0, dual_lr=1e-3), OUT_OF_REACH, {"epochs": 2}),
        (Pointwise(alpha=1.0, dual_lr=1e-3), OUT_OF_REACH, {"fast_dev_run": 5}),
        (Pointwise(alpha=1.0, dual_lr=1e-3), IN_REACH, {}),  # Nothing is pulled.
        (Pointwise(alpha=None, dual_lr=1e-3), OUT_OF_REACH, {}),  # There is only λ.
        (Average(alpha=1.0, dual_lr=0.5), OUT_OF_REACH, {}),
        (Penalty(weight=1.0), OUT_OF_REACH, {}),
        (None, OUT_OF_REACH, {}),
    ],
)
def test_a_fit_whose_multipliers_work_or_that_is_too_short_to_tell_says_nothing(
    formulation: Any, constraints: Any, options: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fit(Toy(formulation, constraints), ROWS, **{"epochs": 4, **options})
    assert not said(caplog)


def test_samples_that_no_epoch_has_met_before_are_no_sign_of_a_small_dual_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One batch an epoch out of hundreds: hardly a sample is visited twice."""
    module = Toy(Pointwise(alpha=1.0, dual_lr=2.0), OUT_OF_REACH)
    fit(module, ToyRows(2000), epochs=4, limit_train_batches=1)
    assert module.pull_shares.figures()["fit"]["share"] == 0
    assert not said(caplog)


@pytest.mark.parametrize("dual_lr", [1e-3, 0.0])
def test_multipliers_that_push_satisfied_samples_are_named(
    dual_lr: float, caplog: pytest.LogCaptureFixture
) -> None:
    """λ starts far too large and hardly moves: the weights drive z far below the bound."""
    module = Toy(Pointwise(alpha=0.01, dual_lr=dual_lr), {"fit": Constraint(at_most=3.0)})
    module.multipliers.set("fit", 5.0)
    fit(module, ROWS, epochs=4)
    assert module.pull_shares.figures()["fit"]["overshoot"] == 1
    if dual_lr:
        assert '100 % of the pull of "fit" fell on samples that satisfied it' in said(caplog)
    else:  # Multipliers that were set, and are to stay.
        assert not said(caplog)


@pytest.mark.parametrize(("epochs", "warns"), [(3, True), (30, False)])
def test_an_overshoot_of_next_to_nothing_is_convergence(
    epochs: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """η = 2α: at first far past the bound, in the end all samples that are pushed lie at it."""
    module = Toy(Pointwise(alpha=0.1, dual_lr=0.2), {"fit": Constraint(at_most=0.3)})
    fit(module, ToyRows(60), epochs=epochs, batch_size=8)
    assert module.pull_shares.figures()["fit"]["overshoot"] > 0.75
    assert bool(said(caplog)) == warns


def test_a_few_multipliers_that_are_left_over_are_not_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    multipliers = torch.zeros(40)
    multipliers[0] = 1.0
    module = Toy(Pointwise(alpha=0.001, dual_lr=1e-4), {"fit": Constraint(at_most=30.0)})
    module.multipliers.set("fit", multipliers)
    fit(module, ToyRows(40), epochs=4)
    assert module.pull_shares.figures()["fit"]["overshoot"] == 1
    assert not said(caplog)


def test_a_second_fit_speaks_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    module = fit(Toy(Pointwise(alpha=1.0, dual_lr=1e-3), OUT_OF_REACH), ROWS, epochs=2)
    fit(module, ROWS, epochs=2)
    assert not said(caplog)


# Checkpoints ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [3, 5, 6, 12], ids=str)
def test_a_resumed_fit_says_what_the_uninterrupted_one_says(
    batches: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three batches an epoch: saved at the end of an epoch, within one, and at the end."""
    found: list[Any] = []
    for path in (None, tmp_path / "stopped.ckpt"):
        save = At(batches, lambda trainer: trainer.save_checkpoint(tmp_path / "stopped.ckpt"))
        module = Toy(Pointwise(alpha=1.0, dual_lr=1e-3), OUT_OF_REACH)
        runner = trainer(max_epochs=4, callbacks=[] if path else [save])
        runner.fit(module, ToyData(ROWS, batch_size=4), ckpt_path=path)
        found.append((said(caplog), module.pull_shares.figures(), module.pull_shares.state_dict()))
        caplog.clear()
    assert found[0][0]
    assert found[0] == found[1]


def test_a_checkpoint_from_before_there_were_shares_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    save = At(3, lambda trainer: trainer.save_checkpoint(path))
    fit(Toy(Pointwise(), OUT_OF_REACH), ROWS, epochs=1, callbacks=[save])
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["pl_pointwise"]["pull_shares"]
    torch.save(checkpoint, path)
    module = Toy(Pointwise(), OUT_OF_REACH)
    trainer(max_epochs=2).fit(module, ToyData(ROWS, batch_size=4), ckpt_path=path)
    assert module.pull_shares.figures()["fit"]["share"] > 0


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"epoch": 0},
        {"epoch": 0, "sums": []},
        {"epoch": "0", "sums": {}},
        *(
            {"epoch": 0, "sums": {name: numbers}}
            for name, numbers in [
                (1, [0.0] * NUMBERS),
                ("fit", [0.0] * (NUMBERS - 1)),
                ("fit", (0.0,) * NUMBERS),
                ("fit", [float("nan")] + [0.0] * (NUMBERS - 1)),
                ("fit", [-1.0] + [0.0] * (NUMBERS - 1)),
                ("fit", ["0"] + [0.0] * (NUMBERS - 1)),
                ("fit", 1),
            ]
        ),
    ],
    ids=str,
)
def test_a_damaged_state_is_refused(state: Any) -> None:
    with pytest.raises(TrainingError, match="'pull_shares'"):
        PullShares().load_state_dict(state)


def test_a_checkpoint_with_a_constraint_that_is_gone_says_nothing_of_it() -> None:
    shares = PullShares()
    sums = {"gone": [4.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 4.0, 3.0, 0.0, 1.0]}
    shares.load_state_dict({"epoch": 3, "sums": sums})
    assert list(shares.warnings({"fit": Pointwise()})) == []
    assert list(shares.warnings({"gone": Pointwise()}))
