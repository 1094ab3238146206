"""Tests of this folder share the module ``rmsnorm_oracle``; importlib mode does not find it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
