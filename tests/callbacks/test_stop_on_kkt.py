"""Training stops at an optimum, not before; the residual is the one that the docs define."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from pl_pointwise import Constraint, Formulation, Pointwise, PointwiseModule, Relaxed
from pl_pointwise.callbacks import StopOnKKT
from tests.callbacks.witness import Witness
from tests.pl_pointwise.test_precision import Float, scaled
from tests.pl_pointwise.toy import PAIRS, At, Toy, ToyData, ToyRows, fit, trainer

CENTRE = torch.tensor([2.0, 1.0], dtype=torch.float64)
NORMALS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)


class Projection(PointwiseModule):
    """min ½‖w − (2, 1)‖² with n·w ≤ 1 for every sample's n; the answer is (1, 0).

    There w₁ ≤ 1 and w₁ + w₂ ≤ 1 are active. The gradient (−1, −1) + mean λn = 0 asks of the four
    samples λ/4 = 0 for the first and 1 for the third, and of the others λ = 0.
    """

    def __init__(self, formulation: Formulation | None = None) -> None:
        super().__init__(formulation=formulation, constraints={"side": Constraint(at_most=1.0)})
        self.w = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, batch: Any) -> Tensor:
        return batch["n"] @ self.w

    def objective(self, outputs: Tensor, batch: Any) -> Tensor:
        return 0.5 * (self.w - CENTRE).square().sum().expand(len(outputs))

    def constraint_values(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"side": outputs}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def normals() -> ToyData:
    return ToyData([{"n": n} for n in NORMALS], batch_size=4)


class Residuals(Callback):
    def __init__(self) -> None:
        self.parts: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        found = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("kkt/")}
        self.parts.append(found)


def test_stops_at_the_optimum_after_so_many_epochs_in_a_row() -> None:
    module, reported = Projection(Pointwise(alpha=1.0, dual_lr=2.0)), Residuals()
    runner = trainer(max_epochs=2000, callbacks=[StopOnKKT(1e-4, patience=4), reported])
    runner.fit(module, normals())
    residuals = [parts["kkt/residual"] for parts in reported.parts]
    assert len(residuals) < 2000
    within = [residual <= 1e-4 for residual in residuals]
    runs = [all(within[i : i + 4]) for i in range(len(within) - 3)]
    assert runs.index(True) == len(within) - 4  # The first four in a row were the last.
    torch.testing.assert_close(module.w.detach(), CENTRE - 1, rtol=0, atol=2e-3)
    expected = torch.tensor([[0.0], [0.0], [4.0], [0.0]])
    torch.testing.assert_close(module.multipliers["side"], expected, rtol=0, atol=1e-2)


def test_an_infeasible_rest_is_no_optimum() -> None:
    """With multipliers that hardly move, the weights settle where the price of the penalty says."""
    reported = Residuals()
    runner = trainer(max_epochs=60, callbacks=[StopOnKKT(1e-3, patience=2), reported])
    runner.fit(Projection(Pointwise(alpha=1.0, dual_lr=1e-9)), normals())
    assert len(reported.parts) == 60
    assert reported.parts[-1]["kkt/stationarity"] < 1e-3
    assert reported.parts[-1]["kkt/feasibility"] > 1e-2


def test_plain_training_stops_where_its_gradient_vanishes() -> None:
    reported = Residuals()
    module = Projection(None)
    trainer(max_epochs=200, callbacks=[StopOnKKT(1e-3), reported]).fit(module, normals())
    assert len(reported.parts) < 200
    assert reported.parts[-1]["kkt/feasibility"] == 0
    torch.testing.assert_close(module.w.detach(), CENTRE, rtol=0, atol=2e-3)


class Gradients(Callback):
    """The gradient of each step's Lagrangian by autograd through the printed ψ of Pointwise."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.epochs: dict[int, list[np.ndarray]] = {}

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        with torch.enable_grad():
            z = pl_module(batch)
            loss = (z - batch["y"]).square().mean()
            violations = {"fit": z[:, None] + 0.3, "pair": 0.2 - z[:, None] * batch["x"][:, :PAIRS]}
            for name, v in violations.items():
                tables = pl_module.multipliers
                m = tables[name][batch["index"]] if name in tables else torch.zeros_like(v)
                psi = self.alpha * (v + m / (2 * self.alpha)).clamp(min=0) ** 2
                loss = loss + psi.mean()
            gradients = torch.autograd.grad(loss, list(pl_module.parameters()))
        flat = torch.cat([gradient.flatten() for gradient in gradients]).numpy()
        self.epochs.setdefault(trainer.current_epoch, []).append(flat)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_stationarity_is_the_norm_of_the_epochs_mean_gradient(clip: float | None) -> None:
    gradients, reported = Gradients(0.8), Residuals()
    module = Toy(Pointwise(alpha=0.8, dual_lr=1.2), gradient_clip_val=clip)
    fit(module, ToyRows(23, seed=2), callbacks=[gradients, StopOnKKT(1e-9), reported])
    for epoch, parts in enumerate(reported.parts):
        steps = gradients.epochs[epoch]
        assert len(steps) == 6
        assert max(np.linalg.norm(step) for step in steps) > 0.3  # It was clipped.
        wanted = np.linalg.norm(np.mean(steps, axis=0))
        assert parts["kkt/stationarity"] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(
    "formulation", [Pointwise(alpha=0.8, dual_lr=1.2), Relaxed(alpha=0.8, beta=1.7, dual_lr=0.9)]
)
def test_feasibility_and_complementarity_are_the_largest_over_constraints(
    formulation: Any,
) -> None:
    witness, reported = Witness({"fit": (-0.3, None), "pair": (None, 0.2)}), Residuals()
    fit(Toy(formulation), ToyRows(23, seed=2), callbacks=[witness, StopOnKKT(1e-9), reported])
    for epoch, parts in enumerate(reported.parts):
        excess: dict[str, list[np.ndarray]] = {"fit": [], "pair": []}
        slack: dict[str, list[np.ndarray]] = {"fit": [], "pair": []}
        for visit in witness.of_epoch(epoch):
            for name in excess:
                v, m = visit.violation[name], visit.after[name][visit.index]
                if isinstance(formulation, Relaxed):  # u* = (λ + 2αv)₊ / 2(α + β)
                    v = v - np.maximum(m + 1.6 * v, 0) / (2 * 2.5)
                excess[name].append(np.maximum(v, 0).ravel())
                slack[name].append(np.abs(m * v).ravel())
        feasibility = max(np.concatenate(each).mean() for each in excess.values())
        complementarity = max(np.concatenate(each).mean() for each in slack.values())
        assert parts["kkt/feasibility"] == pytest.approx(feasibility, rel=1e-5)
        assert parts["kkt/complementarity"] == pytest.approx(complementarity, rel=1e-5)
        assert parts["kkt/residual"] == max(
            parts[f"kkt/{name}"] for name in ("stationarity", "feasibility", "complementarity")
        )


