"""PointwiseLoss in a loop of one's own: the same steps as under Lightning, and what it refuses."""

from __future__ import annotations

import gc
import json
import math
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from pl_pointwise import (
    Average,
    Constraint,
    CVaR,
    Pointwise,
    PointwiseLoss,
    Relaxed,
    Tilted,
)
from pl_pointwise.callbacks import HardestSamples
from pl_pointwise.data import IndexedDataset
from pl_pointwise.errors import DataError, TrainingError
from pl_pointwise.lagrangian.terms import INTEGERS
from tests.pl_pointwise.toy import (
    CONSTRAINTS,
    INTERVALS,
    PAIRS,
    Judged,
    Seen,
    Toy,
    ToyData,
    ToyRows,
    fit,
    initial_weights,
    passed,
    trainer,
)

EQUALITIES = {"fit": Constraint(equals=0.1), "pair": Constraint(at_least=0.2)}
CASES: dict[str, dict[str, Any]] = {
    "pointwise": {"formulation": Pointwise()},
    "stated": {"formulation": Pointwise(alpha=0.8, dual_lr=1.2)},
    "relaxed": {"formulation": Relaxed(price=3.0)},
    "average": {"formulation": Average(alpha="adaptive")},
    "cvar": {"formulation": CVaR(level=0.6, threshold_lr=0.05, alpha=0.8, dual_lr=0.5)},
    "by name": {
        "formulation": {"fit": Tilted(tilt=1.7, dual_lr=0.5), "pair": Pointwise()}
    },
    "intervals": {"formulation": Pointwise(), "constraints": INTERVALS},
    "equalities": {"formulation": Pointwise(), "constraints": EQUALITIES},
    "plain": {"formulation": None},
    "window": {"formulation": Pointwise(), "primal_steps": 2},
    "dual first": {"formulation": Pointwise(), "order": "dual_first"},
    "groups": {
        "formulation": Pointwise(),
        "groups": [0, 2, 1, 1, 0, 2, 2, 2, 4, 0, 1, 1],
    },
    "each sample of a group": {
        "formulation": Pointwise(),
        "groups": [0, 2, 1, 1, 0, 2, 2, 2, 4, 0, 1, 1],
        "constraints": {
            "fit": Constraint(at_most=-0.3, each_sample=True),
            "pair": Constraint(at_least=0.2),
        },
    },
}


class Loop:
    """The toy's steps in plain torch."""

    def __init__(
        self, loss: PointwiseLoss, rows: ToyRows, strict: bool = False
    ) -> None:
        self.loss, self.rows, self.strict = loss, rows, strict
        self.weights = [w.clone().requires_grad_() for w in initial_weights()]
        self.optimizer = torch.optim.SGD(self.weights, lr=0.05)

    def loss_of(self, batch: list[int], masks: bool = True) -> torch.Tensor:
        x, y = self.rows.x[batch], self.rows.y[batch]
        z = torch.tanh(x @ self.weights[0]) @ self.weights[1]
        return self.loss(
            (z - y).square(),
            {"fit": z, "pair": z[:, None] * x[:, :PAIRS]},
            torch.tensor(batch),
            masks={name: mask[batch] for name, mask in self.rows.has.items()}
            if masks
            else None,
            strict={"fit": passed(z)} if self.strict else None,
        )

    def step(self, batch: list[int]) -> None:
        self.optimizer.zero_grad()
        self.loss_of(batch).backward()
        self.optimizer.step()
        self.loss.step()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("partial", [False, True])
def test_a_loop_takes_the_steps_of_lightning_to_the_bit(
    case: str, partial: bool
) -> None:
    options, rows, seen = {**CASES[case]}, ToyRows(12, partial=partial), Seen()
    groups = options.pop("groups", None)
    dataset = IndexedDataset(rows, groups=groups)
    module = fit(Toy(**options, partial=partial), dataset, epochs=6, callbacks=[seen])
    given = {"constraints": CONSTRAINTS, **options}
    loop = Loop(PointwiseLoss(samples=len(rows), groups=groups, **given), rows)
    for _, batch in seen.batches:
        loop.step(batch)
    for found, expected in zip(loop.weights, module.parameters(), strict=True):
        assert torch.equal(found, expected)
    torch.testing.assert_close(
        loop.loss.multipliers, module.multipliers, rtol=0, atol=0
    )
    assert loop.loss.thresholds == module.thresholds
    if options["formulation"] is not None:
        assert any(table.any() for table in module.multipliers.values())


