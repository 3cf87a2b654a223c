"""The command line: LightningCLI's fit, validate, test and predict, ``compare`` and ``report``."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence

from lightning.pytorch.cli import ArgsType, LightningCLI

from .configs import packaged_configs, with_config_paths
from .data import PointwiseDataModule
from .module import PointwiseModule

COMMANDS = {"compare": "compare.command", "report": "compare.report"}
"""Modules of this package with a ``main(args)``, beside LightningCLI's subcommands."""

DESCRIPTION = (
    "Fine-tuning under pointwise constraints. There are also: "
    + " and ".join(f"pl-pointwise {command} --help" for command in COMMANDS)
    + "."
)


class PointwiseCLI(LightningCLI):
    """LightningCLI over the tasks, with packaged configurations by name (``--config reranker``).

    Args:
        args: a command line; None takes the process's.
        run: False only builds trainer, model and data, as ``compare`` needs them.
    """

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        for package in ("tasks", "callbacks"):  # Short class names, in YAML and as options.
            importlib.import_module(f"pl_pointwise.{package}")
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
        if not self.subcommand:
            return
        config = self.config[self.subcommand]
        if config.weights_only is None:
            config.weights_only = True
        if "verbose" in config:
            config.verbose = False  # Lightning's tables cut the names off; ours follows.

    def after_validate(self) -> None:
        self._print_metrics()

    def after_test(self) -> None:
        self._print_metrics()

    def _print_metrics(self) -> None:
        """A line per metric, a column per evaluated data set."""
        if not self.trainer.is_global_zero:
            return
        table: dict[str, dict[str, float]] = {}
        for name, value in self.trainer.callback_metrics.items():
            stage, _, metric = name.partition("/")
            table.setdefault(metric, {})[stage] = float(value)
        stages = list(dict.fromkeys(stage for values in table.values() for stage in values))
        width = max(map(len, table), default=0)
        print(" " * width + "".join(f"{stage:>14}" for stage in stages))
        for metric, values in table.items():
            cells = [f"{values[stage]:.4g}" if stage in values else "" for stage in stages]
            print(f"{metric:<{width}}" + "".join(f"{cell:>14}" for cell in cells))


def main(args: Sequence[str] | None = None) -> None:
    """The console script ``pl-pointwise``; ``args`` stands for the command line."""
    args = list(sys.argv[1:] if args is None else args)
    if args and args[0] in COMMANDS:
        importlib.import_module(f"pl_pointwise.{COMMANDS[args[0]]}").main(args[1:])
    else:
        PointwiseCLI(args)
