"""The exported folder, loaded with sentence-transformers, gives the module's scores to 1e-5."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from sentence_transformers import CrossEncoder
from transformers import (
    AutoTokenizer,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from pl_pointwise import Pointwise
from pl_pointwise.tasks.reranker.data import RerankerDataModule
from pl_pointwise.tasks.reranker.module import RerankerModule

CUT = 90  # tokens: two of the passages below are longer

QUERIES = {
    "how long does a river flow": [
        "a river",
        "it runs from the mountain to the sea, and that is 6,650 km",
        "fish eat " * 60,
        " leading and trailing space \n",
    ],
    "what do 'fish' \"eat\"? {{ messages }} {query}": [
        "salt {% raw %} {passage} {0} </s> [SEP] \\n \\u0041",
        "日本語 ß 🐟 é",
        "a long list of things to eat: " + "water, ice; " * 40,
    ],
}


def write_model(folder: Path, kind: str, num_labels: int, tokenizer: Path) -> str:
    """A tiny model of another architecture than BERT, with the tiny tokenizer."""
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    sizes: dict[str, Any] = {
        "vocab_size": len(loaded),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "num_labels": num_labels,
        "pad_token_id": loaded.pad_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "modernbert":
            config = ModernBertConfig(**sizes, local_attention=8, classifier_bias=True)
            model: Any = ModernBertForSequenceClassification(config)
        else:
            model = RobertaForSequenceClassification(RobertaConfig(**sizes))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    loaded.save_pretrained(folder)
    return str(folder)


def module_scores(module: RerankerModule, tmp_path: Path) -> list[list[float]]:
    """The module's scores by the way its users get them: file, data module, predict_step."""
    file = tmp_path / "predict.jsonl"
    rows = [{"query": query, "passages": passages} for query, passages in QUERIES.items()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = RerankerDataModule(
        module.model_name,
        source="files",
        predict_file=str(file),
        max_length=module.max_length,
    )
    data.setup("predict")
    batch = data.collate([{**data.datasets["predict"][i], "index": i} for i in range(len(rows))])
    assert (batch["lengths"] == CUT).any()  # some pair is cut
    assert (batch["lengths"] < CUT).any()
    with torch.no_grad():
        return [row["scores"] for row in module.eval().predict_step(batch)]


def assert_equal(encoder: CrossEncoder, expected: list[list[float]]) -> None:
    everything = [score for scores in expected for score in scores]
    assert np.std(everything) > 0.01  # guards the comparison: the pairs do differ
    assert max(everything) > 1 or min(everything) < 0  # and a sigmoid would show
    for (query, passages), scores in zip(QUERIES.items(), expected, strict=True):
        found = encoder.predict([(query, passage) for passage in passages])
        # Without padding float32 sums in another order.
        np.testing.assert_allclose(found, scores, rtol=1e-5, atol=1e-5)
        ranked = encoder.rank(query, passages)
        in_order = [hit["score"] for hit in ranked]
        np.testing.assert_allclose(in_order, sorted(scores, reverse=True), rtol=1e-5, atol=1e-5)
        of_each = [scores[int(hit["corpus_id"])] for hit in ranked]
        np.testing.assert_allclose(in_order, of_each, rtol=0, atol=1e-5)


def load(folder: Path) -> CrossEncoder:
    return CrossEncoder(str(folder), device="cpu", local_files_only=True)


@pytest.mark.parametrize("num_labels", [1, 2])
@pytest.mark.parametrize("token_types", [True, False])
def test_predict_and_rank_give_the_modules_scores(
    num_labels: int,
    token_types: bool,
    write_tiny_cross_encoder: Callable[..., Path],
    tmp_path: Path,
) -> None:
    name = write_tiny_cross_encoder(tmp_path / "model", num_labels, pair=token_types)
    module = RerankerModule(str(name), max_length=CUT)
    module.export(tmp_path / "export")
    assert_equal(load(tmp_path / "export"), module_scores(module, tmp_path))


@pytest.mark.parametrize("num_labels", [1, 2])
@pytest.mark.parametrize("kind", ["modernbert", "roberta"])
def test_heads_of_other_architectures_are_carried_too(
    kind: str,
    num_labels: int,
    tiny_tokenizer_without_types_dir: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    name = write_model(folder, kind, num_labels, tiny_tokenizer_without_types_dir)
    module = RerankerModule(name, max_length=CUT)
    module.export(tmp_path / "export")
    assert_equal(load(tmp_path / "export"), module_scores(module, tmp_path))


def test_a_model_inside_an_installed_package_is_loaded_and_exported(
    write_tiny_cross_encoder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_cross_encoder(tmp_path / "carrier_of_weights" / "model")
    (tmp_path / "carrier_of_weights" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    module = RerankerModule("package:carrier_of_weights/model", max_length=CUT)
    module.export(tmp_path / "export")
    assert_equal(load(tmp_path / "export"), module_scores(module, tmp_path))


def test_trained_weights_are_exported_not_those_the_module_began_with(
    tiny_cross_encoder_dir: Path, tmp_path: Path
) -> None:
    module = RerankerModule(str(tiny_cross_encoder_dir), max_length=CUT)
    before = module_scores(module, tmp_path)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.1)
    module.export(tmp_path / "export")
    after = module_scores(module, tmp_path)
    assert not np.allclose(before[0], after[0], atol=1e-2)
    assert_equal(load(tmp_path / "export"), after)


def test_exporting_leaves_the_module_as_it_is(
    write_tiny_cross_encoder: Callable[..., Path], tmp_path: Path
) -> None:
    name = write_tiny_cross_encoder(tmp_path / "model", 2)
    module = RerankerModule(str(name), max_length=CUT)
    config = module.model.config.to_dict()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    module.export(tmp_path / "export")
    assert module.model.config.to_dict() == config
    assert module.model.config.num_labels == 2
    assert before.keys() == module.state_dict().keys()
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())


def test_a_chat_template_of_the_base_model_does_not_reach_the_pairs(
    write_tiny_cross_encoder: Callable[..., Path], tmp_path: Path
) -> None:
    name = write_tiny_cross_encoder(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(name)
    module = RerankerModule(str(name), max_length=CUT)
    module.export(tmp_path / "export")
    assert_equal(load(tmp_path / "export"), module_scores(module, tmp_path))


def test_the_folder_holds_safetensors_and_no_path_of_this_machine(
    write_tiny_cross_encoder: Callable[..., Path], tmp_path: Path
) -> None:
    name = write_tiny_cross_encoder(tmp_path / "model")
    path = RerankerModule(str(name), max_length=CUT).export(tmp_path / "export")
    files = sorted(file.name for file in path.iterdir())
    expected = ["README.md", "config.json", "model.safetensors"]
    assert files == [*expected, "tokenizer.json", "tokenizer_config.json"]
    for file in path.iterdir():
        assert str(tmp_path).encode() not in file.read_bytes()


def test_the_card_says_what_was_required_and_what_loads_it(
    write_tiny_cross_encoder: Callable[..., Path], tmp_path: Path
) -> None:
    name = write_tiny_cross_encoder(tmp_path / "model")
    module = RerankerModule(str(name), Pointwise(alpha=2.0), tolerance=1.0, evaluation_tolerance=3)
    card = ModelCard.load(module.export(tmp_path / "export") / "README.md")
    assert card.data.library_name == "sentence-transformers"
    assert card.data.pipeline_tag == "text-ranking"
    assert card.data.base_model is None  # A folder of this machine.
    assert "| relevance | ≥ 1 | ≥ 3 | `Pointwise(alpha=2.0" in card.text
    assert "CrossEncoder(" in card.text
