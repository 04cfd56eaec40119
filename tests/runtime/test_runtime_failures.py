"""How failures of workers are summarised, and how a signal becomes an exception."""

import signal

import pytest

from rlinf_wamrl.runtime import failures
from rlinf_wamrl.runtime.failures import WorkerFailedError, raise_worker_failures, record_failure


class RemoteError(Exception):
    """Looks like Ray's wrapper: it holds the worker's own exception."""

    def __init__(self, cause):
        super().__init__("long remote traceback")
        self.cause = cause


class ActorDiedError(Exception):
    pass


@pytest.fixture(autouse=True)
def clean():
    before = signal.getsignal(signal.SIGUSR1)
    failures._failure = None
    yield
    failures._failure = None
    signal.signal(signal.SIGUSR1, before)


def test_the_innermost_error_is_what_the_user_reads():
    error = WorkerFailedError("WAMEnvWorker", "interact", RemoteError(ValueError("bad states")))
    assert str(error) == "WAMEnvWorker.interact: ValueError: bad states"


def test_a_killed_process_is_called_so():
    error = WorkerFailedError("WAMLearner", "run_training", ActorDiedError("exit code 137"))
    assert "died without a Python error" in str(error) and "137" in str(error)


def test_a_recorded_failure_interrupts_the_main_thread():
    raise_worker_failures()
    with pytest.raises(WorkerFailedError, match="out of states"):
        record_failure("WAMEnvWorker", "interact", ValueError("out of states"))


def test_the_first_failure_wins():
    raise_worker_failures()
    with pytest.raises(WorkerFailedError, match="first"):
        record_failure("A", "f", ValueError("first"))
    with pytest.raises(WorkerFailedError, match="first"):
        record_failure("B", "g", ValueError("second, a consequence"))
