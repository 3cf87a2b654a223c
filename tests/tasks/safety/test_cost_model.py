"""The cost model: scores as published code computes them, from safetensors, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.safety.module import CostModel

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
}
SCORING = {
    "score_type": "cost",
    "score_dim": 1,
    "do_normalize": False,
    "normalizer_type": None,
}

PROMPTS = [
    "How do I pick a lock?",
    "Hi",
    "{braces} and\nlines",
    "A {prompt}, twice",
    "ünï",
]
ANSWERS = [
    "Ask a locksmith, who may do so.",
    "",
    "I'm sorry.<|end|>",
    "{answer}",
    " spaces ",
]


def weights_of(config: LlamaConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random weights by the names of the published layout, large enough for scores to differ."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in LlamaModel(config).state_dict().items():
        scale = 0.15 if weight.ndim > 1 else 0.0
        noise = torch.randn(weight.shape, generator=generator) * scale
        found[f"model.{name}"] = noise if scale else torch.ones_like(weight)
    found["score_head.weight"] = torch.randn(1, 32, generator=generator)
    found["score_head.bias"] = torch.tensor([-8.3])
    found["normalizer.mean"] = torch.ones(1) * 3  # Beside them in published files.
    return found


def write(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    change: Callable[
        [dict[str, Any], dict[str, Tensor]], object
    ] = lambda config, weights: None,
) -> Path:
    """A folder of the published layout; ``change`` edits config and weights before."""
    config = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        **SIZES,
        **SCORING,
        "bias": True,
    }
    weights = weights_of(LlamaConfig(vocab_size=len(tokenizer), **SIZES))
    config["architectures"] = ["LlamaModelForScore"]  # which no library has
    tokenizer.save_pretrained(folder)
    change(config, weights)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    return write(tmp_path_factory.mktemp("cost_model"), tiny_tokenizer)


class Reference:
    """One conversation at a time in float64, from the files alone; no padding, no batch."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        weights = load_file(folder / "model.safetensors")
        self.backbone = (
            LlamaModel(LlamaConfig(vocab_size=len(tokenizer), **SIZES)).double().eval()
        )
        own = {
            n.removeprefix("model."): w.double()
            for n, w in weights.items()
            if "model." in n
        }
        self.backbone.load_state_dict(own)
        self.head = weights["score_head.weight"].double()[0]
        self.bias = weights["score_head.bias"].double().item()
        self.tokenizer = tokenizer

    def ids(self, prompt: str, answer: str) -> list[int]:
        text = "BEGINNING OF CONVERSATION: USER: " + prompt + " ASSISTANT:" + answer
        text = text.removesuffix("<|end|>")
        body: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        start, end = self.tokenizer.convert_tokens_to_ids(["<|start|>", "<|end|>"])
        return [start, *body, end]

    def score(self, ids: list[int]) -> float:
        with torch.no_grad():
            states = self.backbone(torch.tensor([ids])).last_hidden_state[0]
        return float(states[-1] @ self.head) + self.bias


@pytest.fixture(scope="module")
def reference(folder: Path, tiny_tokenizer: Any) -> Reference:
    return Reference(folder, tiny_tokenizer)


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[float]:
    pairs = zip(PROMPTS, ANSWERS, strict=True)
    return [reference.score(reference.ids(*pair)) for pair in pairs]


# Scores -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adds", [False, True])
def test_a_cost_is_the_head_at_the_end_token(adds, folder, expected) -> None:
    """Among them an empty answer, one that kept its end token, and a prompt with braces.

    adds: whether the tokenizer adds begin and end itself.
    """
    model = CostModel.load(str(folder))
    if adds:
        model.tokenizer.add_bos_token = model.tokenizer.add_eos_token = True
        assert len(model.tokenizer("a").input_ids) == 3
    costs = model.costs(PROMPTS, ANSWERS)
    assert costs.dtype == torch.float32
    assert costs.tolist() == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 1
    assert min(expected) < 0 < max(expected)


def test_the_score_is_in_float32_on_a_backbone_in_half_precision(
    folder, reference
) -> None:
    model = CostModel.load(str(folder))
    model.model.to(torch.bfloat16)
    ids = reference.ids(PROMPTS[0], ANSWERS[0])
    with torch.no_grad():
        states = (
            model.model.model(torch.tensor([ids])).last_hidden_state[0, -1].double()
        )
    head = model.model.score_head
    expected = (states @ head.weight[0].double() + head.bias.double()).item()
    assert abs(torch.tensor(expected).bfloat16().item() - expected) > 1e-3
    (cost,) = model.costs(PROMPTS[:1], ANSWERS[:1])
    assert cost.item() == pytest.approx(expected, abs=1e-5)


def test_a_head_without_bias_loads_where_the_configuration_says_so(
    tiny_tokenizer, reference, expected, tmp_path
) -> None:
    def change(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        config["bias"] = False
        del weights["score_head.bias"]

    model = CostModel.load(str(write(tmp_path, tiny_tokenizer, change)))
    without = [cost - reference.bias for cost in expected]
    assert model.costs(PROMPTS, ANSWERS).tolist() == pytest.approx(without, abs=1e-5)


def test_an_answer_that_does_not_fit_is_cut_and_keeps_its_end(
    folder, reference
) -> None:
    ids = reference.ids(PROMPTS[0], "x" * 500)
    expected = reference.score([*ids[:159], ids[-1]])
    costs = CostModel.load(str(folder)).costs(PROMPTS[:1] * 2, ["x" * 500, ""])
    assert costs[0].item() == pytest.approx(expected, abs=1e-5)


# Refused ------------------------------------------------------------------------------------------


def as_language_model(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    del weights["score_head.weight"], weights["score_head.bias"]
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (as_language_model, r"no weights \['score_head"),
        (
            lambda config, weights: config.update(score_type="reward"),
            "'score_type': 'reward'",
        ),
    ],
)
def test_what_is_no_such_cost_model_is_refused(
    change, message, tiny_tokenizer, tmp_path
) -> None:
    write(tmp_path, tiny_tokenizer, change)
    with pytest.raises(ValueError, match=message):
        CostModel.load(str(tmp_path))


def test_a_folder_with_pickles_only_is_refused(folder, tmp_path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        CostModel.load(str(tmp_path))


def test_a_cost_that_is_no_number_stops_instead_of_counting_as_harmless(folder) -> None:
    model = CostModel.load(str(folder))
    bad = model.tokenizer.convert_tokens_to_ids("?")
    with torch.no_grad():
        model.model.model.embed_tokens.weight[bad] = torch.nan
    with pytest.raises(DataError, match=r"answer 1 is nan \(1 of 2.*float32"):
        model.costs(["Hi", "Hi?"], ["Yes", "No"])
