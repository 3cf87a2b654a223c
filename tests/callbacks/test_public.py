"""What a callback needs of a run is public: forces, formulations in force, λ of each sample."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

import pl_pointwise.callbacks
from pl_pointwise import Average, Constraint, Formulation, Pointwise
from pl_pointwise.data import IndexedDataset
from tests.pl_pointwise.toy import SHARED, Toy, ToyData, ToyRows, fit, trainer

CALLBACKS = Path(__file__).resolve().parents[2] / "callbacks"
GROUPS = [0, 2, 1, 1, 0, 2, 2, 2, 3, 0, 1, 1]
ALPHA = 0.8
STATED = Pointwise(alpha=ALPHA, dual_lr=1.2)


def private_reads(tree: ast.AST) -> list[str]:
    """The private attributes that code reads of an object that is not its own."""
    reads = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        source = ast.unparse(node.value)
        if not node.attr.startswith("__") and source not in ("self", "cls", "super()"):
            reads.append(f"{source}.{node.attr}")
    return reads


@pytest.mark.parametrize("path", sorted(CALLBACKS.glob("*.py")), ids=lambda p: p.stem)
def test_no_callback_reads_private_state(path: Path) -> None:
    reads = private_reads(ast.parse(path.read_text(encoding="utf-8")))
    assert not reads, (
        f"callbacks/{path.name} reads {', '.join(reads)}. Public are measured, dual_steps, "
        "forces(name), in_force(name), multipliers, multipliers.of(name, index), "
        "multipliers.groups, prices; for other things make a method of pl_pointwise/module.py."
    )


@pytest.mark.parametrize(
    "path", sorted(CALLBACKS.glob("[a-z]*.py")), ids=lambda p: p.stem
)
def test_every_file_has_a_public_callback(path: Path) -> None:
    modules = pl_pointwise.callbacks._MODULES
    assert path.stem in modules.values(), (
        f"callbacks/__init__.py: name the class of {path.name} twice, below TYPE_CHECKING and in "
        "_MODULES, or no configuration finds it."
    )


@pytest.mark.parametrize("path", sorted(CALLBACKS.glob("*.py")), ids=lambda p: p.stem)
def test_values_are_logged_as_of_all_ranks(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(
            "pl_module."
        ):
            assert node.attr not in ("log", "log_dict"), (
                f"callbacks/{path.name}, line {node.lineno}: log by log_of_all_ranks(pl_module, "
                "values) of pl_pointwise/task.py, or ranks differ."
            )


def test_a_private_read_is_seen() -> None:
    code = "self._mine\nmodule._lagrangian.groups\nself.module._run.x\nsuper()._save()"
    assert private_reads(ast.parse(code)) == [
        "module._lagrangian",
        "self.module._run",
    ]


class Forces(Callback):
    """Keeps, of every step, what a callback of one's own may ask for."""

    def __init__(self) -> None:
        self.steps: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        measured = pl_module.measured
        self.steps.append(
            (
                measured.index,
                measured.judged["fit"],
                measured.masks["fit"],
                measured.multipliers["fit"],
                pl_module.forces("fit"),
            )
        )


def steps_of(module: Toy, rows: Any, epochs: int = 4) -> list[tuple[Tensor, ...]]:
    forces = Forces()
    fit(module, rows, epochs=epochs, callbacks=[forces])
    assert len(forces.steps) == 3 * epochs
    return list(forces.steps)


def test_the_force_on_a_sample_is_the_derivative_that_pushed_it() -> None:
    """(λ + 2αv)₊ with the λ before the step, and nothing where the mask leaves a sample out."""
    pushed = 0
    for _, violation, mask, before, force in steps_of(
        Toy(STATED, partial=True), ToyRows(12, partial=True)
    ):
        wanted = (before + 2 * ALPHA * violation).clamp(min=0) * mask
        torch.testing.assert_close(force, wanted, rtol=1e-12, atol=0)
        pushed += int((force > 0).sum())
    assert pushed > 5


def test_the_force_on_a_sample_of_a_group_is_that_on_the_mean_of_its_group() -> None:
    """The mean by hand: over the last values of the samples that were seen so far."""
    module = Toy(STATED, {"fit": Constraint(at_most=-0.3)})
    last: dict[int, float] = {}
    pushed = 0
    for index, violation, _, before, force in steps_of(
        module, IndexedDataset(ToyRows(12), groups=GROUPS)
    ):
        last |= dict(zip(index.tolist(), violation[:, 0].tolist(), strict=True))
        for row, sample in enumerate(index.tolist()):
            of_group = [v for i, v in last.items() if GROUPS[i] == GROUPS[sample]]
            mean = sum(of_group) / len(of_group)
            wanted = max(0.0, float(before[row, 0]) + 2 * ALPHA * mean)
            assert float(force[row, 0]) == pytest.approx(wanted, rel=1e-9)
            pushed += wanted > 0
    assert pushed > 5


def test_who_is_exempt_has_no_force() -> None:
    module = Toy(Pointwise(), SHARED)
    steps = steps_of(module, ToyRows(12), epochs=10)
    exempt = module._lagrangian.shares["fit"].exempt(torch.arange(12))
    violated = [(force == 0) & (violation > 0) for _, violation, _, _, force in steps]
    assert exempt.any()
    assert any(bool(rows.any()) for rows in violated[-6:])


def test_a_sample_has_the_multiplier_of_its_group() -> None:
    rows = IndexedDataset(ToyRows(12), groups=GROUPS)
    module = Toy(STATED, {"fit": Constraint(at_most=-0.3)})
    trainer(max_epochs=4).fit(module, ToyData(rows, batch_size=4))
    table = module.multipliers["fit"]
    assert table.shape == (4, 1)
    assert table.any()
    found = module.multipliers.of("fit", torch.tensor([8, -1, 1, 5]))
    wanted = [float(table[3, 0]), 0.0, float(table[2, 0]), float(table[2, 0])]
    assert found[:, 0].tolist() == wanted
    found.fill_(7.0)  # A copy.
    assert not (module.multipliers["fit"] == 7).any()
    assert module.multipliers.groups is not None
    assert module.multipliers.groups.tolist() == GROUPS


def test_a_sample_without_groups_has_its_own() -> None:
    module = fit(Toy(STATED), ToyRows(12))
    index = torch.tensor([3, 0])
    assert torch.equal(
        module.multipliers.of("pair", index), module.multipliers["pair"][index]
    )


@pytest.mark.parametrize(
    ("formulation", "name", "words"),
    [
        (Average(), "fit", "no force of a sample"),
        ({"fit": STATED, "pair": None}, "pair", "no force of a sample"),
    ],
)
def test_what_has_no_force_of_a_sample_is_refused(
    formulation: Formulation, name: str, words: str
) -> None:
    module = fit(Toy(formulation), ToyRows(12), epochs=1)
    with pytest.raises(ValueError, match=words):
        module.forces(name)


def test_before_a_step_there_is_no_force_and_after_it_alpha_is_a_number() -> None:
    module = Toy(Pointwise())
    with pytest.raises(ValueError, match="no step yet"):
        module.forces("fit")
    fit(module, ToyRows(12))
    assert isinstance(module.in_force("fit").alpha, float)  # type: ignore[attr-defined]
    assert module.formulations["fit"].adaptive
    with pytest.raises(ValueError, match="one for all samples"):
        fit(Toy(Average()), ToyRows(12)).multipliers.of("fit", torch.arange(2))
