"""The deterministic policy on held-out initial states, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf_wamrl.data.batch_values import merge_batch_values
from rlinf_wamrl.envs.demo import SUITE_NAME
from rlinf_wamrl.envs.rlinf_env import WAMLiberoEnv
from rlinf_wamrl.policy import SamplingSettings, WAMPolicy
from rlinf_wamrl.wam.pretrained import PretrainedWAM
from rlinf_wamrl.workers.batches import select_rows
from rlinf_wamrl.workers.imagination import chunk_records

__all__ = ["Played", "evaluate_pretrained", "play", "pretrained_policy"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Played:
    """E episodes of one task, and their N macro-steps as the reconstruction reward reads them."""

    success: Tensor  # bool [E]
    episode: Tensor  # int64 [N], row of ``success``
    records: Mapping[str, Tensor]  # [N, ...], see policy_training.imagination_rewards
    frames: Mapping[str, Tensor]  # [N, n, ...], likewise

    @property
    def score(self) -> str:
        """Successes of episodes, as ``46/120``."""
        return f"{int(self.success.sum())}/{len(self.success)}"


def pretrained_policy(pretrained: PretrainedWAM, settings: SamplingSettings) -> WAMPolicy:
    """Make a checkpoint the policy that is measured."""
    return WAMPolicy(
        wam=pretrained.model,
        vae=pretrained.vae,
        text_encoder=pretrained.text_encoder,
        processor=pretrained.processor,
        settings=settings,
    ).eval()


def evaluate_pretrained(
    policy: WAMPolicy,
    demos: Any,
    states: Sequence[int],
    *,
    num_envs: int = 24,
    report: Callable[[str], None] = lambda _: None,
) -> dict[int, Played]:
    """Run the deterministic policy once from each held-out state of each task.

    Args:
        policy: the checkpoint's.
        demos: :class:`~rlinf_wamrl.pretrain.config.DemosConfig`; its tasks and pictures.
        states: [first, past the last] stored initial state.
        num_envs: environments side by side.
        report: called with progress lines.

    Returns:
        Task id -> its episodes.
    """
    section = {
        "task_suite_name": SUITE_NAME,
        "init_state_range": list(states),
        "total_num_envs": num_envs,
        "image_size": demos.image_size,
        "render_quality": demos.render_quality,
        "seed": 1000,
    }
    results = {}
    for task_id in demos.task_ids:
        results[task_id] = play(policy, section, task_id)
        report(f"task {task_id}: {results[task_id].score} held-out states solved")
    return results


def play(policy: WAMPolicy, section: Mapping[str, Any], task_id: int) -> Played:
    """Run the deterministic policy once from each initial state of a task.

    Args:
        policy: the policy.
        section: RLinf's ``env.eval``; its tasks and rounds do not count here.
        task_id: the task.
    """
    first, past = section["init_state_range"]
    num_envs = section["total_num_envs"]
    rounds = -(-(past - first) // num_envs)
    ratio = policy.wam.config.actions_per_frame
    section = {
        **section,
        "task_ids": [task_id],
        "group_size": 1,
        "rollout_epoch": rounds,
        "action_video_freq_ratio": ratio,
        "num_future_frames": policy.settings.num_executed // ratio,
        "is_eval": True,
    }
    env = WAMLiberoEnv(section, num_envs, 0, 1)
    success, parts = [], []
    try:
        for _ in range(rounds):
            solved = _play_round(env, policy, parts, sum(map(len, success)))
            success.append(solved)
            env.update_reset_state_ids()
    finally:
        env.close()
    macro_steps = merge_batch_values(parts)
    return Played(success=torch.cat(success), **macro_steps)


def _play_round(
    env: WAMLiberoEnv, policy: WAMPolicy, parts: list[dict[str, Any]], first: int
) -> Tensor:
    """Run one episode per environment and add its macro-steps to ``parts``.

    Environments without an episode come last, so those that have one are rows ``first``,
    ``first`` + 1, ... of all episodes.

    Returns:
        Success of those that had an episode.
    """
    before, _ = env.reset()
    while True:
        actions, _ = policy.predict_action_batch(before, mode="eval")
        (after,), _, terminated, truncated, (info,) = env.chunk_step(actions)
        records, frames = chunk_records(policy.processor, before, after)
        ran = records["executed_mask"].any(dim=1).nonzero().squeeze(1)
        macro_steps = {"episode": first + torch.arange(env.num_envs), "records": records}
        parts.append(select_rows({**macro_steps, "frames": frames}, ran))
        episode = info["episode"]
        runs = episode["task_id"] >= 0
        if bool((terminated[:, -1] | truncated[:, -1] | ~runs).all()):
            return episode["success_once"][runs]
        before = after
