"""The program of an environment sub-process.

It imports no torch and holds one built environment per task it was asked for. Episodes do not
live here: a command brings their states and the answer takes them along, so any process can go on
with any episode, and memory does not grow with the number of episodes. Pictures go to the parent
through shared memory; the pipe carries small messages only.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass
from multiprocessing.connection import Connection

from rlinf_wamrl.envs.libero import LiberoEnv
from rlinf_wamrl.envs.settings import EnvSettings, Observation
from rlinf_wamrl.envs.shared_memory import ArrayLayout, SharedArrays
from rlinf_wamrl.envs.suites import TaskSpec

__all__ = [
    "Answer",
    "EpisodeSpec",
    "ResetCommand",
    "RunningEpisode",
    "StepCommand",
    "WorkerSetup",
    "main",
]

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class EpisodeSpec:
    """What fixes an episode before its first action."""

    task_id: int
    init_state_id: int
    scene_seed: int
    max_steps: int


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """First message to a sub-process."""

    tasks: dict[int, TaskSpec]
    settings: EnvSettings
    layout: ArrayLayout
    frame_offsets: tuple[int, ...]  # steps after the start of a chunk whose pictures are kept
    max_built_tasks: int


@dataclass(frozen=True, kw_only=True)
class RunningEpisode:
    """An episode between two chunks."""

    spec: EpisodeSpec
    steps: int  # executed so far
    state: bytes  # a pickled SimulationState, which only sub-processes read


@dataclass(frozen=True, kw_only=True)
class ResetCommand:
    """Start episodes, and build what the process may be asked to go on with."""

    episodes: dict[int, EpisodeSpec]  # slot -> episode
    task_ids: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class StepCommand:
    """Execute a chunk of ``length`` actions, found in shared memory, in each episode."""

    episodes: dict[int, RunningEpisode]  # slot -> episode
    length: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Where the episodes of a command stand now, and which tasks are built in the process."""

    states: dict[int, bytes]  # slot -> RunningEpisode.state
    built: frozenset[int]


class _Worker:
    """Executes commands; results are written to shared memory."""

    def __init__(self, setup: WorkerSetup, arrays: SharedArrays) -> None:
        self._setup = setup
        self._arrays = arrays
        self._built: OrderedDict[int, LiberoEnv] = OrderedDict()

    def reset(self, command: ResetCommand) -> Answer:
        self._build(command.task_ids)
        states = {}
        for index, spec in command.episodes.items():
            env = self._built[spec.task_id]
            self._write_observation(index, env.reset(spec.init_state_id, spec.scene_seed))
            states[index] = pickle.dumps(env.save_state())
        return Answer(states=states, built=frozenset(self._built))

    def step(self, command: StepCommand) -> Answer:
        # A process that took the place of a dead one has built nothing yet.
        self._build({episode.spec.task_id for episode in command.episodes.values()})
        states = {}
        for index, episode in command.episodes.items():
            env = self._built[episode.spec.task_id]
            env.load_state(pickle.loads(episode.state))
            self._run_chunk(index, env, episode.spec.max_steps - episode.steps, command.length)
            states[index] = pickle.dumps(env.save_state())
        return Answer(states=states, built=frozenset(self._built))

    def _run_chunk(self, index: int, env: LiberoEnv, steps_left: int, length: int) -> None:
        arrays, offsets = self._arrays, self._setup.frame_offsets
        arrays["executed"][index] = False
        arrays["frame_mask"][index] = False
        arrays["frames"][index] = 0
        arrays["frame_proprio"][index] = 0.0
        arrays["success"][index] = False
        for step in range(1, length + 1):
            last = step in (length, steps_left)
            solved, observation = env.step(
                arrays["actions"][index, step - 1], observe=last or step in offsets
            )
            arrays["executed"][index, step - 1] = True
            if observation is not None and step in offsets:
                self._write_frame(index, offsets.index(step), observation)
            if solved or last:
                arrays["success"][index] = solved
                self._write_observation(index, observation)
                break

    def _build(self, task_ids: Set[int]) -> None:
        """Build what is needed, after dropping what was not used for longest, down to the bound."""
        total = len(task_ids | set(self._built))
        for task_id in [task for task in self._built if task not in task_ids]:
            if total <= self._setup.max_built_tasks:
                break
            self._built.pop(task_id).close()
            total -= 1
        for task_id in sorted(task_ids):
            if task_id not in self._built:
                self._built[task_id] = LiberoEnv(self._setup.tasks[task_id], self._setup.settings)
                # Compiling the model leaves freed heap behind.
                ctypes.CDLL(None).malloc_trim(0)
            self._built.move_to_end(task_id)

    def _write_observation(self, index: int, observation: Observation) -> None:
        self._arrays["main"][index] = observation.main
        self._arrays["wrist"][index] = observation.wrist
        self._arrays["proprio"][index] = observation.proprio

    def _write_frame(self, index: int, position: int, observation: Observation) -> None:
        width = observation.main.shape[1]
        frame = self._arrays["frames"][index, position]
        frame[:, :, :width] = observation.main.transpose(2, 0, 1)
        frame[:, :, width:] = observation.wrist.transpose(2, 0, 1)
        self._arrays["frame_proprio"][index, position] = observation.proprio
        self._arrays["frame_mask"][index, position] = True


def main() -> None:
    """Serve commands until the parent closes the pipe or dies."""
    pipe_descriptor, memory_descriptor, parent = (int(value) for value in sys.argv[1:4])
    _die_with_parent(parent)
    # Ctrl-C reaches the whole terminal group; the parent decides what becomes of its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    pipe = Connection(pipe_descriptor)
    try:
        setup: WorkerSetup = pipe.recv()
        worker = _Worker(setup, SharedArrays(setup.layout, memory_descriptor))
        while True:
            command = pipe.recv()
            try:
                execute = worker.reset if isinstance(command, ResetCommand) else worker.step
                pipe.send(execute(command))
            except Exception:
                pipe.send(traceback.format_exc())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # Skip interpreter shutdown: OpenGL libraries like to crash in it.
        os._exit(0)


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)
