"""The task suites: which tasks, where their files lie, how long an episode may take."""

from __future__ import annotations

import codecs
import importlib.util
import io
import pickle
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlinf_wamrl.envs import demo
from rlinf_wamrl.envs.assets import resolve_libero_root
from rlinf_wamrl.envs.libero_setup import libero_package_root

__all__ = ["SUITE_NAMES", "Suite", "TaskSpec", "load_init_states", "load_suite"]


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One task: everything a process needs to build it, without importing LIBERO."""

    suite: str
    task_id: int
    name: str
    language: str
    bddl_file: Path
    init_states_file: Path
    assets_root: Path | None  # folder that holds `assets/`; None: the task needs no files
    max_steps: int  # control steps of an episode, without settling
    settle_steps: int  # control steps with an open gripper before an episode starts


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A named list of tasks; the index in ``tasks`` is the task id."""

    name: str
    tasks: tuple[TaskSpec, ...]

    def check_task_ids(self, task_ids: list[int]) -> None:
        """Raise ValueError, naming the choices, unless all ids exist and none repeats."""
        wrong = [i for i in task_ids if not isinstance(i, int) or not 0 <= i < len(self.tasks)]
        if not task_ids or wrong or len(set(task_ids)) != len(task_ids):
            choices = "; ".join(f"{task.task_id}: {task.language}" for task in self.tasks)
            raise ValueError(
                f"task_ids={task_ids}: give distinct task numbers of {self.name} ({choices})"
            )


# Step limits and settling steps. The real suites follow FastWAM's evaluation, whose results are
# only comparable under the same numbers; the demo's limits are about twice the expert's mean.
_DEMO_STEPS = dict(zip(demo.TASK_NAMES, (88, 120, 136, 248), strict=True))
_DEMO_SETTLE_STEPS = 5
_LIBERO_STEPS = {
    "libero_spatial": 400,
    "libero_object": 400,
    "libero_goal": 400,
    "libero_10": 700,
}
_LIBERO_SETTLE_STEPS = 30
SUITE_NAMES = (demo.SUITE_NAME, *_LIBERO_STEPS)


def load_suite(name: str, assets_dir: str | Path | None = None) -> Suite:
    """Describe a suite.

    Args:
        name: One of :data:`SUITE_NAMES`.
        assets_dir: Folder with LIBERO's files for the real suites, see
            :func:`rlinf_wamrl.envs.assets.resolve_libero_root`. The demo suite needs none.

    Raises:
        ValueError: Unknown suite.
        FileNotFoundError: LIBERO's files are missing; the message says how to get them.
    """
    if name == demo.SUITE_NAME:
        return _demo_suite()
    if name in _LIBERO_STEPS:
        return _libero_suite(name, assets_dir)
    raise ValueError(
        f"task_suite_name={name!r} is not known; choose one of {', '.join(SUITE_NAMES)}"
    )


def load_init_states(task: TaskSpec) -> np.ndarray:
    """Stored initial simulator states of a task, float64 [n, 1 + nq + nv] (time, qpos, qvel).

    LIBERO stores them with ``torch.save``, as a pickled numpy array; it is read here without torch
    and without executing anything a pickle may ask for.

    Raises:
        ValueError: The file holds something other than one numpy array.
    """
    if task.suite == demo.SUITE_NAME:
        with np.load(task.init_states_file) as archive:
            return archive[task.name].astype(np.float64)
    with zipfile.ZipFile(task.init_states_file) as archive:
        payload = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        states = _NumpyUnpickler(io.BytesIO(archive.read(payload))).load()
    if not isinstance(states, np.ndarray) or states.ndim != 2:
        raise ValueError(f"{task.init_states_file} does not hold a table of initial states")
    return states.astype(np.float64)


def _demo_suite() -> Suite:
    tasks = (
        TaskSpec(
            suite=demo.SUITE_NAME,
            task_id=task_id,
            name=name,
            language=name.replace("_", " "),
            bddl_file=demo.BDDL_DIR / f"{name}.bddl",
            init_states_file=demo.INIT_STATES_FILE,
            assets_root=None,
            max_steps=_DEMO_STEPS[name],
            settle_steps=_DEMO_SETTLE_STEPS,
        )
        for task_id, name in enumerate(demo.TASK_NAMES)
    )
    return Suite(name=demo.SUITE_NAME, tasks=tuple(tasks))


def _libero_suite(suite: str, assets_dir: str | Path | None) -> Suite:
    root = resolve_libero_root(suite, assets_dir)
    tasks = (
        TaskSpec(
            suite=suite,
            task_id=task_id,
            name=name,
            # libero_10 prefixes names with the scene: KITCHEN_SCENE3_turn_on_the_stove...
            language=re.sub(r"^[A-Z_]+SCENE\d+_", "", name).replace("_", " "),
            bddl_file=_libero_file(root, f"bddl_files/{suite}/{name}.bddl"),
            init_states_file=_libero_file(root, f"init_files/{suite}/{name}.pruned_init"),
            assets_root=root,
            max_steps=_LIBERO_STEPS[suite],
            settle_steps=_LIBERO_SETTLE_STEPS,
        )
        for task_id, name in enumerate(_libero_task_names(suite))
    )
    return Suite(name=suite, tasks=tuple(tasks))


def _libero_task_names(suite: str) -> list[str]:
    # The module is loaded by its file: its package would import torch.
    file = libero_package_root() / "benchmark" / "libero_suite_task_map.py"
    spec = importlib.util.spec_from_file_location("_libero_suite_task_map", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.libero_task_map[suite]


def _libero_file(root: Path, relative: str) -> Path:
    for base in (root, libero_package_root()):
        if (base / relative).is_file():
            return base / relative
    raise FileNotFoundError(
        f"{relative} is neither in {root} nor in the installed LIBERO package; reinstall it: "
        "`pip install --force-reinstall --no-deps rlinf-libero==0.1.3`"
    )


class _NumpyUnpickler(pickle.Unpickler):
    """Unpickles numpy arrays and nothing else."""

    _ALLOWED = {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
    }

    def find_class(self, module: str, name: str):
        """Resolve the few names a pickled array refers to."""
        if (module, name) == ("_codecs", "encode"):
            return codecs.encode
        if (module, name) not in self._ALLOWED:
            raise ValueError(f"initial states refer to {module}.{name}, not to a numpy array")
        return super().find_class(module, name)

    def persistent_load(self, pid):
        """Refuse torch storages: initial states are numpy arrays."""
        raise ValueError("initial states hold a torch tensor, not a numpy array")
