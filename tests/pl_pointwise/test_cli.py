"""The command line: LightningCLI as users know it, packaged configurations by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from pl_pointwise import Pointwise
from pl_pointwise.cli import PointwiseCLI, main
from pl_pointwise.configs import config_path, packaged_configs, with_config_paths

TASK = ["--model", "tests.pl_pointwise.line_task.LineModule"]
TASK += ["--data", "tests.pl_pointwise.line_task.LineData"]
SMALL = ["--trainer.max_epochs", "2", "--trainer.accelerator", "cpu", "--trainer.logger", "false"]
SMALL += ["--trainer.enable_progress_bar", "false"]
POINTWISE = ["--model.formulation", "Pointwise", "--model.formulation.alpha", "2.0"]


def test_help_lists_packaged_configs_and_compare() -> None:
    command = [str(Path(sys.executable).with_name("pl-pointwise")), "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "compare" in text
    assert all(name in text.replace("\n", " ") for name in packaged_configs())


def test_formulation_by_short_name_becomes_an_object() -> None:
    cli = PointwiseCLI([*TASK, *SMALL, *POINTWISE], run=False)
    assert cli.model.formulations == {"fit": Pointwise(alpha=2.0)}


def test_a_formulation_per_constraint_from_yaml(tmp_path) -> None:
    config = tmp_path / "one_each.yaml"
    one = {"class_path": "pl_pointwise.Pointwise", "init_args": {"alpha": 2.0}}
    config.write_text(yaml.safe_dump({"model": {"init_args": {"formulation": {"fit": one}}}}))
    args = [*TASK, "--config", str(config)]
    assert PointwiseCLI(args, run=False).model.formulations == {"fit": Pointwise(alpha=2.0)}


def test_optimizer_and_scheduler_options_of_lightning_cli_work(tmp_path) -> None:
    """The multipliers are no parameters, so an optimizer from the command line leaves them out."""
    extra = ["--optimizer", "SGD", "--optimizer.lr", "0.05"]
    extra += ["--lr_scheduler", "StepLR", "--lr_scheduler.step_size", "1"]
    extra += ["--lr_scheduler.gamma", "0.1", "--trainer.default_root_dir", str(tmp_path)]
    cli = PointwiseCLI([*TASK, *SMALL, *POINTWISE, *extra], run=False)
    cli.trainer.fit(cli.model, cli.datamodule)
    (optimizer,) = cli.trainer.optimizers
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.1**2)
    assert cli.model.multipliers["fit"].max() > 0


def test_checkpoint_of_a_command_line_run_holds_plain_hyperparameters(
    tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["fit", *TASK, *SMALL, *POINTWISE, "--trainer.default_root_dir", str(tmp_path)])
    (path,) = tmp_path.rglob("*.ckpt")
    stored = torch.load(path, weights_only=True)["hyper_parameters"]
    assert stored["formulation"]["class_path"].endswith("Pointwise")
    module = type(PointwiseCLI([*TASK], run=False).model).load_from_checkpoint(
        path, weights_only=True
    )
    assert module.formulations == {"fit": Pointwise(alpha=2.0)}
    assert module.multipliers["fit"].shape == (5, 1)
    main(["test", *TASK, *SMALL, "--ckpt_path", str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert ["test", "train"] in [line.split() for line in lines]
    (cvar,) = [line.split() for line in lines if line.startswith("fit/cvar95")]
    assert len([float(value) for value in cvar[1:]]) == 2


def test_checkpoints_are_loaded_as_data_unless_told_otherwise(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    path = tmp_path / "evil.ckpt"
    torch.save({"state_dict": Evil()}, path)
    with pytest.raises(Exception, match=r"[Ww]eights"):
        main(["test", *TASK, *SMALL, "--ckpt_path", str(path)])
    assert not (tmp_path / "ran").exists()


def test_a_file_of_the_working_directory_comes_before_a_packaged_name(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_path("reranker").endswith("reranker/configs/base.yaml")
    (tmp_path / "reranker").write_text("{}")
    assert config_path("reranker") == "reranker"


def test_unknown_config_name_lists_the_known_ones() -> None:
    with pytest.raises(FileNotFoundError, match="reranker/pointwise"):
        with_config_paths(["fit", "--config", "rerankr"])


def test_config_names_are_resolved_in_every_spelling() -> None:
    base = config_path("reranker")
    assert with_config_paths(["--config=reranker", "-c", "reranker"]) == [
        f"--config={base}",
        "-c",
        base,
    ]
