"""The comparison of scoring methods refuses what is nearly right and takes what is right."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pointwise.tasks.common.agreement import InFloat32, compared_weights, moved
from pl_pointwise.tasks.language_model import comparison
from pl_pointwise.tasks.language_model import scoring as scoring_module
from pl_pointwise.tasks.language_model.loading import Lora, add_lora
from pl_pointwise.tasks.language_model.scoring import ResponseScorer
from pl_pointwise.tasks.language_model.shared_prompt import Layout
from tests.tasks.language_model.test_scoring import PROMPTS, gradients, loss_of, make_batch

DTYPES = [torch.float32, torch.bfloat16]
BATCH = make_batch()


def quiet(model: Any) -> Any:
    """With weights so small that positions matter little, as in a model that was just made."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(0.4)
    return model


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
def test_right_methods_pass(architecture, dtype, adapters, make_model, make_adapted) -> None:
    base = make_model(architecture).to(dtype)
    fresh = Lora(target_modules=["q_proj", "up_proj"], lora_dropout=0.3)
    model = (add_lora(base, fresh) if adapters == "fresh" else make_adapted(base)).train()
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
def test_a_shift_by_one_position_is_refused(
    dtype, shifted, make_model, make_adapted, caplog
) -> None:
    """In bfloat16 it is within rounding of a token's mean, so it passed."""
    model = make_adapted(quiet(make_model("llama")).to(dtype))
    mean = {
        way: ResponseScorer(model, method=way)(BATCH).mean_log_likelihood
        for way in ("plain", "shared_prompt")
    }
    error = (mean["shared_prompt"] - mean["plain"]).abs() / (1 + mean["plain"].abs())
    assert 1e-3 < error.max() < 3e-2  # what was allowed in bfloat16
    assert ResponseScorer(model).choose_method(BATCH) == "chunked"
    assert '"shared_prompt" is not used: its log-likelihood of a token differs' in caplog.text


def halved(hidden: Tensor) -> Tensor:
    return (hidden + hidden.detach()) / 2


def without_one_token(hidden: Tensor) -> Tensor:
    return torch.cat([hidden[:1].detach(), hidden[1:]])


@pytest.mark.parametrize("wrong", [halved, without_one_token])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_gradient_is_refused(
    dtype, wrong, make_model, make_adapted, monkeypatch, caplog
) -> None:
    """Of a method whose values are all right."""
    right = ResponseScorer._hidden

    def hidden(self: ResponseScorer, pairs: Any) -> Tensor:
        found = right(self, pairs)
        return wrong(found) if self.method == "shared_prompt" else found

    monkeypatch.setattr(ResponseScorer, "_hidden", hidden)
    scorer = ResponseScorer(make_adapted(make_model("llama").to(dtype)))
    assert scorer.choose_method(BATCH) == "chunked"
    assert '"shared_prompt" is not used: its gradient differs' in caplog.text


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_divergence_is_refused_though_adapters_are_fresh(
    dtype, make_model, monkeypatch, caplog
) -> None:
    """Fresh adapters give the reference, of which every divergence is 0, a wrong one too."""
    right = scoring_module.chunked_token_statistics

    def reversed_divergence(head: Any, hidden: Tensor, targets: Tensor, reference: Any, *rest: Any):
        log_likelihood, _, reference_ll = right(head, hidden, targets, reference, *rest)
        if reference is None:
            return log_likelihood, None, None
        return log_likelihood, right(head, reference, targets, hidden, *rest)[1], reference_ll

    monkeypatch.setattr(scoring_module, "chunked_token_statistics", reversed_divergence)
    model = add_lora(make_model("llama").to(dtype), Lora(target_modules=["q_proj", "up_proj"]))
    assert ResponseScorer(model).choose_method(BATCH) == "plain"
    assert "its KL of a token differs" in caplog.text


