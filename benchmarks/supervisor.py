"""Runs a suite in a child process and goes on after a crash or a hang, leaving out what caused it."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from . import marker

ATTEMPTS = 6
POLL_S = 0.25
KILL_WAIT_S = 30.0


def supervise(
    argv: Sequence[str],
    step_timeout_s: float,
    budget_s: float,
    command: Sequence[str] = (sys.executable, "-m", "benchmarks"),
) -> int:
    """Run ``command argv`` until it ends by itself.

    The worker gets ``--worker FILE --first INDEX --exclude INDEX:VARIANT:STATUS ...`` and, with a
    budget, the seconds that are left.

    Args:
        argv: arguments of the user.
        step_timeout_s: a step that says nothing for longer hangs.
        budget_s: seconds for all attempts; 0 is no limit.
        command: what to run.

    Returns:
        Exit status: 0 if the suite ended, even if variants were left out.
    """
    start, first = time.monotonic(), 0
    excluded: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trying.json"
        for _ in range(ATTEMPTS):
            full = [*command, *argv, f"--worker={path}", f"--first={first}"]
            full += [f"--exclude={entry}" for entry in excluded]
            if budget_s:
                left = budget_s - (time.monotonic() - start)
                if left <= 0:
                    return 0
                full.append(f"--seconds-budget={left:.0f}")
            code, hung = _run(full, path, step_timeout_s)
            trying = marker.read(path)
            if code == 0 or trying is None:
                return code
            status = "hang" if hung else "crash"
            what = trying.variant or "timing"
            print(f"{status} in case {trying.index}, {what}: going on without it", flush=True)
            excluded.append(f"{trying.index}:{trying.variant}:{status}")
            first = first if trying.compiling else trying.index
            path.unlink()
    print(f"gave up after {ATTEMPTS} attempts", flush=True)
    return 1


def _run(
    command: Sequence[str],
    path: Path,
    timeout_s: float,
    now: Callable[[], float] = time.time,
) -> tuple[int, bool]:
    """Exit status of a worker, and whether it hung and was killed."""
    worker = subprocess.Popen(command)
    last = now()
    try:
        while worker.poll() is None:
            time.sleep(POLL_S)
            if path.exists():
                last = max(last, path.stat().st_mtime)
            if now() - last > timeout_s:
                worker.kill()
                worker.wait(KILL_WAIT_S)
                return 1, True
    finally:
        if worker.poll() is None:
            worker.kill()
    return worker.returncode, False
