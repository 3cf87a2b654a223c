"""The wheel works by itself: its packages, its configurations, its command, a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what is in the tree, so that no stale build folder gets in."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pl_pointwise", "tasks", "callbacks"):
        shutil.copytree(
            ROOT / name,
            source / name,
            ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    command = [
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        out,
        source,
    ]
    subprocess.run([sys.executable, "-m", *map(str, command)], check=True, timeout=200)
    (found,) = out.glob("*.whl")
    return found


def test_wheel_holds_the_configurations_and_no_foreign_top_level(wheel: Path) -> None:
    """A wheel that drops ``tasks`` into site-packages would break users' own packages."""
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pl_pointwise"}
    assert "pl_pointwise/py.typed" in names
    for folder in ("tasks", "callbacks"):
        for path in (ROOT / folder).rglob("*"):
            in_package = (
                path.parent / "__init__.py"
            ).is_file() or "configs" in path.parts
            if path.suffix in (".py", ".yaml") and in_package:
                inside = f"pl_pointwise/{path.relative_to(ROOT).as_posix()}"
                assert inside in names, (
                    f"{inside} is not in the wheel: packages, or package-data, of pyproject.toml."
                )
    templates = [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.glob("pl_pointwise/**/*.jinja")
    ]
    assert len(templates) == 2
    assert set(templates) <= set(names)


def test_a_package_index_takes_its_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [
            name for name in packed.namelist() if name.endswith(".dist-info/METADATA")
        ]
        metadata = Metadata.from_email(packed.read(name), validate=True)
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description.startswith("# pl-pointwise")
    assert metadata.license_expression == "Apache-2.0"
    assert "Programming Language :: Python :: 3.10" in metadata.classifiers


def test_wheel_outside_the_repository_runs(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    shutil.copy(ROOT / "tests/pl_pointwise/line_task.py", tmp_path)
    run = ["fit", "--model", "line_task.LineModule", "--data", "line_task.LineData"]
    run += ["--model.formulation", "Pointwise", "--trainer.max_epochs", "1"]
    run += ["--trainer.accelerator", "cpu", "--trainer.logger", "false"]
    code = (
        "import pl_pointwise, sys; from pl_pointwise.cli import main; "
        f"assert pl_pointwise.__file__.startswith({str(site)!r}); "
        "from pl_pointwise.command_line.configs import packaged_configs; "
        "print(*packaged_configs()); "
        f"main({run!r})"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(tmp_path)])}
    options = {
        "cwd": tmp_path,
        "env": env,
        "text": True,
        "capture_output": True,
        "timeout": 200,
    }
    done = subprocess.run([sys.executable, "-c", code], **options)
    assert done.returncode == 0, done.stderr
    assert "reranker/pointwise" in done.stdout
    assert list(tmp_path.rglob("*.ckpt"))
