"""What an environment returns for one executed action chunk: its outcome and its observation.

Shape symbols: B environments of one routed batch, C actions of a chunk, A the width of one action,
D = C * A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from rlinf_wamrl.data.batch_values import (
    CompactPickle,
    merge_batch_values,
    merge_episode_data,
    move_to_cpu,
    split_batch_value,
    split_episode_data,
)

if TYPE_CHECKING:
    from rlinf_wamrl.data.trajectory import TrajectoryStep

__all__ = ["EnvOutput", "EnvTransition"]

# What consumers of an environment batch read, in the order of the documented dict.
_BATCH_FIELDS = (
    "dones",
    "terminations",
    "truncations",
    "rewards",
    "intervene_actions",
    "intervene_flags",
    "rlt_switch_flags",
)


@dataclass(kw_only=True, eq=False)
class EnvTransition(CompactPickle):
    """Environment-owned outcome of one executed action chunk.

    Tensors are moved to contiguous CPU memory; ``episode_data`` is kept as it is given.

    Raises:
        ValueError: ``executed_mask`` is not a bool tensor [B, C].
    """

    rewards: torch.Tensor | None = None  # float [B, C]
    dones: torch.Tensor | None = None  # bool [B, C], terminations | truncations
    terminations: torch.Tensor | None = None  # bool [B, C]
    truncations: torch.Tensor | None = None  # bool [B, C]
    executed_mask: torch.Tensor | None = None  # bool [B, C], False where an action did not run
    intervene_actions: torch.Tensor | None = None  # float [B, D], expert actions
    intervene_flags: torch.Tensor | None = None  # bool [B] or [B, C]
    rlt_switch_flags: torch.Tensor | None = None  # bool or int [B] or [B, C]
    reward_model_output: torch.Tensor | None = None  # float [B, C]
    reward_assign_lengths: list[int] | None = None  # per environment, in action chunks
    episode_data: dict[str, Any] | None = None  # LeRobot payload, see split_episode_data

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, torch.Tensor):
                setattr(self, spec.name, move_to_cpu(value))
        mask = self.executed_mask
        if mask is not None and (mask.dtype != torch.bool or mask.dim() != 2):
            raise ValueError(
                "executed_mask must be a bool tensor [B, C], "
                f"got {mask.dtype} with shape {list(mask.shape)}."
            )

    def with_trajectory_data(
        self,
        *,
        reward_model_output: torch.Tensor | None = None,
        reward_assign_lengths: list[int] | None = None,
        episode_data: dict[str, Any] | None = None,
    ) -> EnvTransition:
        """Return a copy enriched with what only the collector reads.

        All three fields are set: one that is not passed is cleared. Tensors are shared with the
        original, which stays as it was.

        Args:
            reward_model_output: Scores of a reward model, float [B, C]. A [B, 1] tensor broadcasts
                in :meth:`compute_rewards`, that is, it counts once per action.
            reward_assign_lengths: Per environment, how many chunks (the newest included) the score
                belongs to; see :meth:`assign_history_rewards`.
            episode_data: LeRobot payload of the chunk.
        """
        return replace(
            self,
            reward_model_output=reward_model_output,
            reward_assign_lengths=reward_assign_lengths,
            episode_data=episode_data,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the seven fields that consumers of an environment batch read."""
        return {name: getattr(self, name) for name in _BATCH_FIELDS}

    def split(self, split_sizes: list[int]) -> list[EnvTransition]:
        """Split along the batch dimension; ``split_sizes`` are the rows of each shard."""
        columns = {
            spec.name: split_batch_value(getattr(self, spec.name), split_sizes)
            for spec in fields(self)
            if spec.name != "episode_data"
        }
        columns["episode_data"] = split_episode_data(self.episode_data, split_sizes)
        return [
            EnvTransition(**{name: column[index] for name, column in columns.items()})
            for index in range(len(split_sizes))
        ]

    @classmethod
    def merge(cls, transitions: list[EnvTransition]) -> EnvTransition:
        """Merge source fragments in batch order; the inverse of :meth:`split`.

        Raises:
            ValueError: No fragments, or a field that only some of them have.
        """
        if not transitions:
            raise ValueError("cannot merge transitions: there is nothing to merge.")
        episodes = [transition.episode_data for transition in transitions]
        with_episodes = sum(episode is not None for episode in episodes)
        if 0 < with_episodes < len(episodes):
            raise ValueError(
                f"cannot merge transitions: {with_episodes} of {len(episodes)} have episode data."
            )
        return cls(
            episode_data=merge_episode_data(episodes) if with_episodes else None,
            **{
                spec.name: merge_batch_values([getattr(item, spec.name) for item in transitions])
                for spec in fields(cls)
                if spec.name != "episode_data"
            },
        )

    def compute_rewards(
        self,
        *,
        bootstrap_values: torch.Tensor | None,
        env_reward_weight: float,
        reward_weight: float,
        auto_reset: bool,
        bootstrap_type: str,
        gamma: float,
    ) -> torch.Tensor | None:
        """Build the reward tensor that trajectory training consumes.

        With scores of a reward model the rewards are ``env_reward_weight * rewards + reward_weight
        * scores``; without them they are *not* weighted. With automatic resets the value of the
        state in which an episode was cut off is added, discounted, to the last slot of its chunk:
        where ``truncations`` says so for ``bootstrap_type`` "standard", else where ``dones`` does.
        Flags on earlier slots of the chunk don't count.

        Args:
            bootstrap_values: Values of the final observations, float [B, 1].
            env_reward_weight: Weight of the environment's rewards.
            reward_weight: Weight of the reward model's scores.
            auto_reset: Whether environments restart by themselves.
            bootstrap_type: "standard" or "always".
            gamma: Discount factor.

        Returns:
            Float [B, C] in storage of its own, safe to be changed in place, or ``None`` when there
            are no rewards.
        """
        if self.rewards is None:
            return None
        if self.reward_model_output is None:
            rewards = self.rewards.clone()
        else:
            scores = self.reward_model_output.to(self.rewards.dtype)
            rewards = env_reward_weight * self.rewards + reward_weight * scores
        if bootstrap_values is None or not auto_reset or self.dones is None:
            return rewards
        ended = self.truncations if bootstrap_type == "standard" else self.dones
        if ended is None or not ended[:, -1].any():
            return rewards
        final_values = torch.where(
            ended[:, -1].bool(), bootstrap_values[:, 0].to(torch.float32), 0.0
        )
        rewards[:, -1] += gamma * final_values
        return rewards

    def assign_history_rewards(
        self, steps: Sequence[TrajectoryStep], *, reward_weight: float
    ) -> None:
        """Give a delayed reward-model score also to the chunks before the one it arrived with.

        Environment i with length L adds ``reward_weight * reward_model_output[i]`` to its 2nd to
        L-th newest step. The newest is left out: :meth:`compute_rewards` has counted it there.

        Args:
            steps: Steps collected so far, this transition's own last. Those without rewards are
                passed over.
            reward_weight: Weight of the reward model's scores.

        Raises:
            ValueError: There are lengths but no scores.
        """
        if self.reward_assign_lengths is None:
            return
        if self.reward_model_output is None:
            raise ValueError("reward_assign_lengths needs a reward_model_output to assign.")
        rewarded = [step for step in steps if step.rewards is not None]
        for env_id, length in enumerate(self.reward_assign_lengths):
            for age in range(2, min(length, len(rewarded)) + 1):
                rewarded[-age].add_reward(env_id, reward_weight * self.reward_model_output[env_id])


