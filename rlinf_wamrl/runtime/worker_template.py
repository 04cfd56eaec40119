"""A process that has imported what workers need, and forks itself for each of them.

A run on one machine has more than a dozen Python processes: RLinf's managers, channels and workers.
Each would spend 2 to 6 seconds of CPU time on importing PyTorch and what builds on it; a fork has
that at once, and shares its memory.

Before the fork nothing may start threads, touch an accelerator or import Ray, whose library reads
its worker's environment when it is loaded.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlinf_wamrl.runtime import worker_launcher
from rlinf_wamrl.runtime.worker_launcher import ADDRESS_VARIABLE, LENGTH_BYTES

__all__ = ["PRELOADED", "preload", "worker_template"]

PRELOADED = (
    "gymnasium",
    "networkx",
    "peft",
    "rlinf_wamrl.envs.rlinf_env",
    "rlinf_wamrl.rl.reward",
    "rlinf_wamrl.runtime.plugin",
    "rlinf_wamrl.wam.lora",
    "rlinf_wamrl.wam.pretrained",
    "scipy.optimize",
    "torch._dynamo.testing",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.export",
    "transformers.modeling_utils",
)
"""What is imported before the fork: the costly part of what RLinf's workers and ours import."""

_SOCKET = "workers.sock"
_KILLED = 128
"""Added to a signal's number, the status of a process that it ended."""


@contextlib.contextmanager
def worker_template(folder: Path, on_failure: Callable[[int], None]) -> Iterator[Path]:
    """Start the template for the body; it imports while the caller goes on.

    Args:
        folder: where its socket is.
        on_failure: called with the exit status, from another thread, if it ends too early.

    Yields:
        The script that Ray has to start for a worker.
    """
    address = folder / _SOCKET
    environment = {
        # as Ray would set it for an actor; libgomp reads it when PyTorch is imported
        "OMP_NUM_THREADS": "1",
        **os.environ,
        ADDRESS_VARIABLE: str(address),
    }
    os.environ[ADDRESS_VARIABLE] = str(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(address))
        listener.listen(64)  # launchers wait here until all is imported
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listener.fileno())],
            stdin=subprocess.PIPE,  # its end is the end of this process, however that comes
            pass_fds=[listener.fileno()],
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process alone
        )
    ending = threading.Event()

    def watch() -> None:
        status = process.wait()
        if not ending.is_set():
            on_failure(status)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield Path(worker_launcher.__file__).resolve()
    finally:
        ending.set()
        process.stdin.close()
        process.wait()


def main() -> None:
    """Serve workers; in each fork, go on as that worker."""
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        preload()
        request = _serve(listener)
    if request is None:
        os._exit(0)  # frozen objects would be reported as leaks
    atexit.register(gc.unfreeze)
    _become_worker(**request)


def preload() -> None:
    """Import what workers need.

    Raises:
        RuntimeError: Ray was imported with it; its workers would then wait for ever.
    """
    for module in PRELOADED:
        importlib.import_module(module)
        if "ray" in sys.modules:
            raise RuntimeError(f"{module} imports Ray: it cannot be imported before the fork")
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of every object


def _serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork until standard input ends; returns the request in a fork, None at the end."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, None)
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
    workers: dict[int, _Forked] = {}
    while True:
        for key, _ in selector.select():
            if key.fd == sys.stdin.fileno():
                return None
            if key.fd == listener.fileno():
                connection, _ = listener.accept()
                try:
                    request, streams = _receive(connection)
                except ConnectionError:  # Ray gave this worker up
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    for worker in workers.values():
                        worker.close()
                    connection.close()
                    for number, stream in enumerate(streams):
                        os.dup2(stream, number)
                        os.close(stream)
                    return request
                for stream in streams:
                    os.close(stream)
                forked = _Forked(pid, connection)
                workers[pid] = forked
                selector.register(forked.handle, selectors.EVENT_READ, forked)
                selector.register(connection, selectors.EVENT_READ, forked)
            elif key.data.pid in workers:  # it or its launcher ended
                forked = workers.pop(key.data.pid)
                selector.unregister(forked.handle)
                selector.unregister(forked.connection)
                forked.finish()


class _Forked:
    """A forked worker and the launcher that waits for it."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection
        self.handle = os.pidfd_open(pid)

    def finish(self) -> None:
        """End what is left of the two: tell the launcher the status, or kill the worker."""
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if not ended:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        else:
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):
                self.connection.send(bytes([code if code >= 0 else _KILLED - code]))
        self.close()

    def close(self) -> None:
        """Close both handles."""
        os.close(self.handle)
        self.connection.close()


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    length, streams, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 3)
    left = int.from_bytes(length, "big")
    pieces = []
    while left:
        piece = connection.recv(left)
        if not piece:
            raise ConnectionError("a launcher ended before it had sent its request")
        pieces.append(piece)
        left -= len(piece)
    return json.loads(b"".join(pieces)), list(streams)


def _become_worker(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Do what Ray's ``setup_worker.py`` does, and then run the worker here instead of exec."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs
    from ray.core.generated.common_pb2 import Language

    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, rest = parser.parse_known_args(arguments)
    context = RuntimeEnvContext.deserialize(known.serialized_runtime_env_context)
    if known.language != "PYTHON" or context.py_executable != sys.executable:
        context.exec_worker(rest, Language.Value(known.language))
    update_envs(context.env_vars)
    sys.argv = rest
    runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main()
