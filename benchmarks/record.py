"""Result records: one JSON object per row and variant, merged by key into JSON lines."""

import datetime
import importlib.metadata
import json
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

Key = tuple[str, str, tuple[int, ...], str, tuple[tuple[str, str], ...], str]


@dataclass
class Record:
    """One variant on one row.

    ``status`` is ok, wrong, unsupported, compile-error, oom, crash or hang; without ok there is no
    time. ``us`` are microseconds of one call. ``verdict``, ``best_peer`` and ``spread`` stand in our
    own rows. ``dram_pct`` is what a profiler saw of the peak throughput of device memory. ``err`` is the largest error as a fraction of its bound, ``err_peer`` the best peer's.
    """

    suite: str
    op: str
    shape: list[int]
    dtype: str
    opts: dict[str, str]
    variant: str
    method: str = ""
    status: str = "ok"
    us: dict[str, float] = field(default_factory=dict)
    rounds: int = 0
    sets: int = 0
    launches: int = 0
    set_bytes: int = 0
    min_bytes: int = 0
    flop: int = 0
    rate: float = 0.0
    rate_unit: str = "TB/s"
    floor_us: float = 0.0
    dram_pct: float = 0.0
    copy_us: float = 0.0
    copy_kernel: str = ""
    best_peer: str = ""
    verdict: str = ""
    spread: float = 0.0
    err: float = 0.0
    err_peer: float = 0.0
    config: str = ""
    clock_mhz: int = 0
    power_w: float = 0.0
    gpu: str = ""
    date: str = ""
    commit: str = ""
    note: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def row(self) -> tuple[Any, ...]:
        """What the variants of one row share."""
        return self.key[:-1]

    @property
    def key(self) -> Key:
        opts = tuple(sorted(self.opts.items()))
        return (self.suite, self.op, tuple(self.shape), self.dtype, opts, self.variant)

    @property
    def median(self) -> float | None:
        return self.us.get("median") if self.status == "ok" else None

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=False)

    @classmethod
    def from_json(cls, line: str) -> "Record":
        """Read one line; unknown fields are refused.

        Raises:
            ValueError: the line is not JSON or not a record.
        """
        values = json.loads(line)
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"record has unknown fields {unknown}; known are {sorted(known)}")
        return cls(**values)


def read(path: Path) -> list[Record]:
    """All records of one JSON-lines file, or of every such file below a folder."""
    if path.is_dir():
        return [record for file in sorted(path.rglob("*.jsonl")) for record in read(file)]
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [Record.from_json(line) for line in lines if line.strip()]


def merge(path: Path, new: Iterable[Record]) -> None:
    """Put records into a file: those with the key of an older one replace it in place.

    The file is replaced as a whole, so that an interrupted write leaves the old one.
    """
    merged = {record.key: record for record in read(path)}
    merged.update({record.key: record for record in new})
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("".join(record.to_json() + "\n" for record in merged.values()))
    part.replace(path)


def merge_folder(source: Path, target: Path) -> int:
    """Merge every result file below `source` into the same place below `target`."""
    count = 0
    for file in sorted(source.rglob("*.jsonl")):
        records = read(file)
        merge(target / file.relative_to(source), records)
        count += len(records)
    return count


def today() -> str:
    return datetime.date.today().isoformat()


def version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """Short commit of this checkout with ``+`` for local changes; empty without git."""
    root = Path(__file__).parent.parent
    git = ["git", "-C", str(root)]
    try:
        head, changed = (
            subprocess.run([*git, *args], check=True, capture_output=True, text=True).stdout.strip()
            for args in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if changed else "")
