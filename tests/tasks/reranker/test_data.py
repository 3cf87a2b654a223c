"""Records become the documented batches, alike from every source; bad ones are named, never raw."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from transformers import AutoTokenizer

from pl_pointwise.data import fingerprint
from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import records_of, rows_of
from pl_pointwise.tasks.reranker import data
from pl_pointwise.tasks.reranker.data import RerankerDataModule
from pl_pointwise.tasks.reranker.records import (
    Record,
    RerankerDataset,
    parse_candidates,
    parse_labelled,
)
from pl_pointwise.tasks.reranker.template import Template
from tests.tasks.conftest import write_rows
from tests.tasks.reranker.conftest import ms_marco_row, ms_marco_rows

Rows = list[dict[str, Any]]
Make = Callable[..., Any]
TEMPLATE = "query {query} sentence {passage}"


@pytest.fixture
def module(of_files: Make) -> Make:
    """A function (rows, **options) -> data module that trains on a file of those rows."""
    return lambda rows, **options: of_files({"train": rows}, **options)


@pytest.fixture
def fitted(module: Make) -> Make:
    """The function `module`, its result set up for a fit."""

    def make(rows: Rows, **options: Any) -> RerankerDataModule:
        made = module(rows, **options)
        made.setup("fit")
        return made

    return make


@pytest.fixture
def tokenizer(tiny_tokenizer_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_tokenizer_dir)


def collated(module: RerankerDataModule) -> dict[str, Any]:
    dataset = module.datasets["train"]
    return module.collate([{**dataset[i], "index": i} for i in range(len(dataset))])


def parse(row: Any, where: str = "f.jsonl, line 1", *, seed: int = 0) -> Record:
    return parse_labelled(row, where, negatives=3, least=3, seed=seed)


# The batch


def test_batch_has_the_documented_shapes_and_types(fitted: Make) -> None:
    data_module = fitted(ms_marco_rows(9))
    batches = list(data_module.train_dataloader())
    assert sorted(int(i) for batch in batches for i in batch["index"]) == list(range(9))
    for batch in batches:
        size, longest = len(batch["index"]), int(batch["lengths"].max())
        described = {
            key: (tuple(value.shape), value.dtype) for key, value in batch.items()
        }
        assert described == {
            "index": ((size,), torch.long),
            "input_ids": ((size, 4, longest), torch.long),
            "token_type_ids": ((size, 4, longest), torch.long),
            "lengths": ((size, 4), torch.long),
            "candidates": ((size, 4), torch.bool),
            "passage_lengths": ((size, 4), torch.float32),
        }


def test_a_training_query_is_described_by_its_texts(fitted: Make) -> None:
    """A column of the constraint is the negative of the next number."""
    rows = [
        ms_marco_row("how long", f"river {i}", ["sea", "ice", "ship"]) for i in range(2)
    ]
    made = fitted(rows)
    texts = made.describe(1)
    assert texts.pop("record").endswith("train.jsonl, line 2")
    assert texts == {
        "query": "how long",
        "positive": "river 1",
        "negative 1": "sea",
        "negative 2": "ice",
        "negative 3": "ship",
    }


def test_batch_holds_the_pairs_tokens_padded_on_the_right(
    fitted: Make, tokenizer: Any
) -> None:
    data_module = fitted(ms_marco_rows(4))
    batch = collated(data_module)
    dataset = data_module.datasets["train"]
    for i in range(4):
        record = dataset.records[i]
        for j, passage in enumerate(record.passages):
            expected = tokenizer(record.query, passage)
            length = int(batch["lengths"][i, j])
            assert batch["input_ids"][i, j, :length].tolist() == expected["input_ids"]
            assert (
                batch["token_type_ids"][i, j, :length].tolist()
                == expected["token_type_ids"]
            )
            assert (batch["input_ids"][i, j, length:] == tokenizer.pad_token_id).all()


def test_passage_lengths_are_of_the_whole_passage_alone(fitted: Make) -> None:
    """No special tokens, and the part that truncation takes away counts."""
    row = ms_marco_row(
        "where is the sea", "the sea", ["salt " * 500, "ice", "snow and ice"]
    )
    data_module = fitted([row], max_length=20)
    batch = collated(data_module)
    assert batch["passage_lengths"].tolist() == [[2, 500, 1, 3]]
    assert batch["lengths"].tolist() == [[9, 20, 8, 10]]


def test_missing_candidates_are_masked(fitted: Make) -> None:
    rows = [
        ms_marco_row("how long", "a river", ["sea", "ice"], 1),
        ms_marco_row("where", "sea", ["ice"]),
    ]
    data_module = fitted(rows, min_negatives=1)
    batch = collated(data_module)
    assert batch["candidates"].tolist() == [
        [True, True, True, False],
        [True, True, False, False],
    ]
    assert (batch["lengths"] > 0).equal(batch["candidates"])
    assert batch["passage_lengths"].tolist() == [[2, 1, 1, 0], [1, 1, 0, 0]]
    assert (batch["input_ids"][~batch["candidates"]] == 0).all()


@given(
    query=st.text("abc {}]é", min_size=1, max_size=10),
    passage=st.text("abc {}]é", min_size=1, max_size=120).filter(str.strip),
)
def test_template_gives_the_tokens_of_the_formatted_text_cut_at_its_end(
    query: str, passage: str, tiny_tokenizer_dir: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    template, record = (
        "query: {query} sentence {passage}",
        Record(query, (passage,), None, "f"),
    )
    (row,) = RerankerDataset([record], tokenizer, max_length=24, template=template)
    text = template.format(query=query, passage=passage)
    expected = tokenizer(text, truncation=True, max_length=24)["input_ids"]
    assert row["input_ids"][0].tolist() == expected


@pytest.mark.parametrize(
    "template", ["", "{passage} {query}", "{query} {passage", "{x} {query} {passage}"]
)
def test_template_that_could_lose_more_than_passage_is_refused(template: str) -> None:
    with pytest.raises(DataError, match=r"needs \{query\} once"):
        RerankerDataModule("unused", template=template)
    assert Template.parse("Q: {query}\nS: {passage}.") == Template("Q: ", "\nS: ", ".")


# Selecting and holding out


def test_choice_among_many_negatives_depends_on_seed_and_row_alone() -> None:
    row = ms_marco_row("how long", "right", [f"wrong {i}" for i in range(30)], 12)
    picks = {parse(row, seed=seed).passages for seed in range(20)}
    assert len(picks) > 10
    for passages in picks:
        assert passages[0] == "right"
        assert len(set(passages)) == 4
    assert parse(row, seed=5) == parse(json.loads(json.dumps(row)), seed=5)


# Sources


def as_parquet(path: Path, rows: Rows) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


CARD = """---
configs:
- config_name: v1.1
  data_files: [{split: train, path: v1.1.parquet}]
