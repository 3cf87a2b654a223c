"""Whatever a file holds, it is read or refused by name; nothing that it says is run.

Every data module here goes from a file to its first batches, as ``fit``, ``test`` and ``predict``
take them: good records with one value exchanged, one value for each class of bad input; good files
in another encoding; and model folders that would run code if they were let.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pl_pointwise.errors import DataError
from pl_pointwise.tasks import (
    ConversationDataModule,
    RerankerDataModule,
    SafetyDataModule,
    When2CallDataModule,
)
from pl_pointwise.tasks.common.models import model_source
from pl_pointwise.tasks.common.records import rows_of
from pl_pointwise.tasks.language_model.data import Preparation
from pl_pointwise.tasks.language_model.loading import load_language_model, load_tokenizer
from pl_pointwise.tasks.reranker.module import load_cross_encoder
from pl_pointwise.tasks.safety.data import Selection
from tests.tasks.conversation.conftest import conversation_rows
from tests.tasks.reranker.conftest import ms_marco_rows, save_tiny_cross_encoder
from tests.tasks.when2call.conftest import TOOL, choice_rows, preference_rows

LONGEST_MESSAGE = 1200

PREFERENCES = preference_rows(3)
PREFERENCES[0]["tools"] = [TOOL]  # one as an object, the others as JSON texts
PAIRS = [
    {"system": "Be kind.", "input": f"{i} + 1?", "chosen": "Right.", "rejected": "No."}
    for i in range(3)
]
INSTRUCTIONS = [
    {"instruction": f"Add {i}.", "input": "to 1", "output": "Of course: 2."} for i in range(3)
]
UNSAFE = [{"prompt": f"Harm {i}", "response": "Thus.", "is_safe": False} for i in range(3)]
JUDGEMENTS = [
    {
        "prompt": f"Harm {i // 3}",
        "response": "Thus.",
        "category": {"privacy_violation": True, "self_harm": False},
        "is_safe": False,
    }
    for i in range(6)
]
ANSWER_PAIRS = [
    {
        "prompt": f"Harm {i}",
        "response_0": "No.",
        "response_1": "Thus.",
        "is_response_0_safe": True,
        "is_response_1_safe": False,
        "better_response_id": 1,
        "safer_response_id": 0,
    }
    for i in range(3)
]
CHOSEN = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(3)]
PROMPTS = [{"prompt": f"Kill process {i}", "type": "homonyms"} for i in range(3)]
QUERIES = [
    {"query_id": i, "query": "how long", "passages": ["a river", "the sea"]} for i in range(3)
]


@dataclass(frozen=True)
class Loader:
    """A data module that reads one file of its kind, and good rows of it."""

    module: type[Any]
    option: str
    stage: str
    rows: list[Any]
    options: dict[str, Any]

    def build(self, models: dict[str, Path], path: Path) -> Any:
        model = models["encoder" if self.module is RerankerDataModule else "language"]
        files = {self.option: str(path)}
        if self.option == "unsafe_file":  # which is nothing alone
            benign = path.with_name("benign.jsonl")
            benign.write_bytes(lines(INSTRUCTIONS))
            files["benign_file"] = str(benign)
        return self.module(str(model), source="files", **files, **self.options, batch_size=2)


def reranker(option: str, stage: str, rows: list[Any]) -> Loader:
    options = {"negatives": 3, "max_length": 48, "val_fraction": 0.0}
    return Loader(RerankerDataModule, option, stage, rows, options)


def when2call(option: str, stage: str, rows: list[Any], **options: Any) -> Loader:
    options = {"preparation": Preparation(val_fraction=0.0), **options}
    return Loader(When2CallDataModule, option, stage, rows, options)


def safety(option: str, stage: str, rows: list[Any], schema: str | None = None) -> Loader:
    options = {
        "unsafe_schema": schema,
        "preparation": Preparation(val_fraction=0.0),
        "selection": Selection(held_out_per_category=0),
    }
    return Loader(SafetyDataModule, option, stage, rows, options)


def conversation(rows: list[Any]) -> Loader:
    options = {"preparation": Preparation(val_fraction=0.0)}
    return Loader(ConversationDataModule, "train_file", "fit", rows, options)


LOADERS = {
    "conversation": conversation(conversation_rows(1)),
    "conversation, pairs": conversation(CHOSEN),
    "re-ranking": reranker("train_file", "fit", ms_marco_rows(3)),
    "re-ranking, prediction": reranker("predict_file", "predict", QUERIES),
    "when2call": when2call("train_file", "fit", PREFERENCES),
    "when2call, pairs": when2call("train_file", "fit", PAIRS, schema="pairs"),
    "when2call, choices": when2call("mcq_file", "test", choice_rows(3)),
    "safety, benign": safety("benign_file", "fit", INSTRUCTIONS),
    "safety, labelled": safety("unsafe_file", "fit", UNSAFE, "labelled"),
    "safety, judgements": safety("unsafe_file", "fit", JUDGEMENTS, "beavertails"),
    "safety, PKU": safety("unsafe_file", "fit", ANSWER_PAIRS, "pku"),
    "safety, prediction": safety("predict_file", "predict", PROMPTS),
}
every_loader = pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)


@pytest.fixture(name="models", scope="module")
def folders_of_models(
    tmp_path_factory: pytest.TempPathFactory, language_model_folder: Path
) -> dict[str, Path]:
    encoder = save_tiny_cross_encoder(tmp_path_factory.mktemp("encoder"))
    return {"encoder": encoder, "language": language_model_folder}


@pytest.fixture(name="read")
def reader(
    models: dict[str, Path], tmp_path: Path
) -> Callable[[Loader, bytes, str], DataError | None]:
    """(loader, content of its file, ending) → the error it was refused with, None if it was read.

    One data module serves all the files of a test: tokenizers are slow to load.
    """
    modules: dict[str, Any] = {}

    def read(loader: Loader, content: bytes, ending: str = "jsonl") -> DataError | None:
        path = tmp_path / f"hostile.{ending}"
        path.write_bytes(content)
        module = modules.setdefault(ending, loader.build(models, path))
        module.datasets, module._records = {}, {}
        try:
            module.setup(loader.stage)
            for dataset in module.datasets.values():
                rows = [{**dataset[i], "index": i} for i in range(len(dataset))]
                module.collate(rows)
                assert dataset.fingerprint
        except DataError as error:
            refused = error
        else:
            return None
        assert len(str(refused)) < LONGEST_MESSAGE
        assert str(refused).encode()
        return refused

    return read


def lines(rows: Iterable[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@every_loader
def test_good_file_is_read(loader: Loader, read: Any) -> None:
    """What the others are refused for is not in it."""
    assert read(loader, lines(loader.rows)) is None


# Values -------------------------------------------------------------------------------------------


HOSTILE: list[Any] = [
    *(None, True, -1, 1.5, "", " ", [], {}, [None], [{}], "x" * 100_000),
    *("a\0b", "<|end|>", "{{ 7 * 7 }}", "<TOOLCALL>", '{"name": "f", "arguments": 5}'),
    *({"name": "add", "arguments": {}}, [{"role": "tool", "content": "x"}]),
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything within a row."""
    found = []
    waiting = [value]
    while waiting:
        container = waiting.pop()
        keys = container if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], (dict, list)):
                waiting.append(container[key])
    return found


