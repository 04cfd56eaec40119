"""Values of the ``RL`` section that cannot work together, or not with the rest of the run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from omegaconf import DictConfig

from rlinf_wamrl.config.errors import ConfigError
from rlinf_wamrl.config.limits import SIMILARITIES
from rlinf_wamrl.config.placement import world_size

__all__ = ["check_rl"]


def check_rl(run: DictConfig) -> None:
    """Raise :class:`ConfigError` for the first value of the method that cannot work."""
    _check_sampling(run)
    _check_halves(run)
    _check_group(run)


def _check_sampling(run: DictConfig) -> None:
    rl = run.RL
    steps = rl.denoising_steps
    if rl.stochastic_steps == "window":
        window = list(rl.window)
        if not window or window != sorted(set(window)) or not 0 <= window[0] <= window[-1] < steps:
            raise ConfigError(
                f"RL.window must list ascending step indices within 0..{steps - 1} "
                f"(RL.denoising_steps = {steps}), got {window}"
            )
    elif rl.window:
        raise ConfigError(
            f"RL.window = {list(rl.window)} needs RL.stochastic_steps: window, got "
            f"{rl.stochastic_steps!r}"
        )
    if rl.ignore_last and steps == 1:
        raise ConfigError(
            "RL.ignore_last: true leaves no stochastic step with RL.denoising_steps 1"
        )
    if rl.ignore_last and steps - 1 in rl.window:
        raise ConfigError(
            f"RL.ignore_last: true contradicts the last step, {steps - 1}, in RL.window = "
            f"{list(rl.window)}; drop one of them"
        )
    last_is_noisy = rl.ignore_last is False or steps == 1
    if rl.stochastic_steps == "window":
        last_is_noisy = steps - 1 in rl.window
    if rl.sde == "cps" and last_is_noisy:
        raise ConfigError("RL.sde: cps has no noise at the last step; leave that step out")
    _check_noise_basis(run)
    if rl.dual_clip <= 1:
        raise ConfigError(f"RL.dual_clip must be above 1, got {rl.dual_clip}")
    if rl.clip_low >= 1:
        raise ConfigError(f"RL.clip_low must be below 1, got {rl.clip_low}")
    if rl.sigma_shift is not None and rl.sigma_shift <= 0:
        raise ConfigError(f"RL.sigma_shift must be positive or null, got {rl.sigma_shift}")


def _check_noise_basis(run: DictConfig) -> None:
    rl, chunk, width = run.RL, run.actor.model.num_action_chunks, run.actor.model.action_dim
    if rl.noise_modes is not None and not 1 <= rl.noise_modes <= chunk:
        raise ConfigError(
            f"RL.noise_modes must be within 1..{chunk} (actor.model.num_action_chunks), got "
            f"{rl.noise_modes}"
        )
    dims = list(rl.noise_dims)
    if len(set(dims)) < len(dims) or not set(dims) <= set(range(width)):
        raise ConfigError(f"RL.noise_dims must be distinct and within 0..{width - 1}, got {dims}")
    if rl.logprob_reduction == "mean" and (dims or rl.noise_modes is not None):
        raise ConfigError(
            "RL.logprob_reduction: mean counts every action; take sum with RL.noise_modes or "
            "RL.noise_dims"
        )


def _check_halves(run: DictConfig) -> None:
    """Check what the reconstruction reward and the video half need."""
    rl, env, chunk = run.RL, run.env.train, run.actor.model.num_action_chunks
    if not rl.train_actions and not rl.video_sft.enabled:
        raise ConfigError("RL.train_actions: false needs RL.video_sft.enabled: nothing would train")
    if rl.task_reward_weight == 0 and rl.lambda_rec == 0:
        raise ConfigError("RL.task_reward_weight = 0 needs RL.lambda_rec > 0: no reward is left")
    if rl.lambda_step > 0 and rl.lambda_rec == 0:
        raise ConfigError(
            f"RL.lambda_step = {rl.lambda_step} needs RL.lambda_rec > 0: with 0 nothing is imagined"
        )
    encoder = rl.reconstruction.encoder_path
    if encoder is not None and not Path(encoder).is_dir():
        raise ConfigError(f"RL.reconstruction.encoder_path = {encoder!r} is not a folder")
    if rl.lambda_rec > 0 and env.num_future_frames == 0:
        raise ConfigError("RL.lambda_rec > 0 needs env.train.num_future_frames of at least 1")
    _check_similarity(rl.reconstruction.similarity)
    if rl.reconstruction.similarity in ("dino", "vjepa") and not rl.reconstruction.encoder_path:
        raise ConfigError(
            f"RL.reconstruction.similarity = {rl.reconstruction.similarity} needs the folder of a "
            "transformers model: set RL.reconstruction.encoder_path"
        )
    if rl.reconstruction.placement == "worker":
        if rl.reconstruction.source != "frozen":
            raise ConfigError(
                "RL.reconstruction.placement: worker imagines with the pretrained video expert; "
                f"source {rl.reconstruction.source!r} needs placement: learner"
            )
        world_size(run, "reward")
    ratio = env.action_video_freq_ratio
    if rl.video_sft.enabled and (chunk % ratio or env.num_future_frames * ratio < chunk - ratio):
        raise ConfigError(
            "RL.video_sft needs pictures at even distances over a whole chunk: "
            f"actor.model.num_action_chunks = {chunk} must be a multiple of "
            f"env.train.action_video_freq_ratio = {ratio}, and env.train.num_future_frames at "
            f"least {chunk // ratio - 1}"
        )


def _check_similarity(name: str) -> None:
    key, module = "RL.reconstruction.similarity", name.partition(":")[0]
    if ":" not in name:
        if name not in SIMILARITIES:
            raise ConfigError(
                f"{key} must be one of {', '.join(SIMILARITIES)}, or module:function, got {name!r}"
            )
        return
    try:
        exists = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # of a package that the module would be in
        exists = False
    if not exists:
        raise ConfigError(f"{key} = {name!r}: there is no module {module!r} to import")


def _check_group(run: DictConfig) -> None:
    group = run.RL.group_size
    if group < 2:
        raise ConfigError(
            f"RL.group_size must be at least 2, got {group}: an advantage compares an episode "
            "with others of its group"
        )
    others = {
        "algorithm.group_size": run.algorithm.group_size,
        "env.train.group_size": run.env.train.group_size,
    }
    for key, other in others.items():
        if other != group:
            raise ConfigError(f"{key} = {other} must equal RL.group_size = {group}")
    if run.algorithm.update_epoch != run.RL.update_epochs:
        raise ConfigError("algorithm.update_epoch must equal RL.update_epochs; set the latter")
