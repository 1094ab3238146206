"""Where ``quack`` begins: with the standard library alone, so that ``doctor`` runs in any state."""

import importlib.util
import sys
from collections.abc import Sequence

NEEDED = ("click", "rich")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 for findings or failures, 2 for wrong usage.

    Args:
        argv: the words after ``quack``; by default the process's own.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["doctor"]:
        from quack_core.cli import doctor

        return doctor.main(words[1:])
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"quack: {' and '.join(missing)} not found: pip install 'quack-core[cli]' "
            "(`doctor` works without)",
            file=sys.stderr,
        )
        return 2
    from quack_core.cli import commands

    return commands.run(words)
