"""The command line: LightningCLI's fit, validate, test and predict, and our own commands."""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version

from jsonargparse import DefaultHelpFormatter
from lightning.pytorch.cli import ArgsType, LightningCLI

from .configs import nearest, overview, with_config_paths
from .data import PointwiseDataModule
from .module import PointwiseModule

COMMANDS = {
    "compare": "compare.command",
    "monitor": "requirements.monitor",
    "report": "compare.report",
    "tolerances": "requirements.tolerances",
}
"""Modules of this package with a ``main(args)``, beside LightningCLI's subcommands."""

DESCRIPTION = "Fine-tuning under pointwise constraints. There are also:\n  " + "\n  ".join(
    f"pl-pointwise {command} --help" for command in COMMANDS
)


class HelpFormatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the lines of the list of configurations."""


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
        super().__init__(
            PointwiseModule,
            PointwiseDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={
                "prog": "pl-pointwise",
                "description": DESCRIPTION,
                "epilog": overview(),
                "formatter_class": HelpFormatter,
                "version": version("pl-pointwise"),
                # A comparison reports what is wrong with a method instead of ending there.
                "exit_on_error": run,
            },
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
    """Runs the console script ``pl-pointwise``; ``args`` stands for the command line."""
    args = list(sys.argv[1:] if args is None else args)
    first = args[0] if args and not args[0].startswith("-") else None
    if first in COMMANDS:
        importlib.import_module(f"pl_pointwise.{COMMANDS[first]}").main(args[1:])
        return
    known = [*PointwiseCLI.subcommands(), *COMMANDS]
    usage = argparse.ArgumentParser("pl-pointwise", f"pl-pointwise {{{','.join(known)}}} ...")
    if first is not None and first not in known:
        usage.error(f"there is no command {first!r}.{nearest(first, known)}")
    try:
        resolved = with_config_paths(args)
    except FileNotFoundError as error:
        usage.error(str(error))
    PointwiseCLI(resolved)
