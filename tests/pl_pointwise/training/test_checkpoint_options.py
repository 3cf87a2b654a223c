"""The configuration says what a module is; a checkpoint of other settings is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from pl_pointwise import Pointwise
from pl_pointwise.cli import PointwiseCLI, main
from pl_pointwise.training.checkpoints import differences
from tests.pl_pointwise.line_task import LineData, LineModule
from tests.pl_pointwise.toy import trainer

NAME = "tests.pl_pointwise.line_task"
TASK = ["--model", f"{NAME}.LineModule", "--data", f"{NAME}.LineData"]
TRAINER = [
    "--trainer.max_epochs",
    "2",
    "--trainer.accelerator",
    "cpu",
    "--trainer.logger",
    "false",
]
TRAINER += [
    "--trainer.enable_progress_bar",
    "false",
    "--trainer.enable_model_summary",
    "false",
]
SETTINGS = ["--model.formulation", "Pointwise", "--model.formulation.alpha", "2"]
SETTINGS += ["--model.init_args.tolerance", "0.3"]


class NotedIO(TorchCheckpointIO):
    """A user's, which notes how it is asked to load."""

    asked: list[bool | None] = []  # noqa: RUF012

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        self.asked.append(weights_only)
        return super().load_checkpoint(path, map_location, weights_only)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Of the command line with tolerance 0.3 and α = 2, its config.yaml beside it."""
    folder = tmp_path_factory.mktemp("run")
    main(["fit", *TASK, *TRAINER, *SETTINGS, "--trainer.default_root_dir", str(folder)])
    (path,) = folder.rglob("*.ckpt")
    return path


@pytest.fixture
def made(monkeypatch, tmp_path):
    """(arguments of the command) → the module it made."""
    modules = []
    before = PointwiseCLI.after_instantiate_classes

    def note(self):
        modules.append(self.model)
        before(self)

    monkeypatch.setattr(PointwiseCLI, "after_instantiate_classes", note)

    def run(command: str, *args: str) -> LineModule:
        root = ["--trainer.default_root_dir", str(tmp_path / "out")]
        main([command, *TRAINER, *root, *args])
        return modules[-1]

    return run


def test_the_configuration_beside_the_checkpoint_goes_with_it(checkpoint, made) -> None:
    config = checkpoint.parents[1] / "config.yaml"
    module = made("test", "--config", str(config), "--ckpt_path", str(checkpoint))
    assert module.constraints["fit"].at_most == 0.3
    stored = torch.load(checkpoint, weights_only=True)["state_dict"]["weight"]
    assert torch.equal(module.weight, stored)


@pytest.mark.parametrize("command", ["fit", "test"])
def test_other_settings_are_refused_by_name_with_the_configuration(
    command, checkpoint, made, capsys
) -> None:
    args = [
        *TASK,
        *SETTINGS,
        "--model.tolerance",
        "0.7",
        "--model.formulation.alpha",
        "3",
    ]
    with pytest.raises(SystemExit):
        made(command, *args, "--ckpt_path", str(checkpoint))
    said = capsys.readouterr().err.splitlines()[-1]
    config = checkpoint.parents[1] / "config.yaml"
    for named in (checkpoint, "tolerance 0.3, now 0.7", "alpha 2.0, now 3.0", config):
        assert str(named) in said
    assert "dual_lr" not in said


def test_other_settings_can_be_accepted(checkpoint, made) -> None:
    args = [*TASK, "--model.tolerance", "0.7", "--ckpt_path", str(checkpoint)]
    module = made("test", *args, "--accept_differences")
    assert module.constraints["fit"].at_most == 0.7
    assert torch.equal(
        module.weight, torch.load(checkpoint, weights_only=True)["state_dict"]["weight"]
    )
    made(
        "fit", *args, *SETTINGS[:4], "--accept_differences", "--trainer.max_epochs", "3"
    )


def test_a_users_own_reader_is_told_to_run_no_code(checkpoint, made) -> None:
    """Lightning's default is to run it where a checkpoint comes from http://…."""
    config = checkpoint.parents[1] / "config.yaml"
    plugin = [
        "--trainer.plugins",
        "tests.pl_pointwise.training.test_checkpoint_options.NotedIO",
    ]
    NotedIO.asked.clear()
    made("test", "--config", str(config), *plugin, "--ckpt_path", str(checkpoint))
    assert set(NotedIO.asked) == {True}


def test_a_checkpoint_of_a_notebook_goes_on_the_command_line(made, tmp_path) -> None:
    module = LineModule(Pointwise(alpha=2.0), tolerance=0.3)
    runner = trainer()
    runner.fit(module, LineData(batch_size=5))
    path = tmp_path / "notebook.ckpt"
    runner.save_checkpoint(path)
    found = made("test", *TASK, *SETTINGS, "--ckpt_path", str(path))
    assert torch.equal(found.weight, module.weight)


def test_a_checkpoint_of_another_class_is_refused(checkpoint, capsys) -> None:
    other = ["--model", "tests.pl_pointwise.toy.Toy", *TASK[2:]]
    with pytest.raises(SystemExit):
        main(["test", *other, *TRAINER, "--ckpt_path", str(checkpoint)])
    assert (
        "is of a LineModule, and the configuration asks for a Toy"
        in capsys.readouterr().err
    )


def test_arguments_that_only_one_of_the_two_has_are_no_difference(
    checkpoint, made, tmp_path
) -> None:
    """Those of an older or a newer version."""
    content = torch.load(checkpoint, weights_only=True)
    del content["hyper_parameters"]["fail"]
    content["hyper_parameters"]["gone"] = 1
    older = tmp_path / "older.ckpt"
    torch.save(content, older)
    made("test", *TASK, *SETTINGS, "--ckpt_path", str(older))


def test_classes_are_compared_by_name_and_values_by_dotted_name() -> None:
    short, long = (
        {"class_path": f"pl_pointwise{m}.Pointwise"} for m in ("", ".formulations")
    )
    assert differences(short, long) == {}
    assert differences(short, {"class_path": "pl_pointwise.Relaxed"})
