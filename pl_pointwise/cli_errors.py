"""Errors of the command line in one sentence: which option, what is wrong, and the remedy.

jsonargparse tells all it tried over several screens, and argparse its whole usage; this is the one
place that makes a sentence of either. ``--debug``, or PL_POINTWISE_DEBUG=1, shows everything. The
traceback of an error in a user's own code is shown always, from that code on.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import functools
import inspect
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, get_args
from unittest.mock import patch

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser

from .configs import configurations, is_text, missing_base, nearest
from .errors import DataError, TrainingError
from .extras import MissingPackageError, import_all_classes
from .option_names import (
    choices,
    class_of,
    classes_below,
    is_given,
    meant,
    meant_file,
    named,
    options_of,
    place_of,
    plain,
)

DEBUG = "PL_POINTWISE_DEBUG"
LONGEST = 400
"""Characters of a reason that another library gave."""


def debugging() -> bool:
    """Whether errors are to be shown whole."""
    return os.environ.get(DEBUG, "0") not in ("", "0")


# What the parser refuses ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Refusal:
    """What is wrong with one option, by its dotted name without ``init_args``."""

    option: str
    reason: str
    near: str = ""
    """The option that is most like it, where there is none of its name."""

    def below(self, option: str) -> Refusal:
        """Returns it as seen from the parser around: its option is part of that one's."""
        names = [".".join(filter(None, (option, name))) for name in (self.option, self.near)]
        return Refusal(names[0], self.reason, names[1] if self.near else "")

    def __str__(self) -> str:
        """Marked, so that the parser around finds it in what jsonargparse puts around it."""
        return f"\x02{self.option}\x1f{self.reason}\x1f{self.near}\x03"


MARKED = re.compile(r"\x02([^\x1f]*)\x1f([^\x1f]*)\x1f([^\x03]*)\x03")
KEY = re.compile(r'Parser key "(?P<key>[^"]+)"(?: element \d+)?:\s*')
UNKNOWN = re.compile(
    r"unrecognized arguments: (?P<words>.*)"
    r"|(?P<kind>Subcommand|Group|Option) '(?P<of>[^']*)' (?:does not accept option '(?P<name>[^']*)"
    r"|is not accepted)",
    re.DOTALL,
)
REQUIRED = re.compile(r"the following arguments are required: (?P<names>.*)")
CLASS = re.compile(
    r"Problem with given class_path '(?P<name>[^']*)':\s*(?P<why>.*)"
    r"|Expected a dot import path string: (?P<short>\S+)"
    r"|Import path (?P<path>\S+) does not correspond to a subclass of (?P<base>\w+)",
    re.DOTALL,
)
LACKING = re.compile(r"\S+ needs \S+, which is not installed: pip install '[^']*'")
VALUE = re.compile(r"Given value: (?P<given>.*?)\s*\Z|\. Got value: (?P<got>.*)", re.DOTALL)


