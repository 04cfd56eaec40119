"""The rollout worker: samples action chunks and publishes both halves of each trajectory chunk.

Only actions go back to the env worker. The policy's half (``PolicyPart``) and the env's half
(``EnvPart``, received with the next observation) go to the actor channel, whose collector joins
them.
"""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from rlinf.scheduler import Channel, Worker
from rlinf.workers.rollout.hf.huggingface_worker import MultiStepRolloutWorker

from rlinf_wamrl.checkpoint import read_trained_weights
from rlinf_wamrl.data.interface import EnvPart, PolicyInput, PolicyOutput, PolicyPart
from rlinf_wamrl.data.plan import TrajectoryMode, TrajectoryPlan, option
from rlinf_wamrl.data.wire import pack_message
from rlinf_wamrl.workers.env_worker import (
    EVAL_ACTIONS_TAG,
    EVAL_INPUT_TAG,
    TRAIN_ACTIONS_TAG,
    TRAIN_INPUT_TAG,
)
from rlinf_wamrl.workers.messages import receive_observation, receive_request

__all__ = ["WAMRolloutWorker"]


class WAMRolloutWorker(MultiStepRolloutWorker):
    """RLinf's rollout worker, speaking the embodied data interface."""

    def __init__(self, cfg: DictConfig) -> None:
        """Read the sizes; the model is built in ``init_worker``."""
        super().__init__(cfg)
        self._records_episodes = TrajectoryPlan.mode_from_cfg(cfg) is TrajectoryMode.LEROBOT
        # without a learner to explore for, the policy is deterministic unless asked otherwise
        explores = bool(option(cfg, "rollout.explore", not self._records_episodes))
        self._rollout_mode = "train" if explores else "eval"
        if cfg.rollout.num_threads is not None:
            torch.set_num_threads(cfg.rollout.num_threads)

    def init_worker(self) -> None:
        """Build the policy; without a learner, load the weights of ``runner.resume_dir`` too."""
        super().init_worker()
        resume = self.cfg.runner.resume_dir
        has_learner = not (self.only_eval or self._records_episodes)
        if resume is not None and not has_learner:
            self.hf_model.load_state_dict(read_trained_weights(resume), strict=False)

    def setup_sample_params(self) -> None:
        """Tell the policy which mode it samples in.

        RLinf passes ``mode=`` to its own model types only; a plugin's policy gets the sampling
        parameters, and without this would explore in evaluation too.
        """
        super().setup_sample_params()
        self._train_sampling_params = {**self._train_sampling_params, "mode": "train"}
        self._eval_sampling_params = {**self._eval_sampling_params, "mode": "eval"}

    @Worker.timer("rollout/generate")
    async def generate(
        self, input_channel: Channel, output_channel: Channel, actor_channel: Channel
    ) -> None:
        """Serve one iteration's rollouts and publish their trajectory parts."""
        if self.enable_offload:
            self.reload_model()
        for _ in range(self.rollout_epoch):
            for _ in range(self.n_train_chunk_steps):
                for stage in range(self.num_pipeline_stages):
                    request = await self._receive_train(input_channel, stage)
                    self._publish_env_parts(request, actor_channel)
                    self._answer(request, stage, output_channel, actor_channel)
            for stage in range(self.num_pipeline_stages):
                request = await self._receive_train(input_channel, stage)
                self._publish_env_parts(request, actor_channel)
        if self.enable_offload:
            self.offload_model()

    async def evaluate(self, input_channel: Channel, output_channel: Channel) -> None:
        """Serve the evaluation rollouts with the deterministic policy."""
        if self.enable_offload:
            self.reload_model()
        for _ in range(self.eval_rollout_epoch):
            for _ in range(self.n_eval_chunk_steps):
                for stage in range(self.num_pipeline_stages):
                    observation = await receive_observation(
                        self, input_channel, EVAL_INPUT_TAG, stage, self.eval_batch_size
                    )
                    actions, _ = self.predict(observation, mode="eval")
                    self._send_actions(
                        output_channel, actions, stage, EVAL_ACTIONS_TAG, self.eval_batch_size
                    )
        if self.enable_offload:
            self.offload_model()

    async def _receive_train(self, channel: Channel, stage: int) -> PolicyInput:
        return await receive_request(self, channel, TRAIN_INPUT_TAG, stage, self.train_batch_size)

    def _answer(
        self, request: PolicyInput, stage: int, output_channel: Channel, actor_channel: Channel
    ) -> None:
        actions, result = self.predict(request.obs, mode=self._rollout_mode)
        self._send_actions(output_channel, actions, stage, TRAIN_ACTIONS_TAG, self.train_batch_size)
        if self._records_episodes:  # the env's half has everything an episode needs
            part = PolicyPart(sources=request.sources, obs={}, external_actions=actions)
            actor_channel.put(pack_message(part), async_op=True)
            return
        logprobs = result["prev_logprobs"]
        output = PolicyOutput(
            forward_inputs=result["forward_inputs"],
            prev_logprobs=logprobs,
            prev_values=result["prev_values"],
            versions=torch.full_like(logprobs, float(self.version), dtype=torch.float32),
        )
        part = PolicyPart(sources=request.sources, obs={}, output=output)
        actor_channel.put(pack_message(part), async_op=True)

    def _publish_env_parts(self, request: PolicyInput, actor_channel: Channel) -> None:
        for part in request.env_parts:
            if part is not None:
                actor_channel.put(pack_message(self._completed(part)), async_op=True)

    def _completed(self, part: EnvPart) -> EnvPart:
        """Prepare the captured frames as the model sees pictures."""
        after = part.next_obs
        if after is not None:
            processor = self.hf_model.processor
            main, wrist = after["future_frames"].movedim(-3, -1).chunk(2, dim=-2)
            after = {
                **after,
                "future_frames": processor.images(main, wrist),
                "future_states": processor.proprio(after["future_states"]),
            }
        return part.complete(next_obs=after, next_rlt_obs=None, final_prev_values=None)

    def _send_actions(
        self, channel: Channel, actions: Any, stage: int, tag: str, batch_size: int
    ) -> None:
        self.send_to(
            group_name=self.cfg.env.group_name,
            channel=channel,
            data=actions.detach().cpu().contiguous(),
            tag=tag,
            route_key=stage,
            async_op=True,
            batch_size=batch_size,
        )
