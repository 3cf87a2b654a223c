"""Errors of the command line in one sentence: which option, what is wrong, and the remedy.

With ``--debug``, or PL_POINTWISE_DEBUG=1, everything is shown.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser

from ..errors import DataError, TrainingError, printable
from ..extras import MissingPackageError

DEBUG = "PL_POINTWISE_DEBUG"

OURS = (
    *(DataError, TrainingError, MissingPackageError),
    *(MisconfigurationException, OSError, argparse.ArgumentError),
)
"""What says in a sentence what a user has to do."""
MISTAKES = (AttributeError, ImportError, RuntimeError, TypeError, ValueError)
"""What classes raise that are given other arguments than they take."""

KEY = re.compile(r'(?:Parser key "|--)([\w.]+)(?:"(?: element \d+)?)?:\s*')
"""What the parser, or an inner one of this kind, puts before its reason."""
AROUND = re.compile(
    r"[\s-]*(Parser key|Problem with given|Does not validate|Expected a path but)"
)
"""How jsonargparse's errors begin that put something around another one."""
NAME = re.compile(
    r"(?<=--)[\w.]+|(?<=')[\w.]+(?=')|(?<=import path string: )\w+|(?<=value: )\w+"
)
"""What may be a misspelt option or class in a reason."""
WITH_CLASSES = (
    *("pl_pointwise", "pl_pointwise.tasks", "pl_pointwise.callbacks"),
    *("lightning.pytorch.callbacks", "lightning.pytorch.loggers"),
    *("torch.optim", "torch.optim.lr_scheduler"),
)
NO_DEVICE = re.compile(
    r"No supported gpu backend|Accelerator` can not run on your system"
)
"""How Lightning says that a device is not there."""
HINT = " Did you mean"
RATE = " The rate is --model.init_args.training.optimization.learning_rate."


def debugging() -> bool:
    """Whether errors are to be shown whole."""
    return os.environ.get(DEBUG, "0") not in ("", "0")


class ShortErrorParser(LightningArgumentParser):
    """LightningCLI's parser, whose errors are sentences; those of classes within are of it too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A name cut short was taken for the option, silently; now it is answered by the whole one.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not debugging():
            message = sentence(ex or ValueError(message))
            # A parser within has not said it.
            if HINT not in message and RATE not in message:
                message = f"{message.rstrip('.')}.{self._hint(message)}"
            if self.exit_on_error:
                end(self.prog.replace(" [options]", ""), message)
        super().error(message, ex)

    def _hint(self, reason: str) -> str:
        """The remedy where it is known: " Did you mean …?" for an option or a class."""
        # Whoever gave none of the needed options most likely has no configuration.
        if "are required: " in reason:
            return " Give a configuration: --config TASK."
        if re.search(r"\b(lr|l\w+_rate)\b", reason):
            return RATE
        # Python's Pointwise(beta=2), in YAML.
        if call := re.search(r"import path string: (\w+)\(", reason):
            return (
                f" YAML calls nothing: write {call[1]}, or class_path: {call[1]} with its "
                "arguments below init_args."
            )
        known = [plain(action.dest) for action in self._actions]
        for module in WITH_CLASSES:
            known += import_module(module).__all__
        # By the last part, which is what people misspell; of several of one the first.
        lasts = {name.rpartition(".")[2]: name for name in reversed(known)}
        for name in NAME.findall(reason):
            near = get_close_matches(name.rpartition(".")[2], lasts, 1, 0.7)
            if near and name not in known:
                return f"{HINT} {lasts[near[0]]!r}?"
        return ""


def plain(option: str) -> str:
    """An option without the steps that a command line may leave out."""
    return ".".join(
        part for part in option.split(".") if part not in ("init_args", "dict_kwargs")
    )


def innermost(error: BaseException) -> BaseException:
    """The error that jsonargparse's was made of."""
    while error.__cause__ is not None and AROUND.match(str(error)):
        error = error.__cause__
    return error


def sentence(error: BaseException) -> str:
    """What an error says: of the parser's the option and the reason, of ours all, on one line."""
    if isinstance(error, (DataError, TrainingError)):
        return str(error)
    # Python's own text begins with "[Errno 2]".
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MisconfigurationException) and NO_DEVICE.search(str(error)):
        return (
            f"--trainer.accelerator: this machine has no such device, or torch was built without "
            f"it ({printable(error)}). Take --trainer.accelerator cpu, or auto for what there is."
        )
    cause = innermost(error)
    reason = str(cause).strip() or type(cause).__name__
    keys = re.findall(r'Parser key "([\w.]+)"', str(error).partition(reason)[0])
    in_reason = KEY.match(reason)
    if in_reason is not None:  # An inner parser has put its own key in front.
        keys.append(in_reason[1])
        reason = reason[in_reason.end() :]
    option = f"--{plain('.'.join(keys))}: " if keys else ""
    return option + printable(reason)


ON_INTERRUPT = {
    "pl-pointwise compare": "The same command goes on with the runs that are not finished.",
    "pl-pointwise monitor": "These records are not on record: give them again.",
}
"""What to do after Ctrl-C."""


@contextmanager
def short_errors(
    program: str, refused: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Ends the process with a sentence where the block raises ``refused`` or a user's mistake, or
    where the user ends it.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        # Lightning ends the process itself in a fit, after it has put everything away.
        interrupted = isinstance(error, KeyboardInterrupt) or (
            error.code == 1 and isinstance(error.__context__, KeyboardInterrupt)
        )
        if debugging() or not interrupted:
            raise
        sys.stderr.write(f"\n{program}: interrupted. {ON_INTERRUPT.get(program, '')}\n")
        # 128 + SIGINT, as shells expect it.
        raise SystemExit(130) from None
    except Exception as error:
        if debugging() or not isinstance(error, (*OURS, *refused)):
            raise
        where = "" if isinstance(error, OURS) else " (--debug shows where)"
        end(program, sentence(error) + where)


def end(program: str, text: str) -> NoReturn:
    """Ends the process: one line on standard error, status 2."""
    shown = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
    sys.stderr.write(f"{program}: error: {shown}\n")
    raise SystemExit(2)


class CommandParser(argparse.ArgumentParser):
    """argparse's parser for the commands besides LightningCLI's; its errors are sentences."""

    def __init__(
        self, command: str, description: str, epilog: str | None = None
    ) -> None:
        super().__init__(
            prog=f"pl-pointwise {command}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        if debugging():
            super().error(message)
        end(self.prog, message.removeprefix("argument "))


def fraction(text: str) -> float:
    """The type of an option that lies between 0 and 1."""
    with suppress(ValueError):
        if 0 < float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text}: must lie between 0 and 1, 0.95 for 95 %")
