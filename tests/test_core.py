"""The core runs with its own dependencies alone, and what needs more says which extra brings it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

toml = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
ROOT = Path(__file__).resolve().parents[1]
PROJECT = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HEAVY = set(
    "datasets huggingface_hub matplotlib pandas peft pyarrow scipy sentence_transformers sklearn "
    "transformers".split()
)
FIT = (
    "fit --config own.yaml --trainer.max_epochs 1 --trainer.accelerator cpu "
    "--trainer.logger false"
)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages as ``pip install pl-pointwise`` leaves it: links to those here."""
    site = tmp_path_factory.mktemp("core")
    waiting = [Requirement(line) for line in PROJECT["dependencies"]]
    seen = set()
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        found = distribution(requirement.name)
        for top in {file.parts[0] for file in found.files or ()} - {
            "..",
            "__pycache__",
        }:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
        for line in found.requires or ():
            needed = Requirement(line)
            extras = [{"extra": extra} for extra in requirement.extras or {""}]
            if needed.marker is None or any(map(needed.marker.evaluate, extras)):
                waiting.append(needed)
    (site / "pl_pointwise").mkdir()
    for path in [
        *(ROOT / "pl_pointwise").iterdir(),
        ROOT / "tasks",
        ROOT / "callbacks",
    ]:
        (site / "pl_pointwise" / path.name).symlink_to(path)
    (site / "pl_pointwise-0.dist-info").mkdir()
    metadata = (
        f"Metadata-Version: 2.1\nName: pl-pointwise\nVersion: {PROJECT['version']}\n"
    )
    (site / "pl_pointwise-0.dist-info/METADATA").write_text(metadata)
    return site


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a task of one's own, and its configuration."""
    task = (ROOT / "tests/pl_pointwise/line_task.py").read_text()
    (tmp_path / "line_task.py").write_text(task)
    config = {
        "model": {"class_path": "line_task.LineModule"},
        "data": "line_task.LineData",
    }
    config["model"]["init_args"] = {"formulation": {"class_path": "Pointwise"}}
    config["trainer"] = {"callbacks": [{"class_path": "DualMonitor"}]}
    (tmp_path / "own.yaml").write_text(json.dumps(config))
    return tmp_path


def python(
    code: str, folder: Path, site: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs code, with the packages in ``site`` alone, or else with those of this process."""
    path = os.pathsep.join(map(str, filter(None, (site, folder))))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, *(["-S"] if site else []), "-c", code]
    return subprocess.run(
        command, cwd=folder, env=env, text=True, capture_output=True, timeout=200
    )


def test_the_core_alone_fits_from_python_and_from_a_configuration(
    core: Path, folder: Path
) -> None:
    readme = (
        (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    )
    code = "from pl_pointwise.cli import main\n"
    code += (
        f"{readme.replace('max_epochs=30', 'max_epochs=2')}\nmain({FIT.split()!r})\n"
    )
    done = python(code, folder, core)
    assert done.returncode == 0, done.stderr
    assert "λ of every sample: (40, 1)" in done.stdout
    assert list(folder.glob("checkpoints/*.ckpt"))
    assert not [path for path in core.iterdir() if path.name in HEAVY]


def test_nothing_heavy_is_imported_beside_lightning_that_no_configuration_names(
    folder: Path,
) -> None:
    """torchmetrics imports transformers and scipy where they are installed; no more than that."""
    code = f"""
import contextlib, sys
import lightning.pytorch.cli
before = set(sys.modules)
from pl_pointwise.cli import main
with contextlib.suppress(SystemExit):
    main(["--help"])
main({FIT.split()!r})
print(json.dumps(sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})))
"""
    done = python(f"import json{code}", folder)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert "pl_pointwise" in loaded
    assert not HEAVY & loaded


LACKING = {
    "fit --model RerankerModule": "reranker",
    "fit --config safety": "language",
    "fit --config when2call --config when2call/pointwise": "language",
    "fit --config digits": "example",
    f"{FIT} --trainer.callbacks+=ModelExport": "language",
    "compare --config digits --methods digits/methods": "compare",
    "monitor results": "compare",
    "tolerances --config digits": "compare",
}


def test_what_lacks_a_package_says_which_and_what_brings_it(
    core: Path, folder: Path
) -> None:
    code = f"""
import contextlib, sys
from pl_pointwise.cli import main
for args in {list(LACKING)!r}:
    with contextlib.suppress(SystemExit):
        main(args.split())
def certify(): from pl_pointwise.certificates import certify; certify([1.0])
def policy(): from pl_pointwise.tasks import Policy
def losses(): import pl_pointwise.tasks.language_model.likelihood.preference_losses
for use in (certify, policy, losses):
    try:
        use()
    except ImportError as error:
        print(error, file=sys.stderr)
"""
    said = [
        line
        for line in python(code, folder, core).stderr.splitlines()
        if "not installed" in line
    ]
    extras = [*LACKING.values(), "compare", "language", "language"]
    assert len(said) == len(extras)
    for line, extra in zip(said, extras, strict=True):
        remedy = f"which is not installed: pip install 'pl-pointwise[{extra}]'"
        assert line.removesuffix(".").endswith(remedy)


def test_a_task_without_its_packages_says_what_brings_them(
    core: Path, folder: Path
) -> None:
    """Also one that nobody has added to the commands above."""
    tasks = sorted(path.parent.name for path in (ROOT / "tasks").glob("*/__init__.py"))
    code = f"""
from importlib import import_module
from pl_pointwise.extras import MissingPackageError
for task in {tasks!r}:
    try:
        import_module(f"pl_pointwise.tasks.{{task}}")
    except MissingPackageError:
        pass
    except ImportError as error:
        print(f"{{task}}: {{error}}")
"""
    done = python(code, folder, core)
    assert done.returncode == 0, done.stderr
    assert not done.stdout, (
        f"{done.stdout}In the __init__.py of the task import its modules within "
        "with needs(EXTRA, __name__), as tasks/digits does."
    )
