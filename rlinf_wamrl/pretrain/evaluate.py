"""Success of a checkpoint on held-out initial states, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlinf_wamrl.envs.demo import SUITE_NAME
from rlinf_wamrl.envs.rlinf_env import WAMLiberoEnv
from rlinf_wamrl.policy import SamplingSettings, WAMPolicy
from rlinf_wamrl.wam.pretrained import PretrainedWAM

__all__ = ["evaluate_pretrained"]


def evaluate_pretrained(
    pretrained: PretrainedWAM,
    demos: Any,
    settings: SamplingSettings,
    states: Sequence[int],
    *,
    num_envs: int = 24,
    report: Callable[[str], None] = lambda _: None,
) -> dict[int, tuple[int, int]]:
    """Run the deterministic policy once from each held-out state of each task.

    Args:
        pretrained: the checkpoint.
        demos: :class:`~rlinf_wamrl.pretrain.config.DemosConfig`; its tasks and pictures.
        settings: how actions are sampled.
        states: [first, past the last] stored initial state.
        num_envs: environments side by side.
        report: called with progress lines.

    Returns:
        Task id -> (successes, episodes).
    """
    policy = WAMPolicy(
        wam=pretrained.model,
        vae=pretrained.vae,
        text_encoder=pretrained.text_encoder,
        processor=pretrained.processor,
        settings=settings,
    ).eval()
    results = {}
    for task_id in demos.task_ids:
        first, past = states
        epochs = -(-(past - first) // num_envs)
        section = {
            "task_suite_name": SUITE_NAME,
            "task_ids": [task_id],
            "init_state_range": [first, past],
            "total_num_envs": num_envs,
            "group_size": 1,
            "rollout_epoch": epochs,
            "image_size": demos.image_size,
            "render_quality": demos.render_quality,
            "num_future_frames": 0,
            "is_eval": True,
            "seed": 1000,
        }
        env = WAMLiberoEnv(section, num_envs, 0, 1)
        outcome: list[torch.Tensor] = []
        try:
            for _ in range(epochs):
                outcome.append(_run_round(env, policy))
                env.update_reset_state_ids()
        finally:
            env.close()
        solved = torch.cat(outcome)
        results[task_id] = (int(solved.sum()), solved.numel())
        report(f"task {task_id}: {int(solved.sum())}/{solved.numel()} held-out states solved")
    return results


def _run_round(env: WAMLiberoEnv, policy: WAMPolicy) -> torch.Tensor:
    """Run one episode per environment; returns success of those that had one."""
    observation, _ = env.reset()
    while True:
        actions, _ = policy.predict_action_batch(observation, mode="eval")
        (observation,), _, terminated, truncated, (info,) = env.chunk_step(actions)
        episode = info["episode"]
        runs = episode["task_id"] >= 0
        if bool((terminated[:, -1] | truncated[:, -1] | ~runs).all()):
            return episode["success_once"][runs]
