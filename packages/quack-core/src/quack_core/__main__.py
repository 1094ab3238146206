"""``python -m quack_core``: the same as the command ``quack``."""

import sys

from quack_core.cli.entry import main

sys.exit(main())