@every_loader
def test_any_value_is_read_or_refused_by_name(loader: Loader, read: Any) -> None:
    """Each in one place, in turn, and for the row itself; a refusal names the line."""
    good, refused = loader.rows[1:], 0
    count = len(places(loader.rows[0]))
    for place, value in enumerate(HOSTILE):
        row = copy.deepcopy(loader.rows[0])
        container, key = places(row)[place % count]
        container[key] = value
        error = read(loader, lines([row, *good]))
        if error is not None:
            refused += 1
            assert "hostile.jsonl, line 1" in str(error) or "hostile.jsonl: no usable" in str(error)
    assert refused > 3
    for row in (None, "x", [good[0]]):
        assert "hostile.jsonl, line 1" in str(read(loader, lines([row, *good])))
    error = read(loader, json.dumps([1, *good]).encode(), "json")
    assert "hostile.json, record 1" in str(error)


# Bytes --------------------------------------------------------------------------------------------

ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "UTF-16": lambda content: content.decode().encode("utf-16"),
    "latin-1": lambda content: content.replace(b"a", b"\xe9"),
    "NUL bytes": lambda content: content.replace(b"\n", b"\0\n"),
    "gzip": lambda content: gzip.compress(content),
    "cut": lambda content: content[: len(content) // 2],
}


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_other_encodings_are_refused_by_name(ending: str, read: Any) -> None:
    loader = LOADERS["re-ranking"]
    for name, encode in ENCODINGS.items():
        error = read(loader, encode(lines(loader.rows)), ending)
        assert f"hostile.{ending}" in str(error), name


