"""``rlinf imagine``: play held-out states, imagine every macro-step, and write what came out.

One folder holds ``imagination.md`` (tables), ``imagination.json`` (the same, to compute with) and
a picture of each task.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from rlinf_wamrl.checkpoint import read_trained_weights
from rlinf_wamrl.envs.config import EnvConfig
from rlinf_wamrl.files import write_text_atomic
from rlinf_wamrl.policy import WAMPolicy
from rlinf_wamrl.policy_builder import build_policy
from rlinf_wamrl.pretrain.evaluate import Played, play
from rlinf_wamrl.pretrain.imagination import (
    MOTION_THRESHOLD,
    Discrimination,
    FrameErrors,
    Imagination,
    measure_imagination,
    psnr,
)
from rlinf_wamrl.report.pictures import save_imagination
from rlinf_wamrl.rl.reward import RewardSettings, Source

__all__ = ["imagine_pretrained", "imagine_run", "reward_settings", "save_imaginations"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_MAX_BATCH = 32
"""Macro-steps that a freshly trained small model imagines at a time."""

_MAGNIFIED = 3
"""Pixels of a saved picture per pixel: the small model's are 64 high."""


def imagine_run(
    cfg: DictConfig, folder: str | Path | None, report: Callable[[str], None]
) -> dict[Source, list[Imagination]]:
    """Measure the policy of a run, or of its checkpoint ``runner.resume_dir``, on held-out states.

    With the adapters of a checkpoint, the pretrained video expert (frozen) and the trained one
    (live) imagine the very same macro-steps; else there is but one.

    Args:
        cfg: a validated run; ``env.eval`` says which tasks and initial states are played.
        folder: where to write; None takes ``imagination`` in the folder of the run or of the
            checkpoint's run.
        report: called with progress lines.

    Returns:
        Whose imagination -> its measurements, which are written, too.

    Raises:
        ValueError: the checkpoint is of other weights than this configuration trains.
    """
    if cfg.rollout.num_threads is not None:
        torch.set_num_threads(cfg.rollout.num_threads)
    policy = build_policy(cfg.actor.model, _DTYPES[cfg.actor.model.precision]).eval()
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    resume, sources = cfg.runner.resume_dir, ("live",)
    logger = cfg.runner.logger
    place = Path(logger.log_path) / logger.experiment_name / "imagination" / "start"
    if resume is not None:
        _load_trained(policy, Path(resume))
        place = Path(resume).parents[1] / "imagination" / Path(resume).name
        if cfg.actor.model.train_video:
            sources = ("frozen", "live")
    section = OmegaConf.to_container(cfg.env.eval)
    _, tasks, _ = EnvConfig.from_mapping(section).load_suite()
    played = {}
    for task in tasks:
        played[task] = play(policy, section, task)
        report(f"task {task}: {played[task].score} held-out states solved, now imagining")
    measured = {
        source: measure_imagination(
            policy, played, reward_settings(policy, source, cfg.RL.reconstruction.max_batch)
        )
        for source in sources
    }
    save_imaginations(measured, place if folder is None else Path(folder), report)
    return measured


def imagine_pretrained(
    policy: WAMPolicy,
    played: Mapping[int, Played],
    checkpoint: Path,
    report: Callable[[str], None],
) -> dict[str, dict[str, str]]:
    """Measure a freshly trained model on what it played, and write beside its checkpoint.

    Args:
        policy: the model's.
        played: task -> its episodes on held-out states.
        checkpoint: the checkpoint's folder; ``<checkpoint>_imagination`` is written.
        report: called with progress lines.

    Returns:
        A line per task and frame, and per task and reward, for the model card.
    """
    measured = measure_imagination(policy, played, reward_settings(policy, "live", _MAX_BATCH))
    folder = checkpoint.with_name(f"{checkpoint.name}_imagination")
    save_imaginations({"live": measured}, folder, report)
    return {
        f"task_{one.task}": {f"plus_{frame.actions}": _frame_text(frame) for frame in one.frames}
        | {f"{reward.similarity}_{reward.weight}": _reward_text(reward) for reward in one.rewards}
        for one in measured
    }


def reward_settings(policy: WAMPolicy, source: Source, max_batch: int) -> RewardSettings:
    """Return how a policy imagines.

    Args:
        policy: the policy.
        source: whose imagination.
        max_batch: macro-steps at a time.
    """
    return RewardSettings(
        source=source,
        num_steps=policy.settings.imagination_steps,
        shift=policy.settings.shift,
        action_video_freq_ratio=policy.wam.config.actions_per_frame,
        max_batch=max_batch,
    )


