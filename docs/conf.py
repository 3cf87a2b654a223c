"""How Sphinx builds the site: `make docs`.

The source directory is the root of the repository, so that the pages lie where a reader of the
repository finds them and their links work in both places. Nothing is downloaded, neither when the
site is built nor when it is read.
"""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import version as installed_version
from inspect import isroutine
from pathlib import Path
from typing import Any, NewType

import numpy.typing
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode
from sphinx.writers.html5 import HTML5Translator

_HERE = Path(__file__).parent
project = "pl-pointwise"
author = "The pl-pointwise authors"
copyright = author
release = version = installed_version("pl-pointwise")

extensions = [
    "myst_nb",  # Markdown and notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",  # a page for every name that docs/api lists
    "sphinx.ext.napoleon",  # Google style sections: Args, Returns, Raises
    "sphinx.ext.viewcode",
]

root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/appendix/*.md",
    "docs/api/**",
    "notebooks/*.ipynb",
    "benchmarks/README.md",
    "CHANGELOG.md",
    "README.md",
    "CONTRIBUTING.md",
    "RELEASING.md",
]

# Every cross-reference has to resolve, except those to other packages, of which a few are linked:
# all inventories would have to be downloaded.
nitpicky = True
_TORCH = "https://docs.pytorch.org/docs/stable"
_LIGHTNING = "https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch"
# by package and last name: torch says torch.utils.data.dataloader.DataLoader
_ELSEWHERE = {
    "torch.Tensor": f"{_TORCH}/tensors.html",
    "torch.DataLoader": f"{_TORCH}/data.html#torch.utils.data.DataLoader",
    "torch.Dataset": f"{_TORCH}/data.html#torch.utils.data.Dataset",
    "torch.DistributedSampler": f"{_TORCH}/data.html",
    "torch.Module": f"{_TORCH}/generated/torch.nn.Module.html",
    "lightning.Callback": f"{_LIGHTNING}.callbacks.Callback.html",
    "lightning.LightningDataModule": f"{_LIGHTNING}.core.LightningDataModule.html",
    "lightning.LightningModule": f"{_LIGHTNING}.core.LightningModule.html",
    "lightning.ModelCheckpoint": f"{_LIGHTNING}.callbacks.ModelCheckpoint.html",
    "lightning.Trainer": f"{_LIGHTNING}.trainer.trainer.Trainer.html",
    "torchmetrics.Metric": "https://lightning.ai/docs/torchmetrics/stable/references/metric.html",
    "transformers.Trainer": "https://huggingface.co/docs/transformers/main_classes/trainer",
}
_OTHERS = (
    "PIL|Path|abc|argparse|collections|contextlib|datasets|huggingface_hub|jsonargparse|lightning"
    "|lightning_fabric|matplotlib|numpy|os|pandas|pathlib|peft|pyarrow|sentence_transformers|torch"
    "|torchmetrics|transformers|types|typing"
)
nitpick_ignore_regex = [
    ("py:.*", rf"({_OTHERS})(\..*)?"),
    (
        "py:.*",
        r"(.*\.)?(_\w+|[A-Z]|Own|Method|Settings|Metric|Tensor|Optimizer|DataFrame)",
    ),  # private, type variables
    # halves of a type that a dataclass states as text
    ("py:.*", r"(dict\[str|.*Literal\[.*)"),
]

# Markdown
myst_enable_extensions = ["dollarmath", "tasklist"]
myst_heading_anchors = 4  # links such as problem.md#sign-convention
myst_links_external_new_tab = False
nb_execution_mode = "off"  # notebooks are executed by the tests

# API reference
# else its union, four lines of types
numpy.typing.ArrayLike = NewType("ArrayLike", object)
numpy.typing.ArrayLike.__module__ = "numpy.typing"
# A package whose __all__ is its reference: its list is written from it.
for _name, _about in (
    ("pl_pointwise", ""),
    (
        "pl_pointwise.callbacks",
        ":doc:`What each writes, and where </docs/callbacks>`.\n\n",
    ),
):
    _listed = sorted(import_module(_name).__all__, key=str.lower)
    (_HERE / f"api/{_name.rpartition('.')[2]}.rst").write_text(
        f"{_name}\n{'=' * len(_name)}\n\n{_about}.. currentmodule:: {_name}\n\n"
        ".. autosummary::\n   :toctree: generated\n   :nosignatures:\n\n"
        + "".join(f"   {each}\n" for each in _listed),
        encoding="utf-8",
    )

autosummary_filename_map = {  # where file names have no case
    "pl_pointwise.correction.corrected": "pl_pointwise.correction.corrected_of_answers"
}
autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    # in the search, an entry of the index stands above every page
    "no-index-entry": True,
}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
# Members that only the package itself calls.
_INTERNAL = set(
    """
    Constraint.outside Constraint.reported Constraint.residual Constraint.sides
    Multipliers.for_samples Multipliers.pending Multipliers.table
    augmentation beta_in_force force known_scale largest linear psi scale scaled
    standard_relaxation threshold_step
    """.split()
)

# What users call; the rest are hooks.
_OF_TASKS = {"answers_to", "export", "predict_step"}

# The pages
highlight_language = "none"  # of blocks that name no language
html_theme = "furo"
html_title = "pl-pointwise"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(_HERE / "_static/scorer.js")
templates_path = [str(_HERE / "_templates")]
html_additional_pages = {"index": "redirect.html"}  # the root leads to docs/index.html
html_math_renderer = "mathml"


_BAR = r'<mo stretchy="false">\u02c9</mo>'
_WITH_BAR = rf'<mover accent="true">\s*<mi>(\w)</mi>\s*{_BAR}\s*</mover>'
_WITH_BAR_AND_INDEX = (
    rf"<munderover>\s*<mi>(\w)</mi>\s*(<(\w+)>[^<]*</\3>)\s*{_BAR}\s*</munderover>"
)


def _mathml(formula: str, as_block: bool) -> str:
    """The letter itself has its bar, which browsers do not draw, and an index stands beside it."""
    found = tex2mathml(formula, as_block=as_block)
    found = re.sub(_WITH_BAR, "<mi>\\1\u0304</mi>", found)
    return re.sub(_WITH_BAR_AND_INDEX, "<msub><mi>\\1\u0304</mi>\\2</msub>", found)


def _inline_math(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(_mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def _block_math(translator: HTML5Translator, node: nodes.math_block) -> None:
    translator.body.append(
        f'<div class="math">{_mathml(node.astext(), as_block=True)}</div>\n'
    )
    raise nodes.SkipNode


def _reference_by_last_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element
) -> nodes.reference | None:
    """A public name needs no module in a docstring; those of ``_ELSEWHERE`` have another site."""
    if node.get("refdomain") != "py":
        return None
    package, last = node["reftarget"].split(".")[0], node["reftarget"].split(".")[-1]
    if address := _ELSEWHERE.get(
        "torch.Tensor" if last == "Tensor" else f"{package}.{last}"
    ):
        return nodes.reference("", "", content, internal=False, refuri=address)
    found = env.domains.python_domain.find_obj(
        env, None, None, last, node["reftype"], searchmode=1
    )
    found = [(name, entry) for name, entry in found if not entry.aliased]
    if package not in ("", "pl_pointwise", last) or len(found) != 1:
        return None
    ((name, entry),) = found
    source = node.get("refdoc", env.docname)
    return make_refnode(
        app.builder, source, entry.docname, entry.node_id, content, name
    )


def _public_bases(
    app: Sphinx, name: str, obj: type, options: object, bases: list[Any]
) -> None:
    """Of an internal base class, the first public one behind it."""
    public = {
        page.stem.split(".")[-1] for page in (_HERE / "api/generated").glob("*.rst")
    }
    for position, base in enumerate(bases):
        for each in getattr(base, "__mro__", ()):
            if each.__name__ in public or not each.__module__.startswith(
                "pl_pointwise"
            ):
                bases[position] = each
                break


def _skip_internal(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object
) -> bool | None:
    """Other packages' members, what ``_INTERNAL`` names, and hooks of tasks and callbacks."""
    function = getattr(obj, "fget", obj)
    module = getattr(function, "__module__", None) or ""
    if isroutine(function) or function is not obj:
        hooks = module.startswith(("pl_pointwise.tasks", "pl_pointwise.callbacks"))
        if not module.startswith("pl_pointwise") or (hooks and name not in _OF_TASKS):
            return True
    return True if _INTERNAL & {name, getattr(function, "__qualname__", "")} else None


def _link_pages(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """docs/metrics.md in a docstring becomes a link to that page."""
    lines[:] = [re.sub(r"docs/(\w+)\.md", r":doc:`/docs/\1`", line) for line in lines]


def _keep_indented_blocks(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """A block of formulas or a table, set off by a blank line and indented, is shown as it is.

    In reStructuredText it would be a quotation, and its lines would run together.
    """
    shown: list[str] = []
    paragraph, blank = "", False
    for line in lines:
        indented = line.startswith("    ")
        begins = (
            bool(paragraph) and blank and indented and not paragraph.startswith("    ")
        )
        if (
            begins
            and not paragraph.endswith("::")
            and not re.match(r"\.\. |[-*] ", paragraph)
        ):
            shown += ["::", ""]
        shown.append(line)
        blank = not line.strip()
        if not blank:
            paragraph = line
    lines[:] = shown


def _keep_bars(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """A bar is an absolute value, |v|, and not reStructuredText's substitution."""
    for position, line in enumerate(lines):
        if not re.match(r"    |>>> ", line):
            parts = re.split(r"(``.*?``)", line)  # Every second one is a literal.
            parts[::2] = [re.sub(r"(?<!\\)\|", r"\\|", part) for part in parts[::2]]
            lines[position] = "".join(parts)


def _prose_of_attributes(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Undo what napoleon does to an attribute's prose: all before a colon became the type."""
    if what not in ("attribute", "data", "property"):
        return
    for position, line in enumerate(lines):
        if line.startswith(":type: "):
            lines[0] = f"{line.removeprefix(':type: ')}: {lines[0]}"
            del lines[position]
            return


def _tables_of_results(app: Sphinx, docname: str, content: list[str]) -> None:
    """A link to a CSV file of results leads, on the site, to its tables in the appendix."""

    def tables(link: re.Match[str]) -> str:
        page = f"docs/appendix/{link[1]}.md"
        return f"](/{page})" if (Path(app.srcdir) / page).exists() else link[0]

    content[0] = re.sub(
        r"\]\([\w./]*evidence/results/([\w-]+)\.csv\)", tables, content[0]
    )


def _join_numbers_to_signs(app: Sphinx, docname: str, content: list[str]) -> None:
    """No line ends between a number and its ± or %; code stays as it is."""
    if app.env.doc2path(docname).suffix != ".md":
        return
    parts = re.split(r"(?s)(```.*?```|`[^`\n]*`)", content[0])
    parts[::2] = [
        re.sub(r"(?<=\d) (?=[±%])|(?<=±) (?=\d)", "\N{NO-BREAK SPACE}", part)
        for part in parts[::2]
    ]
    content[0] = "".join(parts)


def setup(app: Sphinx) -> None:
    app.connect("source-read", _tables_of_results)
    app.connect("source-read", _join_numbers_to_signs)
    # before and
    app.connect("autodoc-process-docstring", _keep_indented_blocks, priority=400)
    # after napoleon
    app.connect("autodoc-process-docstring", _prose_of_attributes, priority=600)
    app.connect("autodoc-process-docstring", _keep_bars, priority=650)
    app.connect("autodoc-process-docstring", _link_pages)
    app.connect("autodoc-process-bases", _public_bases)
    app.connect("autodoc-skip-member", _skip_internal)
    # Browsers draw MathML themselves; the default is a script from elsewhere.
    app.add_html_math_renderer("mathml", (_inline_math, None), (_block_math, None))
    app.connect("missing-reference", _reference_by_last_name)