def test_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    """What exists and is no directory may still fail when it is read."""
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    unreadable = ["/proc/self/mem", str(tmp_path), str(loop), f"{tmp_path}/{'n' * 300}.jsonl", ""]
    for path in unreadable:
        with pytest.raises(DataError, match=r"(cannot be read|no such file).*Check the path"):
            list(rows_of(path))


# Parquet ------------------------------------------------------------------------------------------


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, crater: Path) -> None:
        self.crater = crater

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.crater),)


# Model folders ------------------------------------------------------------------------------------


def code(crater: Path) -> str:
    return f"import os\nos.mkdir({str(crater)!r})\n"


def load_everything(folder: Path) -> list[Exception]:
    """What each way of loading from the folder raised."""
    raised = []
    for load in (load_language_model, load_tokenizer, load_cross_encoder):
        try:
            load(str(folder))
        except (ValueError, OSError) as error:
            raised.append(error)
    return raised


@pytest.mark.parametrize("kind", ["encoder", "language"])
def test_weights_that_are_not_safetensors_are_not_opened(
    kind: str, models: dict[str, Path], tmp_path: Path
) -> None:
    folder, crater = tmp_path / "model", tmp_path / "crater"
    shutil.copytree(models[kind], folder)
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Bomb(crater)}, folder / "pytorch_model.bin")
    messages = [str(error) for error in load_everything(folder)]
    assert sum("safetensors" in message for message in messages) == 2
    assert not crater.exists()


@pytest.mark.parametrize("kind", ["encoder", "language"])
def test_code_in_a_model_folder_is_not_run(
    kind: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """Of the model, of its tokenizer, and of an adapter beside it."""
    folder, crater = tmp_path / "model", tmp_path / "crater"
    shutil.copytree(models[kind], folder)
    (folder / "stranger.py").write_text(code(crater))
    classes = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
    brought = {name: f"stranger.{name}" for name in classes}
    for name, entry in (
        ("config.json", {"auto_map": brought, "model_type": "stranger"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["stranger.T", "stranger.T"]}}),
    ):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **entry}))
    raised = load_everything(folder)
    assert len(raised) >= 2
    assert not crater.exists()


def test_damaged_files_of_a_model_are_refused_by_its_name(
    models: dict[str, Path], tmp_path: Path
) -> None:
    for size in (0, 5000):
        folder = tmp_path / str(size)
        shutil.copytree(models["language"], folder)
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:size])
        (folder / "tokenizer.json").write_text("{}")
        for load in (load_language_model, load_tokenizer, load_cross_encoder):
            with pytest.raises(ValueError, match=re.escape(str(folder))):
                load(str(folder))


@pytest.mark.parametrize("name", ["package:", "package:os.path/x"])
def test_package_that_is_none_is_refused(name: str) -> None:
    """A name with dots would import what stands before the last."""
    with pytest.raises(FileNotFoundError, match=re.escape(name)):
        model_source(name)
