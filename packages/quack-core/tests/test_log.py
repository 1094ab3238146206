import subprocess
import sys

import pytest

from quack_core import log

SCRIPT = """
import logging, sys
from quack_core import log
assert not logging.getLogger("quack").handlers, "importing must configure nothing"
logger = log.get("quack.jit")
logger.info("compiled")
log.get("quack.jit").warning("slow")
print(logger.name, logging.getLogger("quack").level, len(logging.getLogger("quack").handlers))
"""


def run(level, monkeypatch):
    """``(stdout, stderr lines)`` of the script with ``QUACK_LOG=level``."""
    monkeypatch.delenv("QUACK_LOG", raising=False)
    if level is not None:
        monkeypatch.setenv("QUACK_LOG", level)
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr.splitlines()


@pytest.mark.parametrize(
    ("level", "state", "lines"),
    [
        (None, ["quack.jit", "0", "0"], ["slow"]),
        ("info", ["quack.jit", "20", "1"], ["quack.jit INFO: compiled", "quack.jit WARNING: slow"]),
        ("ERROR", ["quack.jit", "40", "1"], []),
    ],
)
def test_the_level_decides_what_is_printed(level, state, lines, monkeypatch):
    assert run(level, monkeypatch) == (state, lines)


def test_a_bad_level_names_the_variable(monkeypatch):
    monkeypatch.setenv("QUACK_LOG", "loud")
    with pytest.raises(ValueError, match="QUACK_LOG='loud': expected one of DEBUG, INFO"):
        log.get()
