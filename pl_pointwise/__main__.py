"""``python -m pl_pointwise``, as ``pl-pointwise``."""

import os
import sys

# Python puts the current folder first, and what lies there would be taken for optional packages;
# of its own code what is named is found all the same (command_line/own_code.py).
if sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from pl_pointwise.cli import main

if __name__ == "__main__":
    main()
