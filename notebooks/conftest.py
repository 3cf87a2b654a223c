"""keep.ipynb is executed with a tiny model; the outputs that it has stored are of a real one."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.offline_hub import save_chat_model


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if item.path.name != "keep.ipynb":
        return (yield)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        save_chat_model(Path(folder), "Yes.")  # It ends its answers, so they can be kept.
        patched.setenv("KEEP_MODEL", folder)
        return (yield)
