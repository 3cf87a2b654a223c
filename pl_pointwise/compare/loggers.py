"""Method and seed in the loggers of a comparison's runs, to tell their pages apart."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from .runs import Run


def name_runs(loggers: Sequence[Logger], run: Run, hparams: Mapping[str, Any]) -> None:
    """Gives every logger's run the method and the seed, before the fit.

    As hyperparameters in all of them; as name and tags in W&B and MLflow.

    hparams: the module's, logged with them, as TensorBoard shows the first set alone.
    """
    if not on_first_rank():
        return
    title = f"{run.method} seed {run.seed}"
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            experiment: Any = logger.experiment
            experiment.name = title
            experiment.tags = (*(experiment.tags or ()), run.method, f"seed {run.seed}")
        elif isinstance(logger, MLFlowLogger):
            tags = {"mlflow.runName": title, "method": run.method, "seed": str(run.seed)}
            for name, value in tags.items():
                logger.experiment.set_tag(logger.run_id, name, value)
        kept = {name: value for name, value in hparams.items() if not name.startswith("_")}
        logger.log_hyperparams({**kept, "method": run.method, "seed": run.seed})


def on_first_rank() -> bool:
    """Whether this process is rank 0, also before there is a trainer."""
    return not getattr(rank_zero_only, "rank", 0)


def end_runs() -> None:
    """Ends what does not end with the trainer: W&B would go on in the same run with the next."""
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.finish()
