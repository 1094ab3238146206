"""The pytest plugin: which device tests run on, and the record of a run on hardware.

Load it with ``-p quack_core.testing.plugin``. It imports neither torch nor the DSL until a GPU is
asked for, and works where the packages are on PYTHONPATH without being installed.

* ``--device cpu`` (default): tests get ``device == "cpu"``; those that use the fixture ``cuda``
  are skipped, or fail under ``QUACK_REQUIRE_GPU=1``.
* ``--device cuda``: tests get ``device == "cuda"``; without a usable GPU nothing runs.
* ``--record FILE``: write the hardware record of this run (see ``records.py``).
* ``--check-records``: print which sources changed since their records; never fails a run.
* ``--async-compile[=N]``: N processes compile kernels while tests run (see ``async_compile.py``).
"""

import collections
import datetime
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quack_core import env
from quack_core.testing import async_compile, records

_recorder = pytest.StashKey["Recorder"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("quack", "kernels and hardware")
    group.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where operators run: the reference on the CPU (default) or the kernels on a GPU",
    )
    group.addoption(
        "--record",
        metavar="FILE",
        type=Path,
        help="write what this run tested to FILE, such as tests/records/sm90.json; needs a GPU",
    )
    group.addoption(
        "--check-records",
        action="store_true",
        help="print which packages changed since the last run on each architecture",
    )
    async_compile.add_option(group)


def pytest_configure(config: pytest.Config) -> None:
    async_compile.register(config)
    path = config.getoption("record")
    if config.getoption("device") == "cpu":
        if path:
            raise pytest.UsageError("--record describes a run on hardware: add --device cuda")
        return
    try:
        gpu = records.find_gpu()
    except Exception as error:  # torch raises many kinds; each means that nothing can run
        raise pytest.UsageError(f"--device cuda: no usable GPU: {error}") from error
    # workers of xdist report to the controller, which alone writes
    if path and not hasattr(config, "workerinput"):
        try:
            records.check_imports(config.rootpath)
        except RuntimeError as error:
            raise pytest.UsageError(f"--record: {error}") from error
        recorder = Recorder(config, gpu, config.invocation_params.dir / path)
        config.stash[_recorder] = recorder
        config.pluginmanager.register(recorder, "quack-recorder")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.getoption("check_records"):
        terminalreporter.section("hardware records")
        try:
            for line in records.check(config.rootpath):
                terminalreporter.line(line)
        except OSError as error:  # a report must not fail a run
            terminalreporter.line(f"cannot be checked: {error}")
    if recorder := config.stash.get(_recorder, None):
        terminalreporter.line(recorder.outcome)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device that operands lie on: ``"cpu"`` or ``"cuda"``."""
    return str(request.config.getoption("device"))


@pytest.fixture(scope="session")
def cuda(device: str) -> str:
    """``"cuda"``, for tests that mean nothing on a CPU; skips them there."""
    if device != "cuda":
        message = "needs a GPU: run with --device cuda"
        if env.get("QUACK_REQUIRE_GPU"):
            pytest.fail(f"QUACK_REQUIRE_GPU is set, and the test {message}", pytrace=False)
        pytest.skip(message)
    return device


class Recorder:
    """Counts the outcomes of a run and writes its record at the end."""

    def __init__(self, config: pytest.Config, gpu: records.Gpu, path: Path) -> None:
        self.config = config
        self.gpu = gpu
        self.path = path
        self.outcome = ""
        self.counts = dict.fromkeys(("passed", "failed", "errors", "skipped", "xfailed"), 0)
        self.failures: list[str] = []
        self.skip_reasons: collections.Counter[str] = collections.Counter()
        self.before = records.fingerprints(config.rootpath)
        self.date = datetime.datetime.now(datetime.UTC)
        self.start = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.counts["failed" if report.when == "call" else "errors"] += 1
            self.failures.append(report.nodeid)
        elif report.skipped:
            kind = "xfailed" if hasattr(report, "wasxfail") else "skipped"
            self.counts[kind] += 1
            if kind == "skipped" and isinstance(report.longrepr, tuple):
                self.skip_reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
        elif report.when == "call":
            self.counts["passed"] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        # an interrupted run, or one without tests, is no evidence: the last record stays
        finished = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if exitstatus not in finished:
            self.outcome = f"no record: the run ended with exit status {int(exitstatus)}"
        elif self.before != records.fingerprints(self.config.rootpath):
            self.outcome = "no record: sources changed during the run"
        else:
            records.write(self.path, self.record())
            self.outcome = f"record of {self.gpu.arch} written to {self.path}"

    def record(self) -> dict[str, Any]:
        """The record as JSON types."""
        root = self.config.rootpath
        return {
            "format": records.FORMAT,
            "arch": self.gpu.arch,
            "gpu": {"name": self.gpu.name, "count": self.gpu.count},
            "driver": self.gpu.driver,
            "versions": {**records.versions(root), "cuda": self.gpu.cuda},
            "date": self.date.isoformat(timespec="seconds"),
            "duration_s": round(time.monotonic() - self.start, 3),
            "arguments": _without_folders(self.config.invocation_params.args, root),
            "counts": self.counts,
            "failures": sorted(self.failures),
            "skip_reasons": dict(sorted(self.skip_reasons.items())),
            "fingerprints": self.before,
        }


def _without_folders(arguments: Sequence[str], root: Path) -> list[str]:
    """The arguments, which tell a selection from the whole, without this machine's folders."""

    def shorten(text: str) -> str:
        path = Path(text)
        if not path.is_absolute():
            return text
        return str(path.relative_to(root)) if path.is_relative_to(root) else path.name

    return ["=".join(map(shorten, argument.split("=", 1))) for argument in arguments]
