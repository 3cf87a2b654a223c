"""Errors of the command line in one sentence: which option, what is wrong, and the remedy.

With ``--debug``, or PL_POINTWISE_DEBUG=1, everything is shown.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn, get_args, get_type_hints

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser

from .configs import missing_base
from .errors import DataError, TrainingError, printable
from .extras import MissingPackageError

DEBUG = "PL_POINTWISE_DEBUG"

MISTAKES = (AttributeError, ImportError, RuntimeError, TypeError, ValueError)
"""What classes raise that are given other arguments than they take."""

KEY = re.compile(r'Parser key "([^"]+)"(?: element \d+)?:\s*')
NAME = re.compile(r"(?<=--)[\w.]+|(?<=')[\w.]+(?=')")
"""What may be a misspelt option in a reason."""
WITH_CLASSES = (
    *("pl_pointwise.tasks", "pl_pointwise.callbacks"),
    *("lightning.pytorch.callbacks", "lightning.pytorch.loggers"),
)
RATE = " The rate is --model.init_args.training.optimization.learning_rate."


def debugging() -> bool:
    """Whether errors are to be shown whole."""
    return os.environ.get(DEBUG, "0") not in ("", "0")


class Refusal(argparse.ArgumentError):
    """What a parser of this kind says; an outer one puts its own option before it."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(None, f"--{option}: {reason}" if option else reason)
        self.option, self.reason = option, reason


class ShortErrorParser(LightningArgumentParser):
    """LightningCLI's parser, whose errors are sentences; those of classes within are of it too."""

    words: Sequence[str] | None = None
    """The command line, with the names of configurations; None of the parser of a class within."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A name cut short was taken for the option, silently; now it is answered by the whole one.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        """jsonargparse lets an argument ``X | None`` be left out or null; ``X | Y | None`` too."""
        added = super().add_class_arguments(*args, **kwargs)
        for action in self._actions:
            if type(None) in get_args(getattr(action, "_typehint", None)):
                action.required = False
                getattr(self, "required_args", set()).discard(action.dest)  # Of older versions.
        return added

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if debugging():
            super().error(message, ex)
        if isinstance(ex, Refusal):
            raise ex
        last = innermost(ex) if ex is not None else argparse.ArgumentError(None, message)
        key = KEY.match(message)
        option, reason = plain(key[1]) if key else "", KEY.sub("", str(last))
        if isinstance(last, Refusal):
            option, reason = ".".join(filter(None, (option, last.option))), last.reason
        elif isinstance(last, SyntaxError) or place_in_own_code(last):
            reason = f"{type(last).__name__}: {printable(last)}{place_in_own_code(last)}."
        else:
            hint = class_hint(reason) or ("" if key else self._hint(reason))
            hint = RATE if re.search(r"(--|\.|')(lr|learning_rate)\b", reason) else hint
            reason = f"{printable(reason).rstrip('.')}.{hint}"
        if self.words is not None:
            reason += missing_base(self.words)
        refusal = Refusal(option, reason)
        if not self.exit_on_error:
            raise refusal from ex
        end(self.prog.replace(" [options]", ""), str(refusal))

    def _hint(self, reason: str) -> str:
        """Returns " Did you mean …?" with an option."""
        hints = {plain(each.dest): getattr(each, "_typehint", None) for each in self._actions}
        known = [name for option, hint in hints.items() for name in with_fields(option, hint)]
        lasts = {each.rpartition(".")[2]: each for each in reversed(known)}
        for name in NAME.findall(reason):
            by_last = get_close_matches(name.rpartition(".")[2], lasts, 1, 0.7)
            near = get_close_matches(plain(name), known, 1) or [lasts[each] for each in by_last]
            if near and name not in known:
                return f" Did you mean {near[0]!r}?"
        return ""


def class_hint(reason: str) -> str:
    """Returns " Did you mean …?" with a class of this package's or Lightning's."""
    name = re.search(r"(?:import path string|Got value): (\w+)", reason)
    known = [each for package in WITH_CLASSES for each in import_module(package).__all__]
    near = get_close_matches(name[1], known, 1, 0.8) if name else []
    return f" Did you mean {near[0]!r}?" if near else ""


def plain(option: str) -> str:
    """An option without the steps that a command line may leave out."""
    return ".".join(part for part in option.split(".") if part not in ("init_args", "dict_kwargs"))


def with_fields(option: str, hint: Any) -> Iterator[str]:
    """Yields an option and the dotted names of the fields of a dataclass that it takes."""
    yield option
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and is_dataclass(kind):
            for field, inner in get_type_hints(kind).items():
                yield from with_fields(f"{option}.{field}", inner)


def innermost(error: BaseException) -> BaseException:
    """Returns the error behind those of a parser: a refusal, or the first of other code."""
    while error.__cause__ is not None and not isinstance(error, Refusal):
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        raised_in = str(frame.f_globals.get("__name__", ""))
        if not raised_in.startswith(("jsonargparse", "argparse")):
            break
        error = error.__cause__
    return error


# What is refused later --------------------------------------------------------------------------


@contextmanager
def short_errors(program: str, refused: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Ends the process with a sentence where the block raises ``refused`` or a user's mistake."""
    try:
        yield
    except Exception as error:
        ours = (DataError, TrainingError, MissingPackageError, MisconfigurationException)
        # transformers' own, of models that are not there, has no number.
        lost = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
        missing = isinstance(error, OSError) and error.errno in lost
        if debugging() or not (missing or isinstance(error, (*ours, *refused))):
            raise
        end(program, f"{sentence(error)}{place_in_own_code(error)}")


def sentence(error: BaseException) -> str:
    """Returns what an error says, on one line if it is not of this package."""
    text = str(error).strip() or type(error).__name__
    return text if isinstance(error, (DataError, TrainingError)) else printable(text)


def place_in_own_code(error: BaseException) -> str:
    """Returns " (FILE, line N)", the last of a user's own code in an error's traceback, or ""."""
    place, known = "", {"pl_pointwise", "jsonargparse", "lightning", "torch"}
    for frame, line in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        file = frame.f_code.co_filename
        if "-packages" not in file and package not in known | sys.stdlib_module_names:
            place = f" ({file}, line {line})"
    return place


def end(program: str, text: str) -> NoReturn:
    """Ends the process: one line on standard error, status 2."""
    sys.stderr.write(f"{program}: error: {text}\n")
    raise SystemExit(2)


class CommandParser(argparse.ArgumentParser):
    """argparse's parser for the commands besides LightningCLI's; its errors are sentences."""

    def __init__(self, command: str, description: str, epilog: str | None = None) -> None:
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
