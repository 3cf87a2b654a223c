"""A comparison's runs carry method and seed in the loggers."""

from __future__ import annotations

from pathlib import Path

import pytest

from pl_pointwise.cli import main
from tests.pl_pointwise.compare.test_command import BASE, write_files
from tests.pl_pointwise.compare.test_runs import METHODS

EXPECTED = [("pointwise", 3), ("relaxed", 3)]


def write(folder: Path, logger: str) -> list[str]:
    watched = f"logger: {logger}, callbacks: [{{class_path: DualMonitor}}]"
    files = write_files(folder, METHODS, BASE.replace("logger: false", watched))
    return ["compare", *files, "--seeds", "3", "--output", str(folder / "out")]


@pytest.fixture(autouse=True)
def _unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison's own plots take longer than these runs."""
    name = "pl_pointwise.compare.command.draw_plots"
    monkeypatch.setattr(name, lambda *_: None)


def test_tensorboard_has_method_and_seed_of_every_run(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    init = f"{{save_dir: {tmp_path / 'board'}}}"
    main(write(tmp_path, f"{{class_path: TensorBoardLogger, init_args: {init}}}"))
    for number, (method, _) in enumerate(EXPECTED):
        folder = tmp_path / f"board/lightning_logs/version_{number}"
        events = accumulator.EventAccumulator(str(folder), {"scalars": 0})
        events.Reload()
        assert len(events.Scalars("dual/fit/multiplier_max")) == 2
        plugin = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
        assert method.encode() in plugin
        assert b"seed" in plugin
        assert b"tolerance" in plugin  # The module's own are there as well.


def test_a_log_in_the_runs_own_folder_stays_there(tmp_path: Path) -> None:
    main(write(tmp_path, "true"))
    for method, seed in EXPECTED:
        folder = tmp_path / f"out/runs/{method}/seed-{seed}/lightning_logs/version_0"
        assert f"method: {method}" in (folder / "hparams.yaml").read_text()


def test_offline_wandb_has_a_run_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "w").mkdir()
    init = f"{{save_dir: {tmp_path / 'w'}, offline: true, project: p}}"
    main(write(tmp_path, f"{{class_path: WandbLogger, init_args: {init}}}"))
    assert len([*(tmp_path / "w").rglob("run-*.wandb")]) == len(EXPECTED)
