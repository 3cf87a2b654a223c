"""Modules whose training ends badly, for runs in processes of their own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.pl_pointwise.line_task import LineModule


class KilledModule(LineModule):
    """As if the machine ran out of memory."""

    def forward(self, batch: Any) -> Tensor:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(batch)


class EndlessModule(LineModule):
    """Writes the id of its process, and does not end before it is asked."""

    def forward(self, batch: Any) -> Tensor:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Lightning's waits for the end of the batch.
        folder = Path(self.trainer.default_root_dir)
        (folder / "part").write_text(str(os.getpid()))
        (folder / "part").replace(folder / "pid")
        time.sleep(600)
        return super().forward(batch)
