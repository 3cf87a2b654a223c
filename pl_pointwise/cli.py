"""The command line: LightningCLI's fit, validate, test and predict, and ``compare``."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence

from lightning.pytorch.cli import ArgsType, LightningCLI

from .configs import packaged_configs, with_config_paths
from .data import PointwiseDataModule
from .module import PointwiseModule

DESCRIPTION = "Fine-tuning under pointwise constraints. There is also: pl-pointwise compare --help."


class PointwiseCLI(LightningCLI):
    """LightningCLI over the tasks, with packaged configurations by name (``--config reranker``).

    Args:
        args: a command line; None takes the process's.
        run: False only builds trainer, model and data, as ``compare`` needs them.
    """

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        importlib.import_module("pl_pointwise.tasks")  # Short class names in YAML.
        # The command line is handed on with the names of configurations resolved.
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        names = "packaged configurations: " + ", ".join(packaged_configs())
        super().__init__(
            PointwiseModule,
            PointwiseDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            # A comparison reports what is wrong with a row instead of ending there.
            parser_kwargs={"description": DESCRIPTION, "epilog": names, "exit_on_error": run},
            args=with_config_paths(sys.argv[1:] if args is None else args),
            run=run,
        )

    def before_instantiate_classes(self) -> None:
        """A checkpoint is data: unless told otherwise, none is loaded in a way that runs code."""
        if self.subcommand and self.config[self.subcommand].weights_only is None:
            self.config[self.subcommand].weights_only = True


def main(args: Sequence[str] | None = None) -> None:
    """The console script ``pl-pointwise``; ``args`` stands for the command line."""
    args = list(sys.argv[1:] if args is None else args)
    if args[:1] == ["compare"]:
        importlib.import_module("pl_pointwise.compare").main(args[1:])
    else:
        PointwiseCLI(args)
