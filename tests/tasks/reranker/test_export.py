"""The exported folder, loaded with sentence-transformers, gives the module's scores to 1e-5."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from sentence_transformers import CrossEncoder
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pl_pointwise import Pointwise
from pl_pointwise.tasks.reranker.data import RerankerDataModule
from pl_pointwise.tasks.reranker.module import RerankerModule
from tests.tasks.conftest import write_rows
from tests.tasks.reranker.conftest import save_tiny_cross_encoder

TEMPLATE = "Query: {query}\nSentence: {passage}"
ODD_TEMPLATE = (
    # what JSON, Jinja and others may trip on
    '"{query}" -> [MASK] \\n .type é {passage}'
)
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


def module_scores(module: RerankerModule, tmp_path: Path) -> list[list[float]]:
    """The module's scores by the way its users get them: file, data module, predict_step."""
    rows = [
        {"query": query, "passages": passages} for query, passages in QUERIES.items()
    ]
    file = write_rows(tmp_path / "predict.jsonl", rows)
    data = RerankerDataModule(
        module.model_name,
        source="files",
        predict_file=str(file),
        max_length=module.max_length,
        template=module.template,
    )
    data.setup("predict")
    batch = data.collate(
        [{**data.datasets["predict"][i], "index": i} for i in range(len(rows))]
    )
    assert (batch["lengths"] == CUT).any()  # some pair is cut
    assert (batch["lengths"] < CUT).any()
    with torch.no_grad():
        return [row["scores"] for row in module.eval().predict_step(batch)]


def assert_equal(module: RerankerModule, tmp_path: Path) -> None:
    """Of the export, loaded, and the module."""
    encoder = CrossEncoder(
        str(tmp_path / "export"), device="cpu", local_files_only=True
    )
    expected = module_scores(module, tmp_path)
    everything = [score for scores in expected for score in scores]
    assert np.std(everything) > 0.01  # guards the comparison: the pairs do differ
    assert max(everything) > 1 or min(everything) < 0  # and a sigmoid would show
    for (query, passages), scores in zip(QUERIES.items(), expected, strict=True):
        found = encoder.predict([(query, passage) for passage in passages])
        # Without padding float32 sums in another order.
        np.testing.assert_allclose(found, scores, rtol=1e-5, atol=1e-5)
        ranked = encoder.rank(query, passages)
        in_order = [hit["score"] for hit in ranked]
        np.testing.assert_allclose(
            in_order, sorted(scores, reverse=True), rtol=1e-5, atol=1e-5
        )
        of_each = [scores[int(hit["corpus_id"])] for hit in ranked]
        np.testing.assert_allclose(in_order, of_each, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "token_types"),
    [("bert", True), ("bert", False), ("modernbert", False), ("roberta", False)],
)
@pytest.mark.parametrize("num_labels", [1, 2])
@pytest.mark.parametrize("template", [None, TEMPLATE, ODD_TEMPLATE])
def test_predict_and_rank_give_the_modules_scores(
    kind: str, token_types: bool, num_labels: int, template: str | None, tmp_path: Path
) -> None:
    name = save_tiny_cross_encoder(tmp_path / "model", num_labels, token_types, kind)
    module = RerankerModule(str(name), max_length=CUT, template=template)
    with torch.no_grad():
        # It is trained, and not as it was loaded.
        for parameter in module.parameters():
            parameter.mul_(1.1)
    config = module.model.config.to_dict()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    module.export(tmp_path / "export")
    assert module.model.config.to_dict() == config
    assert all(
        torch.equal(before[key], value) for key, value in module.state_dict().items()
    )
    assert_equal(module, tmp_path)


def test_a_model_inside_an_installed_package_is_loaded_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_cross_encoder(tmp_path / "carrier_of_weights" / "model")
    (tmp_path / "carrier_of_weights" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    module = RerankerModule("package:carrier_of_weights/model", max_length=CUT)
    module.export(tmp_path / "export")
    assert_equal(module, tmp_path)


def test_an_export_replaces_an_earlier_one(tmp_path: Path) -> None:
    """A chat template left behind, or the base model's, would turn pairs into its text."""
    name = str(save_tiny_cross_encoder(tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    tokenizer.save_pretrained(name)
    RerankerModule(name, max_length=CUT, template=TEMPLATE).export(tmp_path / "export")
    module = RerankerModule(name, max_length=CUT)
    module.export(tmp_path / "export")
    assert_equal(module, tmp_path)


def test_the_folder_holds_safetensors_a_card_and_no_path_of_this_machine(
    tmp_path: Path,
) -> None:
    name = str(save_tiny_cross_encoder(tmp_path / "model"))
    module = RerankerModule(name, Pointwise(alpha=2.0), 1.0, 3.0, template=TEMPLATE)
    path = module.export(tmp_path / "export")
    files = sorted(file.name for file in path.iterdir())
    expected = ["README.md", "chat_template.jinja", "config.json", "model.safetensors"]
    assert files == [*expected, "tokenizer.json", "tokenizer_config.json"]
    for file in path.iterdir():
        assert str(tmp_path).encode() not in file.read_bytes()
    card = ModelCard.load(path / "README.md")
    assert card.data.library_name == "sentence-transformers"
    assert card.data.pipeline_tag == "text-ranking"
    assert card.data.base_model is None  # A folder of this machine.
    assert "| relevance | ≥ 1 | ≥ 3 | `Pointwise(alpha=2.0" in card.text
    assert "CrossEncoder(" in card.text


def test_a_template_that_the_tokenizer_reads_differently_is_refused(
    tmp_path: Path,
) -> None:
    """This one marks the first word of a text, which after a written-out [CLS] is not the first."""
    name = save_tiny_cross_encoder(tmp_path / "model")
    backend = Tokenizer(
        models.WordLevel({"[CLS]": 0, "[SEP]": 1, "[UNK]": 2, "▁Query:": 3}, "[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
    ).save_pretrained(name)
    module = RerankerModule(str(name), max_length=CUT, template=TEMPLATE)
    with pytest.raises(ValueError, match=r"cannot be exported.*Train on pairs"):
        module.export(tmp_path / "export")
    assert not (tmp_path / "export").exists()
