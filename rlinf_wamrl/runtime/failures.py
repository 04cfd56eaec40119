"""How a failing worker reaches the user: one exception with the worker's own words."""

from __future__ import annotations

import os
import signal
from typing import Any

__all__ = ["EXPECTED_ERRORS", "WorkerFailedError", "raise_worker_failures"]


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
    if _failure is None:
        _failure = WorkerFailedError(worker, function, error)
    os.kill(os.getpid(), signal.SIGUSR1)


def raise_worker_failures() -> None:
    """Make SIGUSR1 raise the recorded failure in the main thread.

    RLinf signals itself so when a worker fails; its own handler queries a dashboard that need not
    run, and then exits with status 255.
    """

    def handler(_signum: int, _frame: Any) -> None:
        if _failure is not None:
            raise _failure

    signal.signal(signal.SIGUSR1, handler)
