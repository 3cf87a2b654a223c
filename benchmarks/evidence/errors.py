"""What a task can lack."""


class MissingError(FileNotFoundError):
    """Records, weights or a package that a task needs are not there."""
