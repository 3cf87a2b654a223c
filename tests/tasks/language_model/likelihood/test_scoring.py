"""Log-likelihoods and divergences are right, and every fast way gives what the plain one gives."""

from __future__ import annotations

import copy
import logging
from contextvars import ContextVar
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from pl_pointwise.errors import DataError, TrainingError
from pl_pointwise.tasks.common import lengths
from pl_pointwise.tasks.language_model.likelihood import scoring as responses_module
from pl_pointwise.tasks.language_model.likelihood.batch import (
    Layout,
    Pairs,
    collate_responses,
)
from pl_pointwise.tasks.language_model.likelihood.scoring import (
    ReferenceCache,
    ResponseScorer,
    ResponseStatistics,
    base_of,
    inference,
)
from pl_pointwise.tasks.language_model.likelihood.vocabulary import (
    VocabularyHead,
    decoder_of,
)
from pl_pointwise.tasks.language_model.model.adapters import Lora, add_lora
from pl_pointwise.tasks.language_model.model.loading import checkpoint_gradients
from tests.tasks.conftest import (
    BY_HAND,
    adapt,
    build_model,
    random_batch,
    response_by_hand,
)

VOCABULARY = 97
PROMPTS = (17, 5, 23)
# tokens of each response: ragged, one of a single token
RESPONSES = ((4, 9), (1,), (11, 3, 6))
CHUNK = 5 * VOCABULARY  # five positions, and there are 34
REQUIRED = ("llama", "qwen2", "mistral", "gemma3")


def make_batch(seed: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def tokens(size: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (size,), generator=generator).tolist()

    prompts = [tokens(size) for size in PROMPTS]
    return collate_responses(
        prompts, [[tokens(size) for size in row] for row in RESPONSES]
    )


def loss_of(statistics: ResponseStatistics) -> Tensor:
    """Depends on every statistic, differently for every response."""
    assert statistics.kl is not None
    weights = torch.linspace(0.5, 1.5, statistics.kl.numel()).view_as(statistics.kl)
    terms = (
        statistics.mean_log_likelihood * weights
        + 0.01 * statistics.log_likelihood.square() * weights.flip(0)
        + 3 * statistics.kl * weights.flip(1)
    )
    if statistics.lead is not None:
        terms = terms + statistics.lead * weights
    return terms.sum()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {
        name: p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def assert_same_values(
    actual: ResponseStatistics, expected: ResponseStatistics, tolerance: float = 1e-5
) -> None:
    for name, value in vars(expected).items():
        torch.testing.assert_close(
            getattr(actual, name), value, rtol=tolerance, atol=tolerance
        )


def assert_same_gradients(
    actual: dict[str, Tensor], expected: dict[str, Tensor]
) -> None:
    """Relative to each parameter's gradient, none of which may be zero."""
    assert actual.keys() == expected.keys()
    assert len(expected) > 0
    for name, gradient in expected.items():
        assert gradient.norm() > 1e-4, (
            f"the gradient of {name} vanishes: the test shows nothing"
        )
        error = (actual[name] - gradient).norm() / gradient.norm()
        assert error < 1e-4, f"{name}: {error:.1e}"


def brute_force(model: PeftModel, batch: dict[str, Tensor]) -> ResponseStatistics:
    """Every pair on its own, without padding, in float64, straight from the definitions."""
    module = SimpleNamespace(model=copy.deepcopy(model).double().eval())
    lengths = batch["response_lengths"]
    found = {name: torch.zeros(lengths.shape, dtype=torch.float64) for name in BY_HAND}
    for row, column in lengths.nonzero().tolist():
        for name, value in response_by_hand(module, batch, row, column).items():
            found[name][row, column] = value
    s, mean, reference, kl, lead = found.values()
    per_token = reference / lengths.clamp(min=1)
    return ResponseStatistics(s, mean, lengths, kl, reference, per_token, lead)


@pytest.mark.parametrize("method", ["chunked", "shared_prompt"])
@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        *((name, "all-linear") for name in (*REQUIRED, "phi3", "granite", "cohere")),
        # An adapted head: the reference has its own.
        ("gemma3", ["q_proj", "lm_head"]),
    ],
)
def test_fast_equals_plain(architecture: str, targets: Any, method: str) -> None:
    """Values to 1e-5, gradients to 1e-4, with windows shorter than the prompt and soft-capping."""
    tied = {"tie_word_embeddings": False} if "lm_head" in targets else {}
    model = adapt(build_model(architecture, **tied), target_modules=targets).train()
    batch = make_batch()
    expected = ResponseScorer(model, method="plain")(batch, leads=True)
    expected_gradients = gradients(model, loss_of(expected))

    actual = ResponseScorer(model, method=method, chunk_elements=CHUNK)(
        batch, leads=True
    )
    assert_same_values(actual, expected)
    assert_same_gradients(gradients(model, loss_of(actual)), expected_gradients)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "lfm2"])