def test_strict_values_move_the_multipliers_as_under_lightning() -> None:
    rows, seen = ToyRows(12), Seen()
    module = fit(Judged(Pointwise()), rows, callbacks=[seen])
    loop = Loop(PointwiseLoss(CONSTRAINTS, Pointwise(), samples=12), rows, strict=True)
    for _, batch in seen.batches:
        loop.step(batch)
    assert torch.equal(loop.loss.multipliers["fit"], module.multipliers["fit"])


def test_the_state_goes_on_to_the_bit() -> None:
    rows = ToyRows(12)
    batches = [torch.randperm(12)[:4].tolist() for _ in range(12)]
    whole = Loop(PointwiseLoss(CONSTRAINTS, Pointwise(), samples=12), rows)
    for batch in batches[:6]:
        whole.step(batch)
    resumed = Loop(PointwiseLoss(CONSTRAINTS, Pointwise(), samples=12), rows)
    resumed.loss.load_state_dict(whole.loss.state_dict())
    for found, expected in zip(resumed.weights, whole.weights, strict=True):
        found.data.copy_(expected.data)
    for batch in batches[6:]:
        whole.step(batch)
        resumed.step(batch)
    assert torch.equal(resumed.weights[0], whole.weights[0])
    torch.testing.assert_close(
        resumed.loss.multipliers, whole.loss.multipliers, rtol=0, atol=0
    )
    other = PointwiseLoss(CONSTRAINTS, Pointwise(), samples=13)
    with pytest.raises(TrainingError, match=r"12 samples, this PointwiseLoss has 13"):
        other.load_state_dict(whole.loss.state_dict())


def test_micro_batches_of_one_size_are_one_batch() -> None:
    """Of stated α: an adaptive one measures Λ on the first of them."""
    rows, batch = ToyRows(12), [3, 1, 7, 5]
    loops = [
        Loop(PointwiseLoss(CONSTRAINTS, Pointwise(alpha=0.8), samples=12), rows)
        for _ in range(2)
    ]
    loops[0].step(batch)
    for half in (batch[:2], batch[2:]):
        (loops[1].loss_of(half) / 2).backward()
    loops[1].optimizer.step()
    loops[1].loss.step()
    torch.testing.assert_close(
        loops[1].weights[0], loops[0].weights[0], rtol=0, atol=1e-12
    )
    tables = [loop.loss.multipliers for loop in loops]
    torch.testing.assert_close(*tables, rtol=0, atol=1e-6)


def test_units_change_nothing() -> None:
    """README's example: violations in units of 0.01, 1 and 100 end alike."""
    ends = []
    for unit in (0.01, 1.0, 100.0):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(40, 3, generator=generator)
        y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.05 * torch.randn(
            40, generator=generator
        )
        weights = torch.zeros(3, requires_grad=True)
        optimizer = torch.optim.Adam([weights], lr=0.05, eps=1e-12)
        loss = PointwiseLoss(
            {"fit": Constraint(at_most=0.1 * unit)}, Pointwise(), samples=40
        )
        for _ in range(20):
            for batch in torch.randperm(40, generator=generator).split(8):
                values = {"fit": unit * (x[batch] @ weights - y[batch]).abs()}
                optimizer.zero_grad()
                loss(
                    weights.square().sum().expand(len(batch)), values, batch
                ).backward()
                optimizer.step()
                loss.step()
        ends.append(weights.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-4)
    torch.testing.assert_close(ends[2], ends[1], rtol=0, atol=1e-4)


def test_a_stream_trains_without_a_table() -> None:
    rows = ToyRows(40)
    loop = Loop(PointwiseLoss(CONSTRAINTS, Pointwise(), samples=None), rows)
    before = [w.detach().clone() for w in loop.weights]
    for start in range(0, 40, 4):
        loop.step(list(range(start, start + 4)))
    assert not any(table.numel() for table in loop.loss.multipliers.values())
    assert not torch.equal(loop.weights[0], before[0])


