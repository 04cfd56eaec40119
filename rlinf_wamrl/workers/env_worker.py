"""The env worker: steps the simulator and tells the trajectory path what happened.

It follows RLinf's embodied data interface: observations go out as ``PolicyInput`` with the
``EnvPart`` of the chunk just executed, and only actions come back.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from rlinf.scheduler import Channel, Worker
from rlinf.workers.env.env_worker import EnvWorker

from rlinf_wamrl.data.interface import (
    EnvOutput,
    EnvPart,
    EnvTransition,
    PolicyInput,
    TrajectoryKey,
    TrajectorySource,
)
from rlinf_wamrl.data.plan import TrajectoryMode, TrajectoryPlan
from rlinf_wamrl.files import write_text_atomic
from rlinf_wamrl.report.pictures import Film
from rlinf_wamrl.workers.episode_payload import episode_payload, policy_observation
from rlinf_wamrl.workers.messages import pack_observation_shards, pack_request_shards
from rlinf_wamrl.workers.reward_worker import REWARD_TAG
from rlinf_wamrl.workers.trajectory_channel import PROGRESS_KEY

__all__ = ["FUTURE_KEYS", "WAMEnvWorker"]

FUTURE_KEYS = ("future_frames", "future_states", "future_frames_mask")
"""Observation entries that describe the chunk just executed."""

AFTER_KEYS = (*FUTURE_KEYS, "task_reward", "reconstruction_raw")
"""What of it reaches the learner; the last two only with a reward component."""

TRAIN_INPUT_TAG = "train_policy_input"
TRAIN_ACTIONS_TAG = "train_actions"
EVAL_INPUT_TAG = "eval_policy_input"
EVAL_ACTIONS_TAG = "eval_actions"


class WAMEnvWorker(EnvWorker):
    """RLinf's env worker, speaking the embodied data interface."""

    def __init__(self, cfg: Any) -> None:
        """Read the sizes; environments start in ``init_worker``."""
        super().__init__(cfg)
        self._iteration = 0
        self._keeps_future = bool(cfg.rollout.collect_transitions)
        self._records_episodes = TrajectoryPlan.mode_from_cfg(cfg) is TrajectoryMode.LEROBOT

    def init_worker(self) -> None:
        """Start the environments, and write what results depend on beside the run's logs."""
        super().init_worker()
        if self._rank == 0:
            sides = {"train": self.env_list, "eval": self.eval_env_list}
            described = {side: envs[0].description() for side, envs in sides.items() if envs}
            file = Path(self.cfg.runner.logger.log_path) / "environment.json"
            write_text_atomic(file, json.dumps(described, indent=2) + "\n")

    def set_global_step(self, global_step: int) -> None:
        """Key the next rollout: its tasks, initial states and random streams follow from it."""
        self._iteration = global_step
        for env in self.env_list:
            env.load_state_dict({**env.state_dict(), "iteration": global_step * self.rollout_epoch})

    def set_task_weights(self, weights: list[float]) -> None:
        """Draw the tasks of later rollouts in proportion to ``weights``, one per chosen task."""
        for env in self.env_list:
            env.set_task_weights(weights)

    async def _run_interact_once(
        self,
        input_channel: Channel,
        rollout_channel: Channel,
        reward_channel: Channel | None,
        actor_channel: Channel | None,
        *,
        cooperative_yield: bool,
    ) -> dict[str, torch.Tensor]:
        metrics: dict[str, list[torch.Tensor]] = defaultdict(list)
        progress = _Progress(actor_channel, self._rank, self.stage_num)
        for epoch in range(self.rollout_epoch):
            first = self._bootstrap_epoch(rollout_channel, epoch)
            before = list(first)
            for chunk in range(self.n_train_chunk_steps):
                is_last = chunk == self.n_train_chunk_steps - 1
                for stage in range(self.stage_num):
                    actions = self._receive_actions(input_channel, stage, TRAIN_ACTIONS_TAG)
                    output, episode = self._step(self.env_list[stage], actions)
                    progress.report(stage, episode, is_last)
                    if reward_channel is not None:
                        output = self._rewarded(
                            before[stage], output, stage, reward_channel, input_channel
                        )
                    if self._records_episodes:
                        payload = episode_payload(before[stage], output, actions, episode)
                        output = EnvOutput(
                            obs=output.obs,
                            transition=output.transition.with_trajectory_data(episode_data=payload),
                        )
                    before[stage] = output
                    initial = first[stage].transition if chunk == 0 else None
                    self._send_train_input(
                        rollout_channel, output, epoch, stage, chunk + 1, initial, is_last
                    )
                    if is_last:
                        self.record_env_metrics(metrics, episode)
            self.finish_rollout()
        return {name: torch.cat(values).contiguous().cpu() for name, values in metrics.items()}

    def _bootstrap_epoch(self, rollout_channel: Channel, epoch: int) -> list[EnvOutput]:
        outputs = []
        for stage in range(self.stage_num):
            env = self.env_list[stage]
            env.is_start = True
            with self.worker_timer("env/reset"):
                observation, _ = env.reset()
            nothing = torch.zeros(
                self.train_num_envs_per_stage, self.model_cfg.num_action_chunks, dtype=torch.bool
            )
            transition = EnvTransition(
                dones=nothing, terminations=nothing.clone(), truncations=nothing.clone()
            )
            outputs.append(EnvOutput(obs=observation, transition=transition))
        for stage, output in enumerate(outputs):
            self._send_train_input(rollout_channel, output, epoch, stage, 0, None, False)
        return outputs

    @Worker.timer("env_interact_step")
    def _step(self, env: Any, actions: torch.Tensor) -> tuple[EnvOutput, dict[str, torch.Tensor]]:
        observations, rewards, terminations, truncations, infos = env.chunk_step(actions.numpy())
        observation = observations[-1]
        transition = EnvTransition(
            rewards=rewards,
            dones=torch.logical_or(terminations, truncations),
            terminations=terminations,
            truncations=truncations,
            executed_mask=observation["executed_mask"],
        )
        return EnvOutput(obs=observation, transition=transition), infos[-1]["episode"]

    def _rewarded(
        self,
        before: EnvOutput,
        after: EnvOutput,
        stage: int,
        reward_channel: Channel,
        input_channel: Channel,
    ) -> EnvOutput:
        """Ask the reward component about the chunk between two outputs; returns the second with it.

        The raw reward also travels beside the frames: the learner normalises it and keeps it apart
        from the task's.
        """
        chunk = policy_observation(before)
        chunk.update({name: after.obs[name] for name in (*FUTURE_KEYS, "executed_mask")})
        self.send_to(
            group_name=self.cfg.reward.group_name,
            channel=reward_channel,
            data=chunk,
            tag=REWARD_TAG,
            route_key=stage,
            batch_size=self.train_batch_size,
            split_fn=pack_observation_shards,
        )
        reward = self.recv_from(
            group_name=self.cfg.reward.group_name,
            channel=input_channel,
            tag=REWARD_TAG,
            route_key=stage,
            batch_size=self.train_batch_size,
        )
        transition = after.transition
        after.obs["task_reward"] = transition.rewards.sum(dim=1)
        after.obs["reconstruction_raw"] = reward.sum(dim=1)
        return EnvOutput(
            obs=after.obs, transition=transition.with_trajectory_data(reward_model_output=reward)
        )

    def _send_train_input(
        self,
        channel: Channel,
        output: EnvOutput,
        epoch: int,
        stage: int,
        chunk: int,
        initial_transition: EnvTransition | None,
        is_last: bool,
    ) -> None:
        """Send the observation before ``chunk``, with the part of the chunk before it."""
        size = self.train_num_envs_per_stage
        parts: list[EnvPart | None] = [None]
        if chunk > 0:
            future = (
                {name: output.obs[name] for name in AFTER_KEYS if name in output.obs}
                if self._keeps_future
                else None
            )
            parts = [
                EnvPart(
                    sources=[TrajectorySource(self._key(epoch, stage, chunk - 1), size)],
                    transition=output.transition,
                    next_obs=future,
                    initial_transition=initial_transition,
                )
            ]
        policy_input = PolicyInput(
            obs=policy_observation(output),
            sources=[TrajectorySource(self._key(epoch, stage, chunk), size)],
            env_parts=parts,
            request_sizes=[size],
            is_last=is_last,
        )
        self.send_to(
            group_name=self.cfg.rollout.group_name,
            channel=channel,
            data=policy_input,
            tag=TRAIN_INPUT_TAG,
            route_key=stage,
            batch_size=self.train_batch_size,
            split_fn=pack_request_shards,
        )

    def _key(self, epoch: int, stage: int, chunk: int) -> TrajectoryKey:
        return TrajectoryKey(self._iteration, epoch, self._rank, stage, chunk)

    def _receive_actions(self, channel: Channel, stage: int, tag: str) -> torch.Tensor:
        batch = self.eval_batch_size if tag == EVAL_ACTIONS_TAG else self.train_batch_size
        return self.recv_from(
            group_name=self.cfg.rollout.group_name,
            channel=channel,
            tag=tag,
            route_key=stage,
            batch_size=batch,
        )

    def evaluate(
        self,
        input_channel: Channel,
        rollout_channel: Channel,
        progress_channel: Channel,
        video: str | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run every evaluation episode once; returns per-episode metrics [episodes] each.

        Args:
            input_channel: where actions come from.
            rollout_channel: where observations go to.
            progress_channel: where counts go to.
            video: file for a video of the first environment's episodes; None films nothing.
        """
        film = Film() if video is not None and self._rank == 0 else None
        metrics: dict[str, list[torch.Tensor]] = defaultdict(list)
        progress = _Progress(progress_channel, self._rank, self.stage_num)
        for env in self.eval_env_list:
            env.load_state_dict({**env.state_dict(), "iteration": 0})
        for _ in range(self.eval_rollout_epoch):
            for stage, env in enumerate(self.eval_env_list):
                env.is_start = True
                observation, _ = env.reset()
                if film is not None and stage == 0:
                    film.start(observation)
                self._send_eval_input(rollout_channel, EnvOutput(obs=observation), stage)
            for chunk in range(self.n_eval_chunk_steps):
                is_last = chunk == self.n_eval_chunk_steps - 1
                for stage, env in enumerate(self.eval_env_list):
                    actions = self._receive_actions(input_channel, stage, EVAL_ACTIONS_TAG)
                    output, episode = self._step(env, actions)
                    progress.report(stage, episode, is_last)
                    if film is not None and stage == 0:
                        film.add(output.obs)
                    if is_last:
                        self.record_env_metrics(metrics, episode)
                    else:
                        self._send_eval_input(rollout_channel, output, stage)
            self.finish_rollout(mode="eval")
        if film is not None:
            film.save(video)
        return {name: torch.cat(values).contiguous().cpu() for name, values in metrics.items()}

    def _send_eval_input(self, channel: Channel, output: EnvOutput, stage: int) -> None:
        self.send_to(
            group_name=self.cfg.rollout.group_name,
            channel=channel,
            data=policy_observation(output),
            tag=EVAL_INPUT_TAG,
            route_key=stage,
            batch_size=self.eval_batch_size,
            split_fn=pack_observation_shards,
        )


class _Progress:
    """Tells the actor channel how many episodes of the current phase have ended."""

    def __init__(self, channel: Channel, rank: int, num_stages: int) -> None:
        self._channel = channel
        self._rank = rank
        self._finished = [0, 0]
        self._running = [[0, 0] for _ in range(num_stages)]
        self._put()

    def report(self, stage: int, episode: dict[str, torch.Tensor], is_last: bool) -> None:
        """Count the episodes of a stage; ``is_last`` closes its round."""
        success = int(episode["success_once"].sum())
        if is_last:
            self._finished[0] += episode["success_once"].numel()
            self._finished[1] += success
            self._running[stage] = [0, 0]
        else:
            self._running[stage] = [success, success]
        self._put()

    def _put(self) -> None:
        ended = self._finished[0] + sum(running[0] for running in self._running)
        successes = self._finished[1] + sum(running[1] for running in self._running)
        item = (self._rank, ended, successes)
        self._channel.put(item, key=PROGRESS_KEY, async_op=True)
