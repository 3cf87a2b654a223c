"""keep.ipynb is executed with a tiny model; the outputs that it has stored are of a real one."""

from __future__ import annotations

import runpy
from collections.abc import Generator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

MODELS = Path(__file__).resolve().parents[1] / "tests/tasks/conftest.py"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if item.path.name != "keep.ipynb":
        return (yield)
    build = runpy.run_path(str(MODELS))
    tokenizer = build["build_tokenizer"]()
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        build["build_model"]("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        patched.setenv("KEEP_MODEL", folder)
        return (yield)
