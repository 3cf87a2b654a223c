"""Whatever a file holds, it is read or refused by name; nothing that it says is run.

Every data module here goes from a file to its first batches, as ``fit`` takes them: good records
with one value exchanged, one value for each class of bad input; good files in another encoding; and
model folders that would run code if they were let.
"""

from __future__ import annotations

import copy
import gzip
import inspect
import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from pl_pointwise.data import fingerprint
from pl_pointwise.errors import DataError
from pl_pointwise.tasks import (
    ConversationDataModule,
    PreferenceDataModule,
    RerankerDataModule,
    SafetyDataModule,
    When2CallDataModule,
)
from pl_pointwise.tasks.common.models import model_source
from pl_pointwise.tasks.common.records import rows_of
from pl_pointwise.tasks.language_model.data import Preparation
from pl_pointwise.tasks.language_model.model.loading import (
    load_language_model,
    load_tokenizer,
)
from pl_pointwise.tasks.reranker.module import load_cross_encoder
from pl_pointwise.tasks.safety.data import Selection
from tests.pl_pointwise.training.test_hostile_checkpoints import Bomb
from tests.tasks.conversation.conftest import conversation_rows
from tests.tasks.preference.conftest import pair_rows
from tests.tasks.reranker.conftest import ms_marco_rows, save_tiny_cross_encoder
from tests.tasks.when2call.conftest import TOOL, choice_rows, preference_rows

LONGEST_MESSAGE = 1200

BENIGN = [
    {"instruction": f"Add {i}.", "input": "to 1", "output": "Of course: 2."}
    for i in (0, 1)
]
UNSAFE = [
    {"prompt": f"Harm {i // 2}", "response": "Thus.", "category": {"self_harm": True}}
    | {"is_safe": False}
    for i in range(4)
]
WHOLE = {"preparation": Preparation(val_fraction=0.0)}
SAFETY = WHOLE | {
    "selection": Selection(held_out_per_category=0),
    "unsafe_schema": "beavertails",
}
RANKING = {"negatives": 3, "max_length": 48, "val_fraction": 0.0}

