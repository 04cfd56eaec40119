"""The World-Action Model: FastWAM's two experts, its variants and what training and RL call.

A video expert imagines the next frames; an action expert turns the video expert's per-layer keys
and values into a chunk of actions. Variants differ in what the actions see of the video (see
:mod:`rlinf_wamrl.wam.masks`); the weights have the same names in all of them.

Shapes: B batch, C latent channels, f latent frames, h and w latent rows and columns, L text tokens,
H actions of width A, P proprio width, K denoising steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_wamrl.wam import inference, training
from rlinf_wamrl.wam.action_expert import ActionExpert
from rlinf_wamrl.wam.config import WAMConfig
from rlinf_wamrl.wam.context import Context, SharedContext
from rlinf_wamrl.wam.mixture import MixtureOfTransformers
from rlinf_wamrl.wam.schedule import FlowMatchScheduler
from rlinf_wamrl.wam.state import ActionCache, KeysValues, WAMState
from rlinf_wamrl.wam.vae import VideoVAE
from rlinf_wamrl.wam.video_expert import VideoExpert

__all__ = ["WAM"]


class WAM(nn.Module):
    """FastWAM in all its variants.

    The parameters are those of the official checkpoints, under the names ``mot.mixtures.video.*``,
    ``mot.mixtures.action.*`` and ``proprio_encoder.*``. The VAE is frozen and is no part of
    ``parameters()`` or ``state_dict()``, but moves with the model.

    Nothing here switches between train and eval mode or draws from a global random state unless no
    generator is given.

    Attributes:
        config: sizes and switches.
        mot: both experts; ``video_expert`` and ``action_expert`` are its parts.
        proprio_encoder: linear layer from proprio to a token in text space, or None.
        vae: image codec, or None for a model that is only given latents.
        train_video_scheduler, infer_video_scheduler: of the video.
        train_action_scheduler, infer_action_scheduler: of the actions.
    """

    def __init__(self, config: WAMConfig, vae: VideoVAE | None = None):
        super().__init__()
        self.config = config
        self.mot = MixtureOfTransformers(
            VideoExpert(config.video_dit_config), ActionExpert(config.action_dit_config)
        )
        self.proprio_encoder = None
        if config.proprio_dim is not None:
            self.proprio_encoder = nn.Linear(config.proprio_dim, config.video_dit_config.text_dim)
        self.train_video_scheduler = FlowMatchScheduler(config.video_train_shift)
        self.infer_video_scheduler = FlowMatchScheduler(config.video_infer_shift)
        self.train_action_scheduler = FlowMatchScheduler(config.action_train_shift)
        self.infer_action_scheduler = FlowMatchScheduler(config.action_infer_shift)
        self.vae = vae
        self._velocity: Callable[..., Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        """Finds the experts in the mixture, where they are registered once."""
        if name in ("video_expert", "action_expert"):
            return self.mot.mixtures[name.removesuffix("_expert")]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Puts a replaced expert (for example one wrapped by peft) into the mixture."""
        if name in ("video_expert", "action_expert"):
            self.mot.mixtures[name.removesuffix("_expert")] = value
        elif name == "vae":
            # Not a submodule: frozen, never saved with the model, never sharded or optimised.
            self.__dict__["vae"] = value
        else:
            super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> WAM:
        super()._apply(fn, recurse)
        if isinstance(self.vae, nn.Module):
            self.vae._apply(fn, recurse)
        return self

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.action_expert.action_encoder.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.action_expert.action_encoder.weight.dtype

    @property
    def action_infer_mode(self) -> str:
        """What the actions see at inference: ``first_frame`` or ``idm`` (the whole video)."""
        return self.config.action_infer_mode

    @property
    def num_latent_frames(self) -> int:
        """Latent frames f of an imagined video."""
        return self.config.num_latent_frames

    @property
    def action_horizon(self) -> int:
        """Actions H of a chunk."""
        return self.config.action_horizon

    @property
    def action_dim(self) -> int:
        """Width A of an action."""
        return self.config.action_dit_config.action_dim

    @property
    def first_frame_stands_alone(self) -> bool:
        """Whether the first frame's tokens see no others: alike in every video that begins so."""
        return self.config.video_dit_config.video_attention_mask_mode != "bidirectional"

    @property
    def lock_step(self) -> bool:
        """Whether :meth:`infer_joint` denoises video and actions together."""
        return self.config.variant == "joint"

    def encode_video(self, video: Tensor) -> Tensor:
        """Latents [B, C, f, h, w] of a video [B, 3, T, H, W] in [-1, 1], without gradient.

        Raises:
            ValueError: a wrong shape, or a model without a VAE.
        """
        if self.vae is None:
            raise ValueError("This model has no VAE: give it latents, or build it with vae=....")
        if video.ndim != 5 or video.shape[1] != 3 or video.shape[2] % 4 != 1:
            raise ValueError(
                "The video must be [B, 3, T, H, W] with T one more than a multiple of 4, got "
                f"{list(video.shape)}."
            )
        with torch.no_grad():
            return self.vae.encode(video.to(self.device))

    def append_proprio(
        self, context: Tensor, context_mask: Tensor, proprio: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Appends the proprio token to the text.

        Args:
            context: [B, L, text_dim].
            context_mask: [B, L] bool.
            proprio: [B, P] normalised; not used by a model without ``proprio_dim``.

        Returns:
            Context [B, L + 1, text_dim] and its mask [B, L + 1] (L for a model without proprio).

        Raises:
            ValueError: wrong shapes, or no proprio where the model needs it.
        """
        width = self.config.video_dit_config.text_dim
        if context.ndim != 3 or context.shape[2] != width:
            raise ValueError(f"The context must be [B, L, {width}], got {list(context.shape)}.")
        if context_mask.shape != context.shape[:2]:
            raise ValueError(
                f"The context mask must be {list(context.shape[:2])}, got "
                f"{list(context_mask.shape)}."
            )
        context = context.to(self.device, self.dtype)
        context_mask = context_mask.to(self.device, torch.bool)
        if self.proprio_encoder is None:
            return context, context_mask
        expected = [len(context), self.config.proprio_dim]
        if proprio is None or list(proprio.shape) != expected:
            got = "none" if proprio is None else list(proprio.shape)
            raise ValueError(f"The model needs proprio {expected}, got {got}.")
        token = self.proprio_encoder(proprio.to(context))[:, None]
        seen = context_mask.new_ones(len(context), 1)
        return torch.cat((context, token), dim=1), torch.cat((context_mask, seen), dim=1)

    def encode_context(self, state: WAMState) -> tuple[Context, Tensor]:
        """Text and proprio token [B, L + 1, text_dim] and their mask [B, L + 1]."""
        if state.context_rows is None:
            return self.append_proprio(state.context, state.context_mask, state.proprio)
        rows = state.context_rows.to(self.device)
        text = state.context.to(self.device, self.dtype)
        text_mask = state.context_mask.to(self.device, torch.bool)[rows]
        no_text = text.new_empty(len(rows), 0, text.shape[2])
        own, own_mask = self.append_proprio(no_text, text_mask[:, :0], state.proprio)
        mask = torch.cat((text_mask, own_mask), dim=1)
        return SharedContext(text=text, rows=rows, own=own), mask

    def prefill(
        self,
        state: WAMState,
        *,
        video_gradient: bool = False,
        known_video: KeysValues | None = None,
    ) -> ActionCache:
        """Computes once per observation what every action velocity reads.

        The video (the first frame alone, or in idm mode the whole of ``state.video``, all of it
        taken as clean) passes through the video expert up to its last keys and values, and the
        context through the action expert's text network and cross-attention projections.

        Args:
            state: a batch of observations; ``video`` is needed in idm mode.
            video_gradient: whether a gradient reaches the video expert, and the proprio encoder
                through it. The part of the action expert and of the proprio encoder follows the
                gradient mode either way.
            known_video: keys and values of the video from an earlier prefill of the same
                observations; the video expert is not run then.

        Raises:
            ValueError: wrong shapes, or no video in idm mode.
        """
        context, context_mask = self.encode_context(state)
        from_video = known_video
        if known_video is None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and video_gradient):
                video = inference.seen_video(self.action_infer_mode, state).to(self.device)
                stream, _ = self.video_expert.embed(video, None, context, context_mask)
                from_video = self.video_expert.keys_values(stream, self.video_expert.mask(video))
        from_context = self.action_expert.context_keys_values(context)
        return ActionCache(
            video_keys=tuple(key for key, _ in from_video),
            video_values=tuple(value for _, value in from_video),
            context_keys=tuple(key for key, _ in from_context),
            context_values=tuple(value for _, value in from_context),
            context_mask=context_mask,
        )

    def action_velocity(self, actions: Tensor, timestep: Tensor, cache: ActionCache) -> Tensor:
        """Velocity ``noise - data`` of noisy actions.

        Args:
            actions: [B, H, A].
            timestep: [B] in 0..1000.
            cache: of the same batch, from :meth:`prefill`.

        Returns:
            [B, H, A] in the dtype of actions.
        """
        batch, width = len(cache.context_mask), self.action_dim
        if actions.ndim != 3 or actions.shape[0] != batch or actions.shape[2] != width:
            raise ValueError(f"Actions must be [{batch}, H, {width}], got {list(actions.shape)}.")
        if list(timestep.shape) != [batch]:
            raise ValueError(f"The timestep must be [{batch}], got {list(timestep.shape)}.")
        velocity = self.action_expert if self._velocity is None else self._velocity
        return velocity(actions, timestep, cache)

    def compile_velocity(self, **options: Any) -> None:
        """Makes :meth:`action_velocity` run through ``torch.compile(**options)``."""
        self.__dict__["_velocity"] = torch.compile(self.action_expert, **options)

    def video_velocity(
        self,
        video: Tensor,
        timestep: Tensor,
        context: Context,
        context_mask: Tensor,
        actions: Tensor | None = None,
    ) -> Tensor:
        """Velocity of the video alone; arguments as in :meth:`VideoExpert.forward`."""
        return self.video_expert(video, timestep, context, context_mask, actions)

    def joint_velocity(
        self,
        video: Tensor,
        video_timestep: Tensor,
        actions: Tensor,
        action_timestep: Tensor,
        context: Context,
        context_mask: Tensor,
        conditioning_actions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Velocities of video and actions in one pass, under the mask of one noisy video.

        Args:
            video: [B, C, f, h, w], the first frame clean.
            video_timestep: [B] in 0..1000.
            actions: [B, H, A].
            action_timestep: [B] in 0..1000.
            context: [B, L + 1, text_dim], from :meth:`encode_context`.
            context_mask: [B, L + 1].
            conditioning_actions: [B, H, A], only for an action-conditioned video expert.

        Returns:
            [B, C, f, h, w] and [B, H, A].
        """
        video_stream, time = self.video_expert.embed(
            video, video_timestep, context, context_mask, conditioning_actions
        )
        action_stream = self.action_expert.embed(actions, action_timestep, context, context_mask)
        mask = training.joint_attention_mask(self, video, actions.shape[1])
        video_tokens, action_tokens = self.mot(video_stream, action_stream, mask)
        return (
            self.video_expert.velocity(video_tokens, time, video),
            self.action_expert.velocity(action_tokens, actions.dtype),
        )

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
        """Flow-matching loss of the variant.

        Args:
            sample: see :func:`rlinf_wamrl.wam.training.build_batch`.
            generator: of all draws, see :func:`rlinf_wamrl.wam.training.draw`.
            lambda_video: weight of the video loss; None takes the configuration's.
            lambda_action: weight of the action loss, 0 = the action expert is not run; None takes
                the configuration's.

        Returns:
            The weighted sum, and detached scalars ``loss``, ``loss_video`` and (if computed)
            ``loss_action``, not weighted and still on the device.
        """
        batch = training.build_batch(self, sample)
        loss = training.compute_loss(
            self,
            batch,
            training.draw(self, batch, generator),
            self.config.loss_lambda_video if lambda_video is None else lambda_video,
            self.config.loss_lambda_action if lambda_action is None else lambda_action,
        )
        return loss.total, loss.scalars()

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """As :meth:`training_loss`."""
        return self.training_loss(*args, **kwargs)
