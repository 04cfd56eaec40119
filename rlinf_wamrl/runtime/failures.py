"""How a failing worker reaches the user: one exception with the worker's own words."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = [
    "EXPECTED_ERRORS",
    "WorkerFailedError",
    "raise_worker_failures",
    "stop_waiting",
    "waiting_thread",
]


class WorkerFailedError(RuntimeError):
    """A worker failed or died; the message is the worker's own error."""

    def __init__(self, worker: str, function: str, cause: BaseException) -> None:
        """Summarise ``cause``, which Ray raised when ``worker.function`` was awaited."""
        self.worker = worker
        self.function = function
        self.cause = cause
        super().__init__(f"{worker}.{function}: {summary(cause)}")


EXPECTED_ERRORS = (WorkerFailedError, ConnectionError, ValueError, FileNotFoundError, RuntimeError)
"""Errors whose message suffices; anything else is a bug and shows its traceback."""

_failure: WorkerFailedError | None = None
_stopping = threading.Event()
_waiting: set[threading.Thread] = set()


def summary(error: BaseException) -> str:
    """Return the innermost error of a Ray exception in one line or a few."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException) and cause is not error:
        return summary(cause)
    name = type(error).__name__
    if name in ("ActorDiedError", "RayActorError", "ActorUnavailableError"):
        return (
            "the process died without a Python error (killed, out of memory, or a crash in a "
            f"native library): {str(error).splitlines()[0]}"
        )
    return f"{name}: {error}"


def record_failure(worker: str, function: str, error: BaseException) -> None:
    """Remember the first failure and wake the main thread, whatever it waits for."""
    global _failure
    if _stopping.is_set():  # workers end because the run does
        return
    if _failure is None:
        _failure = WorkerFailedError(worker, function, error)
    os.kill(os.getpid(), signal.SIGUSR1)


def raise_worker_failures() -> None:
    """Make SIGUSR1 raise the recorded failure in the main thread.

    RLinf signals itself so when a worker fails; its own handler queries a dashboard that need not
    run, and then exits with status 255.
    """

    def handler(_signum: int, _frame: Any) -> None:
        if _failure is not None and not _stopping.is_set():
            raise _failure

    _stopping.clear()
    signal.signal(signal.SIGUSR1, handler)


@contextmanager
def waiting_thread() -> Iterator[threading.Event]:
    """Register the current thread as one that waits for workers, while the body lasts.

    Yields:
        An event that is set when the run ends; the body then returns soon, calling Ray no more.
    """
    thread = threading.current_thread()
    _waiting.add(thread)
    try:
        yield _stopping
    finally:
        _waiting.discard(thread)


def stop_waiting(timeout: float = 20.0) -> None:
    """End the threads that wait for workers, as Ray demands before it is shut down.

    A thread that calls Ray after its shutdown makes Ray end the whole process with status 1.

    Args:
        timeout: seconds to wait for all of them together.
    """
    _stopping.set()
    until = time.monotonic() + timeout
    for thread in list(_waiting):
        thread.join(max(0.0, until - time.monotonic()))
