"""Errors of the command line in one sentence: which option, what is wrong, and the remedy.

jsonargparse tells all it tried over several screens. The errors behind its own lead to the first
that says why, which is shown with the option's name and the name that was perhaps meant. With
``--debug``, or PL_POINTWISE_DEBUG=1, everything is. The traceback of an error in a user's own code
is shown always, from that code on.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, get_args

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser

from .configs import missing_base
from .errors import DataError, TrainingError
from .extras import MissingPackageError, import_all_classes
from .option_names import choices, meant, options_of, plain

DEBUG = "PL_POINTWISE_DEBUG"
LONGEST = 400
"""Characters of a reason that another library gave."""

KEY = re.compile(r'Parser key "([^"]+)"(?: element \d+)?:\s*')
NAME = re.compile(r"--([\w.]+)|'([\w.]+)'")
"""What may be a misspelt option in a reason."""


def debugging() -> bool:
    """Whether errors are to be shown whole."""
    return os.environ.get(DEBUG, "0") not in ("", "0")


class ShortErrorParser(LightningArgumentParser):
    """LightningCLI's parser, whose errors are sentences; those of classes within are of it too."""

    words: Sequence[str] | None = None
    """The command line, with the names of configurations; None of the parser of a class within."""
    other_options: Sequence[str] = ()
    """Options that the command takes beside this parser's, to suggest."""

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
        if isinstance(ex, _Refusal):
            raise ex
        chain = list(_causes(ex)) or [argparse.ArgumentError(None, message)]
        hint = self._hint(message, str(chain[-1]))
        if self.words is None:
            raise _Refusal(message, hint) from (chain[1] if chain[1:] else None)
        texts, last = [message, *map(str, chain[1:])], chain[-1]
        if isinstance(last, SyntaxError) or _own_frames(last):
            texts[-1] = f"{type(last).__name__}: {last}{place_in_own_code(last)}"
            if self.exit_on_error:
                show_own_code(last)
        within = [each.hint for each in chain if isinstance(each, _Refusal)]
        text = self._sentence(texts, *within[-1:] or [hint])
        if not self.exit_on_error:
            raise _Refusal(text) from ex
        end(self.prog.replace(" [options]", ""), text)

    def _hint(self, message: str, reason: str) -> str:
        """Returns " Did you mean …?" with an option, or a class or value of the option."""
        names = ["".join(found) for found in NAME.findall(reason)]
        known = [*options_of(self), *self.other_options]
        if key := KEY.match(message):
            import_all_classes()
            action = next((each for each in self._actions if each.dest == key[1]), None)
            known = choices(getattr(action, "_typehint", None))
            names.append(reason.split()[-1])
        found = (meant(name, known) for name in names if name not in known)
        return next((f" Did you mean {near!r}?" for near in found if near), "")

    def _sentence(self, texts: Sequence[str], hint: str) -> str:
        """texts: jsonargparse's, from the outermost to the one that says why."""
        option = plain(".".join(found[1] for found in map(KEY.match, texts) if found))
        reason = shortened(KEY.sub("", texts[-1])).rstrip(".")
        before = f"--{option}: " if option else ""
        return f"{before}{reason}.{hint}{missing_base(self.words or ())}"


class _Refusal(argparse.ArgumentError):
    """Of a parser of this kind; that of a class within knows best what was meant."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(None, message)
        self.hint = hint


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error of a parser and those behind it, up to the first of other code."""
    while error is not None:
        yield error
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        raised_in = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
        of_parser = raised_in.startswith(("jsonargparse", "argparse", __name__))
        error = error.__cause__ if of_parser else None


def innermost(error: BaseException) -> BaseException:
    """Returns the error behind those of a parser: the first of other code, if there is any."""
    *_, last = _causes(error)
    return last


def shortened(text: str, longest: int = LONGEST) -> str:
    """Returns a text of another library on one line, its end cut off where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[:longest]} …"


# What is refused later --------------------------------------------------------------------------

OURS = {"pl_pointwise", "jsonargparse", "lightning", "lightning_utilities", "torch", "torchmetrics"}
OURS |= {"transformers", "tokenizers", "safetensors", "huggingface_hub", "peft", "datasets"}
OURS |= {"yaml", "numpy", "pandas", "pyarrow", "fsspec", "httpx", "requests", "jinja2"}
OURS |= set(sys.stdlib_module_names)
"""Packages whose tracebacks say nothing about an error in a user's own code."""


@contextmanager
def short_errors(program: str, refused: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Ends the process with a sentence where the block raises what a user can mend.

    These are the package's own errors, missing files and models, what Lightning calls a wrong
    configuration, and ``refused``. Everything else passes. Where the error arose in code that is
    not of this package or below it, its traceback is shown, from there on.
    """
    try:
        yield
    except Exception as error:
        if debugging() or not _refuses(error, refused):
            raise
        show_own_code(error)
        end(program, sentence(error))


def _refuses(error: Exception, refused: tuple[type[Exception], ...]) -> bool:
    if isinstance(error, OSError):  # transformers' own, of models that are not there, has no number
        return error.errno in (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
    ours = (DataError, TrainingError, MissingPackageError, MisconfigurationException)
    return isinstance(error, (*ours, *refused))


def sentence(error: BaseException) -> str:
    """Returns what an error says, on one line if it is not of this package."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {(error.strerror or text).lower()}."
    if isinstance(error, (DataError, TrainingError)):
        return text
    return shortened(text)


def _own_frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """Returns an error's frames and lines from the first of a user's own code on."""
    walked = list(traceback.walk_tb(error.__traceback__))
    return list(itertools.dropwhile(lambda found: not _is_own(found[0]), walked))


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in OURS


def show_own_code(error: BaseException) -> None:
    """Prints the part of an error's traceback that begins in a user's own code, if any does."""
    if own := _own_frames(error):
        lines = traceback.StackSummary.extract(iter(own)).format()
        sys.stderr.write("".join(lines) + f"{type(error).__name__}\n")


def place_in_own_code(error: BaseException) -> str:
    """Returns " (FILE, line N)", the last of a user's own code in an error's traceback, or ""."""
    own = [(frame.f_code.co_filename, line) for frame, line in _own_frames(error) if _is_own(frame)]
    return " ({}, line {})".format(*own[-1]) if own else ""


def end(program: str, text: str) -> NoReturn:
    """Ends the process: one line on standard error, status 2."""
    sys.stderr.write(f"{program}: error: {text}\n")
    raise SystemExit(2)


class CommandParser(argparse.ArgumentParser):
    """argparse's parser, for the commands beside LightningCLI's, whose errors are sentences."""

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
