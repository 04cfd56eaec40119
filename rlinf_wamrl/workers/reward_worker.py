"""The reward component: imagines in its own process, perhaps on its own accelerator.

The env worker sends each executed chunk and gets ``[B, C]`` back, RLinf's shape of a reward model's
output. Imagination is by the pretrained video expert, so this worker never needs new weights.
"""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from rlinf.models import get_model
from rlinf.scheduler import Channel, Worker
from torch import Tensor

from rlinf_wamrl.rl.reward import place_in_last_executed
from rlinf_wamrl.workers.imagination import ImaginationReward, chunk_records
from rlinf_wamrl.workers.messages import receive_observation

__all__ = ["REWARD_TAG", "WAMRewardWorker"]

REWARD_TAG = "train_reconstruction"


class WAMRewardWorker(Worker):
    """Scores the chunks of one iteration, one request per chunk and pipeline stage."""

    def __init__(self, cfg: DictConfig) -> None:
        """Read the sizes; the model is built in ``init_worker``."""
        super().__init__()
        self.cfg = cfg
        env = cfg.env.train
        self.stage_num = cfg.rollout.pipeline_stage_num
        self.batch_size = env.total_num_envs // self.stage_num
        chunks = env.max_steps_per_rollout_epoch // cfg.actor.model.num_action_chunks
        self.requests = env.rollout_epoch * chunks

    def init_worker(self) -> None:
        """Build the policy and the measure."""
        self.policy = get_model(self.cfg.actor.model).eval()
        self.imagination = ImaginationReward(self.cfg, self.policy.wam.config, self.policy.device)

    @Worker.timer("compute_rewards")
    async def compute_rewards(self, input_channel: Channel, output_channel: Channel) -> None:
        """Serve one iteration."""
        for _ in range(self.requests):
            for stage in range(self.stage_num):
                chunk = await receive_observation(
                    self, input_channel, REWARD_TAG, stage, self.batch_size
                )
                self.send_to(
                    group_name=self.cfg.env.group_name,
                    channel=output_channel,
                    data=self.score(chunk),
                    tag=REWARD_TAG,
                    route_key=stage,
                    async_op=True,
                    batch_size=self.batch_size,
                )

    @Worker.timer("score")
    @torch.no_grad()
    def score(self, chunk: dict[str, Any]) -> Tensor:
        """Return the raw rewards [B,C] of executed chunks, in the last executed slot of each.

        Args:
            chunk: the observation before it (RLinf's keys and the record's integers) with
                ``future_frames``, ``future_frames_mask`` and ``executed_mask`` of what ran.
        """
        records, frames = chunk_records(self.policy.processor, chunk, chunk)
        result = self.policy(
            forward_type="imagination_rewards",
            records=records,
            frames=self.imagination.frames(frames),
            settings=self.imagination.settings,
            similarity=self.imagination.similarity,
        )
        return place_in_last_executed(result.reward, result.mask, chunk["executed_mask"])
