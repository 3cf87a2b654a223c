"""What there is to see of a training sample: texts and images, and which one is the culprit."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch import Trainer
from torch import Tensor

from pl_pointwise.data import PointwiseDataModule

if TYPE_CHECKING:
    import PIL.Image

SMALLEST, LARGEST = 4, 2048
"""Sides that an array has which is taken for an image."""
NUMBERS = 16
"""A vector that is no longer is written out."""


def fields_of(trainer: Trainer, index: int) -> tuple[dict[str, str], dict[str, str]]:
    """Training sample ``index`` by field: all as text, and images as data URIs too.

    From ``describe(index)`` of the data module, whatever it returns; without one of its own from
    the sample itself, as the loader's data set gives it.
    """
    data: Any = getattr(trainer, "datamodule", None)
    own = getattr(type(data), "describe", None) not in (None, PointwiseDataModule.describe)
    if own:
        found = data.describe(index)
    elif isinstance(data, PointwiseDataModule):
        found = data.datasets["train"][index]
    else:
        found = trainer.train_dataloader.dataset[index]  # type: ignore[union-attr]
    texts, images = {}, {}
    for name, value in _named(found).items():
        shown = _numpy(value)
        picture = image_of(shown)
        if picture is not None:
            images[name] = _uri(picture)
            texts[name] = f"image, {picture.width} × {picture.height} pixels"
        elif (text := _text(shown)) is not None or own:
            texts[name] = str(shown) if text is None else text
    return texts, images


def culprit(fields: Iterable[str], start: str, value: Mapping[str, Any]) -> str | None:
    """The field that a constraint's value is about, None if no name says so.

    A field's number counts from 1, as the value's does; what is in brackets behind says more.

    start: what the constraint's fields are called, "negative" of "negative 3".
    value: its number, and of how many.

    >>> culprit(["rejected 1 (direct)", "rejected 2"], "rejected", {"number": 1, "of": 2})
    'rejected 1 (direct)'
    >>> culprit(["prompt", "refusal"], "refusal", {"number": 1, "of": 1})
    'refusal'
    """
    bases = {name: name.partition(" (")[0] for name in fields}
    numbered = f"{start} {value['number']}"
    wanted = [numbered, *([start] if value["of"] == 1 else [])]
    found = [name for name, base in bases.items() if base in wanted]
    if not found and value["of"] > 1:
        found = [name for name, base in bases.items() if base.endswith(f" {value['number']}")]
    return found[0] if len(found) == 1 else None


def image_of(value: Any) -> PIL.Image.Image | None:
    """An image, or an array that looks like one, (H, W), (C, H, W) or (H, W, C), C = 1, 3, 4.

    None for what is no image, and without Pillow, which the extra "compare" brings.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError:
        return None
    if isinstance(value, Image.Image):
        return value
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "buif":
        return None
    if value.ndim == 3 and value.shape[0] in (1, 3, 4) and value.shape[2] not in (1, 3, 4):
        value = np.moveaxis(value, 0, 2)
    if value.ndim == 3 and value.shape[2] == 1:
        value = value[..., 0]
    colours = value.ndim == 3 and value.shape[2] in (3, 4)
    if not (value.ndim == 2 or colours):
        return None
    if not all(SMALLEST <= side <= LARGEST for side in value.shape[:2]):
        return None
    if value.dtype != np.uint8:
        numbers = np.nan_to_num(value.astype(float))
        low, high = min(numbers.min(), 0.0), max(numbers.max(), 1e-12)
        high = max(high, 1.0) if value.dtype.kind == "f" and numbers.max() > 0.5 else high
        value = (255 * (numbers - low) / (high - low)).round().astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(value))


def _named(row: Any) -> Mapping[str, Any]:
    if hasattr(row, "_asdict"):
        row = row._asdict()
    if not isinstance(row, Mapping):
        row = dict(enumerate(row)) if isinstance(row, (list, tuple)) else {0: row}
    return {str(name): value for name, value in row.items()}


def _numpy(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    return value.item() if isinstance(value, (np.ndarray, np.generic)) and not value.ndim else value


def _text(value: Any) -> str | None:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (str, int)):
        return str(value)
    if isinstance(value, np.ndarray):
        if value.ndim == 1 and len(value) <= NUMBERS:
            written = "{:.4g}" if value.dtype.kind == "f" else "{}"
            return ", ".join(map(written.format, value.tolist()))
        return f"{value.dtype} array, {' × '.join(map(str, value.shape))}"
    return None


def _uri(picture: PIL.Image.Image) -> str:
    file = io.BytesIO()
    mode = picture.mode if picture.mode in ("L", "RGB", "RGBA", "1", "P") else "RGB"
    (picture if mode == picture.mode else picture.convert(mode)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