def test_samples_of_a_group_share_a_multiplier_that_follows_their_mean() -> None:
    """With a standard Lagrangian of rate η: λ ← (λ + η·mean of the group's violations)₊."""
    groups = [0, 0, 1, 1, 1, 2]
    loss = PointwiseLoss(
        {"fit": Constraint(at_most=0.5)},
        Pointwise(alpha=None, dual_lr=0.5),
        samples=6,
        groups=groups,
    )
    values = torch.tensor([1.0, 0.2, 3.0, 0.0, 0.0], requires_grad=True)
    expected = torch.tensor([[0.05], [0.25], [0.0]])
    for times in (1, 2):
        total = loss(torch.zeros(5), {"fit": values}, torch.tensor([0, 1, 2, 3, 4]))
        loss.step()
        torch.testing.assert_close(loss.multipliers["fit"], times * expected)
    (gradient,) = torch.autograd.grad(total, values)
    torch.testing.assert_close(gradient, expected[torch.tensor(groups[:5]), 0] / 5)
    loss(
        torch.zeros(1),
        {"fit": torch.tensor([0.7], requires_grad=True)},
        torch.tensor([5]),
    )
    loss.step()  # A group of one sample.
    torch.testing.assert_close(
        loss.multipliers["fit"], torch.tensor([[0.1], [0.5], [0.1]])
    )
    for wrong in (groups, ["a", "b", "c", "d", "e"], [0.0, 0.5, 1.0, 1.0, 1.0]):
        with pytest.raises(DataError, match="groups: a whole number from 0"):
            PointwiseLoss(
                {"fit": Constraint(at_most=0.5)}, Pointwise(), samples=5, groups=wrong
            )


def test_groups_of_a_data_set_are_checked_and_belong_to_a_checkpoint(
    tmp_path: Path,
) -> None:
    rows = ToyRows(12)
    rows.groups = [0, 1] * 6  # type: ignore[attr-defined]
    runner = trainer(
        max_epochs=2, callbacks=[HardestSamples(3)], default_root_dir=tmp_path
    )
    module = Toy(Pointwise())
    runner.fit(module, ToyData(rows, batch_size=4))
    assert [len(table) for table in module.multipliers.values()] == [2, 2]
    (file,) = tmp_path.rglob("samples.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    for row in found:
        table = module.multipliers[row["constraint"]]
        assert row["multiplier"] == float(table[row["index"] % 2, row["column"]])
    assert len({(row["constraint"], row["index"]) for row in found}) == len(found) >= 3
    runner.save_checkpoint(tmp_path / "last.ckpt")
    other = IndexedDataset(ToyRows(12), groups=[0, 0, 1, 1] * 3)
    data = ToyData(other, batch_size=4)
    with pytest.raises(TrainingError, match="another training set, order or groups"):
        trainer(max_epochs=3).fit(
            Toy(Pointwise()), data, ckpt_path=tmp_path / "last.ckpt"
        )
    with pytest.raises(TrainingError, match=r'order="dual_first" with groups'):
        trainer().fit(
            Toy(Pointwise(), order="dual_first"), ToyData(other, batch_size=4)
        )
    data = ToyData(IndexedDataset(ToyRows(12), groups=[0.5] * 12), batch_size=4)
    with pytest.raises(
        DataError, match=r"groups of ToyRows: a whole number .*np.unique\(groups"
    ):
        trainer().fit(Toy(Pointwise()), data)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_an_index_is_of_any_type_of_whole_numbers(dtype: torch.dtype) -> None:
    """Of unsigned ones every position was below -1."""
    loss = PointwiseLoss(
        {"fit": Constraint(at_most=0.0)}, Pointwise(alpha=1.0), samples=3
    )
    values = torch.ones(2, requires_grad=True)
    loss(values, {"fit": values}, torch.tensor([0, 2], dtype=dtype)).backward()
    loss.step()
    assert (loss.multipliers["fit"][:, 0] > 0).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("objective", "remedy"),
    [
        (torch.zeros(()), "do not reduce over the batch"),
        (torch.zeros(3), "say by masks"),
        (torch.zeros(2, 1), "leave the other dimensions out"),
        (torch.zeros(2, 2), r"was \(B,\) broadcast with \(B, 1\)"),
        (torch.zeros(2, 5), "reduce each sample's values to one"),
        (0.0, "0 times the values"),
    ],
)
def test_an_objective_of_another_shape_says_what_to_do(
    objective: object, remedy: str
) -> None:
    constrained = PointwiseLoss(CONSTRAINTS, Pointwise(), samples=12)
    values = {"fit": torch.zeros(2), "pair": torch.zeros(2)}
    with pytest.raises(DataError, match=remedy):
        constrained(objective, values, torch.tensor([0, 1]))


