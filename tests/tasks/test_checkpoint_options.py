"""A task's options on the command line win over its checkpoint, that of the model's folder too."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from pl_pointwise import Pointwise
from pl_pointwise.checkpoint_options import usable
from pl_pointwise.cli import PointwiseCLI, main
from pl_pointwise.tasks import ConversationModule, Policy, RerankerModule, SafetyModule
from tests.tasks.reranker.conftest import save_tiny_cross_encoder


def words(prefix: str, options: dict[str, Any]) -> list[str]:
    return [word for key, value in options.items() for word in (f"--{prefix}{key}", str(value))]


@pytest.fixture
def made(monkeypatch):
    """(arguments of the command line) → the module it makes, which it does not run."""
    modules = []
    monkeypatch.setattr(PointwiseCLI, "_run_subcommand", lambda cli, _: modules.append(cli.model))

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


SAFETY = ["--config", "safety", "--config", "safety/pointwise"]
POLICY = "model.init_args.policy."


@pytest.mark.parametrize("notebook", [False, True])
def test_safety_moves_to_another_folder_and_another_evaluation(
    notebook, folder, tmp_path, made
) -> None:
    """And keeps what the command line does not name, which a notebook's checkpoint holds too."""
    if notebook:
        policy = Policy(str(folder), generation={"max_new_tokens": 3})
        module = SafetyModule(policy, Pointwise(alpha=4.0), refuse_tolerance=-0.7)
    else:
        options = {"model_name": folder, "generation.max_new_tokens": 3}
        alpha = ["--model.init_args.formulation.init_args.alpha", "4"]
        refuse = ["--model.init_args.refuse_tolerance", "-0.7"]
        module = made("fit", *SAFETY, *words(POLICY, options), *alpha, *refuse)
    path = save(module, tmp_path / "a.ckpt")
    moved = folder.rename(tmp_path / "b")

    evaluation = {"refuse_tolerance": -0.1, "cost_model": "judge", "answer_in": "[test]"}
    options = {"model_name": moved, "generation.max_new_tokens": 9, "generation.sample": "false"}
    asked = words(POLICY, options) + words("model.init_args.evaluation.", evaluation)
    for command in ("validate", "test", "predict"):
        found = made(command, "--config", "safety", "--ckpt_path", str(path), *asked)
        assert found.model_name == str(moved)
        assert found.evaluation.answer_in == ["test"]
        assert found.evaluation.cost_model == "judge"
        assert (found.generation.max_new_tokens, found.generation.sample) == (9, False)
        assert found.constraints["refuse"].at_least == -0.7
        assert found.evaluation_constraints["refuse"].at_least == -0.1
        assert found.formulations["refuse"].alpha == 4
        found.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        for name, weight in module.state_dict().items():
            assert torch.equal(found.state_dict()[name], weight)

    loaded = SafetyModule.load_from_checkpoint(path, weights_only=True, model_name=str(moved))
    assert loaded.model_name == str(moved)
    assert loaded.lora == module.lora
    assert loaded.generation == module.generation
    for name, weight in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    with pytest.raises(TypeError, match="no argument 'modelname'"):
        SafetyModule.load_from_checkpoint(path, weights_only=True, modelname=str(moved))


def test_when2call_chooses_by_another_score(folder, tmp_path, made) -> None:
    base = ["--config", "when2call", f"--{POLICY}model_name", str(folder)]
    path = save(made("fit", *base), tmp_path / "a.ckpt")
    moved = folder.rename(tmp_path / "b")
    evaluation = {"choose_by": "sum", "chosen_tolerance": -1}
    asked = [*words("model.init_args.evaluation.", evaluation), f"--{POLICY}model_name", str(moved)]
    found = made("test", "--config", "when2call", *asked, "--ckpt_path", str(path))
    assert found.evaluation.choose_by == "sum"
    assert found.evaluation_constraints["chosen"].at_least == -1
    assert found.constraints["chosen"].at_least == -2
    assert found.model_name == str(moved)


def test_the_reranker_moves_too(tmp_path, made) -> None:
    folder = save_tiny_cross_encoder(tmp_path / "a")
    base = ["--config", "reranker", "--model.init_args.model_name", str(folder)]
    path = save(made("fit", *base, "--model.init_args.max_length", "48"), tmp_path / "a.ckpt")
    moved = folder.rename(tmp_path / "elsewhere")
    asked = {"model_name": moved, "evaluation_tolerance": 0.3, "top_k": 2}
    asked = words("model.init_args.", asked)
    found = made("test", "--config", "reranker", "--ckpt_path", str(path), *asked)
    assert (found.model_name, found.top_k) == (str(moved), 2)
    assert found.evaluation_constraints["relevance"].at_least == 0.3
    assert found.max_length == 48
    loaded = RerankerModule.load_from_checkpoint(path, weights_only=True, model_name=str(moved))
    assert loaded.model_name == str(moved)


@pytest.mark.parametrize(
    "stored",
    [
        {"formulation": "evil.Boom"},
        {"formulation": {"class_path": "evil.Boom"}},
        {"formulation": {"prefer": "{class_path: evil.Boom}"}},
        {"policy": {"template_arguments": {"x": {"class_path": "evil.Boom"}}}},
    ],
)
def test_a_class_that_a_checkpoint_names_is_not_imported(stored) -> None:
    kept, _ = usable({**stored, "prefer_tolerance": -1.0}, ConversationModule)
    assert kept == {"prefer_tolerance": -1.0}
    relaxed = {"class_path": "pl_pointwise.Relaxed", "init_args": {"cost": "x", "beta": {}}}
    assert usable({"formulation": relaxed}, ConversationModule) == ({"formulation": relaxed}, [])
