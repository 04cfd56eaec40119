"""Recording of scripted-expert episodes, with noise on what is executed and clean labels.

An episode is a pure function of (seed, task, number), and the dataset holds them in the order of
(task, number) whatever the number of processes; so recording resumes where it stopped.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_wamrl.data.lerobot_dataset import LeRobotWriter
from rlinf_wamrl.data.recorded_episode import Episode

__all__ = ["Episode", "record_demos", "record_episode"]

BATCH = 16
"""Episodes per file; an interrupted recording loses fewer than that."""


def record_episode(env: Any, expert: Any, demos: Any, *, task: Any, number: int) -> Episode:
    """Let the expert play one episode under noise.

    Args:
        env: a :class:`~rlinf_wamrl.envs.libero.LiberoEnv` of the task.
        expert: its scripted expert.
        demos: :class:`~rlinf_wamrl.pretrain.config.DemosConfig`.
        task: the :class:`~rlinf_wamrl.envs.suites.TaskSpec`.
        number: which episode.
    """
    rng = np.random.default_rng([demos.seed, task.task_id, number])
    first, past = demos.init_state_range
    init_state = first + number % (past - first)
    noise = rng.choice(list(demos.noise_levels))
    pushes = [
        (rng.integers(0, 35), rng.integers(4, 9), rng.uniform(-0.8, 0.8, 3))
        for _ in range(rng.integers(0, demos.max_pushes + 1))
    ]
    observation = env.reset(init_state)
    frames, labels, executed = [observation], [], []
    solved_steps = 0
    for step in range(task.max_steps + demos.steps_after_success):
        wanted = np.clip(expert.act(env.object_poses(), env.end_effector()), -1.0, 1.0)
        action = wanted.copy()
        action[:3] += rng.normal(size=3) * noise
        action[5] += rng.normal() * noise * 0.5
        for start, length, offset in pushes:
            if start <= step < start + length:
                action[:3] += offset
        action = np.clip(action, -1.0, 1.0)
        solved, observation = env.step(action, observe=True)
        frames.append(observation)
        labels.append(wanted)
        executed.append(action)
        solved_steps += bool(solved or solved_steps)
        if solved_steps > demos.steps_after_success:
            break
    return Episode(
        main=np.stack([frame.main for frame in frames]),
        wrist=np.stack([frame.wrist for frame in frames]),
        proprio=np.stack([frame.proprio for frame in frames]).astype(np.float32),
        actions=np.stack(labels).astype(np.float32),
        executed_actions=np.stack(executed).astype(np.float32),
        instruction=task.language,
        task_id=task.task_id,
        init_state_id=init_state,
        success=solved_steps > 0,
        number=number,
        seed=demos.seed,
    )


def record_demos(
    demos: Any, folder: str | Path, report: Callable[[int, int, int], None] = lambda *_: None
) -> tuple[int, int]:
    """Record every episode that is not there yet, into a LeRobot dataset.

    Args:
        demos: :class:`~rlinf_wamrl.pretrain.config.DemosConfig`.
        folder: the dataset's, see :class:`~rlinf_wamrl.data.lerobot_dataset.LeRobotWriter`.
        report: called with (episodes done, episodes in all, successes).

    Returns:
        Successes and episodes in all.

    Raises:
        ValueError: The folder was recorded with another seed or picture size.
    """
    writer = LeRobotWriter(folder)
    seeds = {row["seed"] for row in writer.rows} - {demos.seed}
    if seeds:
        raise ValueError(
            f"{folder} was recorded with demos.seed={min(seeds)}, not {demos.seed}: choose another "
            "demos_dir"
        )
    wanted = [
        (task, number) for task in demos.task_ids for number in range(demos.episodes_per_task)
    ]
    recorded = {(row["task_id"], row["number"]): row["success"] for row in writer.rows}
    missing = [key for key in wanted if key not in recorded]
    done = len(wanted) - len(missing)
    successes = sum(recorded[key] for key in wanted if key in recorded)
    report(done, len(wanted), successes)
    pending: list[Episode] = []
    try:
        for episode in _in_order(demos, missing):
            pending.append(episode)
            done += 1
            successes += episode.success
            report(done, len(wanted), successes)
            if len(pending) == BATCH:
                writer.append(pending)
                pending = []
    finally:
        writer.append(pending)
    if successes:
        writer.write_statistics()
    return successes, len(wanted)


def _in_order(demos: Any, keys: list[tuple[int, int]]) -> Iterator[Episode]:
    """Record in parallel, yield in the order of ``keys``."""
    workers = demos.num_processes or os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_prepare_process, initargs=(demos,)
    )
    ahead = 4 * workers  # bounds the episodes that wait for an earlier one
    try:
        jobs = deque(pool.submit(_record, *key) for key in keys[:ahead])
        for position in range(len(keys)):
            yield jobs.popleft().result()
            jobs.extend(
                pool.submit(_record, *key) for key in keys[position + ahead : position + ahead + 1]
            )
    finally:
        pool.shutdown(cancel_futures=True)


_recorder: _Recorder | None = None
"""Of this recording process."""


def _prepare_process(demos: Any) -> None:
    global _recorder
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _recorder = _Recorder(demos)


def _record(task_id: int, number: int) -> Episode:
    return _recorder.record(task_id, number)


class _Recorder:
    """Keeps the environment of one task, the last one asked for."""

    def __init__(self, demos: Any) -> None:
        from rlinf_wamrl.envs.demo import SUITE_NAME
        from rlinf_wamrl.envs.rendering import choose_renderer
        from rlinf_wamrl.envs.suites import load_suite

        choose_renderer()
        self._demos = demos
        self._suite = load_suite(SUITE_NAME)
        self._task_id: int | None = None
        self._env: Any = None

    def record(self, task_id: int, number: int) -> Episode:
        from rlinf_wamrl.envs.demo.expert import Expert
        from rlinf_wamrl.envs.libero import EnvSettings, LiberoEnv

        task, demos = self._suite.tasks[task_id], self._demos
        if task_id != self._task_id:
            if self._env is not None:
                self._env.close()
            settings = EnvSettings(image_size=demos.image_size, render_quality=demos.render_quality)
            self._env, self._task_id = LiberoEnv(task, settings), task_id
        return record_episode(self._env, Expert(task.name), demos, task=task, number=number)
