"""The vectorised environment behind RLinf's interface."""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any

import numpy as np
import torch

from rlinf_wamrl.envs.config import EnvConfig
from rlinf_wamrl.envs.schedule import (
    Assignment,
    evaluation_assignments,
    scene_seed,
    train_assignment,
)
from rlinf_wamrl.envs.vector import MAX_CHUNK, VectorEnv, VectorSettings
from rlinf_wamrl.envs.worker_process import EpisodeSpec

__all__ = ["WAMLiberoEnv"]

logger = logging.getLogger(__name__)


class WAMLiberoEnv:
    """LIBERO tasks for RLinf's ``EnvWorker``, with the frames a world-action model learns from.

    An environment stops at its own success or step limit: later actions of the chunk, and later
    chunks of the rollout, are not executed for it (``executed_mask``). Rendering happens at the
    frame offsets and at the end of what is executed, nowhere else.

    Observations: ``main_images``, ``wrist_images`` uint8 [N, H, W, 3]; ``states`` float32 [N, 8]
    (raw proprio: position 3, axis-angle 3, fingers 2); ``task_descriptions`` list of N;
    ``future_frames`` uint8 [N, F, 3, H, 2W] of the chunk just executed, main and wrist side by
    side, and ``future_states`` float32 [N, F, 8] at the same moments, zeros where
    ``future_frames_mask`` bool [N, F] is false; ``executed_mask`` bool [N, C];
    ``task_id``, ``seed``, ``group_id``, ``episode_id``, ``init_state_id``, ``elapsed_steps``
    int64 [N].

    Rewards are sparse: 1 at the step that solves the task.

    Args:
        cfg: RLinf's ``env.train`` or ``env.eval`` section, see :class:`EnvConfig`.
        num_envs: Environments of this worker and pipeline stage.
        seed_offset: Rank of this worker and stage among all.
        total_num_processes: How many such there are.
        worker_info: RLinf's description of the worker (unused).

    Raises:
        ValueError: An impossible configuration, in words.
        FileNotFoundError: LIBERO's files are missing.
    """

    def __init__(self, cfg, num_envs, seed_offset, total_num_processes, worker_info=None) -> None:
        self.cfg = cfg
        self.config = EnvConfig.from_mapping(cfg)
        if num_envs < 1 or num_envs % self.config.group_size:
            raise ValueError(
                f"group_size={self.config.group_size} does not divide the {num_envs} environments "
                f"of a worker and stage (total_num_envs={self.config.total_num_envs})"
            )
        self.num_envs = num_envs
        self.group_size = self.config.group_size
        self.num_group = num_envs // self.group_size
        self.seed = self.config.seed + seed_offset  # read by RLinf's video wrapper
        self.worker_info = worker_info
        self.video_cfg = cfg.get("video_cfg")
        self.is_start = True
        self._rank, self._num_ranks = seed_offset, total_num_processes
        self._suite, self.task_ids, self._states = self.config.load_suite()
        self._iteration = 0
        self._task_weights: np.ndarray | None = None
        self._evaluation = evaluation_assignments(self.task_ids, self._states)
        if self.config.is_eval:
            self._check_evaluation_coverage()
        self.vector = VectorEnv(
            {task_id: self._suite.tasks[task_id] for task_id in self.task_ids},
            self.config.env_settings(),
            VectorSettings(
                num_envs=num_envs,
                num_processes=self.config.processes(num_envs),
                frame_offsets=self.config.frame_offsets(),
                max_built_tasks=self.config.built_tasks(),
                timeout_seconds=self.config.watchdog_seconds,
                restarts=3 if self.config.restart_dead_processes else 0,
            ),
        )
        self._choose_episodes()
        self._clear_episodes()

    def update_reset_state_ids(self) -> None:
        """Choose tasks and initial states of the next rollout; RLinf calls it after each one."""
        self._iteration += 1
        self._choose_episodes()

    def set_task_weights(self, weights) -> None:
        """Draw the tasks of later rollouts in proportion to ``weights``, one per ``task_ids``.

        Takes effect at the next :meth:`update_reset_state_ids`. None: the tasks take turns.

        Raises:
            ValueError: Wrong length, a negative or non-finite weight, or all zero.
        """
        if weights is None:
            self._task_weights = None
            return
        array = np.asarray(weights, dtype=np.float64)
        if (
            array.shape != (len(self.task_ids),)
            or not np.isfinite(array).all()
            or (array < 0).any()
            or array.sum() <= 0
        ):
            raise ValueError(
                f"task weights {array.tolist()}: give {len(self.task_ids)} non-negative numbers, "
                "one per task, not all zero"
            )
        self._task_weights = array

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to choose the same episodes."""
        weights = None if self._task_weights is None else self._task_weights.tolist()
        return {"iteration": self._iteration, "task_weights": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self._iteration = state["iteration"]
        self.set_task_weights(state["task_weights"])
        self._choose_episodes()

    def reset(self, env_idx=None, reset_state_ids=None) -> tuple[dict[str, Any], dict]:
        """Start the chosen episodes in all environments.

        Raises:
            ValueError: A part of the environments is asked for: groups start together.
            EnvironmentProcessError: A sub-process failed.
        """
        if env_idx is not None or reset_state_ids is not None:
            raise ValueError("environments of a group start together: reset takes no selection")
        self.is_start = False
        self._clear_episodes()
        episodes = {}
        for env in range(self.num_envs):
            assignment = self.assignments[env // self.group_size]
            if assignment is None:
                continue
            task = self._suite.tasks[assignment.task_id]
            episodes[env] = EpisodeSpec(
                task_id=assignment.task_id,
                init_state_id=assignment.init_state_id,
                scene_seed=scene_seed(self.config.seed, assignment),
                max_steps=self.config.max_episode_steps or task.max_steps,
            )
            self._limits[env] = episodes[env].max_steps
        self.vector.reset(episodes)
        self._active = np.array([env in episodes for env in range(self.num_envs)])
        arrays = self.vector.arrays
        for name in ("frames", "frame_proprio", "frame_mask", "executed"):
            arrays[name][:] = 0
        return self._observation(chunk_length=0), {"environment": self.description()}

    def chunk_step(self, chunk_actions):
        """Execute a chunk of actions in every environment that still runs.

        Args:
            chunk_actions: float [N, C, 7], numpy or torch.

        Returns:
            RLinf's five: [observation], rewards float32 [N, C], terminations and truncations
            bool [N, C] (true from the step that ended the episode on), [infos].

        Raises:
            ValueError: Wrong shape, or actions that are not finite.
            EnvironmentProcessError: A sub-process failed.
        """
        actions = _as_actions(chunk_actions, self.num_envs)
        length = actions.shape[1]
        arrays = self.vector.arrays
        idle = ~self._active
        for name in ("frames", "frame_proprio", "frame_mask", "executed", "success"):
            arrays[name][idle] = 0
        running = np.flatnonzero(self._active).tolist()
        if running:
            self.vector.step(actions, running)
        executed = arrays["executed"][:, :length].copy()
        counts = executed.sum(axis=1)
        self._elapsed += counts
        self._nominal += length
        solved = arrays["success"] & self._active
        expired = self._active & ~solved & (self._elapsed >= self._limits)
        rewards = np.zeros((self.num_envs, length), dtype=np.float32)
        rewards[solved, counts[solved] - 1] = 1.0
        self._returns += rewards.sum(axis=1)
        self._solved |= solved
        self._expired |= expired
        self._active &= ~(solved | expired)
        self._end_slot = np.where(solved | expired, counts - 1, self._end_slot)
        terminations, truncations = self._end_flags(length)
        self._end_slot = np.where(self._solved | self._expired, 0, MAX_CHUNK)
        return (
            [self._observation(length)],
            torch.from_numpy(rewards),
            torch.from_numpy(terminations),
            torch.from_numpy(truncations),
            [{"episode": self._episode_info()}],
        )

    def description(self) -> dict[str, Any]:
        """What results depend on and are only comparable under; logged with them."""
        config = self.config
        tasks = [self._suite.tasks[task_id] for task_id in self.task_ids]
        return {
            "task_suite_name": config.task_suite_name,
            "task_ids": self.task_ids,
            "init_state_range": list(self._states),
            "image_size": config.image_size,
            "render_quality": config.render_quality,
            "max_texture_size": config.max_texture_size,
            "num_settle_steps": config.num_settle_steps or tasks[0].settle_steps,
            "max_episode_steps": [config.max_episode_steps or task.max_steps for task in tasks],
            "mujoco": metadata.version("mujoco"),
            "robosuite": metadata.version("robosuite"),
        }

    def offload(self) -> None:
        """Stop the sub-processes to free their memory; the next reset starts them again."""
        self.vector.close()

    def close(self) -> None:
        """Stop the sub-processes."""
        self.vector.close()

    def _choose_episodes(self) -> None:
        self.assignments = [self._assign(group) for group in range(self.num_group)]

    def _assign(self, group: int) -> Assignment | None:
        index = self._rank * self.num_group + group
        if not self.config.is_eval:
            return train_assignment(
                self.config.seed,
                self._iteration,
                index,
                self._num_ranks * self.num_group,
                self.task_ids,
                self._states,
                self._task_weights,
            )
        epoch = self._iteration % self.config.rollout_epoch
        position = epoch * self._num_ranks * self.num_group + index
        return self._evaluation[position] if position < len(self._evaluation) else None

    def _check_evaluation_coverage(self) -> None:
        places = self.config.rollout_epoch * self._num_ranks * self.num_group
        if self._rank == 0 and places < len(self._evaluation):
            logger.warning(
                "evaluation covers %d of the %d (task, initial state) pairs: raise "
                "env.eval.rollout_epoch or total_num_envs, or narrow init_state_range",
                places,
                len(self._evaluation),
            )

    def _clear_episodes(self) -> None:
        n = self.num_envs
        self._active = np.zeros(n, dtype=bool)
        self._solved = np.zeros(n, dtype=bool)
        self._expired = np.zeros(n, dtype=bool)
        self._elapsed = np.zeros(n, dtype=np.int64)
        self._limits = np.zeros(n, dtype=np.int64)
        self._returns = np.zeros(n, dtype=np.float32)
        # First step of the current chunk at which the episode is over.
        self._end_slot = np.full(n, MAX_CHUNK, dtype=np.int64)
        self._nominal = 0

    def _end_flags(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        over = np.arange(length) >= self._end_slot[:, None]
        if not self.config.ignore_terminations:
            return over & self._solved[:, None], over & self._expired[:, None]
        # RLinf then wants all environments to end together, at the common limit.
        terminations = np.zeros((self.num_envs, length), dtype=bool)
        truncations = np.zeros((self.num_envs, length), dtype=bool)
        truncations[:, -1] = self._nominal >= self._limits.max()
        return terminations, truncations

    def _observation(self, chunk_length: int) -> dict[str, Any]:
        arrays = self.vector.arrays
        assignments = [self.assignments[env // self.group_size] for env in range(self.num_envs)]
        places = [a or Assignment(task_id=self.task_ids[0], init_state_id=-1) for a in assignments]
        first_group = self._iteration * self._num_ranks * self.num_group
        first_group += self._rank * self.num_group
        envs = np.arange(self.num_envs)
        # The shared arrays are overwritten by the next chunk, so everything is copied.
        return {
            "main_images": torch.from_numpy(arrays["main"].copy()),
            "wrist_images": torch.from_numpy(arrays["wrist"].copy()),
            "states": torch.from_numpy(arrays["proprio"].astype(np.float32)),
            "task_descriptions": [self._suite.tasks[place.task_id].language for place in places],
            "future_frames": torch.from_numpy(arrays["frames"].copy()),
            "future_states": torch.from_numpy(arrays["frame_proprio"].astype(np.float32)),
            "future_frames_mask": torch.from_numpy(arrays["frame_mask"].copy()),
            "executed_mask": torch.from_numpy(arrays["executed"][:, :chunk_length].copy()),
            "task_id": torch.tensor([place.task_id for place in places]),
            "seed": torch.tensor(
                [scene_seed(self.config.seed, a) if a else -1 for a in assignments]
            ),
            "group_id": torch.from_numpy(first_group + envs // self.group_size),
            "episode_id": torch.from_numpy(first_group * self.group_size + envs),
            "init_state_id": torch.tensor([place.init_state_id for place in places]),
            "elapsed_steps": torch.from_numpy(self._elapsed.copy()),
        }

    def _episode_info(self) -> dict[str, torch.Tensor]:
        lengths = torch.from_numpy(self._elapsed.copy())
        returns = torch.from_numpy(self._returns.copy())
        tasks = [
            -1
            if self.assignments[env // self.group_size] is None
            else self.assignments[env // self.group_size].task_id
            for env in range(self.num_envs)
        ]
        return {
            "success_once": torch.from_numpy(self._solved.copy()),
            "return": returns,
            "episode_len": lengths,
            "reward": returns / lengths.clamp(min=1),
            "task_id": torch.tensor(tasks),
        }


def _as_actions(chunk_actions, num_envs: int) -> np.ndarray:
    if isinstance(chunk_actions, torch.Tensor):
        chunk_actions = chunk_actions.detach().cpu().numpy()
    actions = np.asarray(chunk_actions, dtype=np.float64)
    if actions.ndim != 3 or actions.shape[0] != num_envs or actions.shape[2] != 7:
        raise ValueError(f"actions have shape {list(actions.shape)}, not [{num_envs}, C, 7]")
    if not 1 <= actions.shape[1] <= MAX_CHUNK:
        raise ValueError(f"a chunk of {actions.shape[1]} actions: give 1 to {MAX_CHUNK}")
    if not np.isfinite(actions).all():
        raise ValueError("actions are not finite; the policy has diverged")
    return actions
