"""The numerics page of each block-scaled format: `python -m tools.numerics` writes them.

A test compares what lies in the folder with what this makes.
"""

from pathlib import Path

from .page import pages

FOLDER = Path(__file__).parents[2] / "docs" / "reference" / "numerics"

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
