"""Re-rankers of today: heads of words, padding, adapters; each against the model by itself."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from sentence_transformers import CrossEncoder
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.reranker.data import RerankerDataModule
from pl_pointwise.tasks.reranker.module import RerankerModule
from tests.tasks.conftest import build_model, build_tokenizer, move_adapters, write_rows
from tests.tasks.reranker.conftest import save_tiny_cross_encoder

PREFIX = "<|start|>system\nJudge.<|end|>\n<|start|>user\n"
SUFFIX = "<|end|>\n<|start|>assistant\n\n\n"
TEMPLATE = (
    PREFIX + "Instruct: {instruction}\nQuery: {query}\nDocument: {passage}" + SUFFIX
)
INSTRUCTION = "find the answer"
CUT = 130
PAIRS = {
    "how long is the river": [
        "6,650 km",
        "it rises in the hills " * 12,
        "é {braces} and\nlines",
    ],
    "why": ["because", "the sea is deep", "x" * 300],
}
CLOSE: dict[str, float] = {"atol": 1e-5, "rtol": 1e-5}


def save_causal(folder: Path, kind: str, **overrides: Any) -> Any:
    """A tiny causal model whose tokenizer has the words as tokens; the folder and the model."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save_pretrained(folder)
    model = build_model(kind, vocab_size=len(tokenizer), **overrides)
    model.save_pretrained(folder)
    return model.eval()


def by_hand(model: Any, tokenizer: Any, words: list[str]) -> list[list[float]]:
    """The score as the model's card computes it: prefix, text cut, suffix; the last logits."""

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    rows = []
    for query, passages in PAIRS.items():
        scores = []
        for passage in passages:
            text = f"Instruct: {INSTRUCTION}\nQuery: {query}\nDocument: {passage}"
            room = CUT - len(ids(PREFIX)) - len(ids(SUFFIX))
            whole = torch.tensor([ids(PREFIX) + ids(text)[:room] + ids(SUFFIX)])
            with torch.no_grad():
                logits = model(whole).logits[0, -1]
            values = [float(logits[ids(word)[0]]) for word in words]
            scores.append(values[0] - sum(values[1:]))
        rows.append(scores)
    return rows


def predicted(module: RerankerModule, tmp_path: Path, **row: Any) -> list[list[float]]:
    """The module's scores of the pairs, all in one padded batch."""
    rows = [
        {"query": query, "passages": passages, **row}
        for query, passages in PAIRS.items()
    ]
    file = write_rows(tmp_path / "predict.jsonl", rows)
    data = RerankerDataModule(
        module.model_name,
        source="files",
        predict_file=str(file),
        max_length=module.max_length,
        template=module.template,
        instruction=module.instruction,
    )
    data.setup("predict")
    batch = data.collate(
        [{**data.datasets["predict"][i], "index": i} for i in range(len(rows))]
    )
    with torch.no_grad():
        return [found["scores"] for found in module.eval().predict_step(batch)]


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), **CLOSE)


@pytest.mark.parametrize("words", [["yes", "no"], ["1", "0"], ["yes"]])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral", "gemma"])
def test_a_head_of_words_is_the_causal_models_own_score(kind, words, tmp_path) -> None:
    """Qwen3-Reranker and mxbai-rerank v2, and bge-v2-gemma with one word."""
    model = save_causal(tmp_path / "model", kind, head_dim=8)
    expected = by_hand(model, AutoTokenizer.from_pretrained(tmp_path / "model"), words)
    options: dict[str, Any] = {"max_length": CUT, "template": TEMPLATE, "head": words}
    module = RerankerModule(str(tmp_path / "model"), **options, instruction=INSTRUCTION)
    assert_close(predicted(module, tmp_path), expected)
    plain = RerankerModule(str(tmp_path / "model"), **options, instruction="another")
    assert_close(predicted(plain, tmp_path, instruction=INSTRUCTION), expected)
    assert all(weight.requires_grad for weight in module.parameters())
    reranker = CrossEncoder(str(module.export(tmp_path / "export")))
    for (query, passages), scores in zip(PAIRS.items(), expected, strict=True):
        assert_close(reranker.predict([(query, p) for p in passages]).tolist(), scores)
    options |= {"head": None, "instruction": INSTRUCTION}
    again = RerankerModule(str(tmp_path / "export"), **options)
    assert_close(predicted(again, tmp_path), expected)


def test_what_no_head_of_words_can_give_is_refused(tmp_path) -> None:
    save_causal(tmp_path / "model", "gemma2")  # Its logits are capped.
    name = str(tmp_path / "model")
    with pytest.raises(ValueError, match=r"does more to its logits than a product"):
        RerankerModule(name, head=["yes", "no"])
    with pytest.raises(ValueError, match=r"'maybe' is 5 tokens \['m', 'a', .*one"):
        RerankerModule(name, head=["maybe", "no"])
    with pytest.raises(ValueError, match=r"YAML reads yes and no .* in quotes"):
        RerankerModule(name, head=[True, False])
    with pytest.raises(ValueError, match="give one word, or two"):
        RerankerModule(name, head=["yes", "no", "1"])


