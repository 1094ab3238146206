"""The programs in ``examples/`` are scripts: tests import them as a script beside them would."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
