"""The learner: RLinf's embodied actor, with one optimiser for each half of the model.

One iteration: drain the trajectories; imagine and reward; turn outcomes into advantages; leave out
what teaches nothing (an advantage of exactly 0); re-score the rest in the learner's own forward
pass; PPO of the action expert over shuffled mini-batches; video training of the adapters on
successes, held by a feature KL.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from rlinf.algorithms.registry import calculate_adv_and_returns, policy_loss
from rlinf.scheduler import Channel, CommMapper, Worker
from rlinf.utils.metric_utils import append_to_dict, compute_split_num
from rlinf.utils.utils import unpack_batch
from torch import Tensor

from rlinf_wamrl.data.interface import Trajectory, merge_batch_values
from rlinf_wamrl.data.macro_step import MacroStep
from rlinf_wamrl.report.pictures import save_imagination
from rlinf_wamrl.rl.advantage import episode_returns, reconstruction_share
from rlinf_wamrl.workers.batches import (
    counting_rows,
    drift_message,
    executed_steps,
    flatten_time,
    mini_batches,
    per_step_metrics,
    resident_gib,
    rows_of,
    select_rows,
    staleness_message,
    task_rewards,
    unflatten_time,
)
from rlinf_wamrl.workers.two_halves import TwoHalvesActor

__all__ = ["WAMLearner"]


class WAMLearner(TwoHalvesActor):
    """Trains the action expert and proprio encoder by PPO, the video expert's adapters by SFT."""

    @Worker.timer("actor/recv_traj")
    async def recv_rollout_trajectories(self, input_channel: Channel) -> None:
        """Drain this rank's trajectories and lay them out as [T, B, ...]."""
        sources = self._component_placement.get_world_size("env") * self.stage_num
        expected = compute_split_num(sources, self._world_size)
        trajectories: list[Trajectory] = []
        for _ in range(expected):
            trajectories.append(await input_channel.get(async_op=True).async_wait())
        batch = Trajectory.to_batch(trajectories)
        self.rollout_batch = self._process_received_rollout_batch(batch)

    @Worker.timer("actor/compute_adv")
    def compute_advantages_and_returns(self) -> dict[str, float]:
        """Judge the rollouts received; returns how many macro-steps of this rank count."""
        if self.imagination is not None and self.is_weight_offloaded:  # it runs the model
            self.load_param_and_grad(self.device)
        self._judged = self._judge(self.rollout_batch)
        return {"macro_steps": float(self._counting(flatten_time(self.rollout_batch)).numel())}

    def _counting(self, rows: dict[str, Any]) -> Tensor:
        """Return the rows that teach: without an action half, videos of successes do, all rows."""
        if self.optimizer is None:
            return rows["loss_mask"].flatten(1).any(dim=1).nonzero().squeeze(1)
        return counting_rows(rows)

    def _judge(self, batch: dict[str, Any]) -> dict[str, float]:
        """Imagine, keep successes, and turn outcomes into advantages; returns metrics.

        Raises:
            ValueError: a recorded field of another shape or dtype than this run's macro-steps have.
        """
        rl, metrics = self.cfg.RL, {}
        MacroStep.from_record(
            batch["forward_inputs"],
            rewards=batch["rewards"],
            dones=batch["dones"][1:],  # the first says how things stood before the first chunk
            spec=self.record_spec,
        )
        if self.imagination is not None:
            self.model.eval()
            metrics.update(self.imagination.score(self._forward, batch, self._gathered))
            self._save_pictures(batch)
        if self.video is not None:
            metrics["video/new_successes"] = float(self.video.collect(batch))
            metrics["video/buffer_episodes"] = float(len(self.video.buffer))
            metrics["video/buffer_mib"] = self.video.buffer.nbytes / 2**20
        advantages = calculate_adv_and_returns(
            task_type=self.cfg.runner.task_type,
            adv_type=self.cfg.algorithm.adv_type,
            rewards=task_rewards(batch) * rl.task_reward_weight,
            dones=batch["dones"],
            gamma=self.cfg.algorithm.gamma,
            gae_lambda=self.cfg.algorithm.gae_lambda,
            group_size=rl.group_size,
            reward_type=self.cfg.algorithm.reward_type,
            loss_mask=batch["loss_mask"],
            loss_mask_sum=batch["loss_mask_sum"],
            degenerate=rl.degenerate,
            min_group_std=rl.min_group_std,
            reconstruction_reward=batch.get("reconstruction_reward"),
            reconstruction_mask=batch.get("reconstruction_mask"),
            lambda_rec=rl.lambda_rec,
            lambda_step=rl.lambda_step,
            weigh_by=rl.weigh_by,
        )
        batch.update(advantages)
        if self.imagination is not None:
            task = task_rewards(batch).sum(dim=-1) * rl.task_reward_weight
            exists = batch["reconstruction_mask"] & batch["loss_mask"].flatten(2).any(dim=2)
            returns = episode_returns(task, batch["reconstruction_reward"], exists, rl.lambda_rec)
            metrics["reward/reconstruction_share"] = reconstruction_share(
                returns, task.sum(dim=0), rl.group_size
            )
        return metrics

    @Worker.timer("run_training")
    def run_training(self, input_channel: Channel | None = None) -> dict[str, float]:
        """Take the PPO steps of one iteration.

        Args:
            input_channel: in pipeline mode, where each rollout epoch's micro-batches arrive while
                the next epoch is collected; None trains on the rollouts received before.

        Returns:
            Metrics over all steps, and ``macro_steps``, the rows that were trained on.
        """
        if self.is_weight_offloaded:
            self.load_param_and_grad(self.device)
        if self.is_optimizer_offloaded:
            self.load_optimizer(self.device)
        self.model.train()
        metrics: dict[str, list[float]] = {}
        if input_channel is None:
            append_to_dict(metrics, self._judged)
            trained = self._update(flatten_time(self.rollout_batch), metrics, is_first=True)
        else:
            trained = 0
            for epoch in range(self.cfg.env.train.rollout_epoch):
                self.rollout_batch = self._receive_epoch(input_channel)
                append_to_dict(metrics, self._judge(self.rollout_batch))
                rows = flatten_time(self.rollout_batch)
                trained += self._update(rows, metrics, is_first=epoch == 0)
        if trained and self.optimizer is not None:
            self.lr_scheduler.step()
            self.optimizer.zero_grad()
        # without anything to train on the iteration begins anew, and its video training with it
        if self.video is not None and self._agreed_count(trained):
            self._train_video(metrics)
        metrics["memory/learner_gib_max"] = [resident_gib()]
        return {**self._reduced(metrics), "macro_steps": float(trained)}

    def _update(
        self, rows: dict[str, Any], metrics: dict[str, list[float]], *, is_first: bool
    ) -> int:
        """Train ``RL.update_epochs`` times on the rows that count; returns how many do.

        Later updates of an iteration, and updates on rollouts that ran ahead of it, keep the
        recorded log-probs: the weights that acted are gone.
        """
        keep = self._counting(rows)
        per_rank = self.cfg.actor.global_batch_size // self._world_size
        micro = self.cfg.actor.micro_batch_size
        count = self._agreed_count(math.ceil(keep.numel() / per_rank))
        if count == 0:
            return 0
        if self.optimizer is None:
            return keep.numel()
        if keep.numel() == 0:  # other ranks have rows: one that does not count keeps step
            keep = torch.zeros(1, dtype=torch.int64)
        rows = select_rows(rows, keep)
        rows["prev_logprobs"] = self._reduce(rows["prev_logprobs"], rows)
        stale = self._staleness(rows, metrics)
        self._provide_video_caches(rows, metrics)
        if self.cfg.RL.recompute_logprobs and is_first and not stale:
            self._rescore(rows, metrics)
        generator = torch.Generator().manual_seed(
            self.cfg.actor.seed + 10_007 * self.version + self._rank
        )
        for _ in range(self.cfg.RL.update_epochs):
            for mini_batch in mini_batches(rows, per_rank, count, generator):
                self.optimizer.zero_grad()
                parts = list(mini_batches(mini_batch, micro, per_rank // micro))
                share = self._mean_over_ranks(executed_steps(mini_batch["loss_mask"]))
                for index, part in enumerate(parts):
                    part["weight"] = executed_steps(part["loss_mask"]) / max(share, 1e-9)
                    is_last = index == len(parts) - 1
                    self.train_micro_batch(part, metrics, is_last=is_last)
                norm = self._step(self.optimizer, self.action_parameters)
                rate = self.optimizer.param_groups[0]["lr"]
                append_to_dict(metrics, {"actor/grad_norm": norm, "actor/lr": rate})
        return executed_steps(rows["loss_mask"])

    @torch.no_grad()
    def _provide_video_caches(self, rows: dict[str, Any], metrics: dict[str, list[float]]) -> None:
        """Give every row the keys and values of its video, for all passes of this update.

        Stored ones are of the weights that acted. Once this learner has other weights (it has
        taken a step in this iteration, or the rollout worker was behind), they are made again, on
        all ranks if on one.
        """
        choice, records = self.cfg.RL.wam_cache, rows["forward_inputs"]
        if choice == "none":
            return
        if choice == "store":
            has_trained = self.optimizer_steps != self._steps_at_version
            is_stale = has_trained or bool((rows["versions"] != self.version).any())
            made_again = self._agreed_count(int(is_stale))
            append_to_dict(metrics, {"actor/stored_caches_stale": float(made_again)})
            if not made_again:
                return
            del records["video_cache"]
        micro = self.cfg.actor.micro_batch_size
        count = self._agreed_count(math.ceil(rows_of(rows) / micro))
        made = [
            self._forward(forward_type="video_cache", records=part["forward_inputs"]).cpu()
            for part in mini_batches(rows, micro, count)
        ]
        records["video_cache"] = torch.cat(made)[: rows_of(rows)]

    def _staleness(self, rows: dict[str, Any], metrics: dict[str, list[float]]) -> int:
        """Return how many updates the oldest weights that acted are behind, and check the bound."""
        behind = self.version - rows["versions"]
        metrics["actor/staleness"] = [behind.mean().item()]
        oldest = int(behind.max())
        metrics["actor/staleness_max"] = [float(oldest)]
        bound = self.cfg.algorithm.staleness_threshold + self.cfg.runner.weight_sync_interval - 1
        if oldest > bound:
            raise RuntimeError(staleness_message(oldest, bound))
        return oldest

    def _receive_epoch(self, input_channel: Channel) -> dict[str, Any]:
        """Receive this rank's micro-batches of one rollout epoch and lay them out as [T,B,...].

        They arrive one source after the other, each in time-major order.
        """
        cfg = self.cfg
        chunks = cfg.env.train.max_steps_per_rollout_epoch // cfg.actor.model.num_action_chunks
        sources = self._component_placement.get_world_size("env") * self.stage_num
        key = CommMapper.build_channel_key(self._rank, self._rank, "pipeline_actor")
        shards = []
        for _, size in CommMapper.get_src_ranks(
            cfg.env.train.total_num_envs, sources, self._world_size, self._rank
        ):
            with self.worker_timer("waiting"):
                parts = [
                    unpack_batch(input_channel.get(key=key))
                    for _ in range(size * chunks // cfg.actor.micro_batch_size)
                ]
            shards.append(unflatten_time(merge_batch_values(parts), chunks))
        batch = merge_batch_values(shards, dim=1)
        # micro-batches leave out the boundary after the last chunk, where every episode is over
        batch["dones"] = torch.cat([batch["dones"], torch.ones_like(batch["dones"][:1])])
        return batch

    def _train_video(self, metrics: dict[str, list[float]]) -> None:
        """Train the adapters on windows of successes, when this iteration is due."""
        video, config = self.video, self.policy_config
        if not video.is_due(self.version):
            return
        # every rank must take the steps, so every rank must have something to learn from
        if -self._agreed_count(-len(video.buffer)) == 0:
            return
        video.calibrate(
            self._forward, flatten_time(self.rollout_batch)["forward_inputs"], self._gathered
        )
        ratio = config.action_horizon // (config.num_video_frames - 1)
        for step in range(video.options.steps):
            self.video_optimizer.zero_grad()
            loss = video.loss(self._forward, config.action_horizon, ratio, self.version, step)
            if not math.isfinite(loss.total.item()):
                self._stop_at(
                    f"the video loss is {loss.total.item()}; lower RL.video_sft.lr",
                    {name: float(value) for name, value in loss.metrics.items()},
                )
            loss.total.backward()
            norm = self._step(self.video_optimizer, self.video_parameters)
            video.follow(loss)
            values = {name: float(value) for name, value in loss.metrics.items()}
            append_to_dict(metrics, {**values, "video/grad_norm": norm})
        self.video_optimizer.zero_grad()

    def train_micro_batch(
        self, micro_batch: dict[str, Any], metrics: dict[str, list[float]], *, is_last: bool
    ) -> None:
        """Backpropagate the PPO loss of a micro-batch, weighted by its share of the mini-batch."""
        weight = micro_batch.pop("weight")
        context = self.before_micro_batch(self.model, is_last_micro_batch=is_last)
        logprobs = self._score(micro_batch)
        loss, values = policy_loss(
            task_type=self.cfg.runner.task_type,
            loss_type=self.cfg.algorithm.loss_type,
            logprob_type=self.cfg.algorithm.logprob_type,
            reward_type=self.cfg.algorithm.reward_type,
            single_action_dim=self.cfg.actor.model.action_dim,
            logprobs=logprobs,
            old_logprobs=micro_batch["prev_logprobs"].to(self.device),
            advantages=micro_batch["advantages"].to(self.device),
            loss_mask=micro_batch["loss_mask"].to(self.device),
            clip_ratio_low=self.cfg.algorithm.clip_ratio_low,
            clip_ratio_high=self.cfg.algorithm.clip_ratio_high,
            clip_ratio_c=self.cfg.algorithm.clip_ratio_c,
        )
        if not math.isfinite(loss.item()):
            self._stop_at(
                f"the PPO loss is {loss.item()}, of log-probs in "
                f"[{logprobs.min().item():.4g}, {logprobs.max().item():.4g}]; lower RL.action_lr "
                "or actor.optim.clip_grad, or start from another checkpoint",
                micro_batch,
            )
        if not metrics.get("actor/first_ratio"):
            metrics["actor/first_ratio"] = [values["actor/ratio"]]
        values.update(per_step_metrics(micro_batch, logprobs.detach()))
        with context:
            self.grad_scaler.scale(loss * weight).backward()
        if weight > 0:
            append_to_dict(metrics, values)

    def _score(self, rows: dict[str, Any]) -> Tensor:
        with self.amp_context:
            logprobs = self._forward(forward_inputs=rows["forward_inputs"])["logprobs"]
        return self._reduce(logprobs, rows)

    def _reduce(self, logprobs: Tensor, rows: dict[str, Any]) -> Tensor:
        """Bring log-probs of rows [N,...], scored here or recorded, to ``RL.logprob_reduction``."""
        if self.cfg.RL.logprob_reduction == "sum":
            return logprobs
        executed = rows["forward_inputs"]["executed_mask"].sum(dim=1)
        terms = (executed * logprobs.shape[-1]).clamp(min=1).view(-1, 1, 1)
        return logprobs / terms.to(logprobs)

    def _save_pictures(self, batch: dict[str, Any]) -> None:
        if self._rank == 0 and self.imagination.last is not None:
            rows, result = flatten_time(batch), self.imagination.last
            count = len(result.imagined)
            folder = Path(self.cfg.runner.logger.log_path) / "pictures"
            save_imagination(
                folder / f"iteration_{self.version + 1:04d}.png",
                current=rows["forward_inputs"]["image"][:count],
                imagined=result.imagined,
                executed=self.imagination.frames(rows["next_obs"])["future_frames"][:count],
                rewards=result.reward[:count],
            )

    @torch.no_grad()
    def _rescore(self, rows: dict[str, Any], metrics: dict[str, list[float]]) -> None:
        """Replace the recorded log-probs by the learner's own, and measure the difference."""
        count = self._agreed_count(math.ceil(rows_of(rows) / self.cfg.actor.micro_batch_size))
        scored = [
            self._score(part).cpu()
            for part in mini_batches(rows, self.cfg.actor.micro_batch_size, count)
        ]
        total = rows_of(rows)
        new = torch.cat(scored)[:total]
        drift = (new - rows["prev_logprobs"]).sum(dim=(1, 2)).abs()
        rows["prev_logprobs"] = new
        metrics["actor/logprob_drift"] = [drift.mean().item()]
        metrics["actor/logprob_drift_max"] = [drift.max().item()]
        if drift.max() > self.cfg.RL.max_logprob_drift:
            raise RuntimeError(drift_message(drift.max().item(), self.cfg.RL.max_logprob_drift))

    @staticmethod
    def _reduced(metrics: dict[str, list[float]]) -> dict[str, float]:
        return {
            name: max(values) if name.endswith("_max") else sum(values) / len(values)
            for name, values in metrics.items()
        }
