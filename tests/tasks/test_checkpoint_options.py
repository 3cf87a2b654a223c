"""A task's checkpoint beside its configuration, also where the model's folder has moved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from pl_pointwise.cli import PointwiseCLI, main
from pl_pointwise.tasks import RerankerModule
from tests.tasks.conftest import words
from tests.tasks.reranker.conftest import save_tiny_cross_encoder


@pytest.fixture
def made(monkeypatch):
    """(arguments of the command line) → the module it makes, which it does not run."""
    modules = []
    monkeypatch.setattr(
        PointwiseCLI, "_run_subcommand", lambda cli, _: modules.append(cli.model)
    )

    def make(*args: str) -> Any:
        main([*args, "--trainer.accelerator", "cpu", "--trainer.logger", "false"])
        return modules[-1]

    return make


def save(module: Any, path: Path) -> Path:
    """A checkpoint of a module that was not trained, its weights changed."""
    for weight in module.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.1)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer.save_checkpoint(path)
    return path


@pytest.fixture
def folder(language_model_folder, tmp_path) -> Path:
    """That of a tiny model, which may go."""
    return Path(shutil.copytree(language_model_folder, tmp_path / "a"))


def named(folder: Path) -> list[str]:
    return ["--model.init_args.policy.model_name", str(folder)]


def test_safety_moves_to_another_folder_and_another_evaluation(
    folder, tmp_path, made, capsys
) -> None:
    base = ["--config", "safety", "--config", "safety/pointwise"]
    path = save(made("fit", *base, *named(folder)), tmp_path / "a.ckpt")
    trained = torch.load(path, weights_only=True)["state_dict"]
    moved = folder.rename(tmp_path / "b")

    evaluation = {"refuse_tolerance": "-0.1", "answer_in": "[test]"}
    asked = words(
        {f"model.init_args.evaluation.{name}": v for name, v in evaluation.items()}
    )
    asked += named(moved)
    with pytest.raises(SystemExit):
        made("test", *base, "--ckpt_path", str(path), *asked)
    said = capsys.readouterr().err
    for option in ("policy.model_name", "evaluation.refuse_tolerance -0.5, now -0.1"):
        assert f"--model.{option}" in said
    assert "lora" not in said

    for command in ("validate", "test", "predict"):
        found = made(
            command, *base, "--ckpt_path", str(path), *asked, "--accept_differences"
        )
        assert found.model_name == str(moved)
        assert found.evaluation_constraints["refuse"].at_least == -0.1
        found.load_state_dict(trained)


@pytest.mark.parametrize("task", ["when2call", "conversation"])
def test_the_same_command_line_finds_no_difference(
    task, folder, tmp_path, made
) -> None:
    base = ["--config", task, "--config", f"{task}/relaxed", *named(folder)]
    base += ["--config", "conversation/example"] if task == "conversation" else []
    path = save(made("fit", *base), tmp_path / "a.ckpt")
    made("test", *base, "--ckpt_path", str(path))


def test_the_reranker_moves_too(tmp_path, made) -> None:
    folder = save_tiny_cross_encoder(tmp_path / "a")
    base = ["--config", "reranker", "--model.init_args.model_name", str(folder)]
    path = save(
        made("fit", *base, "--model.init_args.max_length", "48"), tmp_path / "a.ckpt"
    )
    moved = folder.rename(tmp_path / "elsewhere")
    loaded = RerankerModule.load_from_checkpoint(
        path, weights_only=True, model_name=str(moved)
    )
    assert loaded.model_name == str(moved)
    assert loaded.max_length == 48
