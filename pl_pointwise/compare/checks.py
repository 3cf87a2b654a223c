"""What is checked of every method before the first run, so that all that is wrong is said at once.

Options and imports by reading the configuration, values and models by building what a run would
build, data by looking for the files that the data module's options ``…_file`` name. What is in the
files is read with ``--require``.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden

from pl_pointwise.cli import PointwiseCLI
from pl_pointwise.cli_errors import debugging, place_in_own_code, sentence
from pl_pointwise.random_state import random_state
from pl_pointwise.requirements.samples import bounds_of, require_same_bounds

from .runner import CPU, Built, quieten
from .runs import Comparison, MethodsError


def check_methods(comparison: Comparison) -> dict[Path, Built]:
    """Refuses a comparison before it runs, with all that is wrong, method by method.

    Every method that has a run to come is built once, at one seed.

    Returns: by its folder the first run to come as it was built, so that it is not built again.
    """
    quieten()
    runs, problems, names = comparison.planned
    problems, built = dict(problems), dict[Path, Built]()
    results = {run.title: run.result() or {} for run in runs}
    bounds = {title: found["bounds"] for title, found in results.items() if "bounds" in found}
    for run in {run.method: run for run in reversed(runs) if not run.finished}.values():
        built.clear()
        gc.collect()  # The next model is loaded.
        try:
            cli = PointwiseCLI(run.arguments, run=False)
            _check_data(cli)
        except argparse.ArgumentError as error:
            problems[run.method] = str(error)
        except Exception as error:
            if debugging():
                raise
            problems[run.method] = f"{sentence(error)}{place_in_own_code(error)}"
        else:
            built[run.folder] = Built(cli, random_state(CPU))
            bounds[run.title] = bounds_of(cli.model)
    if problems:
        raise MethodsError(problems, names)
    if comparison.requirements:
        require_same_bounds(bounds)
    return built


def _check_data(cli: PointwiseCLI) -> None:
    """That files are there, of the data module's options ``…_file``, and test data."""
    data = cli.config.get("data")
    arguments = data.get("init_args") if data is not None else None
    for name, value in (vars(arguments) if arguments is not None else {}).items():
        if name.endswith(("_file", "_files")):
            for path in value if isinstance(value, (list, tuple)) else [value]:
                local = isinstance(path, (str, os.PathLike)) and "://" not in str(path)
                if local and not os.path.exists(os.path.expanduser(path)):
                    raise FileNotFoundError(f"data.{name}: there is no file {path}.")
    source: Any = cli.datamodule or cli.model
    if not is_overridden("test_dataloader", source):
        raise ValueError(
            f"{type(source).__name__} has no test_dataloader(), and every method is measured by "
            "`test`. Define it; without held-out data it returns the training data's."
        )
