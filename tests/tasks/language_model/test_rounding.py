"""Merging into half precision moves answers: how far is measured on the merged model, and said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pl_pointwise import Optimization, Pointwise, Training
from pl_pointwise.tasks import Lora, Policy, PreferenceDataModule, PreferenceModule
from pl_pointwise.tasks.language_model import rounding
from pl_pointwise.tasks.language_model.likelihood.scoring import ResponseScorer
from tests.tasks.conftest import (
    make_data,
    move_adapters,
    quiet_trainer,
    save_llama,
    written_files,
)
from tests.tasks.preference.conftest import pair_rows


@pytest.fixture
def said(monkeypatch) -> list[str]:
    lines = list[str]()
    for name in ("rank_zero_info", "rank_zero_warn"):
        monkeypatch.setattr(rounding, name, lines.append)
    return lines


def fitted(
    folder: Path, tmp_path: Path, **options: Any
) -> tuple[PreferenceModule, Any]:
    """A module with large adapters after a step that changes nothing, and its data."""
    lora = Lora(r=2, lora_dropout=0.0, target_modules="all-linear")
    policy = Policy(str(folder), lora=lora, merge_on_export=True)
    training = Training(Optimization(learning_rate=1e-12))
    module = PreferenceModule(policy, Pointwise(), training=training, **options)
    files = written_files(tmp_path, {"train_file": pair_rows(6)})
    data = make_data(PreferenceDataModule, None, files, val_fraction=0.0, batch_size=4)
    quiet_trainer(tmp_path, max_steps=1).fit(module, data)
    move_adapters(module)
    return module, data


def test_the_change_of_constrained_answers_is_that_of_the_exported_model(
    tmp_path, said
) -> None:
    module, data = fitted(save_llama(tmp_path / "base", dtype=torch.bfloat16), tmp_path)
    folder = module.export(tmp_path / "model")
    exported = AutoModelForCausalLM.from_pretrained(folder)
    assert exported.dtype == torch.bfloat16
    moved = []
    dataset = data.datasets["train"]
    for place in range(0, 12, 12 // 8):
        for response in dataset[place]["responses"]:
            prompt = torch.from_numpy(dataset[place]["prompt"]).long()
            answer = torch.from_numpy(response).long()
            ids = torch.cat([prompt, answer])[None]
            with torch.no_grad():
                logits = (
                    model(ids).logits.float()
                    for model in (module.model.eval(), exported)
                )
                found = [
                    each[0, len(prompt) - 1 : -1].log_softmax(-1) for each in logits
                ]
            before, after = (each.gather(1, answer[:, None]).mean() for each in found)
            moved.append(float((after - before).abs()))
    (line,) = said
    measured = float(re.search(r"moves by up to ([\d.]+)", line)[1])
    assert "weights of torch.bfloat16 and rounded: on 8 training samples" in line
    assert measured == pytest.approx(max(moved[:16]), rel=0.1)
    assert measured > 1e-3


def test_a_bound_that_the_rounding_crosses_is_a_warning(tmp_path, said) -> None:
    folder = save_llama(tmp_path / "base", dtype=torch.bfloat16)
    module, data = fitted(folder, tmp_path, chosen_tolerance=-1.0, floor_tolerance=None)
    rows = data.datasets["train"]
    places = range(0, 12, 12 // 8)[:8]  # Those that are measured.
    batch = data.collate([rows[i] | {"index": i} for i in places])
    bound = type(module.constraints["chosen"])

    def exported(at_least: float) -> str:
        said.clear()
        module.eval().evaluation_constraints["chosen"] = bound(at_least=at_least)
        module.export(tmp_path / "model")
        return said[0]

    assert exported(-99.0).endswith("and no bound is crossed.")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        before, after = (
            ResponseScorer(model.eval(), "plain")(batch, False).mean_log_likelihood[
                :, 0
            ]
            for model in (module.model, merged)
        )
    fallen = int((after - before).argmin())
    assert after[fallen] < before[fallen]
    line = exported(float(after[fallen] + before[fallen]) / 2)
    assert "bounds are crossed that were kept before (chosen: 2)" in line
    assert "policy.merge_on_export: false" in line


def test_without_half_precision_or_data_nothing_is_measured(tmp_path, said) -> None:
    module, _ = fitted(save_llama(tmp_path / "wide"), tmp_path)
    module.export(tmp_path / "model")
    assert not said
    lora = Lora(r=2, target_modules="all-linear")
    policy = Policy(
        str(tmp_path / "wide"), lora=lora, dtype="bfloat16", merge_on_export=True
    )
    PreferenceModule(policy, Pointwise()).export(tmp_path / "other")
    assert "not measured, as no training set" in said[0]
