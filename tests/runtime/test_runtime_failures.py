"""How failures of workers are summarised, and how a signal becomes an exception."""

import signal
import threading
import time

import pytest

from rlinf_wamrl.runtime import failures
from rlinf_wamrl.runtime.failures import (
    WorkerFailedError,
    raise_worker_failures,
    record_failure,
    stop_waiting,
    waiting_thread,
)
from rlinf_wamrl.runtime.rlinf_compat import report_worker_failures


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
    failures._stopping.clear()
    yield
    failures._failure = None
    failures._stopping.clear()
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


def test_waiting_threads_end_before_the_run_does_and_report_nothing_more():
    raise_worker_failures()
    ended = threading.Event()

    def wait():
        with waiting_thread() as stopping:
            stopping.wait()
            record_failure("WAMEnvWorker", "interact", ActorDiedError("killed by the end of Ray"))
            ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    while thread not in failures._waiting:
        time.sleep(0.001)
    stop_waiting()
    assert ended.is_set() and not thread.is_alive()
    assert failures._failure is None


def test_a_thread_that_starts_late_sees_at_once_that_the_run_ends():
    stop_waiting()
    with waiting_thread() as stopping:
        assert stopping.is_set()


def test_the_wait_of_a_result_ends_with_the_run(monkeypatch):
    from types import SimpleNamespace

    import ray
    from rlinf.scheduler.worker import worker_group

    def never(_references, timeout):
        time.sleep(timeout)
        raise ray.exceptions.GetTimeoutError("not ready")

    original = worker_group.WorkerGroupFuncResult._wait_for_results
    monkeypatch.setattr(worker_group.WorkerGroupFuncResult, "_wait_for_results", original)
    report_worker_failures()
    raise_worker_failures()
    monkeypatch.setattr(ray, "get", never)
    result = SimpleNamespace(_remote_results=[], _wait_done=False)
    wait = worker_group.WorkerGroupFuncResult._wait_for_results
    thread = threading.Thread(target=wait, args=(result,))
    thread.start()
    while thread not in failures._waiting:
        time.sleep(0.001)
    stop_waiting()
    assert not thread.is_alive() and not result._wait_done
