"""The comparison of scoring methods refuses what is nearly right and takes what is right."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from pl_pointwise.tasks.language_model.likelihood.scoring import ResponseScorer
from pl_pointwise.tasks.language_model.likelihood.shared_prompt import Layout
from pl_pointwise.tasks.language_model.model.adapters import Lora, add_lora
from tests.tasks.conftest import adapt, build_model
from tests.tasks.language_model.likelihood.test_scoring import make_batch

DTYPES = [torch.float32, torch.bfloat16]
BATCH = make_batch()


@pytest.fixture
def shifted(monkeypatch) -> None:
    """Responses of the shared prompt one position too far behind it."""
    right = Layout.of.__func__

    def wrong(cls: type[Layout], pairs: Any) -> Layout:
        layout = right(cls, pairs)
        positions, start = layout.positions.clone(), 0
        for sample in layout.samples:
            positions[start + sample[0] : start + sum(sample)] += 1
            start += sum(sample)
        return replace(layout, positions=positions)

    monkeypatch.setattr(Layout, "of", classmethod(wrong))


@pytest.mark.parametrize("adapters", ["fresh", "trained"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_right_methods_pass(architecture, dtype, adapters) -> None:
    base = build_model(architecture).to(dtype)
    fresh = Lora(target_modules=["q_proj", "up_proj"], lora_dropout=0.3)
    model = (add_lora(base, fresh) if adapters == "fresh" else adapt(base)).train()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        assert ResponseScorer(model).choose_method(BATCH) == "shared_prompt"
    assert torch.equal(torch.get_rng_state(), state)
    after = model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert all(weight.grad is None for weight in model.parameters())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("mixed", [False, True])
def test_a_shift_by_one_position_is_refused(mixed, shifted, caplog) -> None:
    """Under autocast too, where rounding would hide it."""
    model = adapt(build_model("llama"))
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        assert ResponseScorer(model).choose_method(BATCH) == "chunked"
    assert '"shared_prompt" is not used: its mean_log_likelihood differs' in caplog.text


def test_a_model_that_differs_from_its_class_is_looked_at_itself(caplog) -> None:
    model = adapt(build_model("llama"))
    layer = model.get_base_model().model.layers[0].mlp
    layer.register_forward_hook(lambda _, __, out: out + out.mean(1, keepdim=True))
    scorer = ResponseScorer(model)
    scorer(BATCH)
    assert scorer.method == "chunked"
    assert '"shared_prompt" is not used: its mean_log_likelihood differs' in caplog.text
