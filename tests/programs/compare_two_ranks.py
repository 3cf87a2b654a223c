"""One rank of a comparison; ``python -m tests.programs.compare_two_ranks USES ARGUMENTS``."""

from __future__ import annotations

import os
import sys

from pl_pointwise.cli import main
from pl_pointwise.compare import command

os.environ["PL_POINTWISE_USES"] = sys.argv[1]
command.draw_plots = lambda *_: None  # They take longer than the runs.
main(["compare", *sys.argv[2:]])