class ShortErrorParser(LightningArgumentParser):
    """LightningCLI's parser whose errors are sentences.

    Parsers of classes within are of this class too; jsonargparse wraps their errors in text, so
    theirs carry marks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A name cut short was taken for the option, silently; now it is answered by the whole one.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    outermost = False
    """Whether it reads the command line itself."""
    may_be_incomplete = False
    """Whether a configuration without a model or without data raises :class:`NotChecked`."""
    words: Sequence[str] = ()
    """The command line, with the names of configurations."""
    other_options: Sequence[str] = ()
    """Options that the command takes beside this parser's, to suggest."""

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        """jsonargparse lets an argument ``X | None`` be left out or null; ``X | Y | None`` too."""
        added = super().add_class_arguments(*args, **kwargs)
        for action in self._actions:
            if type(None) in get_args(getattr(action, "_typehint", None)):
                action.required = False
                getattr(self, "required_args", set()).discard(action.dest)  # Of older versions.
        return added

    def add_instantiator(self, instantiator: Any, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():  # It is deprecated, and what LightningCLI has.
            warnings.simplefilter("ignore")
            super().add_instantiator(_passing_errors(instantiator), *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if debugging():
            super().error(message, ex)
        found = refusal(message, self)
        if self.may_be_incomplete and REQUIRED.search(message):
            raise NotChecked
        if not self.outermost:
            raise argparse.ArgumentError(None, str(found)) from ex
        own = _own_cause(ex)
        if own is not None:  # While a class was imported, and jsonargparse kept the text alone.
            reason = f"{type(own).__name__}: {shortened(str(own))}{place_in_own_code(own)}."
            found = Refusal(found.option, reason)
        text = self._sentence(found)
        if own is not None and self.exit_on_error:
            show_own_code(own)
        if not self.exit_on_error:
            raise argparse.ArgumentError(None, text) from ex
        end(self.prog.replace(" [options]", ""), text)

    def _sentence(self, found: Refusal) -> str:
        option = found.option
        words = [str(word) for word in getattr(self, "args", None) or ()]
        base = missing_base(self.words) if "must be given" in found.reason else ""
        if option in ("config", ""):
            return found.reason + base
        place = "" if is_given(option, words) else place_of(option, configurations(words))
        near = found.near
        if place and near.rpartition(".")[0] == option.rpartition(".")[0]:
            near = near.rpartition(".")[2]
        dashes = "" if place else "--"
        hint = f" Did you mean {dashes}{near}?" if near else ""
        return f"{place}{dashes}{option}: {found.reason}{hint}{base}"


class NotBuilt(BaseException):
    """Around an error of a constructor: jsonargparse keeps the text alone of any Exception."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def build(kind: type, *args: Any, **kwargs: Any) -> Any:
    """An instantiator for jsonargparse, for every class."""
    return kind(*args, **kwargs)


class NotChecked(BaseException):
    """What is not checked without a run: an incomplete configuration, the files of a model."""


@contextmanager
def without_loading() -> Iterator[None]:
    """Looking for a model's files with transformers, on the hub too, raises :class:`NotChecked`."""
    try:
        from transformers import PretrainedConfig, PreTrainedTokenizerBase
        from transformers.utils import hub
    except ModuleNotFoundError:
        yield
        return
    with (
        patch.object(hub, "cached_files", side_effect=NotChecked, create=True),  # New in 4.50.
        patch.object(PretrainedConfig, "get_config_dict", side_effect=NotChecked),
        patch.object(PreTrainedTokenizerBase, "from_pretrained", side_effect=NotChecked),
    ):
        yield


def _passing_errors(instantiator: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(instantiator)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return instantiator(*args, **kwargs)
        except Exception as error:
            raise NotBuilt(error) from error

    return wrapped


def refusal(message: str, parser: ShortErrorParser) -> Refusal:
    """Returns what a parser's own message, or one of a parser within, says in a sentence."""
    key = ""
    if found := KEY.match(message):
        key, message = found["key"], message[found.end() :]
    marked = [Refusal(*parts) for parts in MARKED.findall(message)]
    if marked:
        # Of the types it was tried as the one that led farthest is the one that was meant.
        return max(marked, key=lambda each: each.option.count(".")).below(plain(key))
    if found := UNKNOWN.search(message):
        return _unknown(found, parser).below(plain(key))
    if 'expected "subcommand"' in message:
        return Refusal("", "a command comes first: pl-pointwise fit, validate, test or predict.")
    if found := REQUIRED.search(message):
        return Refusal("", _missing(found["names"].split(", "), parser))
    if message.startswith(("Problems parsing config", "Unexpected config")) or key == "config":
        return Refusal("config", _unreadable(message, parser))
    return Refusal(plain(key), _wrong_value(message, key, parser))


def _unknown(found: re.Match[str], parser: ShortErrorParser) -> Refusal:
    if found["words"] is not None:
        word = found["words"].split()[0]
        if not word.startswith("-"):
            return Refusal(
                "", f"{word!r} belongs to no option. Write options as --NAME VALUE, with quotes "
                "around a value that has blanks."
            )  # fmt: skip
        name = word.lstrip("-").partition("=")[0]
    elif found["kind"] == "Group":
        name = f"{found['of']}.{found['name']}"
    else:
        name = found["name"] or found["of"]
    if found["kind"] == "Subcommand":
        actions = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
        parser = actions[0].choices[found["of"]]
    name = plain(name)
    known = [*options_of(parser), *parser.other_options]
    return Refusal(name, "there is no such option.", meant(name, known))


def _missing(names: Sequence[str], parser: ShortErrorParser) -> str:
    names = [plain(name.partition(".")[2] or name) if "." in name else name for name in names]
    options = " and ".join(f"--{name}" for name in dict.fromkeys(names))
    return f"{options} must be given, on the command line or in a file (--config TASK)."


def _unreadable(message: str, parser: ShortErrorParser) -> str:
    """What is wrong with a configuration file: not there, or no YAML."""
    for file in configurations([str(word) for word in getattr(parser, "args", None) or ()]):
        if is_text(file):
            continue
        if not os.path.isfile(file):
            return f"--config {file}: there is no such file.{meant_file(file)}"
        try:
            read = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            return not_yaml(file, error)
        if not isinstance(read, dict):
            what = "empty" if read is None else f"a {type(read).__name__}"
            return f"{file}: a configuration maps names to values, and this is {what}."
    return shortened(message)


def not_yaml(file: str, error: Exception) -> str:
    """Returns where a file is no YAML, and why."""
    mark = getattr(error, "problem_mark", None)
    line = f", line {mark.line + 1}" if mark is not None else ""
    why = getattr(error, "problem", None) or shortened(str(error))
    return f"{file}{line}: this is not YAML ({why})."


def _wrong_value(message: str, key: str, parser: ShortErrorParser) -> str:
    action = next((each for each in parser._actions if each.dest == key), None)
    hint = getattr(action, "_typehint", None)
    if found := CLASS.search(message):
        return _wrong_class(found, hint)
    if found := VALUE.search(message):
        given = found["given"] if found["given"] is not None else found["got"]
        value = shortened(given.partition("\n")[0], 80)
        if "Not a valid subclass of" in message:
            return f"{value!r} is no {class_of(hint)}. {_choice(value, hint)}"
        if "does not correspond to a subclass of" in message:
            return f"{value!r} is no {class_of(hint)}."
        return f"{value!r} is not {named(hint)}.{nearest(value, choices(hint))}"
    return shortened(message)


def _wrong_class(found: re.Match[str], hint: Any) -> str:
    """A class that cannot be found or imported, or is not of the kind that is asked for."""
    name = found["name"] or found["short"] or found["path"]
    why = found["why"] or ""
    inner = CLASS.search(why)
    if inner is not None:
        return _wrong_class(inner, hint)
    if "." not in name:
        return f"there is no {class_of(hint)} {name!r}. {_choice(name, hint)}"
    if found["base"]:
        near = nearest(name.rpartition(".")[2], classes_below(hint))
        return f"{name} is no {found['base']}.{near}"
    module, _, last = name.rpartition(".")
    if "has no attribute" in why and last in why:
        names = [each for each, value in vars(sys.modules.get(module, object)).items()
                 if inspect.isclass(value)]  # fmt: skip
        names += getattr(sys.modules.get(module), "__all__", [])
        return f"{module} has no class {last!r}.{nearest(last, names)}"
    if lacking := LACKING.search(why):
        return lacking[0]
    if missing := re.search(r"No module named '([^']*)'", why):
        remedy = (
            "Is its folder the current one or on PYTHONPATH, and the name right?"
            if name.startswith(missing[1])
            else f"{module} imports it: install it."
        )
        return f"{name} cannot be imported, there is no module {missing[1]!r}. {remedy}"
    return f"{name} cannot be used: {shortened(why)}"


def _choice(name: str, hint: Any) -> str:
    """What to write in place of a class that there is not."""
    import_all_classes()
    known = classes_below(hint)
    near = nearest(name, known).strip()
    if near:
        return f"{near} Others go by their full path, package.module.Class."
    choice = f"Choose one of {', '.join(known)}, or give" if 0 < len(known) <= 12 else "Give"
    return f"{choice} a class by its full path, package.module.Class."


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


def show_own_code(error: BaseException) -> bool:
    """Prints the part of an error's traceback that begins in a user's own code, if any does."""
    own = _own_code(error.__traceback__)
    if own is None:
        return False
    lines = traceback.format_exception(type(error), error, own, chain=False)
    sys.stderr.write("".join(lines[:-1]))
    sys.stderr.write(f"{type(error).__name__}\n")
    return True


def _own_cause(error: BaseException | None) -> BaseException | None:
    """Returns the error behind another one that arose in a user's own code, or is about it."""
    while error is not None:
        if isinstance(error, SyntaxError) or _own_code(error.__traceback__) is not None:
            return error
        error = error.__cause__ or error.__context__
    return None


def _own_code(where: TracebackType | None) -> TracebackType | None:
    """Returns the part of a traceback from a user's own code on.

    It begins where the error was caught, in this package or below.
    """
    while where is not None:
        root = str(where.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if root not in OURS:
            return where
        where = where.tb_next
    return None


def place_in_own_code(error: BaseException) -> str:
    """Returns " (FILE, line N)", the last of a user's own code in an error's traceback, or ""."""
    own = _own_code(error.__traceback__)
    while own is not None and (deeper := _own_code(own.tb_next)) is not None:
        own = deeper
    return f" ({own.tb_frame.f_code.co_filename}, line {own.tb_lineno})" if own else ""


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
        end(self.prog, self._sentence(message))

    def _sentence(self, message: str) -> str:
        if found := re.match(r"argument (\S+): invalid (\w+) value: (.*)", message):
            kinds = {"int": "a whole number", "float": "a number"}
            return f"{found[1]}: {found[3]} is not {kinds.get(found[2], found[2])}."
        if found := re.match(r"the following arguments are required: (.*)", message):
            actions = {"/".join(each.option_strings) or each.dest: each for each in self._actions}
            names = found[1].split(", ")
            return "; ".join(
                f"give {name.rpartition('/')[2]}: {actions[name].help}" if name in actions else name
                for name in names
            )
        return message.removeprefix("argument ")
