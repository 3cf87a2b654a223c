"""What the source of a chat template says: its arguments, and its marks of thoughts."""

from __future__ import annotations

import re

from jinja2 import Environment, TemplateSyntaxError, meta, nodes

# What transformers gives every template, or a conversation has.
_GIVEN = {
    *(
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
    ),
    *("raise_exception", "strftime_now", "tojson"),
    *(
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
        "sep_token",
        "cls_token",
        "mask_token",
    ),
}

# {% generation %} is a tag of transformers that jinja2 alone does not know.
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")

_WORD = r"([\w:.\-]*(?:think|thought|reason)[\w:.\-]*)"
_PAIRS = (
    (rf"</{_WORD}>", "<{}>", "</{}>"),
    (rf"\[/{_WORD}\]", "[{}]", "[/{}]"),
    (rf"◁/{_WORD}▷", "◁{}▷", "◁/{}▷"),
)
_BEGINS = re.compile(rf"<\|(?:begin|start)_(?:of_)?{_WORD}\|>", re.IGNORECASE)
_STOPS = re.compile(rf"<\|end_(?:of_)?{_WORD}\|>", re.IGNORECASE)


def arguments_of(source: str) -> frozenset[str] | None:
    """The names of a template's own arguments, such as enable_thinking; None if it is unreadable.

    >>> sorted(arguments_of("{% if thinking %}{{ messages }}{% endif %}"))
    ['thinking']
    """
    environment = Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])
    try:
        tree = environment.parse(_GENERATION.sub("", source))
    # A tag of a newer transformers: nothing is known of the arguments, so any passes.
    except TemplateSyntaxError:
        return None
    names = meta.find_undeclared_variables(tree) - _GIVEN - set(environment.globals)
    stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    # A variable that is set in one branch and read in another is none, unless it asks whether.
    asked = {name for name in names & stored if _asks_for(name, source)}
    return frozenset(names - stored | asked)


def _asks_for(name: str, source: str) -> bool:
    """Whether the source asks if ``name`` is given, or has a default for it."""
    return bool(
        re.search(rf"\b{name}\s+is\s+(not\s+)?defined|\b{name}\s*\|\s*default", source)
    )


def marks_in(source: str) -> list[tuple[str, str]]:
    """What begins and what ends a thought, of all pairs of which the source has the end.

    >>> marks_in("{{ content.split('</mm:think>')[-1] }}")
    [('<mm:think>', '</mm:think>')]
    """
    pairs = []
    for pattern, begin, end in _PAIRS:
        for word in re.findall(pattern, source, re.IGNORECASE):
            pairs.append((begin.format(word), end.format(word)))
    begins, ends = _BEGINS.search(source), _STOPS.search(source)
    if begins and ends:
        pairs.append((begins[0], ends[0]))
    return list(dict.fromkeys(pairs))


def opened_by(text: str) -> list[tuple[str, str]]:
    """The marks of the thought that a generation prompt begins, if it ends in one.

    >>> opened_by("<|assistant|><thought>")
    [('<thought>', '</thought>')]
    """
    ending = re.search(rf"(?:<{_WORD}>|\[{_WORD}\]|◁{_WORD}▷)\s*$", text, re.IGNORECASE)
    # The prompt ends where the assistant begins; nothing has begun yet.
    if not ending:
        return []
    begin = ending[0].strip()
    return [(begin, f"{begin[0]}/{begin[1:]}")]
