"""Locks between the processes that share a folder of compiled kernels."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from quack_core import log

LOCK_SECONDS = 600.0
"""How long to wait for another process that compiles the same kernel, before doing it too.

A file that a writer or a soft lock left, and that is older, is of a process that was killed.
"""

NETWORK = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"}
    | {"smb3", "smbfs", "sshfs", "virtiofs", "wekafs"}
)
"""Kinds of file systems on which the kernel's own locks block, fail or hold on one machine only."""

_MOUNTS = Path("/proc/self/mounts")


@contextlib.contextmanager
def held(place: Path, digest: str) -> Iterator[None]:
    """Hold an entry against other processes; where locks do not work, go on without.

    Entries share a few thousand lock files by the first digits of their name, so that files which
    nobody may remove, as others may wait for them, do not grow in number.

    Args:
        place: the folder.
        digest: name of the entry.
    """
    import filelock

    path = place / f"{digest[:3]}.lock"
    if is_network(place):
        _break_if_old(path)
        lock: filelock.BaseFileLock = filelock.SoftFileLock(path, timeout=LOCK_SECONDS, mode=0o600)
    else:
        lock = filelock.FileLock(path, timeout=LOCK_SECONDS, mode=0o600)
    try:
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # filelock.Timeout is an OSError
        log.get("quack.jit").info("no lock for %s (%s): going on without", digest[:12], error)
    try:
        yield
    finally:
        lock.release()


def is_network(place: Path) -> bool:
    """Whether a folder lies on a network file system; False where that cannot be told."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return False
    place = place.resolve()
    kinds = {}
    for line in lines:
        _, mounted, kind, *_ = line.split(" ")
        if place.is_relative_to(mounted.replace("\\040", " ")):
            kinds[len(mounted)] = kind
    kind = kinds[max(kinds)] if kinds else ""
    return kind.removeprefix("fuse.") in NETWORK


def _break_if_old(path: Path) -> None:
    """Remove the soft lock of a process that was killed, perhaps on another machine.

    Two processes that do so at once may both go on: the kernel is compiled twice, no more.
    """
    with contextlib.suppress(OSError):  # there is none, or another process was quicker
        if time.time() - path.stat().st_mtime > LOCK_SECONDS:
            path.unlink()
