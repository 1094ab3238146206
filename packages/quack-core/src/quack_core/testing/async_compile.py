"""``pytest --async-compile[=N]``: worker processes compile kernels while other tests run.

A test whose kernel is not ready is deferred: its attempt is not reported, and it runs again when the
others are through and the kernel is there. Kernels that a worker fails at are compiled by the test
itself, which then shows the real error. Under xdist each of its processes has its share of the N.
"""

import contextlib
import os
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
from _pytest.runner import runtestprotocol  # pytest has no public name for it

from quack_core.jit.pool import Deferred, Pool

MAX_ATTEMPTS = 50
"""A test that asks for new kernels each time compiles them itself in the end."""

MARKER = "compiles_here"


def add_option(group: Any) -> None:
    """Add the option to a group of options."""
    group.addoption(
        "--async-compile",
        metavar="N",
        nargs="?",
        type=int,
        const=len(os.sched_getaffinity(0)),
        default=0,
        help="compile kernels in N processes (default: one per core) while other tests run",
    )


def register(config: pytest.Config) -> None:
    """Act on the option, and make the marker known."""
    text = f"{MARKER}: a test of compiling itself, which --async-compile leaves alone"
    config.addinivalue_line("markers", text)
    processes = config.getoption("async_compile")
    if processes < 0:
        raise pytest.UsageError(f"--async-compile={processes}: must be at least 0")
    if not processes or config.option.collectonly:
        return
    worker = getattr(config, "workerinput", None)
    if worker is None:
        config.pluginmanager.register(Ledger(), "quack-ledger")
    if worker is not None or not getattr(config.option, "numprocesses", None):
        share = processes // (worker["workercount"] if worker else 1)
        config.pluginmanager.register(Deferral(Pool(share)), "quack-deferral")


@dataclass(frozen=True, eq=False)
class Attempt:
    """A test that has to run again.

    Args:
        item: the test.
        number: of attempts so far.
        kernels: are done when the kernels that it lacked are.
    """

    item: pytest.Item
    number: int
    kernels: tuple["Future[None]", ...]


class Deferral:
    """Runs tests, and those whose kernels were not ready once more in the end."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.waiting: list[Attempt] = []
        self._attempts: dict[pytest.Item, int] = {}
        self._lacking: list[Future[None]] = []  # in the present attempt

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        try:
            result = yield
            for item in self._ready(session):
                _tell_xdist(session, item)
                # Nothing of it is kept for a next test, not even a fixture that was deferred.
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            return result
        finally:
            self.pool.close()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        number = self._attempts[item] = self._attempts.get(item, 0) + 1
        self._lacking.clear()
        here = number == MAX_ATTEMPTS or item.get_closest_marker(MARKER) is not None
        deferring = self.pool.deferring(self._lacking.append)
        with contextlib.nullcontext() if here else deferring:
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if self._lacking and not here:  # whatever came of it
            self.waiting.append(Attempt(item, number, tuple(self._lacking)))
            return True
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: Any
    ) -> Generator[None, object, object]:
        try:
            return (yield)
        except Deferred as deferred:
            # pytest remembers, for other tests of a wide scope, what a fixture raised; but not for
            # errors that are neither Exceptions nor outcomes of its own.
            error = pytest.fail.Exception(str(deferred))
            fixturedef.cached_result = (None, fixturedef.cache_key(request), (error, None))
            raise error from deferred

    def pytest_runtest_makereport(self, call: pytest.CallInfo[Any]) -> None:
        if call.excinfo is not None:  # perhaps of a fixture that was deferred for another test
            for error in (call.excinfo.value, call.excinfo.value.__cause__):
                if isinstance(error, Deferred):
                    self._lacking.append(error.done)

    def _ready(self, session: pytest.Session) -> Iterator[pytest.Item]:
        """The tests to run again, each when its kernels are there."""
        while self.waiting and not (session.shouldfail or session.shouldstop):
            ready = [each for each in self.waiting if all(k.done() for k in each.kernels)]
            for attempt in ready:
                self.waiting.remove(attempt)
                yield attempt.item
                if session.shouldfail or session.shouldstop:
                    return
            if not ready:
                self.pool.wait(k for each in self.waiting for k in each.kernels if not k.done())


class Ledger:
    """Fails a session that ends without a result for each test."""

    def __init__(self) -> None:
        self.collected: set[str] = set()
        self.finished: set[str] = set()
        self.lost: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected |= {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.collected |= set(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown" or report.failed:
            self.finished.add(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK:
            self.lost = sorted(self.collected - self.finished)
            if self.lost:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.lost:
            terminalreporter.section("tests without a result")
            for nodeid in self.lost:
                terminalreporter.line(nodeid, red=True)


def _tell_xdist(session: pytest.Session, item: pytest.Item) -> None:
    """A process of xdist reports by the number of the test; it has to know which one runs."""
    for plugin in session.config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            plugin.item_index = session.items.index(item)
