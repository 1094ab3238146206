"""What holds for the tests of all packages."""

import gc


def pytest_collection_finish() -> None:
    """What was imported by now stays; garbage is looked for without going through it each time."""
    gc.collect()
    gc.freeze()
