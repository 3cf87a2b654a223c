"""The command line: LightningCLI as users know it, packaged configurations by name."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch.loggers.logger import DummyLogger

from pl_pointwise import Pointwise
from pl_pointwise.cli import PointwiseCLI, main
from pl_pointwise.command_line import configs
from pl_pointwise.command_line.configs import (
    comparison_path,
    config_parts,
    packaged_configs,
    with_config_parts,
)
from pl_pointwise.command_line.next_steps import config_of
from tests.pl_pointwise.training.test_hostile_checkpoints import Bomb

TASK = ["--model", "tests.pl_pointwise.line_task.LineModule"]
TASK += ["--data", "tests.pl_pointwise.line_task.LineData"]
SMALL = [
    "--trainer.max_epochs",
    "2",
    "--trainer.accelerator",
    "cpu",
    "--trainer.logger",
    "false",
]
SMALL += ["--trainer.enable_progress_bar", "false"]
POINTWISE = ["--model.formulation", "Pointwise", "--model.formulation.alpha", "2.0"]


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two tasks with configurations of every kind, in place of the packaged ones."""
    for name in (
        "one/configs/base.yaml",
        "one/configs/demo.yaml",
        "one/configs/methods.yaml",
        "one/configs/compare/demo.yaml",
        "two/configs/base.yaml",
        "common/configs/methods/average.yaml",
        "common/configs/methods/pointwise.yaml",
    ):
        path = tmp_path / "tasks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "{average: {a: 1}, own: {b: 2}}" if path.name == "methods.yaml" else "{}"
        )
    module = SimpleNamespace(__path__=[str(tmp_path / "tasks")])
    monkeypatch.setattr(configs.importlib, "import_module", lambda name: module)
    configs.by_kind.cache_clear()
    yield tmp_path / "tasks"
    configs.by_kind.cache_clear()


def test_a_name_stands_for_a_file_and_a_method_for_the_shared_one_and_the_tasks_numbers(
    packaged,
) -> None:
    own, shared = packaged / "one/configs", packaged / "common/configs/methods"
    average, pointwise = str(shared / "average.yaml"), str(shared / "pointwise.yaml")
    assert packaged_configs() == {
        "one": [str(own / "base.yaml")],
        "two": [str(packaged / "two/configs/base.yaml")],
        "one/demo": [str(own / "demo.yaml")],
        "one/average": [average, "a: 1\n"],
        "one/pointwise": [pointwise],
        "one/own": ["b: 2\n"],
        "two/average": [average],
        "two/pointwise": [pointwise],
    }
    assert comparison_path("one/demo") == str(own / "compare/demo.yaml")
    assert with_config_parts(
        ["fit", "--config=one", "-c", "one/average", "--config"]
    ) == [
        *(
            "fit",
            "--config",
            str(own / "base.yaml"),
            "-c",
            average,
            "-c",
            "a: 1\n",
            "--config",
        )
    ]


def test_the_overview_has_a_line_per_kind_and_task(packaged) -> None:
    assert [line.split() for line in configs.overview().splitlines()[2:]] == [
        ["base", "(--config", "NAME):"],
        ["one,", "two"],
        ["variants", "(--config", "TASK/NAME):"],
        ["one:", "demo"],
        ["methods", "(--config", "TASK/NAME):"],
        ["one:", "average,", "pointwise,", "own"],
        ["two:", "average,", "pointwise"],
        ["comparisons", "(compare", "--methods", "TASK/NAME):"],
        ["one:", "demo"],
    ]


def test_help_lists_packaged_configs_and_compare_and_version_is_the_packages(
    capsys,
) -> None:
    for option in ("--help", "--version"):
        with pytest.raises(SystemExit) as ended:
            main([option])
        assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "compare" in text
    assert configs.overview() in text
    assert text.splitlines()[-1] == f"pl-pointwise {version('pl-pointwise')}"


def test_a_formulation_per_constraint_from_yaml(tmp_path) -> None:
    config = tmp_path / "one_each.yaml"
    one = {"class_path": "pl_pointwise.Pointwise", "init_args": {"alpha": 2.0}}
    config.write_text(
        yaml.safe_dump({"model": {"init_args": {"formulation": {"fit": one}}}})
    )
    args = [*TASK, "--config", str(config)]
    assert PointwiseCLI(args, run=False).model.formulations == {
        "fit": Pointwise(alpha=2.0)
    }


