"""Values that follow from the chosen tasks when a configuration leaves them null."""

from __future__ import annotations

from omegaconf import DictConfig

from rlinf_wamrl.config.errors import ConfigError
from rlinf_wamrl.envs.config import EnvConfig
from rlinf_wamrl.envs.demo import SUITE_NAME
from rlinf_wamrl.envs.suites import Suite

__all__ = ["derive_from_tasks"]

DEMO_STATES = {"train": [0, 80], "eval": [80, 200]}
"""The demo suite's stored initial states: 80 to train on, 120 held out."""


def derive_from_tasks(run: DictConfig) -> None:
    """Fill in initial states, rollout lengths and instructions of both sides, in place.

    Raises:
        ConfigError: an unknown suite, task or state, missing files, or episodes that would be cut.
    """
    instructions = set(run.actor.model.instructions)
    for side in ("train", "eval"):
        env = run.env[side]
        if env.init_state_range is None and env.task_suite_name == SUITE_NAME:
            env.init_state_range = DEMO_STATES[side]
        try:
            suite, task_ids, states = EnvConfig.from_mapping(env).load_suite()
        except ValueError as error:
            raise ConfigError(f"env.{side}.{error}") from error
        except FileNotFoundError as error:
            raise ConfigError(f"env.{side}.task_suite_name: {error}") from error
        env.init_state_range = list(states)
        _derive_length(run, side, suite, task_ids)
        instructions.update(suite.tasks[task].language for task in task_ids)
    run.actor.model.instructions = sorted(instructions)


def _derive_length(run: DictConfig, side: str, suite: Suite, task_ids: list[int]) -> None:
    env, chunk = run.env[side], run.actor.model.num_action_chunks
    limits = {task: env.max_episode_steps or suite.tasks[task].max_steps for task in task_ids}
    longest = max(limits, key=limits.get)
    if env.max_steps_per_rollout_epoch is None:
        env.max_steps_per_rollout_epoch = -(-limits[longest] // chunk) * chunk
    steps = env.max_steps_per_rollout_epoch
    if steps % chunk:
        below = steps // chunk * chunk
        raise ConfigError(
            f"env.{side}.max_steps_per_rollout_epoch = {steps} must be a multiple of "
            f"actor.model.num_action_chunks = {chunk}; use {below or chunk} or {below + chunk}"
        )
    if steps < limits[longest]:
        raise ConfigError(
            f"env.{side}.max_steps_per_rollout_epoch = {steps} cuts "
            f"episodes of task {longest} ({suite.tasks[longest].language}), which may take "
            f"{limits[longest]} steps; raise it, lower env.{side}.max_episode_steps, or leave it "
            "null"
        )