def stopped(folder: Path, path: Any = None) -> tuple[int, list[float], Projection]:
    """Epochs trained in all, their residuals, and the module; a checkpoint of every epoch."""
    reported = Residuals()
    saver = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, save_last=True)
    module = Projection(Pointwise(alpha=1.0, dual_lr=2.0))
    runner = trainer(
        max_epochs=500,
        callbacks=[StopOnKKT(1e-3, patience=4), reported, saver],
        enable_checkpointing=True,
    )
    runner.fit(module, normals(), ckpt_path=path)
    return runner.current_epoch, [p["kkt/residual"] for p in reported.parts], module


def test_resumed_stops_where_an_uninterrupted_run_does(tmp_path: Path) -> None:
    epochs, residuals, module = stopped(tmp_path)
    assert 10 < epochs < 500
    for before in (2, 9):  # Within the epochs in a row, and earlier.
        checkpoint = tmp_path / f"epoch={epochs - 1 - before}.ckpt"
        again, rest, resumed = stopped(tmp_path / str(before), checkpoint)
        assert again == epochs
        assert rest == residuals[-before:]
        assert torch.equal(resumed.w, module.w)
    # From the end there is nothing left to train.
    again, rest, _ = stopped(tmp_path / "end", tmp_path / "last.ckpt")
    assert (again, rest) == (epochs, [])


