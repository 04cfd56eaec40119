"""Rounds of rollouts, which may run ahead of the learner, and how long each component works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Round", "idle_shares", "mean_timers"]

WORK = {
    "env": ("env_interact_step", "env/reset"),
    "rollout": ("predict",),
    "reward": ("score",),
    "actor": ("run_training", "actor/compute_adv"),
}
"""Timers of each component that run while it works."""

WAITING = "waiting"
"""Timer of the waits inside those."""


@dataclass(frozen=True)
class Round:
    """One iteration's rollouts, started and perhaps still running."""

    step: int  # by which its messages are known
    env: Any  # handle of what the env workers do
    rollout: Any  # handle of what the rollout workers do


def mean_timers(component: str, ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the seconds of a component's timers as ``component/timer``, averaged over its ranks.

    Args:
        component: env, rollout, reward or actor.
        ranks: seconds by timer, for each rank.
    """
    names = {name for timers in ranks for name in timers}
    return {
        f"{component}/{name.removeprefix(f'{component}/')}": sum(
            timers.get(name, 0.0) for timers in ranks
        )
        / len(ranks)
        for name in sorted(names)
    }


def idle_shares(timers: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return ``idle/<component>``, the share of an iteration in which it did not work.

    A round that ran ahead counts where it ended.

    Args:
        timers: seconds of an iteration by ``component/timer``.
        seconds: length of the iteration.
    """
    shares = {}
    for component, names in WORK.items():
        mine = [f"{component}/{name.removeprefix(f'{component}/')}" for name in names]
        if any(name in timers for name in mine):
            worked = sum(timers.get(name, 0.0) for name in mine)
            worked -= timers.get(f"{component}/{WAITING}", 0.0)
            shares[f"idle/{component}"] = min(1.0, max(0.0, 1.0 - worked / seconds))
    return shares
