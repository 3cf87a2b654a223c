"""The changelog says of every public name since when it is there."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

import pl_pointwise
import pl_pointwise.callbacks
import pl_pointwise.tasks

ROOT = Path(__file__).resolve().parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")
LISTED = re.compile(r"^   (?:\w+\.)*(\w+)$", re.MULTILINE)
"""A line of docs/api that names something."""


def names_in_code(text: str) -> set[str]:
    """The words of what a text has in code quotes: `load` is a name there, and no verb."""
    words = set[str]()
    for code in re.findall(r"`([^`]+)`", text):
        words.update(re.findall(r"\w+", code))
    return words


def public_names() -> dict[str, str]:
    """Each with the list that makes it public."""
    names = {}
    for package in (pl_pointwise, pl_pointwise.tasks, pl_pointwise.callbacks):
        names |= dict.fromkeys(package.__all__, f"__all__ of {package.__name__}")
    for page in ("modules", "tasks"):
        text = (ROOT / "docs/api" / f"{page}.rst").read_text("utf-8")
        names |= dict.fromkeys(LISTED.findall(text), f"docs/api/{page}.rst")
    return names


def test_a_new_public_name_is_in_the_changelog() -> None:
    """Those of a published version are in the list below its heading; a new one is news."""
    names = public_names()
    assert len(names) > 100
    told = names_in_code(CHANGELOG)
    silent = [f"{name} ({where})" for name, where in names.items() if name not in told]
    assert not silent, (
        f"CHANGELOG.md does not say that there is {', '.join(silent)}. Tell users in a line under "
        "the newest heading, with the name in code quotes."
    )


@pytest.mark.parametrize("package", [pl_pointwise, pl_pointwise.tasks])
def test_a_name_that_is_told_nowhere_is_found(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "__all__", [*package.__all__, "Unheard"])
    with pytest.raises(AssertionError, match=f"Unheard .__all__ of {package.__name__}"):
        test_a_new_public_name_is_in_the_changelog()
