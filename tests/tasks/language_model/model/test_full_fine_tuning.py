"""All weights are trained; then there is no reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pl_pointwise import Optimization, Pointwise, Training
from pl_pointwise.errors import TrainingError
from pl_pointwise.tasks import Policy, When2CallModule
from pl_pointwise.tasks.language_model.model.adapters import Lora
from tests.tasks.conftest import make_module, quiet_trainer, save_llama

FAST = Training(Optimization(learning_rate=1e-3))


def made(folder: Path, **options: Any) -> When2CallModule:
    options = {"lora": None, "objective": "simpo"} | options
    return make_module(When2CallModule, folder, FAST, False, **options)


def test_training_moves_every_weight_and_the_checkpoint_holds_them(
    language_model_folder, data, tmp_path
) -> None:
    module = made(language_model_folder, formulation=Pointwise(alpha=1.0))
    before = {
        name: weight.clone() for name, weight in module.model.state_dict().items()
    }
    run = quiet_trainer(tmp_path, max_epochs=2)
    run.fit(module, data)
    assert all(
        (w != before[name]).any() for name, w in module.model.state_dict().items()
    )
    assert module.multipliers["rejected"].max() > 0
    run.save_checkpoint(tmp_path / "last.ckpt")
    loaded = When2CallModule.load_from_checkpoint(
        tmp_path / "last.ckpt", weights_only=True
    )
    for name, weight in module.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight), name


def test_what_needs_the_reference_is_refused_and_its_kl_not_reported(
    language_model_folder, data, tmp_path
) -> None:
    trainer = quiet_trainer(tmp_path, max_epochs=1, limit_val_batches=0)
    with pytest.raises(TrainingError, match=r"policy\.lora is null.*cross_entropy"):
        trainer.fit(made(language_model_folder, objective="kl"), data)
    module = made(language_model_folder, reference_cache="memory")
    (found,) = quiet_trainer(tmp_path).validate(module, data, verbose=False)
    assert "val/rejected/mean" in found
    assert "val/kl" not in found
    with pytest.warns(UserWarning, match=r"policy\.lora is null"):
        quiet_trainer(tmp_path, max_steps=1).fit(module, data)


def test_weights_of_half_precision_files_are_trained_in_float32(tmp_path) -> None:
    save_llama(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in made(tmp_path).model.parameters()} == {torch.float32}
    with pytest.warns(UserWarning, match="lost in rounding.*bf16-mixed"):
        half = made(tmp_path, dtype="bfloat16")
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}
    assert made(tmp_path, lora=Lora()).model.get_base_model().dtype == torch.bfloat16


def test_the_command_line_asks_for_it_by_a_word() -> None:
    assert Policy("any", lora="none").lora is None


def test_four_bits_cannot_be_trained() -> None:
    with pytest.raises(
        ValueError, match="quantize_4bit: weights of 4 bits cannot be trained"
    ):
        Policy("any", lora=None, quantize_4bit=True)