@dataclass(kw_only=True, eq=False)
class EnvOutput(CompactPickle):
    """Observation and transition returned by one environment chunk step."""

    obs: dict[str, Any]  # observation after the chunk; leaves [B, ...] or lists of B
    transition: EnvTransition = field(default_factory=EnvTransition)
    final_obs: dict[str, Any] | None = None  # like obs, before the reset of ended environments
    env_infos: dict[str, Any] | None = None  # environment metadata; leaves [B, ...]

    def __post_init__(self) -> None:
        self.obs = move_to_cpu(self.obs)
        self.final_obs = move_to_cpu(self.final_obs)
        self.env_infos = move_to_cpu(self.env_infos)

    @property
    def rewards(self) -> torch.Tensor | None:
        """Per-action environment rewards, float [B, C]."""
        return self.transition.rewards

    @property
    def dones(self) -> torch.Tensor | None:
        """Combined termination and truncation flags, bool [B, C]."""
        return self.transition.dones

    @property
    def terminations(self) -> torch.Tensor | None:
        """Natural terminal flags, bool [B, C]."""
        return self.transition.terminations

    @property
    def truncations(self) -> torch.Tensor | None:
        """Time-limit or external truncation flags, bool [B, C]."""
        return self.transition.truncations

    @property
    def intervene_actions(self) -> torch.Tensor | None:
        """Expert actions recorded by the environment, float [B, D]."""
        return self.transition.intervene_actions

    @property
    def intervene_flags(self) -> torch.Tensor | None:
        """Which action slots used an expert action, bool [B] or [B, C]."""
        return self.transition.intervene_flags

    @property
    def rlt_switch_flags(self) -> torch.Tensor | None:
        """Per-action RLT route choices."""
        return self.transition.rlt_switch_flags

    def prepare_observations(self, obs: dict[str, Any]) -> dict[str, Any]:
        """Select what policies read and turn the task descriptions into a list.

        Args:
            obs: Raw observation.

        Returns:
            Dict with ``main_images``, ``wrist_images``, ``extra_view_images``, ``states`` and
            ``task_descriptions`` (``None`` where absent); ``reset_mask`` too when ``obs`` has it.
        """
        names = ("main_images", "wrist_images", "extra_view_images", "states")
        prepared: dict[str, Any] = {name: obs.get(name) for name in names}
        descriptions = obs.get("task_descriptions")
        prepared["task_descriptions"] = None if descriptions is None else list(descriptions)
        if "reset_mask" in obs:
            prepared["reset_mask"] = obs["reset_mask"]
        return prepared

    def to_dict(self) -> dict[str, Any]:
        """Return prepared observations, environment infos and the seven transition fields."""
        return {
            "obs": self.prepare_observations(self.obs),
            "final_obs": (
                None if self.final_obs is None else self.prepare_observations(self.final_obs)
            ),
            "env_infos": self.env_infos,
            **self.transition.to_dict(),
        }