def test_resumed_from_a_validation_stops_where_an_uninterrupted_run_does(tmp_path: Path) -> None:
    """Validation comes before the end of the epoch."""

    class Saver(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    def run(path: Any = None) -> int:
        module = Projection(Pointwise(alpha=1.0, dual_lr=2.0))
        callbacks = [StopOnKKT(1e-3, patience=4), *([] if path else [Saver()])]
        runner = trainer(max_epochs=500, callbacks=callbacks)
        data = normals()
        data.datasets["val"] = data.datasets["train"]
        runner.fit(module, data, ckpt_path=path)
        return runner.current_epoch

    epochs = run()
    assert run(tmp_path / f"{epochs - 3}.ckpt") == epochs  # Two within the tolerance so far.


@pytest.mark.parametrize("batches", [6, 8])
def test_residual_after_a_resume_is_that_of_the_whole_epoch(tmp_path: Path, batches: int) -> None:
    checkpoint = tmp_path / "mid.ckpt"
    found = []
    for path in (None, checkpoint):
        reported = Residuals()
        savers = [] if path else [At(batches, lambda trainer: trainer.save_checkpoint(checkpoint))]
        runner = trainer(max_epochs=2, callbacks=[StopOnKKT(1e-9), reported, *savers])
        data = ToyData(ToyRows(23), batch_size=4)  # Six batches an epoch.
        runner.fit(Toy(Pointwise(alpha=1.0, dual_lr=1.0)), data, ckpt_path=path)
        found.append(reported.parts)
    assert found[1] == [found[0][1]]


def test_an_epoch_cut_short_is_judged_too() -> None:
    reported = Residuals()
    runner = trainer(max_epochs=-1, max_steps=8, callbacks=[StopOnKKT(1e-9), reported])
    runner.fit(Toy(Pointwise()), ToyData(ToyRows(23), batch_size=4))
    assert len(reported.parts) == 2
    assert reported.parts[0] != reported.parts[1]


def test_a_csv_file_receives_the_parts(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    reported = Residuals()
    fit(Toy(Pointwise()), ToyRows(9), callbacks=[StopOnKKT(1e-9), reported], logger=logger)
    lines = csv.DictReader((Path(logger.log_dir) / "metrics.csv").open())
    found = [float(line["kkt/residual"]) for line in lines if line["kkt/residual"]]
    assert found == pytest.approx([parts["kkt/residual"] for parts in reported.parts])


class FusedFloat(Float):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("kind", [Float, FusedFloat])
def test_stationarity_does_not_grow_with_the_loss_scale(kind: type[Float], clip: Any) -> None:
    """A fused optimizer unscales in its own step: a run under 16-mixed never stopped."""
    found = []
    for plugins in ([], [scaled(2.0)], [scaled(1024.0)]):
        reported = Residuals()
        module = kind(Pointwise(alpha=1.0, dual_lr=1.0), gradient_clip_val=clip)
        callbacks = [StopOnKKT(1e-9), reported]
        fit(module, ToyRows(9), epochs=2, callbacks=callbacks, plugins=plugins)
        found.append(reported.parts[-1]["kkt/stationarity"])
    assert found[1:] == pytest.approx([found[0]] * 2, rel=0.1)


@pytest.mark.parametrize("options", [{"tolerance": 0.0}, {"tolerance": 1.0, "patience": 0}])
def test_useless_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="StopOnKKT"):
        StopOnKKT(**options)