- config_name: v2.1
  data_files: [{split: train, path: train.parquet}, {split: validation, path: validation.parquet}]
dataset_info:
- config_name: v2.1
  features:
  - {name: answers, sequence: string}
  - name: passages
    sequence: [{name: is_selected, dtype: int32}, {name: passage_text, dtype: string}]
  - {name: query, dtype: string}
  - {name: query_id, dtype: int32}
---
"""


@pytest.fixture
def hub(of_files: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A function (train rows, validation rows, **options) -> data module on a folder of them.

    It is laid out, and described in the same way, as the dataset on the hub.
    """
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)

    def make(train: Rows, validation: Rows, **options: Any) -> RerankerDataModule:
        folder = tmp_path / "ms_marco"
        if not folder.exists():
            folder.mkdir()
            for name, rows in (
                ("train", train),
                ("validation", validation),
                ("v1.1", []),
            ):
                as_parquet(
                    folder / f"{name}.parquet",
                    [{"answers": ["Yes"], **row} for row in rows],
                )
            (folder / "README.md").write_text(CARD)
        return of_files({}, source="hub", hub_path=str(folder), **options)

    return make


def test_json_lines_parquet_and_hub_give_the_same_data(
    of_files: Make, hub: Make, tmp_path: Path
) -> None:
    rows = ms_marco_rows(14)
    val = as_parquet(tmp_path / "val.PARQUET", rows[9:])
    options: dict[str, Any] = {"max_queries": 5, "val_queries": 3}
    lines = of_files({"train": rows[:9]}, val_file=str(val), **options)
    train = as_parquet(tmp_path / "train.parquet", rows[:9])
    parquet = of_files({}, train_file=str(train), val_file=str(val), **options)
    found = []
    for each in (lines, parquet, hub(rows[:9], rows[9:], **options)):
        each.prepare_data()
        each.setup(None)
        found.append(
            {name: fingerprint(dataset) for name, dataset in each.datasets.items()}
        )
        assert len(each.datasets["train"]) == 5
        assert len(each.datasets["val"]) == 3
    assert found[0] == found[1] == found[2]
    assert found[0]["val"] == found[0]["test"] != found[0]["train"]


