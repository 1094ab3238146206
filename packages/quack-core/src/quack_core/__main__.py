"""``python -m quack_core``: the same as the command ``quack``."""

import sys

from quack_core.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
