"""Is imagination worth comparing with? Imagined against executed frames, and what rewards tell.

How close are the imagined frames to the executed ones, next to the guess that nothing changes (the
current picture, copied)? How close where something moves, as most of a picture never does? And does
the reconstruction reward tell successes from failures?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlinf_wamrl.pretrain.evaluate import Played
from rlinf_wamrl.rl.reward import ReconstructionReward, RewardSettings
from rlinf_wamrl.rl.similarity import (
    FramePairs,
    build_similarity,
    motion_weight,
    pixel_mse,
    weighted_mean,
)
from rlinf_wamrl.workers.batches import select_rows

__all__ = [
    "MOTION_THRESHOLD",
    "REWARDS",
    "Discrimination",
    "FrameErrors",
    "Imagination",
    "area_under_curve",
    "measure_imagination",
    "psnr",
]

MOTION_THRESHOLD = 0.05
"""A pixel moves when a colour of the executed frame differs by more from the current frame, in
[0, 1]; the autoencoder is measured with the same."""

REWARDS = (("pixel_mse", "uniform"), ("pixel_mse", "motion"), ("optical_flow", "uniform"))
"""Similarity and weight of the rewards that need no encoder."""


@dataclass(frozen=True, kw_only=True)
class FrameErrors:
    """Mean squared errors of the frames a number of actions ahead, colours in [0, 1].

    Moving pixels are chosen by what happened; motion that was only imagined is in the whole frame.
    """

    actions: int  # how far ahead
    frames: int
    moving_share: float  # of all pixels
    imagined: float
    copied: float  # the current picture in place of the imagined one
    imagined_moving: float | None  # None where no pixel moves
    copied_moving: float | None


@dataclass(frozen=True, kw_only=True)
class Discrimination:
    """How a reconstruction reward differs between successes and failures.

    The reward of an episode is the mean over its macro-steps, as it enters the return.
    """

    similarity: str
    weight: str
    successes: int  # episodes
    failures: int
    success_reward: float | None  # mean; None without such episodes
    failure_reward: float | None
    auc: float | None  # share of (success, failure) pairs of one task in which the success has more


@dataclass(frozen=True, kw_only=True, eq=False)
class Imagination:
    """What was measured of one task, or of several together."""

    task: str
    frames: Sequence[FrameErrors]
    rewards: Sequence[Discrimination]
    pictures: Mapping[str, Tensor]  # of a few macro-steps, as ``save_imagination`` takes them


def measure_imagination(
    policy: Callable[..., ReconstructionReward],
    played: Mapping[int, Played],
    settings: RewardSettings,
    *,
    pictures: int = 6,
) -> list[Imagination]:
    """Imagine each macro-step that was played and compare.

    Args:
        policy: answers ``forward_type="imagination_rewards"``.
        played: task -> its episodes.
        settings: whose imagination, and how much of it at a time. Compared are always pixels, all
            alike: what counts more is decided here.
        pictures: macro-steps of each task to keep pictures of, evenly spaced among the half that
            moves most.

    Returns:
        A measurement of each task and, of several tasks, one of all together.
    """
    settings = replace(settings, compare="pixels", weight="uniform")
    measured = {task: _Measurement.of(policy, one, settings) for task, one in played.items()}
    results = [
        Imagination(
            task=str(task),
            frames=_frame_errors([one], settings),
            rewards=_discriminations([one]),
            pictures=_pictures(policy, played[task], one, settings, pictures),
        )
        for task, one in measured.items()
    ]
    if len(measured) > 1:
        everything = list(measured.values())
        results.append(
            Imagination(
                task="all",
                frames=_frame_errors(everything, settings),
                rewards=_discriminations(everything),
                pictures={},
            )
        )
    return results


def psnr(error: float) -> float:
    """Return the peak signal-to-noise ratio in dB of a mean squared error of colours in [0, 1]."""
    return -10.0 * math.log10(error) if error > 0 else math.inf


def area_under_curve(successes: Tensor, failures: Tensor) -> float | None:
    """Return the probability that a success has the greater value, ties counted half.

    It is the area under the ROC curve, and the rank-sum statistic of Mann and Whitney over the
    number of pairs. None without a pair.
    """
    if not len(successes) or not len(failures):
        return None
    difference = successes[:, None] - failures[None, :]
    return float(((difference > 0).double() + 0.5 * (difference == 0)).mean())


_SUMS = ("pixels", "moving", "imagined", "copied", "imagined_moving", "copied_moving")


class _Recorder:
    """A similarity that keeps more of the pictures it is shown than the error it returns.

    So that every measure is taken of the very same imagination, which is the costly part.
    """

    def __init__(self) -> None:
        self._similarities = {name: build_similarity(name) for name, _ in REWARDS}
        self._rows: list[Tensor] = []

    def __call__(self, pairs: FramePairs) -> Tensor:
        """Return the squared error [N, h, w] of each pixel."""
        imagined = pixel_mse(pairs)
        copied = pixel_mse(replace(pairs, imagined=pairs.current))
        moving = (pairs.executed - pairs.current).abs().amax(dim=1) > MOTION_THRESHOLD
        maps = (
            torch.ones_like(imagined),
            moving,
            imagined,
            copied,
            imagined * moving,
            copied * moving,
        )
        weights = {"uniform": None, "motion": motion_weight(pairs)}
        errors = {name: measure(pairs) for name, measure in self._similarities.items()}
        columns = [values.double().sum(dim=(1, 2)) for values in maps]
        columns += [
            weighted_mean(errors[name], weights[weight]).double() for name, weight in REWARDS
        ]
        self._rows.append(torch.stack(columns, dim=1).cpu())
        return imagined

    def table(self, num_cameras: int) -> Tensor:
        """Return [m, columns] of the m frames seen so far, cameras joined.

        Columns are the sums ``_SUMS`` over pixels, then the errors of ``REWARDS``.
        """
        views = torch.cat(self._rows).unflatten(0, (-1, num_cameras))
        sums, errors = views.split((len(_SUMS), len(REWARDS)), dim=2)
        return torch.cat((sums.sum(dim=1), errors.mean(dim=1)), dim=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Measurement:
    """Of one task: N macro-steps, n frames each, E episodes."""

    sums: Tensor  # float64 [N, n, len(_SUMS)]
    rewards: Tensor  # float64 [E, len(REWARDS)]
    success: Tensor  # bool [E]
    reached: Tensor  # bool [N, n]

    @classmethod
    def of(cls, policy: Any, played: Played, settings: RewardSettings) -> _Measurement:
        recorder = _Recorder()
        result = policy(
            forward_type="imagination_rewards",
            records=played.records,
            frames=played.frames,
            settings=settings,
            similarity=recorder,
        )
        # the reward shows its similarity the reached frames in order, the cameras of each in turn
        reached = result.frame_mask
        table = torch.zeros(*reached.shape, len(_SUMS) + len(REWARDS), dtype=torch.float64)
        table[reached] = recorder.table(settings.num_cameras)
        sums, errors = table.split((len(_SUMS), len(REWARDS)), dim=2)
        macro_steps = -errors.sum(dim=1) / reached.sum(dim=1, keepdim=True).clamp(min=1)
        totals = torch.zeros(len(played.success), len(REWARDS) + 1, dtype=torch.float64)
        counted = torch.cat((macro_steps, torch.ones(len(reached), 1)), dim=1)[result.mask]
        totals.index_add_(0, played.episode[result.mask], counted)
        return cls(
            sums=sums,
            rewards=totals[:, :-1] / totals[:, -1:],  # NaN of an episode that reached no frame
            success=played.success,
            reached=reached,
        )


def _frame_errors(measured: Sequence[_Measurement], settings: RewardSettings) -> list[FrameErrors]:
    errors = []
    for index in range(measured[0].reached.shape[1]):
        sums = sum(one.sums[:, index].sum(dim=0) for one in measured)
        total = dict(zip(_SUMS, sums.tolist(), strict=True))
        frames = sum(int(one.reached[:, index].sum()) for one in measured)
        if not frames:
            continue
        moving = total["moving"]
        errors.append(
            FrameErrors(
                actions=(index + 1) * settings.action_video_freq_ratio,
                frames=frames,
                moving_share=moving / total["pixels"],
                imagined=total["imagined"] / total["pixels"],
                copied=total["copied"] / total["pixels"],
                imagined_moving=total["imagined_moving"] / moving if moving else None,
                copied_moving=total["copied_moving"] / moving if moving else None,
            )
        )
    return errors


def _discriminations(measured: Sequence[_Measurement]) -> list[Discrimination]:
    """Compare successes with failures; pairs are formed within a task, as tasks differ."""
    results = []
    for column, (similarity, weight) in enumerate(REWARDS):
        wins, pairs = 0.0, 0
        values: dict[bool, list[Tensor]] = {True: [], False: []}
        for one in measured:
            known = one.rewards[:, column].isfinite()
            sides = {
                solved: one.rewards[known & (one.success == solved), column] for solved in values
            }
            area = area_under_curve(sides[True], sides[False])
            if area is not None:
                count = len(sides[True]) * len(sides[False])
                wins, pairs = wins + area * count, pairs + count
            for solved, side in sides.items():
                values[solved].append(side)
        successes, failures = (torch.cat(values[solved]) for solved in (True, False))
        results.append(
            Discrimination(
                similarity=similarity,
                weight=weight,
                successes=len(successes),
                failures=len(failures),
                success_reward=_mean(successes),
                failure_reward=_mean(failures),
                auc=wins / pairs if pairs else None,
            )
        )
    return results


def _pictures(
    policy: Any, played: Played, measured: _Measurement, settings: RewardSettings, count: int
) -> dict[str, Tensor]:
    whole = measured.reached.all(dim=1).nonzero().squeeze(1)
    motion = measured.sums[whole][:, :, _SUMS.index("copied")].sum(dim=1)
    most = whole[motion.argsort(descending=True)][: max(len(whole) // 2, 1)]
    chosen = most[torch.linspace(0, len(most) - 1, min(count, len(most))).round().long()]
    records = select_rows(played.records, chosen)
    frames = select_rows(played.frames, chosen)
    result = policy(
        forward_type="imagination_rewards",
        records=records,
        frames=frames,
        settings=settings,
        similarity=pixel_mse,
        keep_imagined=len(chosen),
    )
    return {
        "current": records["image"],
        "imagined": result.imagined,
        "executed": frames["future_frames"],
        "rewards": result.reward,
    }


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if len(values) else None
