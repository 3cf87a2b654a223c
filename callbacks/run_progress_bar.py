"""The progress bar of the command line, for a Trainer of one's own."""

from pl_pointwise.report.progress import RunProgressBar

__all__ = ["RunProgressBar"]
