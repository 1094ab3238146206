"""Kernels compiled in other processes, while this one goes on.

    with Pool(8) as pool, pool.deferring():
        ...  # a call whose kernel is not ready raises Deferred: make it again later

Workers see no GPU. They leave kernels in the cache on disk, where this process finds them. Whatever
goes wrong with a worker, this process compiles the kernel itself, and so shows the real error; no
worker is waited for longer than ``seconds``.
"""

import contextlib
import itertools
import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import Self

from quack_core import log

from . import policy, stats, store
from .keys import Kernel, Key

SECONDS = 300.0
"""A worker that takes longer is stuck: kernels compile in up to ten seconds."""

START_SECONDS = 60.0
"""What starting takes at most, on a machine with too few cores."""

AHEAD = 4
"""Jobs that wait at the workers' side, so that none idles. More could fill the pipe to workers that
do not read it, and sending would block."""


class WorkerError(RuntimeError):
    """A worker did not compile a kernel; the message says why."""


class Deferred(BaseException):
    """A kernel is being compiled by a worker: make the call again later.

    It is no Exception, so that code between the operator and whoever defers does not handle it.

    Args:
        kernel: which one.
        done: is done when the worker is.
    """

    def __init__(self, kernel: Kernel, done: "Future[None]") -> None:
        super().__init__(f"{kernel.name} for {kernel.arch.target} is being compiled")
        self.kernel = kernel
        self.done = done


class Pool:
    """Worker processes that compile kernels into the cache on disk; they start with the first one.

    Args:
        workers: how many kernels at a time.
        seconds: how long a kernel may take before its worker is given up.
    """

    def __init__(self, workers: int, seconds: float = SECONDS) -> None:
        self.workers, self.seconds = max(1, workers), seconds
        self._lock = threading.Lock()
        self._jobs: dict[str, Future[None]] = {}  # by digest
        self._queue: deque[tuple[Kernel, Future[None]]] = deque()  # not sent yet
        self._sent: dict[int, tuple[Future[None], float]] = {}  # by number, with the time
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, kernel: Kernel) -> "Future[None]":
        """Have a kernel compiled; what fails is a WorkerError in the answer, never raised here.

        Args:
            kernel: asked for again, it has the same answer.
        """
        return self._submit(kernel, kernel.key())

    def compile(
        self, kernels: Iterable[Kernel], done: Callable[[Kernel, str | None], None]
    ) -> None:
        """Compile kernels; returns when all are done or given up.

        Args:
            kernels: for those on disk already, a worker only looks.
            done: called with each as it gets ready, and with what went wrong or None.
        """
        waiting = {self.submit(kernel): kernel for kernel in kernels}
        while waiting:
            ready, _ = wait(waiting, timeout=1.0, return_when="FIRST_COMPLETED")
            self._give_up_late_ones()
            for future in ready:
                error = future.exception()
                done(waiting.pop(future), None if error is None else str(error))

    @contextlib.contextmanager
    def deferring(self, notify: "Callable[[Future[None]], None] | None" = None) -> Iterator[None]:
        """Inside, a call whose kernel has to be compiled raises Deferred, and a worker compiles it.

        Without a cache on disk, and for what workers failed at, the call compiles as usual.

        Args:
            notify: called before Deferred is raised, with what it holds, on the thread of the call.
        """

        def on_miss(kernel: Kernel, key: Key) -> None:
            try:
                self._on_miss(kernel, key)
            except Deferred as deferred:
                if notify is not None:
                    notify(deferred.done)
                raise

        with policy.during(on_miss):
            yield

    def wait(self, deferred: Iterable["Future[None]"]) -> None:
        """Return when one of these is done; one that takes too long is done as well."""
        futures = list(deferred)
        while futures and not wait(futures, timeout=0.2, return_when="FIRST_COMPLETED").done:
            self._give_up_late_ones()

    def close(self) -> None:
        """Stop the workers; what they did not finish fails."""
        with self._lock:
            self._closed = True
            process, self._process = self._process, None
            if process is not None:
                with contextlib.suppress(OSError):  # they may be gone
                    self._connection.send(None)
        if process is not None:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._finish_all("the pool was closed")

    def _on_miss(self, kernel: Kernel, key: Key) -> None:
        if store.folder() is None or self._closed:
            return
        done = self._submit(kernel, key)
        if not done.done():
            stats.count(deferred=1)
            raise Deferred(kernel, done)
        if error := done.exception():
            text = "a worker did not compile %s (%s): compiling here"
            log.get("quack.jit").warning(text, kernel.name, str(error).strip().split("\n")[-1])

    def _submit(self, kernel: Kernel, key: Key) -> "Future[None]":
        with self._lock:
            future = self._jobs.get(key.digest)
            if future is None:
                future = self._jobs[key.digest] = Future()
                self._queue.append((kernel, future))
                self._send_some()
        return future

    def _send_some(self) -> None:
        """Keep the workers busy; the caller holds the lock."""
        while self._queue and len(self._sent) < self.workers + AHEAD:
            self._send(*self._queue.popleft())

    def _send(self, kernel: Kernel, future: "Future[None]") -> None:
        try:
            if self._closed:
                raise WorkerError("the pool is closed")
            pickled = pickle.dumps(kernel)
            if self._process is None:
                self._start(kernel)
            number = next(self._numbers)
            self._sent[number] = future, time.monotonic()
            self._connection.send((number, kernel.module, pickled))
        except Exception as error:  # noqa: BLE001 - such as a class that cannot be pickled
            _resolve(future, f"{type(error).__name__}: {error}")

    def _start(self, kernel: Kernel) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": "",
            "CUTE_DSL_ARCH": kernel.arch.target,
            "QUACK_ARCH": kernel.arch.target,
            "QUACK_JIT": "allow",
            "QUACK_LOG": "",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        arguments = (theirs.fileno(), self.workers, self.seconds)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "quack_core.jit.worker", *map(str, arguments)],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        threading.Thread(target=self._listen, name="quack-pool", daemon=True).start()

    def _listen(self) -> None:
        """In a thread: hand out answers, until the workers are gone."""
        connection = self._connection
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, text = connection.recv()
                with self._lock:
                    future, _ = self._sent.pop(number, (None, 0.0))
                    self._send_some()
                if future is not None:  # else it was given up
                    _resolve(future, text)
        self._fail("the workers ended")
        connection.close()

    def _give_up_late_ones(self) -> None:
        """If the process behind the workers is stuck itself, go on without it.

        It answers within the time of a job, and of those that the job waited for.
        """
        limit = START_SECONDS + (1 + math.ceil(AHEAD / self.workers)) * self.seconds
        with self._lock:
            oldest = min((sent for _, sent in self._sent.values()), default=None)
        if oldest is not None and time.monotonic() - oldest > limit:
            self._fail("the workers do not answer")
            if self._process is not None:
                self._process.kill()

    def _fail(self, why: str) -> None:
        """Go on without workers, and say so once."""
        with self._lock:
            news, self._closed = not self._closed, True
        if news:
            log.get("quack.jit").warning("%s: kernels are compiled in this process now", why)
        self._finish_all(why)

    def _finish_all(self, why: str) -> None:
        with self._lock:
            futures = [future for future, _ in self._sent.values()]
            futures += [future for _, future in self._queue]
            self._sent.clear()
            self._queue.clear()
        for future in futures:
            _resolve(future, why)


def _resolve(future: "Future[None]", text: str | None) -> None:
    """Set the answer, unless it is set."""
    with contextlib.suppress(Exception):  # InvalidStateError: it is
        if text is None:
            future.set_result(None)
        else:
            future.set_exception(WorkerError(text))
