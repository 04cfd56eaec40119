"""Which output trajectory collection has, and how its rows are routed: validated once per run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf

__all__ = ["RolloutGeometry", "TrajectoryMode", "TrajectoryPlan", "option", "required_option"]


def option(cfg: DictConfig, key: str, default: Any) -> Any:
    """Value of a dotted key of the run config; the default where a level is absent or null."""
    value = OmegaConf.select(cfg, key)
    return default if value is None else value


def required_option(cfg: DictConfig, key: str) -> Any:
    """Value of a dotted key of the run config.

    Raises:
        ValueError: The key is absent or null.
    """
    value = OmegaConf.select(cfg, key)
    if value is None:
        raise ValueError(f"trajectory collection needs the config key {key}, which is not set.")
    return value


class TrajectoryMode(str, Enum):
    """Actor-facing output mode for collected trajectory chunks."""

    ROLLOUT = "rollout"  # whole trajectories per source and iteration
    PIPELINE = "pipeline"  # micro-batches with advantages per rollout epoch
    LEROBOT = "lerobot"  # finished episodes as frames


@dataclass(frozen=True)
class RolloutGeometry:
    """How many environment sources feed how many actors.

    A *source* is one pipeline stage of one environment worker. Every source's output is cut into
    equally many shards so that each actor can read the same number of them.
    """

    source_count: int
    chunk_count: int  # action chunks of one rollout epoch
    shards_per_source: int
    actor_world_size: int

    @classmethod
    def from_cfg(cls, cfg: DictConfig) -> RolloutGeometry:
        """Derive the geometry from the config and the component placement of the live cluster.

        Raises:
            RuntimeError: This process is not connected to Ray.
            ValueError: A config value is missing or doesn't fit; see :meth:`from_world_sizes`.
        """
        # RLinf starts a dozen heavy imports; geometry by numbers has to do without them.
        import ray

        if not ray.is_initialized():
            raise RuntimeError(
                "RolloutGeometry.from_cfg reads world sizes from the placement on a running Ray "
                "cluster, and this process is not connected to one; use "
                "RolloutGeometry.from_world_sizes with known world sizes."
            )
        from rlinf.scheduler import Cluster
        from rlinf.utils.placement import HybridComponentPlacement

        placement = HybridComponentPlacement(cfg, Cluster())
        return cls.from_world_sizes(
            cfg,
            env_world_size=placement.get_world_size("env"),
            actor_world_size=placement.get_world_size("actor"),
        )

    @classmethod
    def from_world_sizes(
        cls, cfg: DictConfig, *, env_world_size: int, actor_world_size: int
    ) -> RolloutGeometry:
        """Derive the geometry from the config and known world sizes.

        Args:
            cfg: Run config with ``rollout.pipeline_stage_num``,
                ``env.train.max_steps_per_rollout_epoch`` and ``actor.model.num_action_chunks``.
            env_world_size: Number of environment workers.
            actor_world_size: Number of actor workers.

        Raises:
            ValueError: A size isn't positive, or an epoch is shorter than one chunk.
        """
        stages = int(required_option(cfg, "rollout.pipeline_stage_num"))
        steps = int(required_option(cfg, "env.train.max_steps_per_rollout_epoch"))
        chunk = int(required_option(cfg, "actor.model.num_action_chunks"))
        sizes = {
            "the env world size": env_world_size,
            "the actor world size": actor_world_size,
            "rollout.pipeline_stage_num": stages,
            "actor.model.num_action_chunks": chunk,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be positive, got {size}.")
        if steps < chunk:
            raise ValueError(
                f"env.train.max_steps_per_rollout_epoch ({steps}) is shorter than one action chunk "
                f"(actor.model.num_action_chunks = {chunk})."
            )
        source_count = env_world_size * stages
        return cls(
            source_count=source_count,
            chunk_count=steps // chunk,
            shards_per_source=math.lcm(source_count, actor_world_size) // source_count,
            actor_world_size=actor_world_size,
        )

    def rows_per_source(self, total_num_envs: int) -> int:
        """Environments of one source.

        Raises:
            ValueError: The environments can't be dealt out equally.
        """
        if total_num_envs < 1 or total_num_envs % self.source_count:
            raise ValueError(
                f"env.train.total_num_envs ({total_num_envs}) must be a positive multiple of the "
                f"{self.source_count} environment sources (env workers times pipeline stages)."
            )
        return total_num_envs // self.source_count


@dataclass(frozen=True)
class TrajectoryPlan:
    """Validated trajectory mode and routing geometry for one run."""

    mode: TrajectoryMode
    geometry: RolloutGeometry

    @classmethod
    def from_cfg(cls, cfg: DictConfig) -> TrajectoryPlan:
        """Build the single source of truth for trajectory collection.

        Raises:
            ValueError: The config combines modes that exclude each other, or sizes don't fit.
            RuntimeError: There is no Ray cluster to read world sizes from.
        """
        return cls(cls.mode_from_cfg(cfg), RolloutGeometry.from_cfg(cfg))

    @staticmethod
    def mode_from_cfg(cfg: DictConfig) -> TrajectoryMode:
        """Validate mode combinations and return the configured output mode.

        Args:
            cfg: Run config; absent keys mean that a feature is off.

        Raises:
            ValueError: Pipeline training together with a feature that it does not support.
        """
        lerobot = bool(option(cfg, "algorithm.dagger.online_lerobot.enabled", False))
        if not option(cfg, "runner.use_training_pipeline", False):
            return TrajectoryMode.LEROBOT if lerobot else TrajectoryMode.ROLLOUT
        unsupported = {
            "algorithm.dagger.online_lerobot.enabled": lerobot,
            "runner.enable_decoupled_mode": option(cfg, "runner.enable_decoupled_mode", False),
            "algorithm.adv_type: opd": option(cfg, "algorithm.adv_type", "") == "opd",
        }
        for name, requested in unsupported.items():
            if requested:
                raise ValueError(f"runner.use_training_pipeline does not support {name}.")
        return TrajectoryMode.PIPELINE

    @property
    def dispatcher(self) -> str | None:
        """Channel dispatcher that fits the routing: pipeline outputs carry their actor's key."""
        return dispatcher_for(self.mode)


def dispatcher_for(mode: TrajectoryMode) -> str | None:
    """Channel dispatcher compatible with an output mode."""
    return None if mode is TrajectoryMode.PIPELINE else "least_loaded"