def test_an_evaluation_compares_values_and_the_first_step_gradients(
    make_model, make_adapted, monkeypatch
) -> None:
    """Lightning's sanity check comes first, in inference mode, where there are no gradients."""
    asked = []
    right = ResponseScorer._gradients
    monkeypatch.setattr(
        ResponseScorer,
        "_gradients",
        lambda self, probe, weights, singly: (
            asked.append(len(weights)) or right(self, probe, weights, singly)
        ),
    )
    scorer = ResponseScorer(make_adapted(make_model("llama")))
    with torch.inference_mode():
        scorer(BATCH)
        assert scorer.method == "shared_prompt"
    assert not any(asked)
    scorer(BATCH)
    assert scorer.method == "shared_prompt"
    assert asked[-1] > 0
    asked.clear()
    scorer(BATCH)
    with torch.inference_mode():
        scorer(BATCH)
    assert asked == []  # once a fit


def test_a_model_that_refuses_float32_is_compared_in_its_own_precision(
    make_model, make_adapted, monkeypatch, caplog
) -> None:
    """As flash attention does."""
    model = make_adapted(make_model("llama").bfloat16())

    def refuse(module: Any, args: Any) -> None:
        if args[0].dtype == torch.float32:
            raise RuntimeError("16 bits only")

    model.get_base_model().model.layers[0].mlp.register_forward_pre_hook(refuse)
    with caplog.at_level("INFO"):
        assert ResponseScorer(model).choose_method(BATCH) == "shared_prompt"
    assert "16 bits only" in caplog.text


def test_gradients_are_of_short_sequences(make_model, make_adapted, monkeypatch) -> None:
    """They need the activations of all layers, which those of the longest sample may not fit."""
    monkeypatch.setattr(comparison, "PROMPT_TOKENS", 3)
    monkeypatch.setattr(comparison, "RESPONSE_TOKENS", 2)
    model, sizes = make_adapted(make_model("llama")), []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            sizes.append(kwargs["input_ids"].shape[1])

    model.get_base_model().model.register_forward_pre_hook(note, with_kwargs=True)
    assert ResponseScorer(model, method="auto").choose_method(BATCH) == "shared_prompt"
    assert sizes[:5] == [3 + 2 - 1] * 5  # plain, a pair at a time
    assert 5 < len(sizes) < 8
    assert max(sizes[5:]) < max(PROMPTS)  # all of them together


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "granite"])
def test_in_float32_a_bfloat16_model_gives_what_a_float32_copy_does(
    architecture, make_model, make_adapted
) -> None:
    model = make_adapted(make_model(architecture)).bfloat16()
    copied = copy.deepcopy(model).float()
    expected = ResponseScorer(copied, method="plain")(BATCH)
    wanted = gradients(copied, loss_of(expected))
    low = ResponseScorer(model, method="plain")(BATCH)
    with InFloat32():
        found = ResponseScorer(model, method="plain")(BATCH)
    assert (low.kl - expected.kl).abs().max() > 1e-3
    torch.testing.assert_close(found.kl, expected.kl, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.log_likelihood, expected.log_likelihood, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(model, loss_of(found)).items():
        error = (gradient.float() - wanted[name]).norm() / wanted[name].norm()
        assert error < 1e-2  # rounded once, when it is put down


def test_in_float32_no_widened_weight_is_kept_for_the_backward_pass() -> None:
    weight = torch.randn(8, 5).bfloat16()
    x = torch.randn(3, 5, requires_grad=True)
    with InFloat32() as mode:
        y = (x @ weight.t()).exp()
        packed = mode._pack(y)
        assert packed is y  # no weight: kept as it is
        assert mode._widened == {}
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, y.detach() @ weight.float())


@pytest.mark.parametrize("fails", [False, True])
def test_weights_are_put_back_exactly(fails, make_model) -> None:
    model = add_lora(make_model("llama"), Lora(target_modules=["q_proj"]))
    weights = compared_weights(model)
    before = [weight.detach().clone() for weight in weights]
    try:
        with moved(weights):
            assert all(not torch.equal(a, b) for a, b in zip(weights, before, strict=True))
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))
