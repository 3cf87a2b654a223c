"""A family as it ships: its optimum by another solver, its configurations, the export."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_model
from scipy.optimize import minimize

import pl_pointwise
from pl_pointwise import Pointwise
from pl_pointwise.cli import main
from pl_pointwise.command_line.configs import packaged_configs
from pl_pointwise.compare import command
from pl_pointwise.correction import Corrected
from pl_pointwise.tasks.family import Family, FamilyDataModule, FamilyModule
from pl_pointwise.tasks.family.family import optimum, problems, split_of
from tests.pl_pointwise.toy import trainer
from tests.tasks.conftest import comparison, train, words

QUIET = [
    "--trainer.enable_progress_bar",
    "false",
    "--trainer.enable_model_summary",
    "false",
]
SIZES = {"variables": 8, "equations": 5, "inequalities": 8, "instances": 240}
SMALL = Family(**SIZES)
PARTS = ("model.family", "data.family")
TINY = words(
    {f"{part}.{name}": str(size) for part in PARTS for name, size in SIZES.items()}
)
SHORT = [*QUIET, *TINY, "--trainer.max_epochs", "1"]


def fitted(epochs: int = 60, **options: Any) -> FamilyModule:
    torch.manual_seed(0)
    training = pl_pointwise.Training(pl_pointwise.Optimization(3e-3, schedule="linear"))
    module = FamilyModule(Pointwise(), SMALL, training=training, **options)
    trainer(max_epochs=epochs).fit(module, FamilyDataModule(SMALL, batch_size=40))
    return module.eval()


@pytest.mark.parametrize("nonconvex", [False, True])
def test_the_optimum_is_that_of_another_solver(nonconvex: bool) -> None:
    family = Family(8, 5, 8, 240, nonconvex)
    of = problems(family)
    square, linear, equal, below, bound = (
        each.numpy() for each in (of.Q, of.p, of.A, of.G, of.h)
    )
    first = split_of(family)["train"].stop
    for row in (0, 7, 39):
        x = of.x[first + row].numpy()
        found = minimize(
            lambda y: y**2 @ square / 2 + (np.sin(y) if nonconvex else y) @ linear,
            of.plus.numpy() @ x,
            constraints=[
                {"type": "eq", "fun": lambda y, x=x: equal @ y - x},
                {"type": "ineq", "fun": lambda y: bound - below @ y},
            ],
            options={"ftol": 1e-12, "maxiter": 500},
        )
        assert optimum(family)[first + row].item() == pytest.approx(found.fun, abs=1e-5)


def test_the_trained_network_is_near_the_optimum_and_a_correction_makes_it_feasible() -> (
    None
):
    module, of, part = fitted(), problems(SMALL), split_of(SMALL)["test"]
    proxy, x = module.proxy, of.x[part].float()
    with torch.no_grad():
        y = proxy(x)
        found = Corrected(proxy, proxy.inequalities, within=proxy.null)(x)
    best = optimum(SMALL)[part].mean()
    assert proxy.inequalities(y, x).max() > 1e-3  # Else there is nothing to correct.
    assert proxy.inequalities(found, x).max() <= 1e-4
    torch.testing.assert_close(found @ proxy.A.T, y @ proxy.A.T, rtol=0, atol=1e-6)
    torch.testing.assert_close(found @ proxy.A.T, x, rtol=0, atol=1e-5)
    assert abs(proxy.objective(found).mean() / best - 1) < 0.02


def test_equalities_in_the_loss_are_a_second_constraint() -> None:
    module = fitted(equalities="loss")
    assert module.multipliers["equalities"].shape == (200, 5)
    assert (module.multipliers["equalities"] < 0).any()
    x = problems(SMALL).x[split_of(SMALL)["test"]].float()
    y = module.proxy(x)
    assert 0 < module.proxy.equalities(y, x).abs().mean() < 0.05


def test_metrics_are_those_by_hand() -> None:
    module, data = fitted(epochs=3, margin=0.1), FamilyDataModule(SMALL, batch_size=40)
    (found, train_found) = trainer().test(module, data, verbose=False)
    proxy, x = module.proxy, problems(SMALL).x[split_of(SMALL)["test"]].float()
    y = proxy(x)
    worst = (y @ proxy.G.T - proxy.h).amax(1).clamp(min=0)
    best = optimum(SMALL)[split_of(SMALL)["test"]].float()
    assert found["test/worst"] == pytest.approx(worst.mean().item(), rel=1e-4)
    assert found["test/beyond"] == pytest.approx((worst > 1e-3).float().mean().item())
    expected = ((proxy.objective(y) - best) / best.abs()).mean().item()
    assert found["test/gap"] == pytest.approx(expected, rel=1e-4)
    assert "train/gap" not in train_found
    bounds = (
        module.constraints["inequalities"],
        module.evaluation_constraints["inequalities"],
    )
    assert [bound.at_most for bound in bounds] == [-0.1, 0]


def test_a_model_of_another_family_than_the_data_is_refused() -> None:
    with pytest.raises(pl_pointwise.errors.DataError, match="set both alike"):
        trainer(max_epochs=1).fit(
            FamilyModule(Pointwise(), SMALL), FamilyDataModule(Family())
        )


def test_the_page_gives_a_feasible_answer() -> None:
    page = Path(__file__).parents[3] / "docs/family.md"
    code, *_ = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(code, "family.md", "exec"), found)
    assert found["y"].shape == (100, 4)
    assert (found["y"] @ found["G"].T - found["h"]).max() <= 1.01e-4
    batch = {"x": torch.randn(5, 4)}
    values = found["module"].constraint_values(found["module"](batch), batch)
    assert values["limits"].shape == (5, 6)


@pytest.mark.parametrize(
    "name", [n for n in packaged_configs() if n.split("/")[0] == "family"]
)
def test_packaged_configs_train(name: str, tmp_path: Path) -> None:
    train("family", name, SHORT, tmp_path)


def test_packaged_comparison_makes_a_table(tmp_path: Path) -> None:
    lines = comparison(
        "family/family", [*SHORT, "--trainer.logger", "false"], tmp_path / "out"
    )
    assert {"test/gap", "test/worst", "test/beyond"} <= set(lines[0])
    (results,) = tmp_path.rglob("comparison.md")
    assert "| method | gap | violation rate of samples |" in results.read_text("utf-8")


def test_the_export_is_loaded_with_its_certificate_and_corrects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "draw_plots", lambda *_: None)
    arguments = ["--config", "family", *TINY, *QUIET, "--model.correction", "100"]
    arguments += ["--trainer.max_epochs", "5", "--trainer.logger", "false"]
    arguments += ["--require", "beyond <= 0.2", "--output", str(tmp_path / "out")]
    main(["compare", *arguments])
    (folder,) = {path.parent for path in (tmp_path / "out").rglob("model.safetensors")}
    moved = shutil.move(folder, tmp_path / "moved")
    module = pl_pointwise.load(moved)
    assert "beyond <= 0.2" in capsys.readouterr().out
    other = FamilyModule(None, SMALL, correction=100).eval()
    load_model(other.solver, str(tmp_path / "moved/model.safetensors"))
    x = problems(SMALL).x[:9].float()
    torch.testing.assert_close(module.solver(x), other.solver(x))
    assert module.proxy.inequalities(module.solver(x), x).max() <= 1e-4


# Proofs -------------------------------------------------------------------------------------------


def file_of(path: Path, **changed: Any) -> Path:
    """SMALL's problems as a file of matrices."""
    of = problems(SMALL)
    found = {name: getattr(of, name).numpy() for name in ("Q", "p", "A", "G", "h")}
    np.savez(path, **{**found, "X": of.x.numpy(), **changed})
    return path


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_every_answer_has_a_proof_that_holds(kind: torch.dtype) -> None:
    module, part = fitted(9, bound=True), split_of(SMALL)["test"]
    x, best = problems(SMALL).x[part], optimum(SMALL)[part]
    with torch.no_grad():
        found = module.solver(x.to(kind))
    assert found.violation.max() <= (1e-8 if kind == torch.float64 else 1e-6)
    assert (found.bound <= best + 1e-6).all()  # The optimum is ADMM's, to that.
    assert found.gap.max() <= 0.005
    alone = module.solver.program.dual(x, module.solver.network(x.float()))
    at_price = module.prices.mean("inequalities") / SMALL.inequalities
    of_price = module.solver.program.dual(x, at_price.expand(len(x), -1))
    # What the network has learnt.
    assert (best - alone).mean() < (best - of_price).mean()


