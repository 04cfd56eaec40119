"""A learner without RLinf's workers around it: one rank, no channels, the real update."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from omegaconf import DictConfig

from rlinf_wamrl.policy import WAMPolicy
from rlinf_wamrl.runtime import plugin
from rlinf_wamrl.workers.learner import WAMLearner


class LoneLearner(WAMLearner):
    """Takes updates on rows it is given; everything but the set-up is the learner's own."""

    def __init__(self, cfg: DictConfig, policy: WAMPolicy) -> None:
        plugin.register()
        self.cfg, self.model, self.policy_config = cfg, policy, policy.wam.config
        self.device, self._rank, self._world_size = policy.device, 0, 1
        self.amp_context = nullcontext()
        self.grad_scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.optimizer_steps = 0
        self.optimizer = self.build_optimizer(policy)
        self.set_global_step(0)

    def before_micro_batch(self, model, is_last_micro_batch):
        return nullcontext()

    def _agreed_count(self, count):
        return count

    def _mean_over_ranks(self, value):
        return value


def recorded_rows(policy: WAMPolicy, observations: dict, *, version: int = 0) -> dict:
    """Rows of an update as the collector makes them of one query of the policy."""
    _, result = policy.predict_action_batch(observations)
    logprobs = result["prev_logprobs"]
    size, executed, _ = logprobs.shape
    record = dict(result["forward_inputs"])
    record["executed_mask"] = torch.ones(size, executed, dtype=torch.bool)
    return {
        "forward_inputs": record,
        "prev_logprobs": logprobs,
        "versions": torch.full_like(logprobs, float(version)),
        "advantages": torch.linspace(-1.0, 1.0, size)[:, None],
        "loss_mask": torch.ones(size, 1, dtype=torch.bool),
    }