def test_groups_of_like_length_equal_one_padded_batch(
    architecture: str, monkeypatch: Any
) -> None:
    """Of the chunked method, several groups; each statistic and gradient in its place."""
    monkeypatch.setitem(lengths.FORWARD_COST, "cpu", 3)
    model = adapt(build_model(architecture)).train()
    batch = random_batch((5, 40, 9), ((4, 6, 30), (2, 8), (7, 25, 5)))
    expected = ResponseScorer(model, method="plain")(batch, leads=True)
    expected_gradients = gradients(model, loss_of(expected))
    passes = list[int]()
    handle = decoder_of(base_of(model)).register_forward_hook(
        lambda *_: passes.append(1)
    )
    actual = ResponseScorer(model, method="chunked", chunk_elements=CHUNK)(
        batch, leads=True
    )
    handle.remove()
    assert len(passes) >= 8  # Of the policy and of the reference.
    assert_same_values(actual, expected)
    assert_same_gradients(gradients(model, loss_of(actual)), expected_gradients)


@pytest.mark.parametrize("architecture", REQUIRED)
def test_plain_statistics_equal_float64_brute_force(architecture: str) -> None:
    model = adapt(build_model(architecture)).train()
    batch = make_batch()
    expected = brute_force(model, batch)
    assert (expected.kl[expected.present] > 1e-3).all()
    with torch.no_grad():
        actual = vars(ResponseScorer(model, method="plain")(batch, leads=True))
    for name, value in vars(expected).items():
        torch.testing.assert_close(
            actual[name], value, rtol=1e-5, atol=1e-5, check_dtype=False
        )


def test_a_float64_model_is_computed_in_float64() -> None:
    model = adapt(build_model("llama")).double()
    expected = brute_force(model, make_batch())
    scorer = ResponseScorer(model, method="shared_prompt", chunk_elements=CHUNK)
    assert_same_values(scorer(make_batch(), leads=True), expected, tolerance=1e-12)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_gradient_checkpointing_changes_nothing(architecture: str) -> None:
    """The layers run again during the backward pass, when the layout is no longer in use."""
    model = adapt(build_model(architecture)).train()
    scorer = ResponseScorer(model, method="shared_prompt", chunk_elements=CHUNK)
    expected = gradients(model, loss_of(scorer(make_batch())))
    checkpoint_gradients(model.get_base_model())
    assert_same_gradients(gradients(model, loss_of(scorer(make_batch()))), expected)


@pytest.mark.parametrize("method", ["plain", "chunked", "shared_prompt"])
def test_padding_is_never_read(method: str) -> None:
    scorer = ResponseScorer(adapt(build_model("llama")).eval(), method=method)
    batch = make_batch()
    clean = scorer(batch)
    width = torch.arange(batch["prompt_ids"].shape[1])
    batch["prompt_ids"][width >= batch["prompt_lengths"][:, None]] = 7
    width = torch.arange(batch["response_ids"].shape[2])
    batch["response_ids"][width >= batch["response_lengths"][..., None]] = 8
    assert_same_values(scorer(batch), clean, tolerance=0)


@pytest.mark.parametrize("method", ["plain", "chunked", "shared_prompt"])
def test_the_reference_is_computed_where_it_is_asked_for(method: str) -> None:
    model = adapt(build_model("llama"))
    scorer = ResponseScorer(model, method=method, chunk_elements=CHUNK)
    batch = make_batch()
    everything = scorer(batch, leads=True)
    asked = torch.tensor([[False, True, False], [False] * 3, [True, False, True]])
    some = scorer(batch, reference=asked, leads=True)
    torch.testing.assert_close(some.log_likelihood, everything.log_likelihood)
    torch.testing.assert_close(some.lead, everything.lead)
    for name in ("kl", "reference_log_likelihood", "reference_mean_log_likelihood"):
        expected = getattr(everything, name).masked_fill(~asked, 0.0)
        torch.testing.assert_close(getattr(some, name), expected, rtol=1e-5, atol=1e-5)
    none = scorer(batch, reference=False)
    assert none.kl is None
    assert none.reference_log_likelihood is None
    expected_gradients = gradients(model, everything.log_likelihood.sum())
    assert_same_gradients(
        gradients(model, some.log_likelihood.sum()), expected_gradients
    )
    assert_same_gradients(
        gradients(model, none.log_likelihood.sum()), expected_gradients
    )


