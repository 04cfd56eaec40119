"""What the trajectory collector makes of joined chunks: the frame of a scope, and rollout mode.

A *scope* is the set of chunks that are emitted together. Each mode says which scope a chunk belongs
to, what it keeps of it, and what it emits when the scope is full.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from omegaconf import DictConfig

from rlinf_wamrl.data.parts import EnvPart, PolicyPart
from rlinf_wamrl.data.plan import RolloutGeometry, option, required_option
from rlinf_wamrl.data.sources import TrajectoryKey
from rlinf_wamrl.data.trajectory import Trajectory
from rlinf_wamrl.data.trajectory_step import TrajectoryStep
from rlinf_wamrl.data.transition import EnvTransition

__all__ = [
    "DEFAULT_KEY",
    "ResolvedStep",
    "RolloutOutput",
    "ScopedOutput",
    "SourceOutput",
    "StepResolver",
]

DEFAULT_KEY = "default_queue"  # the queue that RLinf's channels read without a key

Emission = tuple[str, Any]
RecordT = TypeVar("RecordT")


class ScopedOutput(ABC, Generic[RecordT]):
    """Gathers what a mode keeps of each joined chunk until a scope is full, then emits it.

    Taking a chunk either succeeds entirely or changes nothing, also when it is the emission that
    fails: the chunk can be given again, and a repaired one leads to a new attempt.

    Args:
        chunks_per_scope: Chunks that fill a scope.
    """

    def __init__(self, chunks_per_scope: int) -> None:
        self._chunks_per_scope = chunks_per_scope
        self._scopes: dict[Hashable, dict[TrajectoryKey, RecordT]] = {}

    def take(self, key: TrajectoryKey, policy: PolicyPart, env: EnvPart) -> list[Emission]:
        """Take one joined chunk.

        Returns:
            Pairs of channel key and item that are ready by it; empty until the scope is full.

        Raises:
            ValueError: The chunk has been taken already and its scope isn't emitted yet, or the
                mode can't use it.
        """
        scope = self.scope(key)
        records = self._scopes.get(scope, {})
        if key in records:
            raise ValueError(f"duplicate trajectory event for {key}: its chunk has been collected.")
        records = {**records, key: self.record(key, policy, env)}
        if len(records) < self._chunks_per_scope:
            self._scopes[scope] = records
            return []
        emissions = self.emit(records)
        self._scopes.pop(scope, None)
        return emissions

    @abstractmethod
    def scope(self, key: TrajectoryKey) -> Hashable:
        """Identity of the scope that a chunk belongs to."""

    @abstractmethod
    def record(self, key: TrajectoryKey, policy: PolicyPart, env: EnvPart) -> RecordT:
        """What to keep of a chunk; raises ``ValueError`` for one that can't be used."""

    @abstractmethod
    def emit(self, records: dict[TrajectoryKey, RecordT]) -> list[Emission]:
        """Outputs of a full scope, whose chunks come in the order of their completion.

        Must leave ``records`` and the output's own state as they were when it raises.
        """

    def open_chunks(self, step_id: int | None = None) -> list[TrajectoryKey]:
        """Chunks that were taken and not emitted, of iterations up to ``step_id``."""
        return [
            key
            for records in self._scopes.values()
            for key in records
            if step_id is None or key.step_id <= step_id
        ]

    def forget(self, step_id: int) -> None:
        """Drop the open scopes of this and earlier iterations."""
        late = {self.scope(key) for key in self.open_chunks(step_id)}
        self._scopes = {scope: held for scope, held in self._scopes.items() if scope not in late}


@dataclass(frozen=True)
class ResolvedStep:
    """A chunk's training data, and its transition for rewards that reach back."""

    step: TrajectoryStep
    transition: EnvTransition