@pytest.mark.parametrize("pad", [None, 7])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_pairs_in_a_batch_score_as_one_by_one_whatever_the_files_pad_with(
    kind, pad, tmp_path
) -> None:
    """The configurations of Qwen, Llama and Mistral name no such token, or another one."""
    tokenizer = build_tokenizer()
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4} if kind == "gpt2" else {}
    build_model(
        kind, vocab_size=len(tokenizer), pad_token_id=pad, **sizes
    ).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    module = RerankerModule(str(tmp_path / "model"), max_length=CUT)
    assert module.model.config.pad_token_id == tokenizer.pad_token_id
    scores = predicted(module, tmp_path)
    for (query, passages), row in zip(PAIRS.items(), scores, strict=True):
        for passage, score in zip(passages, row, strict=True):
            ids = tokenizer(query, passage, truncation="longest_first", max_length=CUT)
            with torch.no_grad():
                alone = module.model(torch.tensor([ids["input_ids"]])).logits[0, 0]
            assert abs(float(alone) - score) < 1e-6
    reranker = CrossEncoder(str(module.export(tmp_path / "export")))
    found = reranker.predict(
        [(query, p) for query, passages in PAIRS.items() for p in passages]
    )
    assert_close(found.tolist(), [*chain.from_iterable(scores)])


def test_a_tokenizer_without_a_pad_token_gets_one(tmp_path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "model")
    model = build_model("llama", vocab_size=len(tokenizer), pad_token_id=None)
    model.save_pretrained(tmp_path / "model")
    module = RerankerModule(str(tmp_path / "model"), max_length=CUT)
    # Not its end token.
    assert module.model.config.pad_token_id == build_tokenizer().pad_token_id
    predicted(module, tmp_path)


def test_positions_that_are_counted_from_the_padding_stay(tmp_path) -> None:
    """RoBERTa's: with another number its export would read other positions."""
    folder = save_tiny_cross_encoder(tmp_path / "model", kind="roberta")
    config = json.loads((folder / "config.json").read_text()) | {"pad_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    module = RerankerModule(str(folder), max_length=CUT - 10)
    scores = [*chain.from_iterable(predicted(module, tmp_path))]
    reranker = CrossEncoder(str(module.export(tmp_path / "export")))
    pairs = [(query, p) for query, passages in PAIRS.items() for p in passages]
    assert_close(reranker.predict(pairs).tolist(), scores)


# Adapters -----------------------------------------------------------------------------------------


def scores_of(model: Any, labels: int = 1) -> Tensor:
    ids = torch.arange(5, 45).view(2, 20)
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=ids).logits
    return logits[:, 0] if labels == 1 else logits[:, 1] - logits[:, 0]


@pytest.mark.parametrize(("kind", "labels"), [("qwen3", 1), ("llama", 2), ("bert", 1)])
def test_an_adapter_is_merged_with_its_head(kind, labels, tmp_path) -> None:
    base = tmp_path / "base"
    if kind == "bert":
        save_tiny_cross_encoder(base)
        targets = ["query", "value"]
    else:
        save_causal(base, kind)
        targets = ["q_proj", "v_proj"]
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)
    model.config.pad_token_id = 0
    adapted = get_peft_model(
        model, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=targets)
    )
    move_adapters(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    module = RerankerModule(str(tmp_path / "adapter"), max_length=CUT - 10)
    assert module.model.config.num_labels == labels
    torch.testing.assert_close(
        scores_of(module.model, labels), scores_of(adapted, labels), **CLOSE
    )
    assert all(weight.requires_grad for weight in module.parameters())
    reranker = CrossEncoder(str(module.export(tmp_path / "export")))
    pairs = [(query, p) for query, passages in PAIRS.items() for p in passages]
    found = [*chain.from_iterable(predicted(module, tmp_path))]
    assert_close(reranker.predict(pairs).tolist(), found)


def test_an_adapter_of_a_model_that_answers_in_words(tmp_path) -> None:
    base = save_causal(tmp_path / "base", "qwen3")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    options = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "down_proj"]
    )
    adapted = get_peft_model(base, options)
    move_adapters(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    expected = by_hand(adapted.eval(), tokenizer, ["yes", "no"])
    options = {"max_length": CUT, "template": TEMPLATE, "head": ["yes", "no"]}
    module = RerankerModule(
        str(tmp_path / "adapter"), **options, instruction=INSTRUCTION
    )
    assert_close(predicted(module, tmp_path), expected)


# Templates ----------------------------------------------------------------------------------------


def test_an_instruction_that_nobody_gives_is_asked_for(tmp_path) -> None:
    save_causal(tmp_path / "model", "llama")
    name, options = str(tmp_path / "model"), {"max_length": CUT, "template": TEMPLATE}
    with pytest.raises(
        DataError, match=r"has an \{instruction\}: set model\.instruction"
    ):
        RerankerModule(name, **options)
    module = RerankerModule(name, max_length=CUT, template="{query} {passage}")
    with pytest.raises(
        DataError, match=r"line 1: field .instruction. has no place.*template"
    ):
        predicted(module, tmp_path, instruction="find")
    with pytest.raises(DataError, match=r"\{instruction\} at most once"):
        RerankerModule(str(tmp_path / "model"), template="{instruction}" + TEMPLATE)