# The reference policy


def test_the_reference_leaves_the_model_as_it_was() -> None:
    """PEFT makes every adapter trainable on the way out, and eval() forgets who was in training."""
    model = adapt(build_model("llama")).train()
    frozen = (
        model.get_base_model().model.layers[1].self_attn.q_proj.lora_A["default"].weight
    )
    frozen.requires_grad_(False)
    model.get_base_model().model.norm.eval()
    training = [module.training for module in model.modules()]
    trainable = [p.requires_grad for p in model.parameters()]
    with inference(model, reference=True):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == training
    assert [p.requires_grad for p in model.parameters()] == trainable


def test_the_reference_has_no_dropout() -> None:
    model = adapt(build_model("llama", attention_dropout=0.4), lora_dropout=0.5).train()
    scorer = ResponseScorer(model, method="shared_prompt")
    first, second = scorer(make_batch()), scorer(make_batch())
    assert (first.log_likelihood - second.log_likelihood).abs().max() > 1e-3
    assert torch.equal(first.reference_log_likelihood, second.reference_log_likelihood)


def test_no_reference_without_adapters() -> None:
    scorer = ResponseScorer(build_model("llama"), method="shared_prompt")
    assert scorer(make_batch(), reference=False).kl is None
    with pytest.raises(TrainingError, match="no adapters"):
        scorer(make_batch())


def test_no_reference_that_moves() -> None:
    model = adapt(build_model("llama"))
    model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(TrainingError, match=r"would move.*norm\.weight"):
        ResponseScorer(model, method="chunked")(make_batch())


@pytest.mark.parametrize("method", ["chunked", "shared_prompt"])
def test_cached_equals_uncached(method: str) -> None:
    model = adapt(build_model("gemma3")).train()
    plain = ResponseScorer(model, method=method, chunk_elements=CHUNK)(make_batch())
    expected = gradients(model, loss_of(plain))
    cache = ReferenceCache(model, dtype=torch.float32)
    scorer = ResponseScorer(model, method=method, cache=cache, chunk_elements=CHUNK)
    rows = torch.tensor([2, 0])
    scorer({name: tensor[rows] for name, tensor in make_batch().items()})
    assert len(cache) == 5
    for _ in range(2):  # partly there, then all there
        cached = scorer(make_batch())
        assert len(cache) == 6
        assert_same_values(cached, plain)
        assert_same_gradients(gradients(model, loss_of(cached)), expected)


def test_a_cache_in_bfloat16_moves_the_divergence_little_and_always_alike() -> None:
    model = adapt(build_model("llama")).eval()
    exact = ResponseScorer(model, method="shared_prompt")(make_batch())
    scorer = ResponseScorer(
        model, method="shared_prompt", cache=ReferenceCache(model, dtype=torch.bfloat16)
    )
    first, later = scorer(make_batch()), scorer(make_batch())
    torch.testing.assert_close(first.kl, exact.kl, rtol=1e-2, atol=1e-3)
    assert not torch.equal(first.kl, exact.kl)
    assert torch.equal(first.kl, later.kl)


def test_cache_misses_when_a_token_changes() -> None:
    """As it does when a record or the chat template is changed."""
    model = adapt(build_model("llama"))
    cache = ReferenceCache(model, dtype=torch.float32)
    scorer = ResponseScorer(model, method="shared_prompt", cache=cache)
    scorer(make_batch())
    batch = make_batch()
    batch["prompt_ids"][0, 0] += 1
    batch["response_ids"][2, 1, 2] += 1
    values = scorer(batch)
    assert len(cache) == 6 + 3
    assert_same_values(values, ResponseScorer(model, method="plain")(batch))


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["model.norm"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [4, 5]},
    ],
)
def test_no_cache_where_head_embeddings_or_final_norm_are_adapted(
    options: dict[str, object],
) -> None:
    model = adapt(build_model("llama", tie_word_embeddings=False), **options)
    with pytest.raises(ValueError, match=r"not kept: .* is adapted"):
        ReferenceCache(model)