class StepResolver:
    """Turns joined pairs into steps and steps into trajectories, by the run's options.

    Args:
        cfg: Run config. Read are, with their defaults, ``rollout.collect_prev_infos`` (true),
            ``rollout.collect_transitions`` (false), ``algorithm.loss_type`` (none),
            ``algorithm.bootstrap_type`` (standard), ``algorithm.gamma`` (1),
            ``reward.env_reward_weight`` (0), ``reward.reward_weight`` (1),
            ``env.train.auto_reset`` (false) and ``env.train.max_episode_steps`` (0).
        chunk_count: Chunks of an epoch; the last one keeps its final value.
    """

    def __init__(self, cfg: DictConfig, chunk_count: int) -> None:
        self._chunk_count = chunk_count
        self.collect_prev_infos = bool(option(cfg, "rollout.collect_prev_infos", True))
        self._collect_transitions = bool(option(cfg, "rollout.collect_transitions", False))
        self._enable_rlt = option(cfg, "algorithm.loss_type", "") in ("rlt_ac", "rlt_td3")
        self._reward_weight = float(option(cfg, "reward.reward_weight", 1.0))
        self._reward_options = {
            "env_reward_weight": float(option(cfg, "reward.env_reward_weight", 0.0)),
            "reward_weight": self._reward_weight,
            "auto_reset": bool(option(cfg, "env.train.auto_reset", False)),
            "bootstrap_type": str(option(cfg, "algorithm.bootstrap_type", "standard")),
            "gamma": float(option(cfg, "algorithm.gamma", 1.0)),
        }
        self._max_episode_length = int(option(cfg, "env.train.max_episode_steps", 0))

    def resolve(self, key: TrajectoryKey, policy: PolicyPart, env: EnvPart) -> ResolvedStep:
        """Training data of one pair; see :meth:`TrajectoryStep.from_parts`."""
        if not 0 <= key.chunk_id < self._chunk_count:
            raise ValueError(
                f"{key} is outside its epoch of {self._chunk_count} chunks "
                "(env.train.max_steps_per_rollout_epoch // actor.model.num_action_chunks)."
            )
        step = TrajectoryStep.from_parts(
            policy,
            env,
            rewards=env.compute_rewards(**self._reward_options),
            collect_prev_infos=self.collect_prev_infos,
            collect_transitions=self._collect_transitions,
            enable_rlt=self._enable_rlt,
            include_final_value=key.chunk_id == self._chunk_count - 1,
        )
        return ResolvedStep(step, env.transition)

    def stack(self, resolved: Iterable[ResolvedStep]) -> Trajectory:
        """One trajectory of steps in their order, with delayed rewards given to earlier steps."""
        resolved = list(resolved)
        steps = [item.step for item in resolved]
        if any(item.transition.reward_assign_lengths is not None for item in resolved):
            # Rewards grow in place here; the retained steps must survive a failed emission as
            # they are, or a second attempt would count the delayed rewards twice.
            steps = [_with_own_rewards(step) for step in steps]
            for newest, item in enumerate(resolved, start=1):
                item.transition.assign_history_rewards(
                    steps[:newest], reward_weight=self._reward_weight
                )
        return Trajectory.from_steps(steps, max_episode_length=self._max_episode_length)


def _with_own_rewards(step: TrajectoryStep) -> TrajectoryStep:
    twin = copy.copy(step)
    twin.rewards = None if step.rewards is None else step.rewards.clone()
    return twin


class SourceOutput(ScopedOutput[RecordT]):
    """Emits every source alone, when all epochs of an iteration are in.

    Args:
        cfg: Run config.
        geometry: Routing geometry.
    """

    def __init__(self, cfg: DictConfig, geometry: RolloutGeometry) -> None:
        epochs = int(required_option(cfg, "env.train.rollout_epoch"))
        super().__init__(chunks_per_scope=epochs * geometry.chunk_count)
        self._shards = geometry.shards_per_source

    def scope(self, key: TrajectoryKey) -> Hashable:
        """One source of one iteration."""
        return key.step_id, key.env_rank, key.stage_id


class RolloutOutput(SourceOutput[ResolvedStep]):
    """Emits trajectories, in shards for the actors."""

    def __init__(self, cfg: DictConfig, geometry: RolloutGeometry) -> None:
        super().__init__(cfg, geometry)
        self._resolver = StepResolver(cfg, geometry.chunk_count)

    def record(self, key: TrajectoryKey, policy: PolicyPart, env: EnvPart) -> ResolvedStep:
        """Resolve the pair at once, so that bad data is refused when it arrives."""
        return self._resolver.resolve(key, policy, env)

    def emit(self, records: dict[TrajectoryKey, ResolvedStep]) -> list[Emission]:
        """Trajectories [T, B / shards, ...] in environment order."""
        trajectory = self._resolver.stack(records.values())
        shards = [trajectory] if self._shards == 1 else trajectory.split(self._shards)
        return [(DEFAULT_KEY, shard) for shard in shards]
