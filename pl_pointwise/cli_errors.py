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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, get_args
from unittest.mock import patch

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser

from .configs import OPTIONS, nearest
from .errors import DataError, TrainingError

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
    other_options: Sequence[str] = ()
    """Options that the command takes beside this parser's, to suggest."""

    def add_instantiator(self, instantiator: Any, *args: Any, **kwargs: Any) -> None:
        super().add_instantiator(_passing_errors(instantiator), *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if debugging():
            super().error(message, ex)
        found = refusal(message, self)
        if self.may_be_incomplete and REQUIRED.search(message):
            raise NotChecked
        if not self.outermost:
            raise argparse.ArgumentError(None, str(found)) from ex
        text = self._sentence(found)
        if not self.exit_on_error:
            raise argparse.ArgumentError(None, text) from ex
        end(self.prog.replace(" [options]", ""), text)

    def _sentence(self, found: Refusal) -> str:
        option = found.option
        if option in ("config", ""):
            return found.reason
        words = [str(word) for word in getattr(self, "args", None) or ()]
        place = "" if _given(option, words) else place_of(option, configurations(words))
        near = found.near
        if place and near.rpartition(".")[0] == option.rpartition(".")[0]:
            near = near.rpartition(".")[2]
        dashes = "" if place else "--"
        hint = f" Did you mean {dashes}{near}?" if near else ""
        return f"{place}{dashes}{option}: {found.reason}{hint}"


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
    """Reading a model's or tokenizer's files with transformers raises :class:`NotChecked`."""
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    with (
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
        return max(marked, key=lambda each: each.option.count(".")).below(_plain(key))
    if found := UNKNOWN.search(message):
        return _unknown(found, parser).below(_plain(key))
    if 'expected "subcommand"' in message:
        return Refusal("", "a command comes first: pl-pointwise fit, validate, test or predict.")
    if found := REQUIRED.search(message):
        return Refusal("", _missing(found["names"].split(", "), parser))
    if "Problems parsing config" in message or key == "config":
        return Refusal("config", _unreadable(message, parser))
    return Refusal(_plain(key), _wrong_value(message, key, parser))


def _plain(option: str) -> str:
    """An option without the steps that a command line may leave out.

    >>> _plain("model.init_args.training.optimization.init_args.lr")
    'model.training.optimization.lr'
    """
    return ".".join(part for part in option.split(".") if part not in ("init_args", "dict_kwargs"))


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
    name = _plain(name)
    known = [*options_of(parser), *parser.other_options]
    return Refusal(name, "there is no such option.", meant(name, known))


def meant(name: str, known: Sequence[str]) -> str:
    """Returns the dotted option that is most like ``name``, or "".

    The whole name may be alike, the last step alone (which then has to be the same or nearly so),
    or the first.

    >>> meant("trainer.max_epoks", ["trainer.max_epochs", "trainer.max_time", "model"])
    'trainer.max_epochs'
    >>> meant("lern_rate", ["tolerance", "training.optimization.learning_rate"])
    'training.optimization.learning_rate'
    >>> meant("modle.tolerance", ["trainer", "model"])
    'model.tolerance'
    """
    last = name.rpartition(".")[2]
    lasts = {each.rpartition(".")[2]: each for each in reversed(known)}
    roots = {each.partition(".")[0] for each in known}
    found = close(name, known)
    if found is None and (end := close(last, lasts)) is not None:
        found = lasts[end]
    root, _, rest = name.partition(".")
    if found is None and rest and (begin := close(root, roots)) is not None and begin != root:
        found = f"{begin}.{rest}"
    return found or ""


def close(word: str, known: Iterable[str]) -> str | None:
    """Returns the known word that is most like ``word``, if any is."""
    found = re.search(r"'(.*)'", nearest(word, known))
    return found[1] if found else None


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Returns the dotted names of a parser's options, fields of dataclasses among them."""
    names = []
    for action in parser._actions:
        if action.dest not in (argparse.SUPPRESS, "help"):
            names.append(_plain(action.dest))
            names += _fields(getattr(action, "_typehint", None), _plain(action.dest))
    return list(dict.fromkeys(names))


def _fields(hint: Any, name: str, depth: int = 3) -> list[str]:
    found = []
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and depth:
            for each in dataclasses.fields(kind):
                below = f"{name}.{each.name}"
                found += [below, *_fields(_hints(kind).get(each.name), below, depth - 1)]
    return found


def _hints(kind: type) -> dict[str, Any]:
    from typing import get_type_hints

    try:
        return get_type_hints(kind)
    except (NameError, TypeError):  # A name for type checkers only.
        return {}


def _missing(names: Sequence[str], parser: ShortErrorParser) -> str:
    names = [_plain(name.partition(".")[2] or name) if "." in name else name for name in names]
    options = " and ".join(f"--{name}" for name in dict.fromkeys(names))
    return f"{options} must be given, on the command line or in a file (--config TASK)."


def _unreadable(message: str, parser: ShortErrorParser) -> str:
    """What is wrong with a configuration file: not there, or no YAML."""
    for file in configurations([str(word) for word in getattr(parser, "args", None) or ()]):
        if not os.path.isfile(file):
            return f"--config {file}: there is no such file.{meant_file(file)}"
        try:
            read = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        except yaml.MarkedYAMLError as error:
            mark, why = error.problem_mark, error.problem or "no YAML"
            line = f", line {mark.line + 1}" if mark is not None else ""
            return f"{file}{line}: not YAML ({why})."
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            return f"{file}: not YAML ({shortened(str(error))})."
        if not isinstance(read, dict):
            what = "empty" if read is None else f"a {type(read).__name__}"
            return f"{file}: a configuration maps names to values, and this is {what}."
    return shortened(message)


def meant_file(path: str) -> str:
    """Returns " Did you mean …?" with a file of the same folder, or ""."""
    folder = Path(path).parent
    there = [str(each) for each in folder.iterdir()] if folder.is_dir() else []
    return nearest(path, [each.removeprefix("./") for each in there])


def _wrong_value(message: str, key: str, parser: ShortErrorParser) -> str:
    action = next((each for each in parser._actions if each.dest == key), None)
    hint = getattr(action, "_typehint", None)
    if found := CLASS.search(message):
        return _wrong_class(found, hint)
    if found := VALUE.search(message):
        given = found["given"] if found["given"] is not None else found["got"]
        value = shortened(given.partition("\n")[0], 80)
        if "Not a valid subclass of" in message:
            return f"{value!r} is no {_class_of(hint)}. {_choice(value, hint)}"
        return f"{value!r} is not {named(hint)}.{nearest(value, _choices(hint))}"
    return shortened(message)


def _wrong_class(found: re.Match[str], hint: Any) -> str:
    """A class that cannot be found or imported, or is not of the kind that is asked for."""
    name = found["name"] or found["short"] or found["path"]
    why = found["why"] or ""
    inner = CLASS.search(why)
    if inner is not None:
        return _wrong_class(inner, hint)
    if "." not in name:
        return f"there is no {_class_of(hint)} {name!r}. {_choice(name, hint)}"
    if found["base"]:
        near = nearest(name.rpartition(".")[2], classes_below(hint))
        return f"{name} is no {found['base']}.{near}"
    module, _, last = name.rpartition(".")
    if "has no attribute" in why and last in why:
        names = [each for each, value in vars(sys.modules.get(module, object)).items()
                 if inspect.isclass(value)]  # fmt: skip
        return f"{module} has no class {last!r}.{nearest(last, names)}"
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
    known = classes_below(hint)
    near = nearest(name, known).strip()
    if near:
        return f"{near} Others go by their full path, package.module.Class."
    choice = f"Choose one of {', '.join(known)}, or give" if 0 < len(known) <= 12 else "Give"
    return f"{choice} a class by its full path, package.module.Class."


def _class_of(hint: Any) -> str:
    """Returns the name of the class whose subclasses an annotation takes."""
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and kind.__module__ != "builtins" and not get_args(kind):
            return kind.__name__
    inside = [_class_of(each) for each in get_args(hint) if get_args(each)]
    return inside[0] if inside else "class"


def classes_below(hint: Any) -> list[str]:
    """Returns the short names of the classes that an annotation takes and that are known."""
    found: list[str] = []
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and kind.__module__ not in ("builtins", "typing"):
            waiting = [kind]
            while waiting:
                each = waiting.pop(0)
                waiting += each.__subclasses__()
                if not (inspect.isabstract(each) or each.__name__.startswith("_")):
                    found.append(each.__name__)
        elif kind is not hint:
            found += classes_below(kind)
    return list(dict.fromkeys(found))


def named(hint: Any) -> str:
    """Returns an annotation in words; that null is taken too is left out.

    >>> named(int), named(int | None), named(list[str])
    ('a whole number', 'a whole number', 'a list')
    """
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    words[type(None)] = "null"
    if hint in words:
        return words[hint]
    origin, inside = getattr(hint, "__origin__", None), get_args(hint)
    if inside and (origin is None or "Union" in str(origin)):
        return " or ".join(dict.fromkeys(named(e) for e in inside if e is not type(None)))
    if inside and "Literal" in str(origin):
        return f"one of {', '.join(map(str, inside))}" if len(inside) > 1 else str(inside[0])
    kind = origin or hint
    if isinstance(kind, type) and issubclass(kind, (dict, list, tuple)):
        return f"a {kind.__name__}"
    return getattr(kind, "__name__", None) or "what it takes"


def _choices(hint: Any) -> list[str]:
    inside = get_args(hint)
    if "Literal" in str(getattr(hint, "__origin__", "")):
        return [str(each) for each in inside]
    return [choice for each in inside if each is not hint for choice in _choices(each)]


def shortened(text: str, longest: int = LONGEST) -> str:
    """Returns a text of another library on one line, its end cut off where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[:longest]} …"


# Where in which file ----------------------------------------------------------------------------


def configurations(words: Sequence[str]) -> list[str]:
    """Returns the values of ``--config`` on a command line."""
    found = []
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in OPTIONS:
            found += [value] if equals else list(words[place + 1 : place + 2])
    return found


def _given(option: str, words: Sequence[str]) -> bool:
    """Whether the command line itself sets an option, or a part of it."""
    return any(
        word.startswith("--") and f"{_plain(word[2:].partition('=')[0])}.".startswith(f"{option}.")
        for word in words
    )


def place_of(option: str, files: Sequence[str]) -> str:
    """Returns "FILE, line N, " for the last file that sets an option, or ""."""
    for file in reversed(files):
        try:
            tree = yaml.compose(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        line = _line(tree, option.split("."))
        if line is not None:
            return f"{file}, line {line}, "
    return ""


def _line(node: yaml.Node | None, path: Sequence[str]) -> int | None:
    if isinstance(node, yaml.SequenceNode):
        return next((n for n in (_line(each, path) for each in node.value) if n is not None), None)
    if not isinstance(node, yaml.MappingNode):
        return None
    for key, value in node.value:
        if key.value in ("init_args", "dict_kwargs"):
            found = _line(value, path)
        elif key.value == path[0]:
            found = _line(value, path[1:]) if path[1:] else key.start_mark.line + 1
        else:
            continue
        if found is not None:
            return found
    return None


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
    return isinstance(error, (DataError, TrainingError, MisconfigurationException, *refused))


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


def _own_code(where: TracebackType | None) -> TracebackType | None:
    inside = False  # Frames before the first of this package are of the script that called it.
    while where is not None:
        root = str(where.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        inside = inside or root == "pl_pointwise"
        if inside and root not in OURS:
            return where
        where = where.tb_next
    return None


def end(program: str, text: str) -> NoReturn:
    """Ends the process: one line on standard error, status 2."""
    sys.stderr.write(f"{program}: error: {text}\n")
    raise SystemExit(2)


class CommandParser(argparse.ArgumentParser):
    """argparse's parser, for the commands beside LightningCLI's, whose errors are sentences."""

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
        return message
