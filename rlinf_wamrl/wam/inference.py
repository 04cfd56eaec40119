"""Deterministic denoising: imagined video, actions, or both in lock step.

Latents and actions stay in float32 between steps whatever the model's dtype, and so do the grids.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from rlinf_wamrl.wam.context import Context
from rlinf_wamrl.wam.state import WAMState

__all__ = ["Denoiser", "check_first_frame", "imagine", "infer_action", "infer_joint", "seen_video"]


class Denoiser(Protocol):
    """What the functions here need of a model."""

    device: torch.device
    num_latent_frames: int  # f
    action_horizon: int  # H
    action_dim: int  # A
    lock_step: bool  # whether video and actions are denoised together
    infer_video_scheduler: Any
    infer_action_scheduler: Any

    def encode_context(self, state: WAMState) -> tuple[Context, Tensor]:
        """Context and mask with the proprio token."""

    def video_velocity(self, video: Tensor, timestep: Tensor, *context: Context | None) -> Tensor:
        """Velocity of the video alone."""

    def joint_velocity(
        self,
        video: Tensor,
        video_timestep: Tensor,
        actions: Tensor,
        action_timestep: Tensor,
        *context: Context,
    ) -> tuple[Tensor, Tensor]:
        """Velocities of video and actions."""

    def prefill(self, state: WAMState) -> Any:
        """What stays constant over the action steps."""

    def action_velocity(self, actions: Tensor, timestep: Tensor, cache: Any) -> Tensor:
        """Velocity of the actions."""


def check_first_frame(state: WAMState) -> None:
    """Checks that the state holds one latent frame.

    Raises:
        ValueError: another shape.
    """
    frame = state.first_frame
    if frame is None or frame.ndim != 5 or frame.shape[2] != 1:
        got = "none" if frame is None else list(frame.shape)
        raise ValueError(
            f"state.first_frame must be the latents [B, C, 1, h, w] of one image, got {got}."
        )


def seen_video(action_infer_mode: str, state: WAMState) -> Tensor:
    """The clean latents that the actions see: first frame or whole video.

    Raises:
        ValueError: a wrong shape, or no imagined video in idm mode.
    """
    check_first_frame(state)
    if action_infer_mode == "first_frame":
        return state.first_frame
    if state.video is None:
        raise ValueError(
            "In idm mode the actions see the imagined video: set state.video to the result of "
            "imagine(state, num_steps, ...) first."
        )
    return state.video


def _start(
    shape: tuple[int, ...],
    what: str,
    noise: Tensor | None,
    generator: torch.Generator | None,
    device: torch.device,
) -> Tensor:
    """Initial noise in float32: the given one, or drawn on the generator's device."""
    if (noise is None) == (generator is None):
        raise ValueError(f"Give exactly one of a generator and the {what} noise {list(shape)}.")
    if noise is None:
        noise = torch.randn(shape, generator=generator, device=generator.device)
    elif tuple(noise.shape) != tuple(shape):
        raise ValueError(f"The {what} noise must be {list(shape)}, got {list(noise.shape)}.")
    return noise.to(device, torch.float32)


