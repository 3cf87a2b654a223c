"""What a sample is, for people to look at: texts, numbers and an image of what a row holds."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping
from inspect import signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LONGEST = 4000
"""Characters of a text; the rest is in the data."""
MOST_NUMBERS = 16
"""Numbers of a vector that are shown."""
FEWEST_PIXELS, MOST_PIXELS = 4, 1024
"""The sides of an image: a smaller table is no image, a larger one too much for a page."""

SOURCE = "record"
"""The field of ``describe`` that says where a sample is from."""


def described(
    data: Any, rows: Any, index: int, dataset: str
) -> tuple[dict[str, str], bytes | None]:
    """What a sample is: as its data module describes it, else the row itself.

    A ``describe`` of one's own that takes the index alone describes training samples.
    """
    describe = getattr(data, "describe", None)
    if describe is not None and "dataset" in signature(describe).parameters:
        return fields_and_image(describe(index, dataset=dataset))
    # An earlier version's describe() took no data set.
    if describe is not None and dataset == "train":
        return fields_and_image(describe(index))
    return fields_and_image(rows[index]) if rows is not None else ({}, None)


def source_of(fields: Mapping[str, str]) -> str | None:
    """The file and line of a sample, if it has them; a page names no folder of this machine."""
    return re.split(r"[/\\]", fields[SOURCE])[-1] if SOURCE in fields else None


def without_source(fields: Mapping[str, str]) -> dict[str, str]:
    """The fields that say what a sample is, not where it is from."""
    return {name: text for name, text in fields.items() if name != SOURCE}


def fields_and_image(row: Any) -> tuple[dict[str, str], bytes | None]:
    """The entries of a row that can be read, by name, and the first that is an image, as a PNG."""
    entries = row.items() if isinstance(row, Mapping) else [("row", row)]
    fields = dict[str, str]()
    image = None
    for name, value in entries:
        drawn = png_of(value) if image is None else None
        if drawn is not None:
            image = drawn
            continue
        text = text_of(value)
        # NaN: what this row does not have.
        if text is None or text == "nan" or name == "index":
            continue
        fields[str(name)] = text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
    return fields, image


def text_of(value: Any) -> str | None:
    """A text, a number, or a vector of up to 16; None of anything else."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, list):
        return _vector_text(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value) if isinstance(value, (str, int)) else None


def _vector_text(numbers: list[Any]) -> str | None:
    if len(numbers) > MOST_NUMBERS or any(isinstance(entry, list) for entry in numbers):
        return None
    texts = [text_of(entry) for entry in numbers]
    if None in texts:
        return None
    return ", ".join(text for text in texts if text)


def png_of(value: Any) -> bytes | None:
    """An image (H, W), (1, H, W) or (3, H, W) as a PNG, its values stretched to black and white.

    None of anything else; a picture has at least four pixels a side.
    """
    if not isinstance(value, (Tensor, np.ndarray)):
        return None
    pixels = torch.as_tensor(value).detach().cpu()
    if pixels.dim() == 2:
        pixels = pixels[None]
    if not _is_an_image(pixels):
        return None
    pixels = pixels.double().nan_to_num()
    low = float(pixels.min())
    high = float(pixels.max())
    # Colours keep their brightness.
    if pixels.shape[0] == 3 and low >= 0 and high <= 255:
        low = 0.0
        high = 1.0 if high <= 1 else 255.0
    shades = (pixels - low) / ((high - low) or 1.0) * 255
    rows = shades.round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    return _png(rows)


def _is_an_image(pixels: Tensor) -> bool:
    if pixels.dim() != 3 or pixels.shape[0] not in (1, 3):
        return False
    if pixels.dtype == torch.bool or pixels.is_complex():  # A mask, or a spectrum.
        return False
    sides = pixels.shape[1:]
    return min(sides) >= FEWEST_PIXELS and max(sides) <= MOST_PIXELS


def _png(rows: NDArray[np.uint8]) -> bytes:
    """A PNG of (height, width, 1 or 3), 8 bits a channel, in its three chunks."""
    height, width, channels = rows.shape
    grey, colours = 0, 2  # The format's numbers.
    kind = grey if channels == 1 else colours
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    body = b"".join(b"\0" + row.tobytes() for row in rows)  # Each row without a filter.
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(body, 9))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    """Its length, its kind, what it holds, and a check sum."""
    return (
        struct.pack(">I", len(data))
        + kind
        + data
        + struct.pack(">I", zlib.crc32(kind + data))
    )