def test_optimizer_and_scheduler_options_of_lightning_cli_work(tmp_path) -> None:
    """The multipliers are no parameters, so an optimizer from the command line leaves them out."""
    extra = ["--optimizer", "SGD", "--optimizer.lr", "0.05"]
    extra += ["--lr_scheduler", "StepLR", "--lr_scheduler.step_size", "1"]
    extra += [
        "--lr_scheduler.gamma",
        "0.1",
        "--trainer.default_root_dir",
        str(tmp_path),
    ]
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
    main(
        ["fit", *TASK, *SMALL, *POINTWISE, "--trainer.default_root_dir", str(tmp_path)]
    )
    (path,) = tmp_path.rglob("*.ckpt")
    stored = torch.load(path, weights_only=True)["hyper_parameters"]
    assert stored["formulation"]["class_path"].endswith("Pointwise")
    module = type(PointwiseCLI([*TASK], run=False).model).load_from_checkpoint(
        path, weights_only=True
    )
    assert module.formulations == {"fit": Pointwise(alpha=2.0)}
    assert module.multipliers["fit"].shape == (5, 1)
    main(["test", *TASK, *SMALL, *POINTWISE, "--ckpt_path", str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert ["test", "train"] in [line.split() for line in lines]
    (cvar,) = [line.split() for line in lines if line.startswith("fit/cvar95")]
    assert len([float(value) for value in cvar[1:]]) == 2


def test_checkpoints_are_loaded_as_data_unless_told_otherwise(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)

    path = tmp_path / "evil.ckpt"
    torch.save({"state_dict": Bomb(tmp_path / "ran")}, path)
    with pytest.raises(SystemExit):
        main(["test", *TASK, *SMALL, *POINTWISE, "--ckpt_path", str(path)])
    assert "more than tensors and plain values" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_a_file_of_the_working_directory_comes_before_a_packaged_name(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_parts("reranker")[0].endswith("reranker/configs/base.yaml")
    (tmp_path / "reranker").write_text("trainer: {}")
    assert config_parts("reranker") == ["reranker"]


class FolderOfAll(DummyLogger):
    """Keeps all runs in the current folder, as W&B does."""

    save_dir = "."  # type: ignore[assignment]
    name, version = "project", "run"  # type: ignore[assignment]


@pytest.mark.parametrize("logger", ["FolderOfAll", "false"])
def test_a_configuration_that_was_there_is_never_written_over(
    logger, tmp_path, monkeypatch, capsys
) -> None:
    """``--trainer.logger WandbLogger`` replaced the user's own, which had been the input."""
    monkeypatch.chdir(tmp_path)
    text = "model: tests.pl_pointwise.line_task.LineModule  # my words\n"
    text += "data: tests.pl_pointwise.line_task.LineData\n"
    Path("config.yaml").write_text(text)
    logger = logger if logger == "false" else f"{__name__}.{logger}"
    quiet = [*SMALL[:4], "--trainer.logger", logger, *SMALL[6:]]
    for epochs in ("1", "2"):
        main(["fit", "--config", "config.yaml", *quiet, "--trainer.max_epochs", epochs])
        assert Path("config.yaml").read_text() == text
        command = shlex.split(capsys.readouterr().out.splitlines()[-1])
        used = yaml.safe_load(Path(command[command.index("--config") + 1]).read_text())
        assert used["trainer"]["max_epochs"] == int(epochs)
        assert str(config_of(command[-1])) == str(Path(command[3]).absolute())
    main([*command[1:], *quiet, "--trainer.max_epochs", "9"])
    saved = sorted(str(path) for path in Path().rglob("config*.yaml"))
    folder = "project/run/" if logger.endswith("FolderOfAll") else ""
    numbers = ("", "-1") if folder else ("-1", "-2")
    assert saved == sorted(
        {"config.yaml", *(f"{folder}config{n}.yaml" for n in numbers)}
    )
