"""The surface of :class:`rlinf_wamrl.wam.wam.WAM` on an official FastWAM object.

``adapt(model)`` returns what the samplers, rewards and losses of this package accept, from an
official object of any variant and either generation (see :mod:`rlinf_wamrl.wam.official`). The
official ``infer_*`` and ``_predict_action_*`` methods are not used: they take one observation, run
without gradient and switch to eval mode.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_wamrl.wam import inference
from rlinf_wamrl.wam.config import TEMPORAL_STRIDE
from rlinf_wamrl.wam.official import Generation, OfficialCache, generation_of
from rlinf_wamrl.wam.state import KeysValues, WAMState
from rlinf_wamrl.wam.wam import WAM

__all__ = ["OfficialFastWAM", "OfficialVAE", "adapt"]


class OfficialVAE:
    """The official autoencoder behind ``encode(video)`` and ``decode(latents)``."""

    def __init__(self, model: Any):
        """Args: model: the official FastWAM object."""
        self._model = model
        self.spatial_factor = int(model.vae.upsampling_factor)
        self.temporal_factor = int(model.vae.temporal_downsample_factor)

    def encode(self, video: Tensor) -> Tensor:
        """Latents [B, C, f, h, w] of a video [B, 3, T, H, W] in [-1, 1]."""
        model = self._model
        return model._encode_video_latents(video.to(model.device, model.torch_dtype))

    def decode(self, latents: Tensor) -> Tensor:
        """Video [B, 3, T, H, W] in [-1, 1] of latents [B, C, f, h, w]."""
        model = self._model
        return model.vae.decode(latents.to(model.device, model.torch_dtype), device=model.device)


class OfficialFastWAM(nn.Module):
    """An official FastWAM object that behaves like our :class:`~rlinf_wamrl.wam.wam.WAM`.

    Everything not defined here (``video_expert``, ``infer_action_scheduler``, ...) is the official
    object's own. That object is a submodule, so that it moves, trains and is saved with this one.
    """

    def __init__(
        self,
        model: Any,
        *,
        action_infer_mode: str | None = None,
        num_video_frames: int = 9,
        action_horizon: int = 32,
    ):
        """Wraps a model; see :func:`adapt`."""
        super().__init__()
        self.model = model
        self._generation: Generation = generation_of(model)
        sees_whole_video = "num_video_frames" in _parameters(model.infer_action)
        optional = hasattr(model, "action_idm_prob")
        own = "idm" if sees_whole_video and not optional else "first_frame"
        self.action_infer_mode = own if action_infer_mode is None else action_infer_mode
        if self.action_infer_mode not in (("first_frame", "idm") if optional else (own,)):
            raise ValueError(
                f"{type(model).__name__} cannot infer actions in mode {action_infer_mode!r}: its "
                f"actions were trained in mode {own!r}."
            )
        self.lock_step = sees_whole_video and not hasattr(
            model, "_build_teacher_forcing_attention_mask"
        )
        self.num_latent_frames = 1 + (num_video_frames - 1) // TEMPORAL_STRIDE
        self.first_frame_stands_alone = False  # perhaps it does: its mask is not asked
        self.action_horizon = action_horizon
        self.action_dim = int(model.action_expert.action_dim)

    def __getattr__(self, name: str) -> Any:
        """Everything else of the official object."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":  # not set yet, for example while unpickling
                raise
        return getattr(self.model, name)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.model.torch_dtype

    @property
    def vae(self) -> OfficialVAE:
        """The autoencoder, with our signatures."""
        return OfficialVAE(self.model)

    def encode_context(self, state: WAMState) -> tuple[Tensor, Tensor]:
        """As :meth:`WAM.encode_context`."""
        model = self.model
        if model.proprio_encoder is not None and state.proprio is None:
            raise ValueError("The model needs proprio [B, P] in the state, got none.")
        proprio = None if model.proprio_encoder is None else state.proprio
        context, context_mask = state.context, state.context_mask
        if state.context_rows is not None:  # the official code wants a text per observation
            rows = state.context_rows.to(context.device)
            context, context_mask = context[rows], context_mask[rows]
        return model._append_proprio_to_context(
            context=context.to(model.device, model.torch_dtype),
            context_mask=context_mask.to(model.device, torch.bool),
            proprio=proprio,
        )

    def prefill(
        self,
        state: WAMState,
        *,
        video_gradient: bool = False,
        known_video: KeysValues | None = None,
    ) -> OfficialCache:
        """As :meth:`WAM.prefill`; the official code offers no cache of the actions' context."""
        context, context_mask = self.encode_context(state)
        if known_video is None:
            video = inference.seen_video(self.action_infer_mode, state)
            video = video.to(self.model.device, self.model.torch_dtype)
            with torch.set_grad_enabled(torch.is_grad_enabled() and video_gradient):
                keys, values = self._generation.keys_values(
                    video, video.new_zeros(len(video)), context, context_mask
                )
        else:
            keys, values = zip(*known_video, strict=True)
        return OfficialCache(
            video_keys=tuple(keys),
            video_values=tuple(values),
            context=context,
            context_mask=context_mask,
        )

    def action_velocity(self, actions: Tensor, timestep: Tensor, cache: OfficialCache) -> Tensor:
        """As :meth:`WAM.action_velocity`; the official code needs timesteps in its own dtype."""
        dtype = self.model.torch_dtype
        velocity = self._generation.action_velocity(actions.to(dtype), timestep.to(dtype), cache)
        return velocity.to(actions.dtype)

    def video_velocity(
        self,
        video: Tensor,
        timestep: Tensor,
        context: Tensor,
        context_mask: Tensor,
        actions: Tensor | None = None,
    ) -> Tensor:
        """As :meth:`WAM.video_velocity`."""
        dtype = self.model.torch_dtype
        conditioning = {} if actions is None else {"action": actions.to(dtype)}
        velocity = self.model.video_expert(
            x=video.to(dtype),
            timestep=timestep.to(dtype),
            context=context,
            context_mask=context_mask,
            fuse_vae_embedding_in_latents=True,
            **conditioning,
        )
        return velocity.to(video.dtype)

    def joint_velocity(
        self,
        video: Tensor,
        video_timestep: Tensor,
        actions: Tensor,
        action_timestep: Tensor,
        context: Tensor,
        context_mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`WAM.joint_velocity`, always without gradient."""
        dtype = self.model.torch_dtype
        predicted = self.model._predict_joint_noise(
            latents_video=video.to(dtype),
            latents_action=actions.to(dtype),
            timestep_video=video_timestep.to(dtype),
            timestep_action=action_timestep.to(dtype),
            context=context,
            context_mask=context_mask,
            fuse_vae_embedding_in_latents=True,
        )
        return predicted[0].to(video.dtype), predicted[1].to(actions.dtype)

    imagine = inference.imagine
    infer_action = inference.infer_action
    infer_joint = inference.infer_joint

    def training_loss(
        self,
        sample: Mapping[str, Any],
        generator: torch.Generator | None = None,
        lambda_video: float | None = None,
        lambda_action: float | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As :meth:`WAM.training_loss`, on the official loss.

        The official code draws from the global random state and reads its weights from attributes;
        with a generator its draws are a function of that, and both are as before afterwards.
        """
        model = self.model
        before = {name: getattr(model, name) for name in _LAMBDAS}
        given = dict(zip(_LAMBDAS, (lambda_video, lambda_action), strict=True))
        weights = {k: before[k] if value is None else value for k, value in given.items()}
        devices = [model.device] if torch.device(model.device).type == "cuda" else []
        try:
            for name, value in weights.items():
                setattr(model, name, value)
            with torch.random.fork_rng(devices, enabled=generator is not None):
                if generator is not None:
                    seed = torch.randint(2**62, (), generator=generator, device=generator.device)
                    torch.manual_seed(int(seed))
                total, weighted = model.training_loss(sample)
        finally:
            for name, value in before.items():
                setattr(model, name, value)
        scalars = {"loss": total.detach()}
        for name, weight in weights.items():
            part = name.replace("loss_lambda", "loss")
            if weight != 0:
                scalars[part] = torch.as_tensor(weighted[part] / weight)
        return total, scalars


_LAMBDAS = ("loss_lambda_video", "loss_lambda_action")


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def adapt(
    model: Any,
    *,
    action_infer_mode: str | None = None,
    num_video_frames: int = 9,
    action_horizon: int = 32,
) -> WAM | OfficialFastWAM:
    """Returns a model with the surface of :class:`WAM`.

    Args:
        model: a WAM, an already adapted model (both are returned as they are) or an official
            FastWAM object of any variant and generation.
        action_infer_mode: ``first_frame`` or ``idm``, for an official FastWAMOptionalIDM; None
            takes ``first_frame`` there and the variant's only mode elsewhere.
        num_video_frames: images of a video, which official objects are told in each call.
        action_horizon: actions of a chunk, likewise.

    Raises:
        TypeError: the object has neither surface; the message says what it lacks.
        ValueError: a mode the variant was not trained for.
    """
    if isinstance(model, WAM | OfficialFastWAM):
        return model
    return OfficialFastWAM(
        model,
        action_infer_mode=action_infer_mode,
        num_video_frames=num_video_frames,
        action_horizon=action_horizon,
    )
