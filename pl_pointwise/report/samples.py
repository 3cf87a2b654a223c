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
from torch import Tensor

LONGEST = 4000
"""Characters of a text; the rest is in the data."""


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
    if describe is not None and dataset == "train":
        return fields_and_image(describe(index))
    return fields_and_image(rows[index]) if rows is not None else ({}, None)


def source_of(fields: Mapping[str, str]) -> str | None:
    """The file and line of a sample, if it has them; a page names no folder of this machine."""
    return re.split(r"[/\\]", fields[SOURCE])[-1] if SOURCE in fields else None


def without_source(fields: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in fields.items() if name != SOURCE}


def fields_and_image(row: Any) -> tuple[dict[str, str], bytes | None]:
    """The entries of a row that can be read, by name, and the first that is an image, as a PNG."""
    entries = row.items() if isinstance(row, Mapping) else [("row", row)]
    fields, image = dict[str, str](), None
    for name, value in entries:
        if image is None and (drawn := png_of(value)) is not None:
            image = drawn
            continue
        text = text_of(value)
        if text not in (None, "nan") and name != "index":  # NaN: what this row does not have.
            fields[str(name)] = text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
    return fields, image


def text_of(value: Any) -> str | None:
    """A text, a number, or a vector of up to 16; None of anything else."""
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, list) and not any(isinstance(each, list) for each in value):
        texts = [text_of(each) for each in value[:17]]
        return ", ".join(filter(None, texts)) if None not in texts and len(texts) <= 16 else None
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value) if isinstance(value, (str, int)) else None


def png_of(value: Any) -> bytes | None:
    """An image (H, W), (1, H, W) or (3, H, W) as a PNG, its values stretched to black and white.

    None of anything else; a picture has at least four pixels a side.
    """
    if not isinstance(value, (Tensor, np.ndarray)):
        return None
    pixels = torch.as_tensor(value).detach().cpu()
    if pixels.dim() == 2:
        pixels = pixels[None]
    if pixels.dim() != 3 or pixels.shape[0] not in (1, 3) or min(pixels.shape[1:]) < 4:
        return None
    if max(pixels.shape[1:]) > 1024 or pixels.dtype == torch.bool or pixels.is_complex():
        return None
    pixels = pixels.double().nan_to_num()
    low, high = float(pixels.min()), float(pixels.max())
    if pixels.shape[0] == 3 and low >= 0 and high <= 255:  # Colours keep their brightness.
        low, high = 0.0, 1.0 if high <= 1 else 255.0
    shades = (pixels - low) / ((high - low) or 1.0) * 255
    rows = shades.round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    height, width, channels = rows.shape
    body = b"".join(b"\0" + row.tobytes() for row in rows)  # Each row without a filter.
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(body, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
