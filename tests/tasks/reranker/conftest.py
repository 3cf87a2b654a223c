"""Tiny cross-encoders built on the spot, and rows of MS MARCO's schema, for the re-ranker."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from pl_pointwise.tasks.reranker.data import RerankerDataModule
from tests.tasks.conftest import write_rows

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = (
    "query sentence how long does a river flow where is the sea what do fish eat water salt ship "
    "ice wind short very and of in to it runs from mountain lake rain snow cold deep blue small "
    "large"
).split()
POSITIONS = 128  # the largest max_length the tiny models take


def save_tiny_tokenizer(path: Path, pair: bool = True) -> Path:
    """Save a WordPiece tokenizer: 39 words, and any other word by characters.

    `pair=True` makes token types as BERT does; `pair=False` makes none, as ModernBERT.
    """
    characters = list(string.ascii_lowercase + string.digits + string.punctuation)
    tokens = list(
        dict.fromkeys([*SPECIAL, *WORDS, *characters, *("##" + c for c in characters)])
    )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(
        models.WordPiece(
            vocab=vocabulary, unk_token="[UNK]", max_input_chars_per_word=100
        )
    )
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1" if pair else "[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    names = ["input_ids", *(["token_type_ids"] if pair else []), "attention_mask"]
    marks = {
        f"{name}_token": f"[{name.upper()}]"
        for name in ("unk", "pad", "cls", "sep", "mask")
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=POSITIONS,
        model_input_names=names,
        **marks,
    )
    tokenizer.save_pretrained(path)
    return path


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
# Windows of 8 tokens in two layers of three, so that padding could reach into a window.
OWN: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "modernbert": {
        "local_attention": 8,
        "classifier_pooling": "mean",
        "num_hidden_layers": 3,
    }
    | {"classifier_bias": True, "cls_token_id": 2, "sep_token_id": 3},
}


def save_tiny_cross_encoder(
    path: Path, num_labels: int = 1, pair: bool = True, kind: str = "bert"
) -> Path:
    """Save a small encoder with a classification head of `num_labels`, and its tokenizer.

    The weights are drawn wide, so that scores of pairs differ visibly; about 30k parameters.
    """
    save_tiny_tokenizer(path, pair=pair)
    size = len(PreTrainedTokenizerFast.from_pretrained(path))
    config = CONFIG_MAPPING[kind](
        vocab_size=size, num_labels=num_labels, **SIZES | OWN[kind]
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
        if kind != "bert":  # A head's bias must be carried too.
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    torch.nn.init.normal_(parameter)
        model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_cross_encoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved one-label cross-encoder with token types, shared: do not write into it."""
    return save_tiny_cross_encoder(tmp_path_factory.mktemp("tiny-cross-encoder"))


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny tokenizer with token types."""
    return save_tiny_tokenizer(tmp_path_factory.mktemp("tiny-tokenizer"))


def ms_marco_row(
    query: str,
    positive: str,
    negatives: Iterable[str],
    position: int = 0,
    query_id: int = 0,
) -> dict[str, Any]:
    """One row of the hub's schema, the positive standing at `position` among the passages."""
    texts = list(negatives)
    texts.insert(position, positive)
    selected = [int(i == position) for i in range(len(texts))]
    return {
        "query_id": query_id,
        "query": query,
        "passages": {"is_selected": selected, "passage_text": texts},
    }


def ms_marco_rows(count: int, negatives: int = 3) -> list[dict[str, Any]]:
    """`count` rows of distinct queries, in the tiny tokenizer's words, of different lengths."""
    rows = []
    for i in range(count):
        words = [WORDS[(i + j) % len(WORDS)] for j in range(negatives + 1)]
        wrong = [
            " ".join([word] * (2 + (i * j) % 9))
            for j, word in enumerate(words[1:], start=1)
        ]
        positive = f"{words[0]} {words[-1]} is in the sea"
        rows.append(
            ms_marco_row(f"what is {words[0]} {i}", positive, wrong, i % len(words), i)
        )
    return rows


@pytest.fixture
def of_files(
    tiny_tokenizer_dir: Path, tmp_path: Path
) -> Callable[..., RerankerDataModule]:
    """A function (rows by split, **options) -> data module over files of those rows."""

    def make(parts: dict[str, list[Any]], **options: Any) -> RerankerDataModule:
        for name, rows in parts.items():
            options[f"{name}_file"] = str(write_rows(tmp_path / f"{name}.jsonl", rows))
        defaults = {
            "model_name": str(tiny_tokenizer_dir),
            "source": "files",
            "negatives": 3,
        }
        defaults |= {"val_fraction": 0.0, "batch_size": 4, "max_length": 48}
        return RerankerDataModule(**defaults | options)

    return make


def tables(
    draw: st.DrawFn, rows: int, width: int
) -> Callable[[st.SearchStrategy], list[list]]:
    """A function that draws `rows` lists of `width` elements each."""

    def table(element: st.SearchStrategy) -> list[list]:
        row = st.lists(element, min_size=width, max_size=width)
        return draw(st.lists(row, min_size=rows, max_size=rows))

    return table
