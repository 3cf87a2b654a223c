"""What is checked of every method before the first run, so that all that is wrong is said at once.

Options and imports by reading the configuration, values and models by building what a run would
build, data by looking for the files that the data module's options ``…_file`` name. What is in the
files is read with ``--require``.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden

from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.cli_errors import debugging, place_in_own_code, sentence
from pl_pointwise.configs import meant_file
from pl_pointwise.requirements.samples import bounds_of, require_same_bounds

from .runner import Built, quieten
from .runs import Comparison, MethodsError, Run

log = logging.getLogger(__name__)


def check_methods(
    comparison: Comparison, files: bool = True, options: Sequence[str] = ()
) -> dict[Path, Built]:
    """Refuses a comparison before it runs, with all that is wrong, method by method.

    Every method that has a run to come is built once, at one seed.

    files: build the models and look for the data too; else, where they are perhaps on another
        machine, the options alone are checked.
    options: of the command around it, to suggest.
    Returns: by its folder the first run to come as it was built, so that it is not built again.

    Raises:
        MethodsError: there is something wrong.
        RequirementError: methods are to be judged by different bounds.
    """
    quieten()
    runs, problems, names = comparison.planned
    problems, bounds = dict(problems), dict[str, dict[str, str]]()
    built: dict[Path, Built] = {}
    for run in {run.method: run for run in reversed(runs) if not run.finished}.values():
        built.clear()
        gc.collect()  # The next model is loaded.
        try:
            found = _check(run, files, options)
        except argparse.ArgumentError as error:
            problems[run.method] = str(error)
        except Exception as error:
            if debugging():
                raise
            problems[run.method] = f"{sentence(error)}{place_in_own_code(error)}"
        else:
            if found is not None:
                built[run.folder] = found
                bounds[run.title] = bounds_of(found.cli.model)
    if problems:
        raise MethodsError(problems, names)
    if comparison.requirements:
        known = {
            run.title: result["bounds"]
            for run in runs
            if "bounds" in (result := run.result() or {})
        }
        require_same_bounds(known | bounds)
    return built


def _check(run: Run, files: bool, options: Sequence[str]) -> Built | None:
    cli = PointwiseCLI(run.arguments, run=False, build=files, other_options=options)
    if not files:
        return None
    _check_files(cli.config.get("data"))
    source = cli.datamodule or cli.model
    if not is_overridden("test_dataloader", source):
        raise ValueError(
            f"{type(source).__name__} has no test_dataloader(), and every method is measured "
            "by `test`. Define it; without held-out data it returns the training data's."
        )
    return Built.of(cli)


def _check_files(data: Any) -> None:
    """
    Raises:
        FileNotFoundError: an option ``…_file`` of the data module names a file that is not there.
    """
    arguments = data.get("init_args") if data is not None else None
    for name, value in (vars(arguments) if arguments is not None else {}).items():
        if name.endswith(("_file", "_files")):
            for path in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(path, (str, os.PathLike)) and not _is_there(str(path)):
                    raise FileNotFoundError(
                        f"data.{name}: there is no file {path}.{meant_file(str(path))}"
                    )


def _is_there(path: str) -> bool:
    return "://" in path or os.path.exists(os.path.expanduser(path))