def test_gap_is_what_is_proved_and_an_export_proves_it_too(tmp_path: Path) -> None:
    module, data = fitted(3, bound=True), FamilyDataModule(SMALL, batch_size=40)
    (found, train_found) = trainer().test(module, data, verbose=False)
    assert {"test/gap", "test/unproved", "train/gap"} <= {*found, *train_found}
    assert 0 <= found["test/gap"] <= 0.005
    assert found["test/unproved"] == 0
    assert found["test/inequalities/violated"] == 0  # In float32 too.
    module.export(tmp_path / "model")
    usage = (tmp_path / "model/README.md").read_text()
    assert "y, violation, objective, bound, gap = module.solver(x)" in usage
    other = FamilyModule(None, SMALL, bound=True)
    load_model(other.solver, tmp_path / "model/model.safetensors")
    x = problems(SMALL).x[:5].float()
    torch.testing.assert_close(other.eval().solver(x), module.solver(x))


def test_proofs_are_in_checkpoints(tmp_path: Path) -> None:
    module = fitted(3, bound=True)
    module.trainer.save_checkpoint(tmp_path / "model.ckpt")
    other = FamilyModule.load_from_checkpoint(
        tmp_path / "model.ckpt", weights_only=True
    ).eval()
    x = problems(SMALL).x[:5]
    torch.testing.assert_close(other.solver(x), module.solver(x))


