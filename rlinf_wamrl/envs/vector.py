"""Many episodes side by side in sub-processes, with frames in shared memory."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Hashable, Set
from dataclasses import dataclass
from multiprocessing import connection

import numpy as np

from rlinf_wamrl.envs.rendering import choose_renderer
from rlinf_wamrl.envs.settings import EnvSettings
from rlinf_wamrl.envs.shared_memory import ArrayLayout, SharedArrays
from rlinf_wamrl.envs.suites import TaskSpec
from rlinf_wamrl.envs.worker_process import (
    Answer,
    EpisodeSpec,
    ResetCommand,
    RunningEpisode,
    StepCommand,
    WorkerSetup,
)

__all__ = ["EnvironmentProcessError", "VectorEnv", "VectorSettings", "spread"]

logger = logging.getLogger(__name__)

MAX_CHUNK = 128
# Not `python -m`: the messages' classes would exist twice, once in __main__.
_CHILD_PROGRAM = "from rlinf_wamrl.envs.worker_process import main; main()"


class EnvironmentProcessError(RuntimeError):
    """A sub-process raised, died or hangs; the message carries its own traceback or signal."""


class _ProcessLostError(EnvironmentProcessError):
    """A sub-process died or hangs: a new one may do better."""


@dataclass(frozen=True, kw_only=True)
class VectorSettings:
    """How episodes are spread over processes and guarded."""

    num_envs: int
    num_processes: int
    frame_offsets: tuple[int, ...]  # steps into a chunk whose pictures are kept
    max_built_tasks: int  # built environments a process keeps beyond those it needs
    timeout_seconds: float = 300.0  # for one reset or chunk of one process
    restarts: int = 3  # replacements of a dead or hanging process before giving up; 0: none


def spread(candidates: dict[Hashable, Set[int]]) -> dict[int, list[Hashable]]:
    """Share items evenly among the processes that can take each.

    Args:
        candidates: Item -> processes that can take it, at least one.

    Returns:
        Process -> its items; processes without any are left out.
    """
    shares = {process: [] for process in sorted(set().union(*candidates.values()))}
    # Those with the least choice first; the others even out the rest.
    for item in sorted(candidates, key=lambda item: len(candidates[item])):
        shares[min(sorted(candidates[item]), key=lambda p: len(shares[p]))].append(item)
    return {process: items for process, items in shares.items() if items}


class VectorEnv:
    """Runs ``num_envs`` episodes in sub-processes that start at the first reset.

    Episodes that start alike are started once. Before each chunk the running ones are shared
    evenly among the processes: some end early, and a fixed place would leave a core idle. Only
    processes that have built an episode's task take it; at the start of a round process
    ``i * num_processes // num_envs`` builds the task of slot ``i``, so that neighbours, which share
    a task in a group, share a built environment.

    Args:
        tasks: Task id -> task.
        env_settings: Drawing and settling.
        settings: Processes.
    """

    def __init__(
        self, tasks: dict[int, TaskSpec], env_settings: EnvSettings, settings: VectorSettings
    ) -> None:
        self.settings = settings
        n, size, frames = settings.num_envs, env_settings.image_size, len(settings.frame_offsets)
        layout = ArrayLayout(
            entries=(
                ("actions", (n, MAX_CHUNK, 7), "f8"),
                ("main", (n, size, size, 3), "u1"),
                ("wrist", (n, size, size, 3), "u1"),
                ("proprio", (n, 8), "f8"),
                ("frames", (n, frames, 3, size, 2 * size), "u1"),
                ("frame_proprio", (n, frames, 8), "f8"),
                ("frame_mask", (n, frames), "?"),
                ("executed", (n, MAX_CHUNK), "?"),
                ("success", (n,), "?"),
            )
        )
        self.arrays = SharedArrays(layout)
        self._setup = WorkerSetup(
            tasks=tasks,
            settings=env_settings,
            layout=layout,
            frame_offsets=settings.frame_offsets,
            max_built_tasks=settings.max_built_tasks,
        )
        self._episodes: dict[int, RunningEpisode] = {}
        self._processes: list[_Process | None] = [None] * settings.num_processes
        self._restarts_left = settings.restarts
        self._finalizer = weakref.finalize(self, _stop, self._processes)

    def reset(self, episodes: dict[int, EpisodeSpec]) -> None:
        """End all episodes, start one in each named slot, write first observations to ``arrays``.

        Raises:
            EnvironmentProcessError: A process failed.
        """
        homes: dict[EpisodeSpec, set[int]] = {}
        first: dict[EpisodeSpec, int] = {}
        task_ids: dict[int, set[int]] = {}
        for slot, spec in episodes.items():
            home = slot * self.settings.num_processes // self.settings.num_envs
            homes.setdefault(spec, set()).add(home)
            first.setdefault(spec, slot)
            task_ids.setdefault(home, set()).add(spec.task_id)
        shares = spread(homes)
        states = self._execute(
            {
                process: ResetCommand(
                    episodes={first[spec]: spec for spec in shares.get(process, ())},
                    task_ids=frozenset(tasks),
                )
                for process, tasks in task_ids.items()
            }
        )
        for slot, spec in episodes.items():
            for name in ("main", "wrist", "proprio"):
                self.arrays[name][slot] = self.arrays[name][first[spec]]
        self._episodes = {
            slot: RunningEpisode(spec=spec, steps=0, state=states[first[spec]])
            for slot, spec in episodes.items()
        }

    def step(self, actions: np.ndarray, slots: list[int]) -> None:
        """Execute a chunk in each named slot, until its task is solved or its limit is reached.

        Results are in ``arrays``: ``executed`` [n, MAX_CHUNK], ``success`` [n], the observation at
        the end of what was executed, and the ``frames`` on the way.

        Args:
            actions: float [num_envs, C, 7].
            slots: Slots whose episode goes on.

        Raises:
            EnvironmentProcessError: A process failed.
        """
        length = actions.shape[1]
        self.arrays["actions"][:, :length] = actions
        shares = spread({slot: self._places(self._episodes[slot].spec.task_id) for slot in slots})
        states = self._execute(
            {
                process: StepCommand(
                    episodes={slot: self._episodes[slot] for slot in members}, length=length
                )
                for process, members in shares.items()
            }
        )
        for slot in slots:
            episode = self._episodes.pop(slot)
            steps = episode.steps + int(self.arrays["executed"][slot].sum())
            if not self.arrays["success"][slot] and steps < episode.spec.max_steps:
                self._episodes[slot] = RunningEpisode(
                    spec=episode.spec, steps=steps, state=states[slot]
                )

    def process_ids(self) -> list[int]:
        """Operating system ids of the running sub-processes."""
        return [process.popen.pid for process in self._processes if process is not None]

    def close(self) -> None:
        """Stop all sub-processes; the next reset starts new ones."""
        _stop(self._processes)
        self._episodes.clear()

    def _places(self, task_id: int) -> set[int]:
        """Processes that have built a task; all if none has, as after a death."""
        everyone = range(self.settings.num_processes)
        running = {i for i in everyone if self._processes[i] is not None}
        return {i for i in running if task_id in self._processes[i].built} or set(everyone)

    def _execute(self, commands: dict[int, ResetCommand | StepCommand]) -> dict[int, bytes]:
        """Send commands to processes; return the states of all episodes in them."""
        states: dict[int, bytes] = {}
        try:
            for process, command in commands.items():
                self._running(process).send(command)
            waiting = dict(commands)
            deadline = time.monotonic() + self.settings.timeout_seconds
            while waiting:
                pipes = {self._processes[p].pipe: p for p in waiting}
                ready = connection.wait(list(pipes), max(0.0, deadline - time.monotonic()))
                for index in [pipes[pipe] for pipe in ready] or list(waiting):
                    try:
                        states.update(self._processes[index].receive(hangs=not ready).states)
                        del waiting[index]
                    except _ProcessLostError as error:
                        self._replace(index, waiting[index], error)
                        deadline = time.monotonic() + self.settings.timeout_seconds
        except BaseException:
            # After a failure or Ctrl-C no answer can be matched to its question any more.
            _stop(self._processes)
            raise
        return states

    def _running(self, index: int) -> _Process:
        if self._processes[index] is None:
            self._processes[index] = _Process(self._setup, self.arrays, index)
        return self._processes[index]

    def _replace(self, index: int, command, error: _ProcessLostError) -> None:
        """Start a new process and give it the command, which brings its episodes' states."""
        if self._restarts_left == 0:
            raise error
        self._restarts_left -= 1
        logger.warning("%s\nIt is replaced, and the chunk is run again.", error)
        _stop([self._processes[index]])
        self._processes[index] = None
        self._running(index).send(command)