def test_hub_rows_without_one_marked_passage_are_left_out_or_stop_the_run_if_asked(
    hub: Make,
) -> None:
    rows = ms_marco_rows(9)
    rows[2]["passages"]["is_selected"] = [0, 0, 0, 0]
    rows[5]["passages"]["is_selected"] = [1, 1, 0, 0]
    data_module = hub(rows[:7], rows[7:])
    with pytest.warns(
        UserWarning, match="left out 2 of 7 records.*record 3: .*marks no passages"
    ):
        data_module.setup("fit")
    assert len(data_module.datasets["train"]) == 5
    with pytest.raises(
        DataError, match=r"train, record 3: .*marks no pass.*invalid: skip"
    ):
        hub(rows[:7], rows[7:], invalid="error").setup("fit")


def test_lengths_on_the_hub_are_measured_once(
    hub: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ms_marco_rows(8)
    data_module = hub(rows[:5], rows[5:])
    data_module.prepare_data()
    calls = []
    measure = data._variance
    monkeypatch.setattr(data, "_variance", lambda *a: calls.append(1) or measure(*a))
    data_module.setup(None)
    hub(rows[:5], rows[5:]).setup(None)
    assert not calls
    hub(rows[:5], rows[5:], negatives=2).setup("validate")  # another measurement
    assert len(calls) == 3  # of what is validated alone


def test_hub_that_cannot_be_reached_is_an_error_with_a_remedy(
    of_files: Make, tmp_path: Path
) -> None:
    data_module = of_files({}, source="hub", hub_path=str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"cannot be loaded: .*take another source"):
        data_module.setup("fit")
    data_module.trainer = Trainer(logger=False, accelerator="cpu")
    data_module.trainer.state.fn = TrainerFn.PREDICTING
    # What is predicted for is a file's: the hub is not asked.
    data_module.prepare_data()


# Prediction


def test_prediction_keeps_text_order_and_any_number_of_candidates(
    module: Make, tmp_path: Path
) -> None:
    rows: Rows = [
        {"query": "where is the sea", "passages": ["a ship", "the sea " * 40, "ice"]},
        {
            "query": "how",
            "passages": {"passage_text": ["wind"], "is_selected": [0]},
            "query_id": 7,
        },
        {
            "query": "what",
            "passages": [f"lake {i}" for i in range(6)],
            "query_id": "q-3",
        },
    ]
    path = write_rows(tmp_path / "predict.jsonl", rows)
    data_module = module(ms_marco_rows(4), predict_file=str(path))
    data_module.setup("predict")
    assert list(data_module.datasets) == ["predict"]
    (batch,) = data_module.predict_dataloader()
    assert batch["query_id"] == [None, 7, "q-3"]
    assert batch["candidates"].sum(dim=1).tolist() == [3, 1, 6]
    assert batch["input_ids"].shape == (3, 6, 48)
    assert batch["passage_lengths"][0].tolist() == [2, 80, 1, 0, 0, 0]


def test_prediction_without_a_file_or_of_a_bad_record_is_an_error_never_skipped(
    module: Make, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="Set predict_file"):
        module(ms_marco_rows(4)).setup("predict")
    path = write_rows(tmp_path / "p.jsonl", [{"query": "how", "passages": []}])
    data_module = module(ms_marco_rows(4), predict_file=str(path), invalid="skip")
    with pytest.raises(
        DataError, match=r'p\.jsonl, line 1: field "passages" is mis'
    ) as error:
        data_module.setup("predict")
    assert "invalid: skip" not in str(error.value)


# Bad input


def changed(row: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {key: value for key, value in {**row, **fields}.items() if value is not ...}


GOOD: dict[str, Any] = {
    "query": "how long is the river",
    "passages": {
        "is_selected": [0, 1, 0, 0],
        "passage_text": ["sea", "very long", "ice", "snow"],
    },
}
PASSAGES: dict[str, Any] = GOOD["passages"]


def texts(*passages: Any) -> dict[str, Any]:
    return changed(GOOD, passages=changed(PASSAGES, passage_text=list(passages)))


def labels(*selected: Any, of: Any = PASSAGES["passage_text"]) -> dict[str, Any]:
    return changed(
        GOOD, passages={"is_selected": list(selected), "passage_text": [*of]}
    )


NEGATIVES = ["negative_2", "negative_3", "negative_4"]

BAD_ROWS: dict[str, tuple[Any, str]] = {
    "no query": (changed(GOOD, query=...), r'field "query" is missing .*Add it'),
    "texts are a text": (
        changed(GOOD, passages=changed(PASSAGES, passage_text="sea")),
        '"passages.passage_text" is a text. Give a list',
    ),
    "a passage is empty": (
        texts("a", "b", "", "c"),
        r'"passages.passage_text\[2\]" is empty',
    ),
    "no positive": (labels(0, 0, 0, 0), "marks no passages. Mark one"),
    "two positives": (labels(0, 1, 1, 0), "marks 2 passages. .* give a row each"),
    "no label": (
        changed(GOOD, passages={"passage_text": ["a"]}),
        "selected. is not a list of 0",
    ),
    "twin": (
        texts("sea", "a b", "ice", " A  B"),
        r"passage_text\[3\]. is .*\[1\] again, but for case",
    ),
    "no form": (
        {"query": "a", "text": "b"},
        "found: 'query', 'text'.*.pos. with .neg.",
    ),
    "a list in a cell": (
        {"query": "a", "pos": "['a']", "neg": ["b"]},
        '"pos" is a text. Give a list',
    ),
    "labels of other length": (labels(0, 1), "has 2 entries for 4 passages"),
    "too few negatives": (
        labels(1, 0, 0, of="abc"),
        "has 2 passages besides the marked one, and 3 are needed. Add some, or lower min_negatives",
    ),
}


@pytest.mark.parametrize(("row", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_bad_record_is_an_error_naming_file_line_field_and_remedy(
    row: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(row)}\n")
    with pytest.raises(DataError, match=rf"train\.jsonl, line 3: .*{message}"):
        records_of(rows_of(str(path)), str(path), parse)


FORMS: dict[str, dict[str, Any]] = {
    "lists": {"pos": ["p"], "neg": ["a", "b", "c"]},
    "a table": {"positive": "p", "negative": "a"}
    | dict(zip(NEGATIVES, ["b", "c", None], strict=True)),
    "negatives in a list": {"positive": "p", "negative": ["a", "b", "c"]},
    "labels": {"docs": [*"apbc"], "labels": [0, 1, 0, 0]},
    "true and false": {"passages": [*"abpc"], "labels": [False, False, True, False]},
}


@pytest.mark.parametrize("fields", FORMS.values(), ids=FORMS)
def test_each_form_is_read(fields: dict[str, Any]) -> None:
    row = {**fields, "anchor" if "positive" in fields else "query": "how long"}
    record = parse_labelled(row, "f", negatives=4, least=3)
    assert ("".join(record.passages), record.unit) == ("pabc", "how long")
    assert set(parse_candidates(row, "f").passages) == {*"pabc"}


def test_fields_that_are_not_read_are_named() -> None:
    row = {"query": "q", "pos": ["p"], "neg": ["a"], "pos_ids": [7], "source": "web"}
    parse = partial(parse_labelled, negatives=1, least=1)
    with pytest.warns(
        UserWarning, match="fields pos_ids, source of 1 of 1 records are not"
    ):
        assert records_of([("f", row)], "f", parse)[0].passages == ("p", "a")


def test_passage_that_a_long_query_cuts_away_is_an_error(fitted: Make) -> None:
    """With a template; of a pair the longer is cut."""
    long = ms_marco_row("river " * 40, "the sea", ["ice", "ship", "lake"])
    options: dict[str, Any] = {"template": TEMPLATE, "max_length": 24}
    expected = r"line 3: field .passages.: 'the sea' gives no token within max_length=24. Raise"
    with pytest.raises(DataError, match=expected):
        fitted([*ms_marco_rows(2), long], **options)
    with pytest.warns(UserWarning, match="left out 1 of 3 records"):
        data_module = fitted([*ms_marco_rows(2), long], **options, invalid="skip")
    assert len(data_module.datasets["train"]) == 2


@pytest.mark.parametrize("template", [TEMPLATE, "query {query}:{passage}"])
def test_one_token_of_passage_is_enough(template: str, tokenizer: Any) -> None:
    """With two special tokens and two of the template, 44 are room for 39 and one more."""
    options: dict[str, Any] = {"max_length": 44, "template": template}

    def dataset(length: int) -> RerankerDataset:
        row = ms_marco_row("river " * (length - 1) + "river", "sea sea", ["ice"] * 3)
        return RerankerDataset([parse(row)], tokenizer, **options)

    assert tokenizer.decode(dataset(39)[0]["input_ids"][0]).endswith(" sea [SEP]")
    with pytest.raises(DataError, match="'sea sea' gives no token"):
        dataset(40)


def test_passage_that_tokenises_to_nothing_is_an_error(module: Make) -> None:
    row = ms_marco_row("how long", "sea", ["ice", "\u200b\u2060", "lake"])
    with pytest.raises(DataError, match=r"line 1: .* gives no token"):
        module([row]).setup("fit")


def test_cut_pairs_are_counted_and_said_once(
    fitted: Make, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(caplog.handler)
    rows = [
        *ms_marco_rows(3),
        ms_marco_row("how long", "sea " * 90, ["ice", "ship " * 50, "lake"]),
    ]
    with caplog.at_level(logging.INFO, logger=logger.name):
        data_module = fitted(rows)
        list(data_module.train_dataloader())
        list(data_module.train_dataloader())
    logger.removeHandler(caplog.handler)
    messages = {
        id(r): r.getMessage() for r in caplog.records if "were cut" in r.getMessage()
    }
    assert list(messages.values()) == [
        "train: 2 pairs of more than 48 tokens were cut."
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_name": None}, "^model_name: the data need a tokenizer"),
        ({"negatives": 0}, "1 ≤ min_negatives ≤ negatives"),
        ({"val_fraction": 1.0}, "val_fraction=1.0"),
        ({"source": "disk"}, "choose one of embedded, hub, files"),
        ({"train_file": "a.jsonl"}, "source=embedded: it takes no files"),
        ({"source": "files"}, "needs train_file"),
        ({"max_length": 4}, "max_length=4: .* from 5 to 128 tokens"),
        ({"max_length": 129}, "max_length=129: .* from 5 to 128 tokens"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: dict[str, Any], message: str, tiny_tokenizer_dir: Path
) -> None:
    with pytest.raises(DataError, match=message):
        RerankerDataModule(**{"model_name": str(tiny_tokenizer_dir), **options}).setup(
            "fit"
        )


def test_stage_without_data_says_what_to_set(module: Make) -> None:
    with pytest.raises(
        DataError, match=r"no data to validate .*val_file, or val_fraction"
    ):
        module(ms_marco_rows(4)).setup("validate")
