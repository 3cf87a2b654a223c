"""Makes README.md one that a package index can show: its relative links become whole addresses.

    python docs/package_readme.py https://HOST/OWNER/pl-pointwise TAG

rewrites README.md in place, for a build (RELEASING.md); a page of the repository is then linked at
that tag, a picture by its raw bytes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\n)*)\]\(((?!https?://|#)[^)\s]+)\)")


def with_whole_links(text: str, repository: str, tag: str) -> str:
    """The text with every link that is relative to the repository's root made a whole address."""

    def whole(link: re.Match[str]) -> str:
        picture, label, path = link.groups()
        kind = "raw" if picture else "blob"
        return f"{picture}[{label}]({repository}/{kind}/{tag}/{path})"

    return LINK.sub(whole, text)


if __name__ == "__main__":
    readme = Path(__file__).resolve().parents[1] / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(with_whole_links(text, *sys.argv[1:]), encoding="utf-8")