class _Process:
    """One sub-process, its pipe and the file its error output goes to."""

    def __init__(self, setup: WorkerSetup, arrays: SharedArrays, index: int) -> None:
        choose_renderer()  # a missing library is told by the parent, in words
        self.index = index
        self.built: frozenset[int] = frozenset()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by _stop
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", _CHILD_PROGRAM]
        command += [str(theirs.fileno()), str(arrays.descriptor), str(os.getpid())]
        # A child dies with the thread that started it, so that must be one that stays.
        self.popen = (
            _spawner()
            .submit(
                subprocess.Popen,
                command,
                stdin=subprocess.DEVNULL,
                stdout=self.errors,
                stderr=self.errors,
                pass_fds=(theirs.fileno(), arrays.descriptor),
                env=_child_environment(),
            )
            .result()
        )
        theirs.close()
        self.pipe = connection.Connection(ours.detach())
        self.send(setup)

    def send(self, message) -> None:
        # A death is told when the answer is awaited.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(message)

    def receive(self, hangs: bool) -> Answer:
        """Take the answer to the last command.

        Raises:
            EnvironmentProcessError: It is a traceback.
            _ProcessLostError: The process is dead, or ``hangs``.
        """
        name = f"environment process {self.index} (pid {self.popen.pid})"
        if hangs:
            self.popen.send_signal(signal.SIGUSR1)  # makes it write where it hangs
            time.sleep(0.5)
            raise _ProcessLostError(f"{name} does not answer.\n{self._error_output()}")
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            code = self.popen.wait()
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            )
            # Only what comes from outside may go better a second time.
            kind = _ProcessLostError if code < 0 else EnvironmentProcessError
            raise kind(f"{name} {how}.\n{self._error_output()}") from None
        if not isinstance(answer, Answer):
            raise EnvironmentProcessError(f"{name} failed:\n{answer}")
        self.built = answer.built
        return answer

    def _error_output(self) -> str:
        # The child shares the file's position, so it is read without moving it.
        content = os.pread(self.errors.fileno(), os.fstat(self.errors.fileno()).st_size, 0)
        return "\n".join(content.decode(errors="replace").splitlines()[-40:])


def _stop(processes: list[_Process | None]) -> None:
    """Ask all to end by closing their pipes, and kill those that are in the middle of something."""
    running = [process for process in processes if process is not None]
    processes[:] = [None] * len(processes)
    for process in running:
        process.pipe.close()
    deadline = time.monotonic() + 0.5
    for process in running:
        try:
            process.popen.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.popen.kill()
            process.popen.wait()
        process.errors.close()


_SPAWNER: concurrent.futures.ThreadPoolExecutor | None = None


def _spawner() -> concurrent.futures.ThreadPoolExecutor:
    global _SPAWNER
    if _SPAWNER is None:
        _SPAWNER = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="env-spawner")
    return _SPAWNER


def _child_environment() -> dict[str, str]:
    environment = dict(os.environ)
    # One core per process; the software renderer would start a thread per core as well.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
        environment[name] = "1"
    environment["LP_NUM_THREADS"] = "0"
    environment["PYTHONSAFEPATH"] = "1"  # no module from the folder the run was started in
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return environment
