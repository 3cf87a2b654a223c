"""A module that trains as the toy does, and can be asked."""

from __future__ import annotations

from typing import Any

import torch

from tests.pl_pointwise.toy import Toy


class Answering(Toy):
    """Says nothing, and notes in which state it was asked."""

    def answers_to(self, prompts: list[Any]) -> list[dict[str, Any]]:
        self.modes = self.training, torch.is_grad_enabled()
        return [{"answer": "", "refused": False, "cut": False} for _ in prompts]
