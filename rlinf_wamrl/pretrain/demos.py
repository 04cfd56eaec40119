"""Recording of scripted-expert episodes, with noise on what is executed and clean labels.

One file per episode, so that recording resumes where it stopped; an episode is a pure function of
(seed, task, number).
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np

from rlinf_wamrl.files import atomic_path

__all__ = ["Episode", "episode_file", "load_episode", "record_demos", "record_episode"]


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One recorded episode of T steps."""

    main: np.ndarray  # uint8 [T+1, H, W, 3], before each step and after the last
    wrist: np.ndarray  # uint8 [T+1, H, W, 3]
    proprio: np.ndarray  # float32 [T+1, 8]
    actions: np.ndarray  # float32 [T, 7] what the expert wanted
    executed_actions: np.ndarray  # float32 [T, 7] what ran
    instruction: str
    task_id: int
    init_state_id: int
    success: bool


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
    )


def record_demos(
    demos: Any, folder: str | Path, report: Callable[[int, int, int], None] = lambda *_: None
) -> tuple[int, int]:
    """Record every episode that is not there yet.

    Args:
        demos: :class:`~rlinf_wamrl.pretrain.config.DemosConfig`.
        folder: where the episodes go, one ``.npz`` each.
        report: called with (episodes done, episodes in all, successes).

    Returns:
        Successes and episodes in all.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [
        (task, number) for task in demos.task_ids for number in range(demos.episodes_per_task)
    ]
    missing = [key for key in wanted if not episode_file(folder, *key).exists()]
    done = len(wanted) - len(missing)
    successes = sum(
        load_episode(episode_file(folder, *key)).success
        for key in wanted
        if key not in set(missing)
    )
    report(done, len(wanted), successes)
    workers = demos.num_processes or os.cpu_count() or 1
    chunks = [missing[start::workers] for start in range(workers)]
    context = multiprocessing.get_context("spawn")
    queue = context.Manager().Queue()
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        jobs = [pool.submit(_record_some, demos, folder, chunk, queue) for chunk in chunks if chunk]
        while done < len(wanted):
            failed = [job for job in jobs if job.done() and job.exception() is not None]
            if failed:
                raise failed[0].exception()
            try:
                successes += queue.get(timeout=1.0)
            except Empty:
                continue
            done += 1
            report(done, len(wanted), successes)
        for job in as_completed(jobs):
            job.result()
    return successes, len(wanted)


def _record_some(demos: Any, folder: Path, keys: list[tuple[int, int]], queue: Any) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from rlinf_wamrl.envs.demo import SUITE_NAME
    from rlinf_wamrl.envs.demo.expert import Expert
    from rlinf_wamrl.envs.libero import EnvSettings, LiberoEnv
    from rlinf_wamrl.envs.rendering import choose_renderer
    from rlinf_wamrl.envs.suites import load_suite

    choose_renderer()
    suite = load_suite(SUITE_NAME)
    settings = EnvSettings(image_size=demos.image_size, render_quality=demos.render_quality)
    env, current = None, None
    for task_id, number in keys:
        task = suite.tasks[task_id]
        if task_id != current:
            if env is not None:
                env.close()
            env, current = LiberoEnv(task, settings), task_id
        episode = record_episode(env, Expert(task.name), demos, task=task, number=number)
        _save_episode(episode, episode_file(folder, task_id, number))
        queue.put(int(episode.success))
    env.close()


def episode_file(folder: Path, task_id: int, number: int) -> Path:
    """Return the file of an episode."""
    return folder / f"task_{task_id}_episode_{number:05d}.npz"


def _save_episode(episode: Episode, path: Path) -> None:
    with atomic_path(path) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, **vars(episode))


def load_episode(path: str | Path) -> Episode:
    """Read an episode :func:`record_demos` wrote."""
    with np.load(path) as archive:
        values = {name: archive[name] for name in archive.files}
    return Episode(
        **{name: value if value.ndim else value.item() for name, value in values.items()}
    )
