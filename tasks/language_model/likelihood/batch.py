"""A batch of prompts and responses, the (prompt, response) pairs in it, and how a model reads them.

Token ids, padded on the right. Every tensor has the samples in front:

    prompt_ids        (B, P)
    prompt_lengths    (B,)       at least 1
    response_ids      (B, R, T)  with the end token
    response_lengths  (B, R)     0 where a sample has fewer than R responses

What padding holds is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pl_pointwise.errors import DataError
from pl_pointwise.task import Batch

ABSENT = -1
"""The number of no response."""


def collate_responses(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[Sequence[int]]],
    columns: int = 0,
) -> dict[str, Tensor]:
    """The tensors of a batch from prompts' and responses' token ids; R is at least ``columns``."""
    count = max(columns, max(map(len, responses), default=0))
    flat: list[Sequence[int]] = []
    for answers in responses:
        flat += answers
        flat += [()] * (count - len(answers))
    width = max(map(len, flat), default=0)
    lengths = torch.tensor([len(answer) for answer in flat], dtype=torch.long)
    return {
        "prompt_ids": collate_columns(prompts, max(map(len, prompts), default=0), 0),
        "prompt_lengths": torch.tensor([len(prompt) for prompt in prompts]),
        "response_ids": collate_columns(flat, width, 0).view(
            len(prompts), count, width
        ),
        "response_lengths": lengths.view(len(prompts), count),
    }


def collate_columns(
    values: Sequence[Sequence[int]], width: int, filler: int = ABSENT
) -> Tensor:
    """Rows of numbers as a long tensor (B, width); the filler where a row has none."""
    rows = [[*of_row, *[filler] * (width - len(of_row))] for of_row in values]
    return torch.tensor(rows, dtype=torch.long).view(len(rows), width)


@dataclass(frozen=True)
class Pairs:
    """The (prompt, response) pairs of a batch, or some of them, in the order sample, response.

    n is the number of their response tokens, in the order sample, response, token.
    """

    prompt_ids: Tensor  # (B, P)
    response_ids: Tensor  # (B, R, T)
    prompt_lengths: list[int]
    response_lengths: list[list[int]]  # 0 for what is absent or left out

    @classmethod
    def of(cls, batch: Batch) -> Pairs:
        """All pairs of a batch."""
        pairs = cls(
            prompt_ids=batch["prompt_ids"],
            response_ids=batch["response_ids"],
            prompt_lengths=batch["prompt_lengths"].tolist(),
            response_lengths=batch["response_lengths"].tolist(),
        )
        # A forward pass of nothing fails deep inside the model.
        if not pairs.places:
            raise DataError("A batch without a single response.")
        return pairs

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """(sample, response) of each pair."""
        places = []
        for row, lengths in enumerate(self.response_lengths):
            for column, length in enumerate(lengths):
                if length:
                    places.append((row, column))
        return places

    @cached_property
    def targets(self) -> Tensor:
        """(n,) the response tokens."""
        lengths = torch.tensor(self.response_lengths, dtype=torch.long)
        # (B, R, T)
        filled = torch.arange(self.response_ids.shape[2]) < lengths[..., None]
        return self.response_ids.flatten()[_places_of(filled, self.response_ids.device)]

    def only(self, places: set[tuple[int, int]]) -> Pairs:
        """Some of the pairs; these themselves where it is all of them."""
        if len(places) == len(self.places):
            return self
        kept = [[0] * len(lengths) for lengths in self.response_lengths]
        for row, column in places:
            kept[row][column] = self.response_lengths[row][column]
        return replace(self, response_lengths=kept)

    def within(self, pairs: Pairs) -> Tensor:
        """(n,) places of these tokens among those of a larger selection from the same batch."""
        chosen = set(self.places)
        kept = torch.tensor([place in chosen for place in pairs.places])
        tokens = kept.repeat_interleave(torch.tensor(pairs.sizes))
        return _places_of(tokens, self.response_ids.device)

    @property
    def sizes(self) -> list[int]:
        """The tokens of each pair's response."""
        return [self.response_lengths[row][column] for row, column in self.places]

    def sequences(self) -> tuple[Tensor, Tensor, Tensor]:
        """Whole sequences, padded on the right: ids (M, L), mask (M, L), predicting places (n,).

        A response's last token predicts nothing and is left out. The places are in the flattened
        (M·L,) sequences.
        """
        prompts = torch.tensor([self.prompt_lengths[row] for row, _ in self.places])
        sizes = prompts + torch.tensor(self.sizes) - 1
        columns = torch.arange(int(sizes.max()))
        ids = self.prompt_ids.new_zeros((len(sizes), len(columns)))
        for sequence, (row, column) in enumerate(self.places):
            prompt, size = self.prompt_lengths[row], int(sizes[sequence])
            ids[sequence, :prompt] = self.prompt_ids[row, :prompt]
            ids[sequence, prompt:size] = self.response_ids[row, column, : size - prompt]
        mask = columns < sizes[:, None]
        predicting = mask & (columns >= prompts[:, None] - 1)
        attended = mask.long().to(ids.device, non_blocking=True)
        return ids, attended, _places_of(predicting, ids.device)

    @cached_property
    def layout(self) -> Layout:
        """Of the samples that have a pair, each prompt once and nothing padded."""
        prompt_width = self.prompt_ids.shape[1]
        response_width = self.response_ids.shape[2]
        # Behind the prompts, one after the other.
        responses_from = self.prompt_ids.numel()
        source = list[int]()
        positions = list[int]()
        predicting = list[int]()
        samples = list[list[int]]()
        of_rows = zip(self.prompt_lengths, self.response_lengths, strict=True)
        for row, (prompt, lengths) in enumerate(of_rows):
            present = [
                (column, length) for column, length in enumerate(lengths) if length
            ]
            if not present:
                continue
            source += range(row * prompt_width, row * prompt_width + prompt)
            positions += range(prompt)
            last = len(source) - 1  # predicts the first token of each response
            for column, length in present:
                start = responses_from + (row * len(lengths) + column) * response_width
                predicting += [last, *range(len(source), len(source) + length - 1)]
                source += range(start, start + length - 1)
                positions += range(prompt, prompt + length - 1)
            samples.append([prompt, *(length - 1 for _, length in present)])
        tokens = torch.cat([self.prompt_ids.flatten(), self.response_ids.flatten()])
        return Layout(
            ids=tokens[self._on_device(source)],
            positions=self._on_device(positions),
            predicting=self._on_device(predicting),
            samples=samples,
        )

    def _on_device(self, numbers: list[int]) -> Tensor:
        tensor = torch.tensor(numbers, dtype=torch.long)
        return tensor.to(self.prompt_ids.device, non_blocking=True)


@dataclass(frozen=True)
class Layout:
    """A batch as one row of N tokens; see shared_prompt.py."""

    ids: Tensor  # (N,)
    positions: Tensor  # (N,) position ids
    predicting: Tensor  # (n,) places in the row, by sample, response, token
    # of each the length of its prompt, and of all but a response's end
    samples: list[list[int]]


def _places_of(mask: Tensor, device: torch.device) -> Tensor:
    """Where a mask on the CPU is true, (n,) places in it flattened, on a device."""
    return mask.flatten().nonzero()[:, 0].to(device, non_blocking=True)