@pytest.mark.filterwarnings("error")
def test_misuse_is_refused() -> None:
    loop = Loop(PointwiseLoss(CONSTRAINTS, Pointwise(), samples=12), ToyRows(12))
    with pytest.raises(TrainingError, match="without a loss since the last step"):
        loop.loss.step()
    with torch.no_grad(), pytest.raises(TrainingError, match="without gradients"):
        loop.loss_of([0, 1])
    values = {"fit": torch.ones(1), "pair": torch.ones(1)}
    with pytest.raises(TrainingError, match="outside the training set of 12 samples"):
        loop.loss(torch.zeros(1), values, torch.tensor([12]))
    with pytest.raises(DataError, match="holds -2: a position in the training set"):
        loop.loss(torch.zeros(1), values, torch.tensor([-2]))
    for masks in ([], torch.tensor([True])):
        with pytest.raises(ValueError, match="give a dict by name"):
            loop.loss(torch.zeros(1), values, torch.tensor([0]), masks=masks)
    values = {"fit": torch.zeros(()), "pair": torch.zeros(2)}
    with pytest.raises(DataError, match='"fit" must have one value per sample'):
        loop.loss(torch.zeros(2), values, torch.tensor([0, 1]))
    for index in (
        [0, 1],
        torch.tensor([0.0, 1.0]),
        torch.tensor([True, False]),
        torch.tensor(0),
    ):
        with pytest.raises(DataError, match="index: each sample's position"):
            loop.loss(torch.zeros(2), values, index)
    for wrong in (
        {"samples": 0},
        {"samples": [1]},
        {"primal_steps": 0},
        {"order": "dual"},
    ):
        with pytest.raises(ValueError, match=r"=.*: "):
            PointwiseLoss(CONSTRAINTS, Pointwise(), **{"samples": 12, **wrong})
    for state in (None, {}, {**loop.loss.state_dict(), "multipliers": {"fit": "x"}}):
        with pytest.raises(TrainingError, match="no state of a PointwiseLoss"):
            loop.loss.load_state_dict(state)
    loop.rows.y[3] = math.nan
    with pytest.raises(TrainingError, match='"objective" is nan for sample 3'):
        loop.loss_of([2, 3])
    assert not any(table.any() for table in loop.loss.multipliers.values())


def test_weights_go_with_the_loss_that_holds_them() -> None:
    """Within a cycle of references they would take memory until the next collection."""
    weight = torch.zeros(1, requires_grad=True)
    options = {"samples": 1, "parameters": [weight]}
    loss = PointwiseLoss({"fit": Constraint(at_most=0.0)}, Pointwise(), **options)
    loss(weight, {"fit": weight + 1}, torch.tensor([0])).backward()
    loss.step()
    found, options = weakref.ref(weight), {}
    gc.disable()
    try:
        del weight, loss
        assert found() is None
    finally:
        gc.enable()


def test_a_forgotten_step_is_found() -> None:
    loop = Loop(PointwiseLoss(CONSTRAINTS, Pointwise(), samples=12), ToyRows(12))
    for _ in range(6):
        loop.loss_of([0, 1, 2, 3])
    with pytest.raises(TrainingError, match=r"28 samples since the last step\(\)"):
        loop.loss_of([0, 1, 2, 3])


def test_what_was_set_or_saved_has_to_fit(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(PointwiseLoss(CONSTRAINTS, Pointwise(), samples=12), ToyRows(12))
    loop.loss.multipliers.set("fitt", 1.0)
    loop.loss_of([0, 1])
    assert 'Multipliers of "fitt" are dropped' in caplog.text
    loop.loss.step()
    other = PointwiseLoss(CONSTRAINTS, Average(), samples=12)
    with pytest.raises(TrainingError, match="one per sample, and those of"):
        other.load_state_dict(loop.loss.state_dict())


def test_outside_a_run_an_adaptive_formulation_has_no_numbers() -> None:
    one = torch.ones(1)
    for formulation in (Pointwise(), Relaxed(price=2.0), Average(alpha="adaptive")):
        for act in (formulation.lagrangian, formulation.dual_direction):
            with pytest.raises(TrainingError, match="PointwiseLoss"):
                act(one, one)


def test_it_is_imported_without_lightning() -> None:
    program = (
        "import sys; from pl_pointwise import PointwiseLoss, Constraint, Pointwise, Multipliers; "
        "print([m for m in ('lightning', 'torchmetrics', 'transformers') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert found.stdout.strip() == "[]", found.stderr


def test_the_public_names_are_those_that_the_page_documents() -> None:
    """What the package needs besides stands behind it, in ``_lagrangian``."""
    loss = PointwiseLoss(CONSTRAINTS, Pointwise(), samples=2)
    public = {name for name in dir(loss) if not name.startswith("_")}
    section = (PointwiseLoss.__doc__ or "").partition("Attributes:")[2]
    lines = re.findall(r"^ {8}([a-z_, ]+): ", section, re.MULTILINE)
    attributes = {name for line in lines for name in line.split(", ")}
    methods = {
        name
        for name in public
        if callable(getattr(loss, name)) and getattr(loss, name).__doc__
    }
    assert len(attributes) > 5
    assert public == attributes | (methods - {"multipliers"})
