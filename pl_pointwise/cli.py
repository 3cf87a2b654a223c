"""The command line: LightningCLI's fit, validate, test and predict, and our own commands."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Any

from jsonargparse import DefaultHelpFormatter
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_warn

from .checkpoint_options import CheckpointConfig, differences, hyperparameters, sources, usable
from .cli_run import (
    default_logger,
    find_classes_of_the_folder,
    missing_data,
    tell_after_fit,
    tell_after_test,
)
from .configs import nearest, overview, with_config_paths
from .module import PointwiseModule

COMMANDS = {
    "compare": "compare.command",
    "export": "export",
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
            None,  # Any LightningDataModule, or none where the module has loaders of its own.
            subclass_mode_model=True,
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

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        self._args = args
        super().parse_arguments(parser, args)

    def _parse_ckpt_path(self) -> None:
        """Takes a checkpoint's arguments of the model, which Lightning lets win over all others.

        What wins over what: checkpoint_options.py.
        """
        subcommand = self.config.get("subcommand")
        path = self.config[subcommand].get("ckpt_path") if subcommand else None
        if not path or not os.path.isfile(path) or not isinstance(self._args, Sequence):
            super()._parse_ckpt_path()  # Of a command line that is a mapping.
            return
        stored = hyperparameters(path)
        class_path = self.config[subcommand].model.class_path
        kind = resolve_name(class_path)
        of = str(stored.pop("_class_path", class_path)).rpartition(".")[2]
        if of not in [parent.__name__ for parent in kind.__mro__]:
            self.parser.error(
                f"--ckpt_path {path} is of a {of}, and the command line asks for a "
                f"{kind.__name__}. Give the configuration it was trained with."
            )
        arguments, problems = usable(stored, kind)
        if problems:
            rank_zero_warn(f"--ckpt_path {path}: not taken of it {', '.join(problems)}.")
        with CheckpointConfig(subcommand, self._args, class_path, arguments) as checkpoint:
            self.config = self.parser.parse_args(checkpoint.in_its_place())
            theirs = self.parser.parse_args(checkpoint.last())
        before, now = (each[subcommand].model.as_dict() for each in (theirs, self.config))
        self._tell_sources(path, differences(before, now), set(now["init_args"]) - set(stored))

    def _tell_sources(
        self, path: str, changed: dict[str, tuple[Any, Any]], absent: Iterable[str]
    ) -> None:
        """In config.yaml and, but for a fit, which says so itself when it resumes, in a warning."""
        subcommand = self.config.subcommand
        parser = self._parser(subcommand)
        changed = {f"model.{name}": values for name, values in changed.items()}
        absent = [f"model.init_args.{name}" for name in sorted(absent)]
        parser.dump_header = [*(parser.dump_header or []), *sources(path, changed, absent)]
        if changed and subcommand != "fit":
            shown = [f"{name} {now!r} (its {old!r})" for name, (old, now) in changed.items()]
            rank_zero_warn(
                f"Not as in the checkpoint {path}, as the command line says otherwise: "
                f"{', '.join(shown)}."
            )

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        if self.subcommand:
            kwargs = {**default_logger(self.config[self.subcommand].trainer), **kwargs}
        return super().instantiate_trainer(**kwargs)

    def before_instantiate_classes(self) -> None:
        """A checkpoint is data: unless told otherwise, none is loaded in a way that runs code."""
        self._require_data()
        if not self.subcommand:
            return
        config = self.config[self.subcommand]
        if config.weights_only is None:
            config.weights_only = True
        if "verbose" in config:
            config.verbose = False  # Lightning's tables cut the names off; ours follows.

    def _require_data(self) -> None:
        config = self.config[self.subcommand] if self.subcommand else self.config
        kind = resolve_name(config.model.class_path)
        problem = missing_data(kind, self.subcommand, config.get("data"))
        if problem is not None:
            (self._parser(self.subcommand) if self.subcommand else self.parser).error(problem)

    def after_fit(self) -> None:
        tell_after_fit(self)

    def after_validate(self) -> None:
        self._print_metrics()

    def after_test(self) -> None:
        self._print_metrics()
        tell_after_test(self)

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
    if args is None:
        find_classes_of_the_folder()
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