# by name: data module, its file's option, stage, good rows, other options
Loader = tuple[type[Any], str, str, list[Any], dict[str, Any]]
LOADERS: dict[str, Loader] = {
    "conversation": (
        ConversationDataModule,
        "train_file",
        "fit",
        conversation_rows(1),
        WHOLE,
    ),
    "preference": (PreferenceDataModule, "train_file", "fit", pair_rows(2), WHOLE),
    "re-ranking": (RerankerDataModule, "train_file", "fit", ms_marco_rows(3), RANKING),
    "when2call": (
        *(When2CallDataModule, "train_file", "fit"),
        [row | {"tools": [TOOL]} for row in preference_rows(2)],
        WHOLE,
    ),
    "choices": (When2CallDataModule, "mcq_file", "test", choice_rows(3), WHOLE),
    "benign": (
        SafetyDataModule,
        "benign_file",
        "fit",
        BENIGN,
        WHOLE | {"unsafe_schema": None},
    ),
    "unsafe": (SafetyDataModule, "unsafe_file", "fit", UNSAFE, SAFETY),
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

    def build(loader: Loader, path: Path) -> Any:
        kind, option, _, _, options = loader
        files = {option: str(path)}
        if option == "unsafe_file":  # which is nothing alone
            files["benign_file"] = str(path.with_name("benign.jsonl"))
            Path(files["benign_file"]).write_bytes(lines(BENIGN))
        takes = inspect.signature(kind).parameters
        of_model = {}
        # What reads no texts has no tokenizer, and nothing of the hub.
        if "model_name" in takes:
            folder = models["encoder" if kind is RerankerDataModule else "language"]
            of_model = {"model_name": str(folder), "source": "files"}
        return kind(**of_model, **files, **options, batch_size=2)

    def read(loader: Loader, content: bytes, ending: str = "jsonl") -> DataError | None:
        path = tmp_path / f"hostile.{ending}"
        path.write_bytes(content)
        module = modules.setdefault(ending, build(loader, path))
        module.datasets, module._records = {}, {}
        try:
            module.setup(loader[2])
            for dataset in module.datasets.values():
                rows = [{**dataset[i], "index": i} for i in range(len(dataset))]
                module.collate(rows)
                assert fingerprint(dataset)
        except DataError as error:
            return error
        return None

    return read


def lines(rows: Iterable[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


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
    rows, refused = loader[3], 0
    assert read(loader, lines(rows)) is None
    for place, value in enumerate(HOSTILE):
        row = copy.deepcopy(rows[0])
        container, key = places(row)[place % len(places(row))]
        container[key] = value
        error = read(loader, lines([row, *rows[1:]]))
        if error is not None:
            refused += 1
            assert len(str(error).encode()) < LONGEST_MESSAGE
            assert "hostile.jsonl, line 1" in str(
                error
            ) or "hostile.jsonl: no usable" in str(error)
    assert refused > 3
    for row in (None, "x", [rows[0]]):
        assert "hostile.jsonl, line 1" in str(read(loader, lines([row, *rows[1:]])))
    error = read(loader, json.dumps([1, *rows[1:]]).encode(), "json")
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
        error = read(loader, encode(lines(loader[3])), ending)
        assert f"hostile.{ending}" in str(error), name


def test_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    """What exists and is no directory may still fail when it is read."""
    for path in ("/proc/self/mem", str(tmp_path), f"{tmp_path}/none.csv", ""):
        with pytest.raises(
            DataError, match=f"^{re.escape(path)}: cannot be read.*Check the path"
        ):
            list(rows_of(path))


# Model folders ------------------------------------------------------------------------------------


def load_everything(folder: Path) -> list[str]:
    """What each way of loading from the folder was refused with."""
    raised = []
    for load in (load_language_model, load_tokenizer, load_cross_encoder):
        try:
            load(str(folder))
        except (ValueError, OSError) as error:
            raised.append(str(error))
    return raised


def plant_pickle(folder: Path, crater: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Bomb(crater)}, folder / "pytorch_model.bin")


def plant_code(folder: Path, crater: Path) -> None:
    """Of the model and of its tokenizer."""
    (folder / "stranger.py").write_text(f"import os\nos.mkdir({str(crater)!r})\n")
    classes = (
        "AutoConfig",
        "AutoModelForCausalLM",
        "AutoModelForSequenceClassification",
    )
    brought = {name: f"stranger.{name}" for name in classes}
    for name, entry in (
        ("config.json", {"auto_map": brought, "model_type": "stranger"}),
        (
            "tokenizer_config.json",
            {"auto_map": {"AutoTokenizer": ["stranger.T", "stranger.T"]}},
        ),
    ):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **entry}))


@pytest.mark.parametrize("kind", ["encoder", "language"])
@pytest.mark.parametrize(
    ("plant", "said"), [(plant_pickle, "safetensors"), (plant_code, "")]
)
def test_code_in_a_model_folder_is_not_run(
    plant: Any, said: str, kind: str, models: dict[str, Path], tmp_path: Path
) -> None:
    folder, crater = tmp_path / "model", tmp_path / "crater"
    shutil.copytree(models[kind], folder)
    plant(folder, crater)
    found = sum(said in message for message in load_everything(folder))
    assert found == 2 or (found > 2 and plant is plant_code)
    assert not crater.exists()


def test_damaged_files_of_a_model_are_refused_by_its_name(
    models: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models["language"], folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    (folder / "tokenizer.json").write_text("{}")
    for load in (load_language_model, load_tokenizer, load_cross_encoder):
        with pytest.raises(ValueError, match=re.escape(str(folder))):
            load(str(folder))


@pytest.mark.parametrize("name", ["package:", "package:os.path/x"])
def test_package_that_is_none_is_refused(name: str) -> None:
    """A name with dots would import what stands before the last."""
    with pytest.raises(FileNotFoundError, match=re.escape(name)):
        model_source(name)
