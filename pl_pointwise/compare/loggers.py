"""Method and seed in the loggers of a comparison's runs, to tell their pages apart."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from lightning.pytorch.utilities import rank_zero_only

from .runs import Run

DEFAULT_NAME = "lightning_logs"


def name_runs(loggers: Sequence[Logger], run: Run, hparams: Mapping[str, Any]) -> None:
    """Gives every logger's run the method and the seed, before the fit.

    As hyperparameters in all of them; as a folder, METHOD/seed-0, in TensorBoard and CSV files that
    are not in the run's own folder anyway; as name and tags in W&B and MLflow.

    hparams: the module's, logged with them: of several sets TensorBoard shows one, and which one
        follows from the names of the files. So later sets, such as Lightning's own, get them too.
    """
    title, named = f"{run.method} seed {run.seed}", {"method": run.method, "seed": run.seed}
    for logger in loggers:
        if isinstance(logger, (TensorBoardLogger, CSVLogger)):
            _name_folder(logger, run)
        if not on_first_rank():
            continue
        if isinstance(logger, WandbLogger):
            experiment: Any = logger.experiment
            experiment.name = title
            experiment.tags = (*(experiment.tags or ()), run.method, f"seed {run.seed}")
        elif isinstance(logger, MLFlowLogger):
            tags = {"mlflow.runName": title, "method": run.method, "seed": str(run.seed)}
            for name, value in tags.items():
                logger.experiment.set_tag(logger.run_id, name, value)
        kept = {name: value for name, value in hparams.items() if not name.startswith("_")}
        vars(logger)["log_hyperparams"] = partial(_log_hyperparams, logger, named)
        logger.log_hyperparams(kept)


def on_first_rank() -> bool:
    """Whether this process is rank 0, also before there is a trainer."""
    return not getattr(rank_zero_only, "rank", 0)


def _log_hyperparams(
    logger: Logger,
    added: Mapping[str, Any],
    params: Mapping[str, Any] | Namespace,
    *args: Any,
    **kwargs: Any,
) -> None:
    """The logger's own method, with ``added``; a function of the module, as loggers are pickled."""
    given = vars(params) if isinstance(params, Namespace) else params
    type(logger).log_hyperparams(logger, {**given, **added}, *args, **kwargs)


def _name_folder(logger: TensorBoardLogger | CSVLogger, run: Run) -> None:
    place = Path(logger.save_dir).absolute()
    if place.is_relative_to(run.folder.absolute()):
        return
    method = re.sub(r"[^\w.=-]+", "-", run.method).strip("-")
    own = f"{method}/seed-{run.seed}"
    logger._name = own if logger.name in ("", DEFAULT_NAME) else f"{logger.name}/{own}"


def end_runs() -> None:
    """Ends what does not end with the trainer: W&B would go on in the same run with the next."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.finish()
