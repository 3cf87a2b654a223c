"""The documentation runs: README's code as a reader would paste it, and every ``>>>`` line."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

import pl_pointwise.metrics
from pl_pointwise.configs import config_path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_doctests_of_the_page_pass(page: Path) -> None:
    failures, _ = doctest.testfile(str(page), module_relative=False)
    assert failures == 0


def test_doctests_of_the_metrics_pass() -> None:
    failures, tried = doctest.testmod(pl_pointwise.metrics)
    assert tried > 0
    assert failures == 0


def test_the_task_of_the_readme_trains(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    found: dict = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), found)
    module = found["module"]
    multipliers = module.multipliers["fit"][:, 0]
    assert multipliers.shape == (40,)
    assert 0 < (multipliers > 0.01).sum() < 30
    rows = found["Points"](batch_size=40)
    rows.setup("fit")
    batch = rows.collate(rows.datasets["train"])
    residuals = (module(batch) - batch["y"]).abs()
    assert residuals.max() < 0.11
    assert "torch.Size([40, 1])" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_configurations_named_on_the_page_exist(page: Path) -> None:
    for option, name in re.findall(r"--(config|methods|rows) ([a-z][\w/]*)", page.read_text()):
        assert config_path(name, comparison=option != "config").endswith(".yaml")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_the_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target
