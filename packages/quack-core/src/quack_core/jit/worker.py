"""The process behind `pool.Pool`: it forks a worker for each kernel.

It imports the DSL and compiles a blank kernel once, so that a fork compiles the next one in a
fraction of a second; it never uses CUDA and stays single-threaded, so that forking is safe. It runs
apart from the process that wants kernels, whose environment, main module, threads and CUDA context
it has nothing to do with.

    python -m quack_core.jit.worker FILE_DESCRIPTOR WORKERS SECONDS

Over the connection come ``(number, module, pickled kernel)``, or None at the end, and back go
``(number, None or what went wrong)``.
"""

import contextlib
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait

from quack_core import arch
from quack_core.jit import cache
from quack_core.jit.keys import Kernel

Job = tuple[int, str, bytes]


@dataclass(frozen=True)
class Worker:
    """A fork at work.

    Args:
        number: of its job.
        pid: of the process.
        deadline: when it is taken for stuck, on the monotonic clock.
    """

    number: int
    pid: int
    deadline: float


def serve(parent: Connection, workers: int, seconds: float) -> None:
    """Compile what the parent asks for, until it says so or is gone.

    Args:
        parent: the other process.
        workers: how many kernels at a time.
        seconds: after which a worker is stopped.
    """
    waiting: deque[Job] = deque()
    running: dict[Connection, Worker] = {}
    try:
        while True:
            while waiting and len(running) < workers:
                answer, worker = _fork(waiting.popleft(), parent, list(running), seconds)
                running[answer] = worker
            deadlines = [worker.deadline for worker in running.values()]
            rest = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            for ready in wait([parent, *running], rest):
                assert isinstance(ready, Connection)
                if ready is parent:
                    job = parent.recv()
                    if job is None:
                        return
                    waiting.append(job)
                else:
                    parent.send(_finish(ready, running.pop(ready)))
            for answer, worker in list(running.items()):
                if worker.deadline <= time.monotonic():
                    os.kill(worker.pid, signal.SIGKILL)
                    parent.send(_finish(answer, running.pop(answer)))
    except (EOFError, OSError):  # the parent is gone
        return
    finally:
        for worker in running.values():
            os.kill(worker.pid, signal.SIGKILL)


def _fork(
    job: Job, parent: Connection, others: list[Connection], seconds: float
) -> tuple[Connection, Worker]:
    number, module, pickled = job
    with contextlib.suppress(Exception):  # the worker will say what is wrong with it
        importlib.import_module(module)  # once for all workers
    answer, answering = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        for each in (answer, parent, *others):
            each.close()
        _work(pickled, answering)
    answering.close()
    return answer, Worker(number, pid, time.monotonic() + seconds)


def _work(pickled: bytes, answering: Connection) -> None:
    """In the fork: compile, answer, end."""
    try:
        kernel: Kernel = pickle.loads(pickled)
        cache.ensure(kernel)
        answering.send(None)
    except BaseException:  # noqa: BLE001 - whatever it is goes to whoever wants the kernel
        answering.send(traceback.format_exc())
    finally:
        os._exit(0)


def _finish(answer: Connection, worker: Worker) -> tuple[int, str | None]:
    """The answer of a worker that has answered, has ended, or was stopped."""
    try:
        text: str | None = answer.recv()
    except (EOFError, OSError):
        text = ""
    answer.close()
    _, status = os.waitpid(worker.pid, 0)
    if text == "":
        code = os.waitstatus_to_exitcode(status)
        late = worker.deadline <= time.monotonic()
        text = "it took too long" if late else f"it ended with exit status {code}"
    return worker.number, text


def main() -> None:
    """Get ready, then serve."""
    descriptor, workers, seconds = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    from quack_core.jit import blank
    from quack_core.jit.compile import compile_kernel

    with contextlib.suppress(Exception):  # workers will meet the same and say so
        compile_kernel(blank.__name__, blank.BlankSpec(), blank.BlankConfig(), arch.ARCHS[0])
    serve(Connection(int(descriptor)), int(workers), float(seconds))


if __name__ == "__main__":
    main()
