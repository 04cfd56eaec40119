"""The learner: RLinf's embodied actor, trained by flow PPO on group advantages.

One update: drain the trajectories, turn outcomes into advantages, leave out what teaches nothing
(an advantage of exactly 0), re-score the rest in the learner's own forward pass, then PPO over
shuffled mini-batches.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from omegaconf import DictConfig
from rlinf.algorithms.registry import calculate_adv_and_returns, policy_loss
from rlinf.scheduler import Channel, CommMapper, Worker
from rlinf.utils.metric_utils import append_to_dict, compute_split_num
from rlinf.utils.utils import unpack_batch
from rlinf.workers.actor.fsdp_actor_worker import EmbodiedFSDPActor
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from rlinf_wamrl.checkpoint import read_learner, write_learner
from rlinf_wamrl.data.interface import Trajectory, merge_batch_values
from rlinf_wamrl.workers.batches import (
    counting_rows,
    drift_message,
    executed_steps,
    flatten_time,
    mini_batches,
    rows_of,
    select_rows,
)

__all__ = ["WAMLearner"]


class WAMLearner(EmbodiedFSDPActor):
    """Trains the action expert and the proprio encoder; everything else is frozen."""

    def __init__(self, cfg: DictConfig) -> None:
        """Read the sizes; the model is built in ``init_worker``."""
        super().__init__(cfg)
        if cfg.actor.num_threads is not None:
            torch.set_num_threads(cfg.actor.num_threads)

    def setup_model_and_optimizer(self) -> None:
        """Build the model, and send only what trains to the rollout workers."""
        super().setup_model_and_optimizer()
        self.param_names_need_sync = [
            name for name, parameter in self.model.named_parameters() if parameter.requires_grad
        ]

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
        """Turn outcomes into advantages; returns how many macro-steps of this rank count."""
        batch, rl = self.rollout_batch, self.cfg.RL
        advantages = calculate_adv_and_returns(
            task_type=self.cfg.runner.task_type,
            adv_type=self.cfg.algorithm.adv_type,
            rewards=batch["rewards"],
            dones=batch["dones"],
            gamma=self.cfg.algorithm.gamma,
            gae_lambda=self.cfg.algorithm.gae_lambda,
            group_size=rl.group_size,
            reward_type=self.cfg.algorithm.reward_type,
            loss_mask=batch["loss_mask"],
            loss_mask_sum=batch["loss_mask_sum"],
        )
        batch.update(advantages)
        return {"macro_steps": float(counting_rows(flatten_time(batch)).numel())}

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
            trained = self._update(flatten_time(self.rollout_batch), metrics, is_first=True)
        else:
            trained = 0
            for epoch in range(self.cfg.env.train.rollout_epoch):
                rows = self._receive_epoch(input_channel)
                trained += self._update(rows, metrics, is_first=epoch == 0)
        if trained:
            self.lr_scheduler.step()
        self.optimizer.zero_grad()
        return {**self._reduced(metrics), "macro_steps": float(trained)}

    def _update(
        self, rows: dict[str, Any], metrics: dict[str, list[float]], *, is_first: bool
    ) -> int:
        """Train ``RL.update_epochs`` times on the rows that count; returns how many do.

        Later updates of an iteration keep the recorded log-probs: the weights that acted are gone.
        """
        keep = counting_rows(rows)
        per_rank = self.cfg.actor.global_batch_size // self._world_size
        micro = self.cfg.actor.micro_batch_size
        count = self._agreed_count(math.ceil(keep.numel() / per_rank))
        if count == 0:
            return 0
        if keep.numel() == 0:  # other ranks have rows: one that does not count keeps step
            keep = torch.zeros(1, dtype=torch.int64)
        rows = select_rows(rows, keep)
        if self.cfg.RL.recompute_logprobs and is_first:
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
                grad_norm, rates = self.optimizer_step()
                append_to_dict(metrics, {"actor/grad_norm": float(grad_norm), "actor/lr": rates[0]})
        return executed_steps(rows["loss_mask"])

    def _receive_epoch(self, input_channel: Channel) -> dict[str, Any]:
        """Receive this rank's micro-batches of one rollout epoch and join them."""
        cfg = self.cfg
        chunks = cfg.env.train.max_steps_per_rollout_epoch // cfg.actor.model.num_action_chunks
        rows = cfg.env.train.total_num_envs * chunks // self._world_size
        key = CommMapper.build_channel_key(self._rank, self._rank, "pipeline_actor")
        parts = [
            unpack_batch(input_channel.get(key=key))
            for _ in range(rows // cfg.actor.micro_batch_size)
        ]
        return merge_batch_values(parts)

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
            raise FloatingPointError(
                f"the PPO loss is {loss.item()} at iteration {self.version}; the inputs were "
                f"log-probs in [{logprobs.min().item():.4g}, {logprobs.max().item():.4g}]. Lower "
                "RL.action_lr or actor.optim.clip_grad, or start from another checkpoint"
            )
        if not metrics.get("actor/first_ratio"):
            metrics["actor/first_ratio"] = [values["actor/ratio"]]
        with context:
            self.grad_scaler.scale(loss * weight).backward()
        if weight > 0:
            append_to_dict(metrics, values)

    def save_checkpoint(self, save_path: str, step: int = 0) -> None:
        """Write what trains: weights, optimiser, schedule. Never the frozen base.

        Args:
            save_path: folder, which exists.
            step: training iteration.
        """
        options = StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=True
        )
        state = {
            "step": step,
            "model": get_model_state_dict(self.model, options=options),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=options),
            "lr_scheduler": self.lr_scheduler.state_dict(),
        }
        if self._rank == 0:
            trained = set(self.param_names_need_sync)
            state["model"] = {k: v for k, v in state["model"].items() if k in trained}
            write_learner(save_path, state)

    def load_checkpoint(self, load_path: str) -> None:
        """Continue from a folder :meth:`save_checkpoint` wrote."""
        state = read_learner(load_path)
        trained = set(self.param_names_need_sync)
        if state["model"].keys() != trained:
            difference = sorted(state["model"].keys() ^ trained)
            raise ValueError(
                f"{load_path} was written for other trainable parameters; {len(difference)} "
                f"differ, for example {difference[:3]}"
            )
        options = StateDictOptions(full_state_dict=True, strict=False, ignore_frozen_params=True)
        set_model_state_dict(self.model, state["model"], options=options)
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=options)
        self.lr_scheduler.load_state_dict(state["lr_scheduler"])

    def _score(self, rows: dict[str, Any]) -> Tensor:
        with self.amp_context:
            logprobs = self.model(forward_inputs=rows["forward_inputs"])["logprobs"]
        if self.cfg.RL.logprob_reduction == "mean":
            executed = rows["forward_inputs"]["executed_mask"].sum(dim=1)
            logprobs = logprobs / (executed * logprobs.shape[-1]).clamp(min=1).view(-1, 1, 1).to(
                logprobs
            )
        return logprobs

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
        recorded = rows["prev_logprobs"]
        if self.cfg.RL.logprob_reduction == "mean":
            executed = rows["forward_inputs"]["executed_mask"].sum(dim=1)
            recorded = recorded / (executed * new.shape[-1]).clamp(min=1).view(-1, 1, 1)
        drift = (new - recorded).sum(dim=(1, 2)).abs()
        rows["prev_logprobs"] = new
        metrics["actor/logprob_drift"] = [drift.mean().item()]
        metrics["actor/logprob_drift_max"] = [drift.max().item()]
        if drift.max() > self.cfg.RL.max_logprob_drift:
            raise RuntimeError(drift_message(drift.max().item(), self.cfg.RL.max_logprob_drift))

    def _agreed_count(self, count: int) -> int:
        """Return the largest ``count`` over the ranks: all must take equally many steps."""
        agreed = torch.tensor(count, device=self.device)
        torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MAX)
        return int(agreed)

    def _mean_over_ranks(self, value: float) -> float:
        """Return the mean over ranks: gradients are averaged, so losses weigh by global counts."""
        total = torch.tensor(float(value), device=self.device)
        torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.SUM)
        return float(total) / self._world_size

    @staticmethod
    def _reduced(metrics: dict[str, list[float]]) -> dict[str, float]:
        return {
            name: max(values) if name.endswith("_max") else sum(values) / len(values)
            for name, values in metrics.items()
        }
