"""How Sphinx builds the site: `make docs`.

The source directory is the root of the repository, so that the pages lie where a reader of the
repository finds them and their links work in both places. Nothing is downloaded, neither when the
site is built nor when it is read.
"""

from __future__ import annotations

import re
from importlib.metadata import version as installed_version
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode
from sphinx.writers.html5 import HTML5Translator

project = "pl-pointwise"
author = "The pl-pointwise authors"
copyright = author
release = version = installed_version("pl-pointwise")

extensions = [
    "myst_nb",  # Markdown and notebooks
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",  # a page for every module of the package
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
    "CONTRIBUTING.md",
    "RELEASING.md",
]

# Every cross-reference has to resolve, except those to other packages: their inventories would
# have to be downloaded.
nitpicky = True
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
    ("py:.*", r"(dict\[str|.*Literal\[.*)"),  # halves of a type that a dataclass states as text
]

suppress_warnings = ["ref.python"]  # two modules have a Requirement

# Markdown
myst_enable_extensions = ["dollarmath", "tasklist"]
myst_heading_anchors = 4  # links such as problem.md#sign-convention
myst_links_external_new_tab = False
nb_execution_mode = "off"  # notebooks are executed by the tests

# API reference
# What a module re-exports is described where it is defined.
autodoc_default_options = {"members": True, "ignore-module-all": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False

# The pages
highlight_language = "none"  # of blocks that name no language
html_theme = "furo"
html_title = "pl-pointwise"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = [str(Path(__file__).parent / "_templates")]
html_additional_pages = {"index": "redirect.html"}  # the root leads to docs/index.html
html_math_renderer = "mathml"


def _inline_math(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def _block_math(translator: HTML5Translator, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>\n')
    raise nodes.SkipNode


def _reference_by_last_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element
) -> nodes.reference | None:
    """A name that only one module of the package defines needs no module in a docstring."""
    if node.get("refdomain") != "py":
        return None
    found = env.domains.python_domain.find_obj(
        env, None, None, node["reftarget"], node["reftype"], searchmode=1
    )
    if len(found) != 1:
        return None
    ((name, entry),) = found
    source = node.get("refdoc", env.docname)
    return make_refnode(app.builder, source, entry.docname, entry.node_id, content, name)


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
        begins = bool(paragraph) and blank and indented and not paragraph.startswith("    ")
        if begins and not paragraph.endswith("::") and not re.match(r"\.\. |[-*] ", paragraph):
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

    content[0] = re.sub(r"\]\([\w./]*evidence/results/([\w-]+)\.csv\)", tables, content[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", _tables_of_results)
    app.connect("autodoc-process-docstring", _keep_indented_blocks, priority=400)  # before and
    app.connect("autodoc-process-docstring", _prose_of_attributes, priority=600)  # after napoleon
    app.connect("autodoc-process-docstring", _keep_bars, priority=650)
    # Browsers draw MathML themselves; the default is a script from elsewhere.
    app.add_html_math_renderer("mathml", (_inline_math, None), (_block_math, None))
    app.connect("missing-reference", _reference_by_last_name)
