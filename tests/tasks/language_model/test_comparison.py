"""The comparison of scoring methods refuses what is nearly right and takes what is right."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pointwise.tasks.common import agreement
from pl_pointwise.tasks.language_model.likelihood import scoring as scoring_module
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

    def wrong(cls: type[Layout], prompts: Any, *rest: Any) -> Layout:
        layout = right(cls, prompts, *rest)
        positions, start = layout.positions.clone(), 0
        for sample in layout.samples:
            size = sample.trunk + sample.branches
            positions[start + sample.prompt : start + size] += 1
            start += size
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shift_by_one_position_is_refused(dtype, shifted, caplog) -> None:
    """In a model of bfloat16 too, where rounding hides it."""
    model = adapt(build_model("llama").to(dtype))
    assert ResponseScorer(model).choose_method(BATCH) == "chunked"
    assert '"shared_prompt" is not used: its log-likelihood per token differs' in caplog.text


def halved(hidden: Tensor) -> Tensor:
    return (hidden + hidden.detach()) / 2


def without_one_token(hidden: Tensor) -> Tensor:
    return torch.cat([hidden[:1].detach(), hidden[1:]])


@pytest.mark.parametrize(
    ("dtype", "wrong"), [(torch.float32, without_one_token), (torch.bfloat16, halved)]
)
def test_a_wrong_gradient_is_refused(dtype, wrong, monkeypatch, caplog) -> None:
    """Of a method whose values are all right."""
    right = ResponseScorer._hidden

    def hidden(self: ResponseScorer, pairs: Any) -> Tensor:
        found = right(self, pairs)
        return wrong(found) if self.method == "shared_prompt" else found

    monkeypatch.setattr(ResponseScorer, "_hidden", hidden)
    scorer = ResponseScorer(adapt(build_model("llama").to(dtype)))
    assert scorer.choose_method(BATCH) == "chunked"
    assert '"shared_prompt" is not used: its gradient differs' in caplog.text


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_divergence_is_refused_though_adapters_are_fresh(
    dtype, monkeypatch, caplog
) -> None:
    """Fresh adapters give the reference, of which every divergence is 0, a wrong one too."""
    right = scoring_module.chunked_token_statistics

    def reversed_divergence(
        head: Any, hidden: Tensor, targets: Tensor, reference: Any, **rest: Any
    ):
        found = right(head, hidden, targets, reference, **rest)
        if reference is None:
            return found
        wrong = right(head, reference, targets, hidden, **rest).divergence
        return found._replace(divergence=wrong)

    monkeypatch.setattr(scoring_module, "chunked_token_statistics", reversed_divergence)
    model = add_lora(build_model("llama").to(dtype), Lora(target_modules=["q_proj", "up_proj"]))
    assert ResponseScorer(model).choose_method(BATCH) == "plain"
    assert "its KL per token differs" in caplog.text


def test_a_model_that_differs_from_its_class_is_looked_at_itself(caplog) -> None:
    model = adapt(build_model("llama"))
    layer = model.get_base_model().model.layers[0].mlp
    layer.register_forward_hook(lambda _, __, out: out + out.mean(1, keepdim=True))
    scorer = ResponseScorer(model)
    scorer(BATCH)
    assert scorer.method == "plain"
    assert '"shared_prompt" is not used: its log-likelihood per token differs' in caplog.text


def test_a_class_of_which_no_clone_can_be_made_is_computed_plainly(monkeypatch, caplog) -> None:
    def refuse(config: Any) -> Any:
        raise ValueError("sizes that do not go together")

    monkeypatch.setattr(agreement, "narrow_config", refuse)
    assert ResponseScorer(adapt(build_model("llama"))).choose_method(BATCH) == "plain"
    assert "sizes that do not go together" in caplog.text
