"""The loggers of the packages: ``quack`` and its children, at the level that ``QUACK_LOG`` names."""

import logging

from quack_core import env

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def get(name: str = "quack") -> logging.Logger:
    """A logger, after ``QUACK_LOG`` has been applied to ``quack``. Call it when there is news.

    Unset, nothing is configured and the application's logging decides. Set, the logger ``quack``
    gets that level and, unless the application gave it a handler, one that writes to stderr.

    Args:
        name: ``"quack"`` or a child such as ``"quack.jit"``.

    Raises:
        ValueError: ``QUACK_LOG`` is no level.
    """
    level = env.get("QUACK_LOG")
    if level:
        _configure(level)
    return logging.getLogger(name)


def _configure(level: str) -> None:
    wanted = level.upper()
    if wanted not in _LEVELS:
        raise ValueError(f"QUACK_LOG={level!r}: expected one of {', '.join(_LEVELS)}")
    logger = logging.getLogger("quack")
    logger.setLevel(wanted)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)
