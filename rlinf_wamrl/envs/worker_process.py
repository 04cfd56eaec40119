"""The program of an environment sub-process.

It imports no torch, holds one built environment per task it was asked for, and runs several
episodes ("slots") in it by swapping their states, so that memory does not grow with the number of
episodes. Pictures go to the parent through shared memory; the pipe carries small messages only.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from collections import OrderedDict
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

from rlinf_wamrl.envs.libero import LiberoEnv
from rlinf_wamrl.envs.settings import EnvSettings, Observation
from rlinf_wamrl.envs.shared_memory import ArrayLayout, SharedArrays
from rlinf_wamrl.envs.suites import TaskSpec

if TYPE_CHECKING:
    from rlinf_wamrl.envs.physics import SimulationState

__all__ = ["EpisodeSpec", "ResetCommand", "StepCommand", "WorkerSetup", "main"]

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
class ResetCommand:
    """Forget all episodes and start others.

    ``history`` holds actions that are executed at once, without pictures: they bring an episode
    back to where it was when its process died.
    """

    episodes: dict[int, EpisodeSpec]  # slot -> episode
    history: dict[int, np.ndarray] = field(default_factory=dict)  # slot -> float64 [t, 7]


@dataclass(frozen=True, kw_only=True)
class StepCommand:
    """Execute a chunk of ``length`` actions, found in shared memory, in each slot."""

    slots: tuple[int, ...]
    length: int


@dataclass
class _Slot:
    spec: EpisodeSpec
    steps: int = 0
    state: SimulationState | None = None


class _Worker:
    """Executes commands; results are written to shared memory."""

    def __init__(self, setup: WorkerSetup, arrays: SharedArrays) -> None:
        self._setup = setup
        self._arrays = arrays
        self._slots: dict[int, _Slot] = {}
        self._built: OrderedDict[int, LiberoEnv] = OrderedDict()
        # Slot whose episode each built environment is in the middle of.
        self._loaded: dict[int, int] = {}

    def reset(self, command: ResetCommand) -> None:
        self._slots.clear()
        self._loaded.clear()
        self._make_room({spec.task_id for spec in command.episodes.values()})
        for index, spec in command.episodes.items():
            env = self._environment(spec.task_id)
            self._park(spec.task_id)
            self._write_observation(index, env.reset(spec.init_state_id, spec.scene_seed))
            slot = _Slot(spec)
            for action in command.history.get(index, ()):
                env.step(action)
                slot.steps += 1
            self._slots[index] = slot
            self._loaded[spec.task_id] = index

    def step(self, command: StepCommand) -> None:
        for index in command.slots:
            self._run_chunk(index, command.length)

    def _run_chunk(self, index: int, length: int) -> None:
        arrays, offsets = self._arrays, self._setup.frame_offsets
        slot = self._slots[index]
        env = self._resume(index)
        arrays["executed"][index] = False
        arrays["frame_mask"][index] = False
        arrays["frames"][index] = 0
        arrays["frame_proprio"][index] = 0.0
        arrays["success"][index] = False
        for step in range(1, length + 1):
            slot.steps += 1
            last = step == length or slot.steps == slot.spec.max_steps
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

    def _environment(self, task_id: int) -> LiberoEnv:
        if task_id not in self._built:
            self._built[task_id] = LiberoEnv(self._setup.tasks[task_id], self._setup.settings)
            # Compiling the model leaves freed heap behind.
            ctypes.CDLL(None).malloc_trim(0)
        self._built.move_to_end(task_id)
        return self._built[task_id]

    def _make_room(self, needed: set[int]) -> None:
        """Drop built environments that were not used for longest, down to the bound."""
        total = len(needed | set(self._built))
        for task_id in [task for task in self._built if task not in needed]:
            if total <= self._setup.max_built_tasks:
                break
            self._built.pop(task_id).close()
            total -= 1

    def _park(self, task_id: int) -> None:
        index = self._loaded.pop(task_id, None)
        if index is not None:
            self._slots[index].state = self._built[task_id].save_state()

    def _resume(self, index: int) -> LiberoEnv:
        task_id = self._slots[index].spec.task_id
        env = self._environment(task_id)
        if self._loaded.get(task_id) != index:
            self._park(task_id)
            env.load_state(self._slots[index].state)
            self._loaded[task_id] = index
        return env

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
                if isinstance(command, ResetCommand):
                    worker.reset(command)
                else:
                    worker.step(command)
            except Exception:
                pipe.send(traceback.format_exc())
            else:
                pipe.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # Skip interpreter shutdown: OpenGL libraries like to crash in it.
        os._exit(0)


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)