# Which way is taken


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("bloom", 'attention implementation "eager" is not "sdpa"'),
        ("gemma2", 'attention implementation "eager" is not "sdpa"'),
        ("lfm2", "its layers ['conv'] pass on more"),
    ],
)
def test_models_that_cannot_share_a_prompt_fall_back_and_say_why(
    architecture: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Of Gemma 2 newer versions of transformers take it by themselves.
    eager = "eager" if architecture == "gemma2" else None
    model = adapt(
        build_model(architecture, attention=eager), target_modules="all-linear"
    )
    attention = model.config._attn_implementation
    scorer = ResponseScorer(model, chunk_elements=CHUNK)
    with caplog.at_level(logging.INFO, responses_module.__name__):
        actual = scorer(make_batch())
    assert scorer.method == "chunked"
    assert reason in caplog.text
    assert 'computed by the scoring method "chunked"' in caplog.text
    assert model.config._attn_implementation == attention
    assert_same_values(actual, ResponseScorer(model, method="plain")(make_batch()))


def test_samples_that_see_each_other_are_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the layout a row is one long causal sequence. A batch of one response, for which that
    is right, must not be enough to pass."""
    monkeypatch.setattr(
        responses_module, "LAYOUT", ContextVar("one that no attention reads")
    )
    scorer = ResponseScorer(adapt(build_model("llama")))
    scorer({name: tensor[1:2] for name, tensor in make_batch().items()})
    assert scorer.method == "chunked"
    assert "differs from the plain method's" in caplog.text


def test_the_comparison_holds_one_sequences_logits_at_a_time() -> None:
    """With 128 thousand words those of four are gigabytes, more than a step of training takes."""
    model = adapt(build_model("llama"))
    shapes = []
    head = model.get_base_model().lm_head
    head.register_forward_hook(lambda _, args, logits: shapes.append(logits.shape[:2]))
    ResponseScorer(model, chunk_elements=CHUNK).choose_method(make_batch())
    longest = max(PROMPTS) + max(map(max, RESPONSES))
    assert len(shapes) > 8
    assert all(count == 1 and tokens < longest for count, tokens in shapes)


def test_generation_is_what_it_was_after_sharing_prompts() -> None:
    model = build_model("mistral").eval()
    ids = make_batch()["prompt_ids"][2:]
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    before = model.generate(ids, **options)
    ResponseScorer(model, method="shared_prompt")(make_batch(), reference=False)
    assert torch.equal(model.generate(ids, **options), before)


# Precision


@pytest.mark.parametrize("mixed", [False, True])
def test_logits_are_summed_in_float32_in_a_half_precision_run(mixed: bool) -> None:
    """Logits rounded to bfloat16, as the model itself returns them, are off by a quarter and bias
    what is summed over them."""
    model = build_model("gemma3", final_logit_softcapping=300.0)
    model = (model if mixed else model.bfloat16()).requires_grad_(False)
    hidden = (torch.randn(7, 32) * 30).to(model.lm_head.weight.dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        logits = VocabularyHead(model)(hidden)
        rounded = model.lm_head(hidden)
    exact = hidden.double() @ model.lm_head.weight.double().T
    exact = 300 * torch.tanh(exact / 300)
    assert logits.dtype == torch.float32
    assert rounded.dtype == torch.bfloat16
    scale = exact.abs().max()
    assert (logits - exact).abs().max() < 3e-3 * scale
    if not mixed:  # the same factors, so nothing but the sums is left to differ
        assert (logits - exact).abs().max() < 1e-5 * scale

    weights = torch.randn_like(logits)
    (gradient,) = torch.autograd.grad((logits * weights).sum(), hidden)
    (expected,) = torch.autograd.grad((exact * weights).sum(), hidden)
    assert gradient.norm() > 1
    assert (gradient - expected).norm() < 1e-2 * expected.norm()


# The batch


def test_a_batch_without_responses_is_refused() -> None:
    with pytest.raises(DataError, match="without a single response"):
        ResponseScorer(build_model("llama"))(collate_responses([[1]], [[]]))


# The comparison of scoring methods: what is nearly right is refused -------------------------------

DTYPES = [torch.float32, torch.bfloat16]
BATCH = make_batch()


@pytest.fixture
def shifted(monkeypatch) -> None:
    """Responses of the shared prompt one position too far behind it."""
    right = Pairs.layout.func

    def wrong(pairs: Pairs) -> Layout:
        layout = right(pairs)
        positions, start = layout.positions.clone(), 0
        for sample in layout.samples:
            positions[start + sample[0] : start + sum(sample)] += 1
            start += sum(sample)
        return replace(layout, positions=positions)

    monkeypatch.setattr(Pairs, "layout", property(wrong))


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
