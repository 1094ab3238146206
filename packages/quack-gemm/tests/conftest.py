"""Tests of this folder share a module that importlib mode does not find."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