def _video_start(
    model: Denoiser, state: WAMState, noise: Tensor | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Noise with the clean first frame [B, C, f, h, w], and that frame."""
    check_first_frame(state)
    first = state.first_frame.to(model.device, torch.float32)
    batch, channels, _, height, width = first.shape
    shape = (batch, channels, model.num_latent_frames, height, width)
    return _keep_first(_start(shape, "video", noise, generator, model.device), first), first


def _keep_first(video: Tensor, first: Tensor) -> Tensor:
    return torch.cat((first, video[:, :, 1:]), dim=2)


def _action_start(
    model: Denoiser, state: WAMState, noise: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    shape = (len(state.first_frame), model.action_horizon, model.action_dim)
    return _start(shape, "action", noise, generator, model.device)


@torch.no_grad()
def imagine(
    model: Denoiser,
    state: WAMState,
    num_steps: int,
    generator: torch.Generator | None = None,
    *,
    noise: Tensor | None = None,
    shift: float | None = None,
    actions: Tensor | None = None,
) -> Tensor:
    """Denoises the video alone, resetting its first frame to the observation after each step.

    Args:
        model: the model; its video never sees its actions, so they play no part.
        state: a batch of observations.
        num_steps: K.
        generator: of the initial noise; or give ``noise``.
        noise: initial noise [B, C, f, h, w].
        shift: of the schedule; None takes the scheduler's.
        actions: [B, H, A], only for an action-conditioned video expert.

    Returns:
        Latents [B, C, f, h, w] in float32.
    """
    video, first = _video_start(model, state, noise, generator)
    context, context_mask = model.encode_context(state)
    scheduler = model.infer_video_scheduler
    grid = scheduler.build_inference_schedule(num_steps, model.device, torch.float32, shift)
    for timestep, delta in zip(*grid, strict=True):
        velocity = model.video_velocity(
            video, timestep.expand(len(video)), context, context_mask, actions
        )
        video = _keep_first(scheduler.step(velocity, delta, video), first)
    return video


@torch.no_grad()
def infer_action(
    model: Denoiser,
    state: WAMState,
    num_steps: int,
    generator: torch.Generator | None = None,
    *,
    noise: Tensor | None = None,
    shift: float | None = None,
) -> Tensor:
    """Denoises the actions of an observation, with one prefill.

    Args:
        model: the model.
        state: a batch of observations; in idm mode with the imagined ``video``.
        num_steps: K.
        generator: of the initial noise; or give ``noise``.
        noise: initial noise [B, H, A].
        shift: of the schedule; None takes the scheduler's.

    Returns:
        Actions [B, H, A] in float32, still normalised.
    """
    actions = _action_start(model, state, noise, generator)
    cache = model.prefill(state)
    scheduler = model.infer_action_scheduler
    grid = scheduler.build_inference_schedule(num_steps, model.device, torch.float32, shift)
    for timestep, delta in zip(*grid, strict=True):
        velocity = model.action_velocity(actions, timestep.expand(len(actions)), cache)
        actions = scheduler.step(velocity, delta, actions)
    return actions


@torch.no_grad()
def infer_joint(
    model: Denoiser,
    state: WAMState,
    num_steps: int,
    generator: torch.Generator | None = None,
    *,
    video_noise: Tensor | None = None,
    action_noise: Tensor | None = None,
    shift: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Denoises video and actions, the way the variant does it.

    Joint: in lock step, the actions seeing the video of the same step. Otherwise the video first;
    then the actions, seeing what ``action_infer_mode`` says. (For uncond this equals lock step.)

    Args:
        model: the model.
        state: a batch of observations; ``video`` is ignored.
        num_steps: K, for both.
        generator: of the initial noises, the video's first; or give both noises.
        video_noise: [B, C, f, h, w].
        action_noise: [B, H, A].
        shift: of both schedules; None takes each scheduler's.

    Returns:
        Latents [B, C, f, h, w] and actions [B, H, A] in float32.
    """
    video, first = _video_start(model, state, video_noise, generator)
    actions = _action_start(model, state, action_noise, generator)
    if not model.lock_step:
        video = imagine(model, state, num_steps, noise=video, shift=shift)
        state = replace(state, video=video)
        return video, infer_action(model, state, num_steps, noise=actions, shift=shift)
    context = model.encode_context(state)
    video_grid, action_grid = (
        scheduler.build_inference_schedule(num_steps, model.device, torch.float32, shift)
        for scheduler in (model.infer_video_scheduler, model.infer_action_scheduler)
    )
    for video_time, video_delta, action_time, action_delta in zip(
        *video_grid, *action_grid, strict=True
    ):
        video_velocity, action_velocity = model.joint_velocity(
            video,
            video_time.expand(len(video)),
            actions,
            action_time.expand(len(actions)),
            *context,
        )
        video = model.infer_video_scheduler.step(video_velocity, video_delta, video)
        video = _keep_first(video, first)
        actions = model.infer_action_scheduler.step(action_velocity, action_delta, actions)
    return video, actions
