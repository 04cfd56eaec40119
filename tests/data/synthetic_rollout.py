"""Random but reproducible rollouts, as the messages that workers would send."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from omegaconf import DictConfig, OmegaConf

from rlinf_wamrl.data.embodied_types import (
    EnvPart,
    EnvTransition,
    PolicyOutput,
    PolicyPart,
    TrajectoryKey,
    TrajectorySource,
)


def run_config(**overrides) -> DictConfig:
    """A complete small config; keyword keys use ``__`` for dots."""
    cfg = OmegaConf.create(
        {
            "runner": {"task_type": "embodied", "use_training_pipeline": False},
            "algorithm": {
                "adv_type": "grpo",
                "reward_type": "chunk_level",
                "group_size": 2,
                "gamma": 1.0,
                "gae_lambda": 1.0,
                "normalize_advantages": False,
                "shuffle_rollout": True,
            },
            "reward": {"reward_weight": 1.0, "env_reward_weight": 1.0},
            "rollout": {"pipeline_stage_num": 1, "collect_prev_infos": True},
            "env": {
                "train": {
                    "total_num_envs": 4,
                    "rollout_epoch": 1,
                    "max_steps_per_rollout_epoch": 6,
                    "max_episode_steps": 6,
                    "auto_reset": False,
                    "ignore_terminations": False,
                }
            },
            "actor": {
                "seed": 7,
                "micro_batch_size": 2,
                "model": {"num_action_chunks": 2, "action_dim": 3},
            },
        }
    )
    for key, value in overrides.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, force_add=True)
    return cfg


@dataclass
class ChunkPair:
    key: TrajectoryKey
    policy: PolicyPart
    env: EnvPart


@dataclass
class Rollouts:
    """Generates joined chunks of one source.

    Attributes follow the config: B rows, C actions per chunk of width A.
    """

    seed: int = 0
    rows: int = 4
    chunk: int = 2
    action_dim: int = 3
    image: int = 4
    with_values: bool = True

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def flags(self, *shape, probability=0.2):
        return torch.rand(*shape, generator=self.generator) < probability

    def transition(self, ended: torch.Tensor | None = None) -> EnvTransition:
        if ended is None:
            ended = torch.zeros(self.rows, self.chunk, dtype=torch.bool)
        return EnvTransition(
            rewards=self.normal(self.rows, self.chunk),
            dones=ended,
            terminations=ended.clone(),
            truncations=torch.zeros_like(ended),
        )

    def forward_inputs(self) -> dict[str, torch.Tensor]:
        return {
            "action": self.normal(self.rows, self.chunk * self.action_dim),
            "chain": self.normal(self.rows, 3, self.chunk, self.action_dim),
            "k_star": torch.randint(0, 2, (self.rows,), generator=self.generator),
            "image": torch.randint(
                0,
                256,
                (self.rows, 3, self.image, self.image),
                generator=self.generator,
                dtype=torch.uint8,
            ),
        }

    def pair(self, key: TrajectoryKey, ended: torch.Tensor | None = None) -> ChunkPair:
        source = TrajectorySource(key, self.rows)
        output = PolicyOutput(
            forward_inputs=self.forward_inputs(),
            prev_logprobs=self.normal(self.rows, self.chunk, self.action_dim),
            prev_values=self.normal(self.rows, 1) if self.with_values else None,
            versions=torch.full((self.rows, self.chunk, self.action_dim), float(key.step_id)),
        )
        env = EnvPart(
            sources=[source],
            transition=self.transition(ended),
            final_prev_values=self.normal(self.rows, 1) if self.with_values else None,
            initial_transition=(
                EnvTransition(
                    dones=torch.zeros(self.rows, self.chunk, dtype=torch.bool),
                    terminations=torch.zeros(self.rows, self.chunk, dtype=torch.bool),
                    truncations=torch.zeros(self.rows, self.chunk, dtype=torch.bool),
                )
                if key.chunk_id == 0
                else None
            ),
        )
        return ChunkPair(key, PolicyPart(sources=[source], obs={}, output=output), env)

    def epoch(
        self,
        chunks: int,
        *,
        step: int = 0,
        epoch: int = 0,
        env_rank: int = 0,
        stage: int = 0,
        ends: bool = True,
    ) -> list[ChunkPair]:
        """All chunks of one epoch; with ``ends``, some environments end before the last chunk."""
        pairs = []
        done = torch.zeros(self.rows, dtype=torch.bool)
        for index in range(chunks):
            ended = self.flags(self.rows, self.chunk) & ~done[:, None]
            if not ends:
                ended = torch.zeros_like(ended)
            done |= ended.any(dim=1)
            pairs.append(self.pair(TrajectoryKey(step, epoch, env_rank, stage, index), ended))
        return pairs