def test_problems_of_a_file_are_those_of_the_family(tmp_path: Path) -> None:
    path = str(file_of(tmp_path / "own.npz"))
    torch.manual_seed(0)
    module = FamilyModule(Pointwise(), bound=True, problem=path)
    trainer(max_epochs=2).fit(module, FamilyDataModule(batch_size=40))
    part = split_of(SMALL)["test"]
    torch.testing.assert_close(
        optimum(module.family)[part], optimum(SMALL)[part], atol=1e-5, rtol=0
    )
    x = problems(SMALL).x[part]
    assert module.eval().solver(x).gap.max() <= 0.005


def test_quadratic_constraints_and_a_full_objective_come_from_a_file(
    tmp_path: Path,
) -> None:
    draw = np.random.default_rng(0)
    root = draw.normal(size=(8, 8))
    curved = 0.3 * draw.random((8, 8))  # Diagonals.
    path = file_of(
        tmp_path / "own.npz",
        Q=root @ root.T / 8 + np.eye(8),
        H=curved,
        h=problems(SMALL).h + 2,
    )
    torch.manual_seed(0)
    module = FamilyModule(Pointwise(), bound=True, problem=str(path))
    trainer(max_epochs=2).fit(module, FamilyDataModule(batch_size=40))
    x = problems(module.family).x[split_of(module.family)["test"]]
    found = module.eval().solver(x)
    below = (
        found.y.square() @ torch.from_numpy(curved).T / 2
        + found.y @ problems(SMALL).G.T
    )
    assert (below <= problems(SMALL).h + 2 + 1e-7).all()
    assert found.gap.median() <= 1e-4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"p": np.zeros(3)}, "own.npz: Q is"),
        ({"G": np.full((8, 8), np.nan)}, "not finite"),
        ({"A": np.ones((5, 8))}, "depend on each other"),
        ({"h": np.array([None] * 8)}, "no .npz file of numbers"),
    ],
)
def test_a_file_that_is_not_as_it_should_be_is_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = file_of(tmp_path / "own.npz", **changed)
    with pytest.raises(pl_pointwise.errors.DataError, match=message):
        FamilyModule(Pointwise(), problem=str(path))


def test_a_problem_that_is_not_convex_has_no_gap_but_its_stationarity() -> None:
    family = Family(8, 5, 8, 240, nonconvex=True)
    module = FamilyModule(Pointwise(), family, bound=True)
    data = FamilyDataModule(family, batch_size=40)
    trainer(max_epochs=6).fit(module, data)
    (found, _) = trainer().test(module.eval(), data, verbose=False)
    assert 0 < found["test/stationarity"] <= 1
    assert "test/unproved" not in found
    answers = module.solver(problems(family).x[:5])
    assert answers._fields == ("y", "violation", "objective", "stationarity")
