"""A base model and code of one's own, told apart by what they are, wherever they lie."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pl_pointwise.identity.code import digest_of_code, own_code
from pl_pointwise.identity.models import bases_of, is_a_base, is_as_it_was


def base(folder: Path, weights: bytes = b"weights", **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def configured(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "class_path": "a.B",
        "init_args": {"policy": {"model_name": str(folder), **more}},
    }


def test_a_base_is_its_files_wherever_it_lies(tmp_path: Path) -> None:
    one, other = base(tmp_path / "one"), base(tmp_path / "elsewhere/base")
    [of_one], [of_other] = (
        bases_of(configured(one)).values(),
        bases_of(configured(other)).values(),
    )
    assert of_one == of_other
    (one / "README.md").write_text("a card")
    (one / ".cache").mkdir()
    assert is_as_it_was(str(one), of_one)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_another_file_is_another_base(tmp_path: Path, name: str) -> None:
    one = base(tmp_path / "base")
    [was] = bases_of(configured(one)).values()
    (one / name).write_text("other")
    assert not is_as_it_was(str(one), was)


def test_a_file_that_is_added_is_another_base(tmp_path: Path) -> None:
    one = base(tmp_path / "base")
    [was] = bases_of(configured(one)).values()
    (one / "chat_template.jinja").write_text("{{ messages }}")
    assert not is_as_it_was(str(one), was)


def test_an_adapter_as_the_base_has_its_own_base_in_its_digest(tmp_path: Path) -> None:
    below, adapter = base(tmp_path / "below"), tmp_path / "adapter"
    adapter.mkdir()
    config = {"base_model_name_or_path": str(below)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    [was] = bases_of(configured(adapter)).values()
    assert is_as_it_was(str(adapter), was)
    (below / "model.safetensors").write_text("other")
    assert not is_as_it_was(str(adapter), was)
    config = {"base_model_name_or_path": str(adapter)}  # A circle ends.
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert bases_of(configured(adapter))


def test_a_folder_without_a_model_is_no_base(tmp_path: Path) -> None:
    """As an output folder, which every run changes."""
    assert bases_of({"model": {"folder": str(tmp_path), "x": ["cpu", "auto", 3]}}) == {}


def test_a_model_of_the_hub_is_its_commit(tmp_path: Path, monkeypatch: Any) -> None:
    asked = []

    def cached(name: str, file: str, revision: str | None = None) -> str | None:
        asked.append(revision)
        found = (
            tmp_path / "models--org--base/snapshots" / f"c0ffee{revision or ''}" / file
        )
        return str(found) if (name, file) == ("org/base", "config.json") else None

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    [plain] = bases_of(configured(Path("org/base"))).values()
    [pinned] = bases_of(configured(Path("org/base"), revision="v1")).values()
    assert (plain, pinned) == ("commit c0ffee", "commit c0ffeev1 of v1")
    assert is_as_it_was("org/base", plain)
    assert is_as_it_was("org/base", pinned)
    assert not is_as_it_was("org/base", "commit other")
    assert is_a_base("commit c0ffee of main", ["commit c0ffee"])


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_losses.py").write_text("def loss(x):\n    return x\n")
    text = (
        "import torch\nfrom own_losses import loss\nclass Task(torch.nn.Module): pass\n"
    )
    (tmp_path / "own_task_of_test.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own_losses", "own_task_of_test"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_own_code_is_the_file_of_the_class_and_what_it_imports_of_ones_own(
    own: Path,
) -> None:
    task = importlib.import_module("own_task_of_test").Task()
    found = own_code([task, None, 3])
    assert {Path(path).name for path in found} == {
        "own_task_of_test.py",
        "own_losses.py",
    }
    was = digest_of_code(found)
    (own / "own_losses.py").write_text("def loss(x):\n    return x + 3\n")
    assert digest_of_code(own_code([task])) != was


def test_what_is_installed_is_no_own_code() -> None:
    import torch

    assert own_code([torch.nn.Linear(1, 1), Path()]) == {}
    assert digest_of_code({}) is None
