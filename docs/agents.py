"""Writes llms.txt, an index of the pages, and AGENTS.md, for programs that read or change the code.

python docs/agents.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = (
    "Set-up",
    "The tree",
    "Where a change goes",
    "Tests",
    "Style",
    "How a change is checked",
)
"""Of CONTRIBUTING.md, that AGENTS.md repeats."""


def text_of(page: Path) -> str:
    """A page as Markdown; of a notebook its text."""
    if page.suffix == ".ipynb":
        cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
        return "\n\n".join(
            "".join(c["source"]) for c in cells if c["cell_type"] == "markdown"
        )
    # of .rst
    return re.sub(r"\A(.+)\n=+\n", r"# \1\n", page.read_text(encoding="utf-8"))


def described(text: str) -> tuple[str, str]:
    """The title of a page, and the first sentence of its prose."""
    title = re.search(r"(?m)^# (.+)$", text)
    prose = re.sub(r"(?s)```.*?```", "", text)
    paragraphs = (
        p for p in re.split(r"\n\s*\n", prose) if re.match(r"\*\*|[`\"]|[^\W\d_]", p)
    )
    first = next(paragraphs, "")
    sentence = re.split(r"(?<=[.?])\s", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", first))[
        0
    ]
    return (title[1] if title else ""), " ".join(sentence.replace("**", "").split())


def index() -> str:
    """The text of llms.txt: the navigation of docs/index.md with a sentence for each page."""
    start = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    lines = ["# pl-pointwise", "", f"> {described(text_of(ROOT / 'README.md'))[1]}"]
    lines += [
        "",
        "- [README](README.md): what it does, installation, an example, results",
    ]
    for table in re.findall(r"(?s)```{toctree}\n(.*?)```", start):
        caption, *entries = (
            line for line in table.splitlines() if line and line != ":hidden:"
        )
        lines += ["", f"## {caption.removeprefix(':caption: ')}", ""]
        for entry in entries:
            for ending in (".md", ".ipynb", ".rst"):
                page = (ROOT / "docs" / (entry + ending)).resolve()
                if page.exists():
                    title, sentence = described(text_of(page))
                    path = page.relative_to(ROOT).as_posix()
                    lines.append(f"- [{title or path}]({path}): {sentence}")
    return "\n".join(lines) + "\n"


def instructions() -> str:
    """The text of AGENTS.md."""
    parts = re.split(r"(?m)^## ", text_of(ROOT / "CONTRIBUTING.md"))
    kept = [f"## {part.strip()}" for part in parts if part.split("\n")[0] in SECTIONS]
    head = (
        "# For programs that change this code\n\nMade from CONTRIBUTING.md by"
        " `python docs/agents.py`; edit that page."
        " All pages: [llms.txt](llms.txt). Lint alone: `make lint`."
    )
    return "\n\n".join([head, *kept]) + "\n"


FILES = {"llms.txt": index, "AGENTS.md": instructions}

if __name__ == "__main__":
    for name, text in FILES.items():
        (ROOT / name).write_text(text(), encoding="utf-8")
