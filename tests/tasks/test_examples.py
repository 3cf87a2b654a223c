"""Every example runs as it stands, prints what its last lines say, and is on their page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.printed import alike

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {"sft_budget"}  # Longer, with options; tests/test_sft_budget.py runs it.
EXAMPLES = sorted(
    set(ROOT.glob("examples/*.py")) - {ROOT / f"examples/{n}.py" for n in SCRIPTS}
)
HOSTS = {"pina_solver": "pina", "anypinn_module": "anypinn"}  # Longer: up to 60 lines.


def promised(text: str) -> list[str]:
    """The comment that a file ends with."""
    lines = text.rstrip().splitlines()
    count = next(
        i for i, line in enumerate(reversed(lines)) if not line.startswith("#")
    )
    return [line.removeprefix("# ") for line in lines[len(lines) - count :]]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_prints_its_last_lines(
    path: Path, tmp_path: Path, language_model_folder: Path
) -> None:
    text = path.read_text("utf-8")
    if "from trl" in text and find_spec("trl") is None:
        pytest.skip("TRL is not installed")
    host = HOSTS.get(path.stem)
    if host is not None and find_spec(host) is None:
        pytest.skip(f"{host} is not installed")
    # It says Python 3.10, and imports typing.override.
    if host == "anypinn" and sys.version_info < (3, 12):
        pytest.skip("anypinn 0.25 needs Python 3.12")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MODEL": str(language_model_folder),
    }
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    expected = promised(text)
    assert expected
    printed = [line for line in re.split(r"[\r\n]+", done.stdout) if line.strip()]
    # Another model here: only the table's form can be compared.
    if path.stem == "trl_sft":
        assert any(line.split()[:3] == ["kl", "≤", "0.1"] for line in printed)
        return
    last = printed[-len(expected) :]
    assert all(map(alike, last, expected)), (last, expected)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_is_short_and_shown_from_its_file(path: Path) -> None:
    text = path.read_text("utf-8").rstrip()
    assert len(text.splitlines()) <= (60 if path.stem in HOSTS else 40)
    page = (ROOT / "docs/examples.md").read_text("utf-8")
    assert f"```python\n{text}\n```" in page
    assert f"](examples/{path.stem}.png)" in page
    assert (ROOT / f"docs/examples/{path.stem}.png").is_file()


def test_other_pages_show_examples_as_they_are() -> None:
    for page, names in {
        "physics": ["physics", "pina_solver", "anypinn_module"],
        "any_loop": ["plain_loop", "trl_sft"],
    }.items():
        text = (ROOT / f"docs/{page}.md").read_text("utf-8")
        for name in names:
            assert (ROOT / f"examples/{name}.py").read_text("utf-8").rstrip() in text