def save_imaginations(
    measured: Mapping[Source, Sequence[Imagination]],
    folder: Path,
    report: Callable[[str], None],
) -> None:
    """Write tables and pictures to a folder, and report the tables."""
    text = "\n".join(_tables(measured))
    report(text)
    write_text_atomic(folder / "imagination.md", text + "\n")
    plain = {
        source: [
            {
                "task": one.task,
                "frames": [asdict(frame) for frame in one.frames],
                "rewards": [asdict(reward) for reward in one.rewards],
            }
            for one in results
        ]
        for source, results in measured.items()
    }
    write_text_atomic(folder / "imagination.json", json.dumps(plain, indent=2) + "\n")
    for source, results in measured.items():
        for one in results:
            if one.pictures:
                file = folder / f"task_{one.task}_{source}.png"
                save_imagination(file, **one.pictures, magnified=_MAGNIFIED)
    report(f"imagined against executed frames in {folder}")


def _frame_text(frame: FrameErrors) -> str:
    return (
        f"PSNR {_decibels(frame.imagined)} dB (copied {_decibels(frame.copied)}); moving pixels "
        f"{_decibels(frame.imagined_moving)} dB (copied {_decibels(frame.copied_moving)})"
    )


def _reward_text(reward: Discrimination) -> str:
    return (
        f"{reward.successes} successes {_number(reward.success_reward)}, {reward.failures} "
        f"failures {_number(reward.failure_reward)}, AUC {_number(reward.auc)}"
    )


_FRAME_HEAD = (
    "| task | imagination | actions ahead | frames | imagined | copied | moving pixels | "
    "imagined, moving | copied, moving |",
    "|---|---|---:|---:|---:|---:|---:|---:|---:|",
)

_REWARD_HEAD = (
    "| task | imagination | similarity | weight | successes | failures | mean of successes | "
    "mean of failures | AUC |",
    "|---|---|---|---|---:|---:|---:|---:|---:|",
)


def _tables(measured: Mapping[Source, Sequence[Imagination]]) -> Iterator[str]:
    results = [(one.task, source, one) for source, several in measured.items() for one in several]
    yield (
        "PSNR in dB of frames imagined by the video expert, next to the current picture copied, "
        "against what was executed. A pixel moves when a colour of the executed frame differs from "
        f"the current picture by more than {MOTION_THRESHOLD} of its range."
    )
    yield from ("", *_FRAME_HEAD)
    for task, source, one in results:
        for frame in one.frames:
            yield _row(task, source, *_frame_cells(frame))
    yield ""
    yield (
        "Reconstruction reward of episodes, before normalisation. AUC: how often a success has "
        "more than a failure of the same task; 0.5 tells nothing."
    )
    yield from ("", *_REWARD_HEAD)
    for task, source, one in results:
        for reward in one.rewards:
            yield _row(task, source, *_reward_cells(reward))


def _frame_cells(frame: FrameErrors) -> tuple[object, ...]:
    whole = (_decibels(frame.imagined), _decibels(frame.copied))
    moving = (_decibels(frame.imagined_moving), _decibels(frame.copied_moving))
    return (f"+{frame.actions}", frame.frames, *whole, f"{frame.moving_share:.1%}", *moving)


def _reward_cells(reward: Discrimination) -> tuple[object, ...]:
    values = (reward.success_reward, reward.failure_reward, reward.auc)
    counts = (reward.successes, reward.failures)
    return (reward.similarity, reward.weight, *counts, *(_number(value) for value in values))


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _decibels(error: float | None) -> str:
    return "–" if error is None else f"{psnr(error):.1f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _load_trained(policy: WAMPolicy, checkpoint: Path) -> None:
    weights = read_trained_weights(checkpoint)
    trained = {name for name, value in policy.named_parameters() if value.requires_grad}
    different = sorted(trained ^ weights.keys())
    if different:
        raise ValueError(
            f"{checkpoint} holds other weights than this configuration trains ({len(different)} "
            f"differ, for example {different[0]}): give {checkpoint.parents[1] / 'config.yaml'} as "
            "the configuration"
        )
    policy.load_state_dict(weights, strict=False)
