"""What the runner says and records about iterations and evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlinf_wamrl.report.console import rate_text, wilson_interval

__all__ = ["falling_message", "iteration_line", "summarise_evaluation", "training_metrics"]

_SUMMARY = (
    ("first ratio", "train/actor/first_ratio", ".6f"),
    ("drift", "train/actor/logprob_drift_max", ".1e"),
    ("stale", "train/actor/staleness_max", ".0f"),
    ("KL", "train/actor/approx_kl_k3", ".4f"),
    ("clipped", "train/actor/clip_fraction", ".3f"),
    ("|g|", "train/actor/grad_norm", ".2f"),
    ("r_rec", "train/reward/reconstruction", ".4f"),
    ("video loss", "train/video/sft_video_loss", ".3f"),
    ("feature KL", "train/video/feature_kl", ".3f"),
)
"""What the line of an iteration says, where the run has it."""


def iteration_line(metrics: Mapping[str, float]) -> str:
    """Return the numbers to watch of an iteration, in one line."""
    successes, episodes = metrics["rollout/successes"], metrics["rollout/episodes"]
    groups = metrics["rollout/groups"]
    parts = [
        f"success {rate_text(int(successes), int(episodes))}",
        f"groups used {groups - metrics['rollout/groups_degenerate']:.0f}/{groups:.0f}",
        *(f"{name} {metrics[key]:{form}}" for name, key, form in _SUMMARY if key in metrics),
    ]
    idle = [
        f"{name.removeprefix('idle/')} {share:.0%}"
        for name, share in metrics.items()
        if name.startswith("idle/")
    ]
    if idle:
        parts.append(f"idle {' '.join(idle)}")
    return "  ".join(parts)


def summarise_evaluation(
    results: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, float], dict[str, Any], str]:
    """Sum an evaluation up.

    Args:
        results: of each env worker, per episode: ``task_id`` (negative where no episode was left
            for a place) and ``success_once``.

    Returns:
        Metrics; what ``evaluations.jsonl`` records; and text for the terminal.
    """
    per_task: dict[int, list[bool]] = {}
    for result in results:
        for task, ok in zip(result["task_id"], result["success_once"], strict=True):
            if task >= 0:
                per_task.setdefault(int(task), []).append(bool(ok))
    metrics: dict[str, float] = {}
    texts = []
    for task, mine in sorted(per_task.items()):
        metrics[f"eval/success_rate/task_{task}"] = sum(mine) / len(mine)
        texts.append(f"task {task} {rate_text(sum(mine), len(mine))}")
    outcome = [ok for mine in per_task.values() for ok in mine]
    metrics["eval/success_rate"] = sum(outcome) / len(outcome)
    metrics["eval/episodes"] = float(len(outcome))
    record = {
        "successes": sum(outcome),
        "episodes": len(outcome),
        "per_task": {str(task): [sum(mine), len(mine)] for task, mine in sorted(per_task.items())},
    }
    return metrics, record, "; ".join(texts)


def falling_message(evaluations: Sequence[tuple[int, int]]) -> str | None:
    """Say that success on the evaluation states falls, and what to do; None while it does not.

    It does when it fell twice in a row, or when the newest 95 % interval lies below that of the
    best evaluation.

    Args:
        evaluations: successes and episodes of each evaluation so far.
    """
    if len(evaluations) < 2:
        return None
    rates = [successes / episodes for successes, episodes in evaluations]
    best = max(range(len(rates)), key=rates.__getitem__)
    twice = len(rates) > 2 and rates[-3] > rates[-2] > rates[-1]
    lost = wilson_interval(*evaluations[-1])[1] < wilson_interval(*evaluations[best])[0]
    if not (twice or lost):
        return None
    course = " -> ".join(
        f"{rate:.0%}" for rate in (rates[-3:] if twice else (rates[best], rates[-1]))
    )
    return (
        f"success on the evaluation states falls ({course}): lower RL.action_lr, collect more "
        "episodes per iteration (env.train.rollout_epoch), or go back to an earlier checkpoint"
    )


def training_metrics(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Join the ranks' metrics: counts are summed, maxima kept, the rest averaged."""
    joined = {}
    for name in sorted({name for result in results for name in result}):
        values = [result[name] for result in results if name in result]
        if name == "macro_steps":
            joined[f"train/{name}"] = sum(values)
        elif name.endswith("_max"):
            joined[f"train/{name}"] = max(values)
        else:
            joined[f"train/{name}"] = sum(values) / len(values)
    return joined
