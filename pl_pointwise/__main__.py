"""``python -m pl_pointwise``: the same as the command ``pl-pointwise``."""

from .cli import main

if __name__ == "__main__":
    main()
