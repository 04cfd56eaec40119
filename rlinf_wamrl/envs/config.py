"""The keys of ``env.train`` and ``env.eval`` that the environment reads, checked in words."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf_wamrl.envs.demo import SUITE_NAME
from rlinf_wamrl.envs.settings import EnvSettings
from rlinf_wamrl.envs.suites import Suite, load_init_states, load_suite

__all__ = ["EnvConfig"]


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """Typed view of RLinf's environment section; unset keys take the defaults below."""

    task_suite_name: str
    total_num_envs: int
    group_size: int
    seed: int
    task_ids: tuple[int, ...] = ()  # empty: all tasks of the suite
    init_state_range: tuple[int, int] | None = None  # [first, end); null: all stored states
    image_size: int = 128  # pixels, height and width of both cameras
    max_episode_steps: int | None = None  # null: each task's own limit
    num_settle_steps: int | None = None  # null: the suite's own number
    render_quality: str = "stock"  # stock | fast | light
    max_texture_size: int | None = None  # pixels; 512 saves most of the real suites' memory
    assets_dir: str | None = None  # LIBERO's files; null: LIBERO_ASSETS, then installed packages
    num_processes: int | None = None  # null: one per core
    # Built environments a process keeps beyond those that run, so that changing tasks costs
    # nothing; null: 8 of the demo's (17 MB each), 2 of the real suites' (205 MB each with
    # textures of at most 512 pixels, 740 MB with whole ones).
    max_built_tasks: int | None = None
    restart_dead_processes: bool = True
    watchdog_seconds: float = 300.0  # a process that takes longer for a chunk hangs
    auto_reset: bool = False
    ignore_terminations: bool = False
    action_video_freq_ratio: int = 4  # control steps per video frame
    num_future_frames: int = 2  # executed frames kept per chunk, at 1, 2, ... times the ratio
    is_eval: bool = False
    rollout_epoch: int = 1

    @classmethod
    def from_mapping(cls, section: Mapping[str, Any]) -> EnvConfig:
        """Read a configuration section; keys of RLinf itself are left alone.

        Raises:
            ValueError: A value is impossible; the message names key, value and remedy.
        """
        values = {
            name: section[name]
            for name in cls.__dataclass_fields__
            if section.get(name) is not None
        }
        for name in ("task_suite_name", "total_num_envs", "group_size", "seed"):
            if name not in values:
                raise ValueError(f"the environment section lacks {name}")
        for name, value in values.items():
            values[name] = _typed(name, value, cls.__annotations__[name])
        config = cls(**values)
        config._check()
        return config

    def _check(self) -> None:
        for name in ("total_num_envs", "group_size", "rollout_epoch"):
            _require(name, getattr(self, name), getattr(self, name) >= 1, "give at least 1")
        _require(
            "total_num_envs",
            self.total_num_envs,
            self.total_num_envs % self.group_size == 0,
            f"it must be a multiple of group_size={self.group_size}",
        )
        for name in ("max_episode_steps", "num_processes", "max_built_tasks"):
            value = getattr(self, name)
            _require(name, value, value is None or value >= 1, "give at least 1, or null")
        _require("auto_reset", True, not self.auto_reset, "only false is supported")
        _require(
            "action_video_freq_ratio",
            self.action_video_freq_ratio,
            self.action_video_freq_ratio >= 1,
            "give at least 1",
        )
        _require(
            "num_future_frames",
            self.num_future_frames,
            self.num_future_frames >= 0,
            "give 0 or more",
        )
        _require(
            "watchdog_seconds", self.watchdog_seconds, self.watchdog_seconds > 0, "give seconds > 0"
        )
        self.env_settings()

    def env_settings(self) -> EnvSettings:
        """The part that a single environment needs."""
        return EnvSettings(
            image_size=self.image_size,
            render_quality=self.render_quality,
            max_texture_size=self.max_texture_size,
            settle_steps=self.num_settle_steps,
        )

    def frame_offsets(self) -> tuple[int, ...]:
        """Steps after the start of a chunk whose pictures are kept, e.g. (4, 8)."""
        return tuple(self.action_video_freq_ratio * (i + 1) for i in range(self.num_future_frames))

    def processes(self, num_envs: int) -> int:
        """Number of sub-processes for the environments of one worker."""
        cores = len(os.sched_getaffinity(0))
        return min(self.num_processes or cores, num_envs)

    def built_tasks(self) -> int:
        """Bound on the built environments of a process."""
        return self.max_built_tasks or (8 if self.task_suite_name == SUITE_NAME else 2)

    def load_suite(self) -> tuple[Suite, list[int], tuple[int, int]]:
        """Suite, task ids and initial-state range, checked against the stored states.

        Raises:
            ValueError: Unknown suite, task or state.
            FileNotFoundError: LIBERO's files are missing.
        """
        suite = load_suite(self.task_suite_name, self.assets_dir)
        task_ids = list(self.task_ids) or list(range(len(suite.tasks)))
        suite.check_task_ids(task_ids)
        stored = min(len(load_init_states(suite.tasks[task_id])) for task_id in task_ids)
        states = self.init_state_range or (0, stored)
        _require(
            "init_state_range",
            list(states),
            len(states) == 2 and 0 <= states[0] < states[1] <= stored,
            f"give [first, end) within the {stored} stored initial states",
        )
        return suite, task_ids, states


_TYPES = {"str": str, "int": int, "float": (int, float), "bool": bool}


def _typed(key: str, value: Any, annotation: str) -> Any:
    """Check a value against the annotation of its field; lists become tuples."""
    kind = annotation.removesuffix(" | None")
    if kind.startswith("tuple"):
        numbers = not isinstance(value, str) and all(type(item) is int for item in value)
        _require(key, value, numbers, "give a list of integers")
        return tuple(value)
    right = isinstance(value, _TYPES[kind]) and (kind == "bool") == isinstance(value, bool)
    _require(key, repr(value), right, f"give a value of type {kind}")
    return value


def _require(key: str, value: Any, holds: bool, remedy: str) -> None:
    if not holds:
        raise ValueError(f"{key}={value}: {remedy}")
