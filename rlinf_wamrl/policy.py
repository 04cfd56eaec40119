"""The World-Action Model as an RLinf embodied policy.

``predict_action_batch`` samples chunks in the rollout worker, ``forward`` scores recorded chunks in
the learner. Both meet in ``forward_inputs``, a flat dict of tensors with all that the learner needs
to recompute a log-probability: the image, the proprioception, the instruction and the chain; and
the imagined video, where the model acts on one (idm mode). With ``keep_video_cache`` also what the
action expert read of the video, so that the learner need not run the video expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rlinf.models.embodiment.base_policy import BasePolicy, ForwardType
from torch import Tensor, nn

from rlinf_wamrl.instructions import pack_instructions, unpack_instructions
from rlinf_wamrl.policy_training import (
    calibration_moments,
    imagination_rewards,
    video_cache,
    video_loss,
)
from rlinf_wamrl.processing import Processor, pixels_to_unit
from rlinf_wamrl.rl import flow_sde
from rlinf_wamrl.rl.chain_noise import ChainNoise, draw_chain_noise
from rlinf_wamrl.rl.noise_basis import NoiseBasis, cosine_basis
from rlinf_wamrl.streams import random_stream
from rlinf_wamrl.wam.state import WAMState, stack_keys_values, unstack_keys_values
from rlinf_wamrl.wam.text import TextEncoder
from rlinf_wamrl.wam.vae import VideoVAE

__all__ = ["SamplingSettings", "WAMPolicy"]

RECORD_IDS = ("task_id", "seed", "group_id", "episode_id", "init_state_id", "elapsed_steps")
"""Integers of the observation that travel with every macro-step."""

_KEY_BOUND = 2**62

TRAINING_FORWARDS = {
    "imagination_rewards": imagination_rewards,
    "video_loss": video_loss,
    "calibration_moments": calibration_moments,
    "video_cache": video_cache,
}
"""Further calls that go through ``forward``, by ``forward_type``."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How actions are sampled and scored."""

    num_executed: int  # C, actions executed before replanning
    denoising_steps: int  # K while training
    eval_denoising_steps: int  # K of the deterministic policy
    imagination_steps: int  # K_video, of the video that the actions see in idm mode
    noise_level: float  # a
    stochastic_steps: str | tuple[int, ...] = "one_random"  # or "all", or listed steps
    ignore_last: bool | None = None  # leave out step K-1; None = when K > 1
    variant: str = "sde"  # or "cps"
    shift: float | None = None  # overrides the checkpoint's sigma shifts
    initial_noise: str = "episode"  # or "group": its members imagine and start chunks alike
    noise_modes: int | None = None  # M, cosine modes that get noise; None for white noise
    noise_dims: tuple[int, ...] = ()  # action dimensions that get noise; empty for all
    seed: int = 0  # root of all random streams
    keep_video_cache: bool = False  # record the video's keys and values


class WAMPolicy(nn.Module, BasePolicy):
    """A World-Action Model with everything around it: autoencoder, text encoder, processor.

    Submodules are ``wam`` (trained in parts) and ``vae`` (always frozen). The text encoder has no
    trained weights here and is asked once per instruction.
    """

    def __init__(
        self,
        *,
        wam: Any,
        vae: VideoVAE,
        text_encoder: TextEncoder,
        processor: Processor,
        settings: SamplingSettings,
    ) -> None:
        """Join the parts; parameters of ``vae`` are frozen.

        Args:
            wam: a :class:`~rlinf_wamrl.wam.wam.WAM`, or what
                :func:`~rlinf_wamrl.wam.adapter.adapt` makes of an official FastWAM object.
            vae: encodes the images.
            text_encoder: encodes the instructions.
            processor: prepares observations and finishes actions.
            settings: how actions are sampled and scored.

        Raises:
            ValueError: more actions are to be executed than the model predicts.
        """
        super().__init__()
        if not 1 <= settings.num_executed <= wam.action_horizon:
            raise ValueError(
                f"num_action_chunks = {settings.num_executed} must be within 1.."
                f"{wam.action_horizon}, the actions this model predicts"
            )
        self.wam = wam
        self.vae = vae.requires_grad_(False) if isinstance(vae, nn.Module) else vae
        self.text_encoder = text_encoder
        self.processor = processor
        self.settings = settings
        self._basis = cosine_basis(
            horizon=wam.action_horizon,
            num_executed=settings.num_executed,
            action_dim=wam.action_dim,
            num_modes=settings.noise_modes,
            dims=settings.noise_dims,
        )
        self._contexts: dict[str, tuple[Tensor, Tensor]] = {}
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._replayed: Any = None  # the model as CUDA graphs, once they are wanted

    def enable_torch_compile(self, mode: str = "default") -> None:
        """Sample and score through ``torch.compile`` in one of its modes.

        Raises:
            ValueError: the model is an official object, which cannot be compiled here.
        """
        if not hasattr(self.wam, "compile_velocity"):
            raise ValueError(
                "rollout.enable_torch_compile works with this package's own model, not with an "
                f"adapted {type(self.wam).__name__}"
            )
        self.wam.compile_velocity(mode=mode)

    def capture_cuda_graph(self, train_batch_size: int, eval_batch_size: int) -> None:
        """Sample by replaying CUDA graphs, for batches of these sizes.

        Raises:
            ValueError: the model is not on a CUDA device.
        """
        if self.device.type != "cuda":
            raise ValueError(
                "rollout.enable_cuda_graph needs the rollout worker on a CUDA device, but the "
                f"model is on {self.device}: leave it false"
            )
        from rlinf.utils.cuda_graph import CUDAGraphManager

        from rlinf_wamrl.wam.cuda_graphs import ReplayedActions

        self.cuda_graph_manager = CUDAGraphManager(self.device)
        self._replayed = ReplayedActions(
            self.wam, (train_batch_size, eval_batch_size), self.cuda_graph_manager
        )

    def release_cuda_graph(self) -> None:
        """Sample as without CUDA graphs again, and free them."""
        self._replayed = None
        super().release_cuda_graph()

    @property
    def device(self) -> torch.device:
        """Where the model's weights are."""
        return self.wam.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's weights."""
        return self.wam.dtype

    @property
    def imagines(self) -> bool:
        """Whether the actions see an imagined video (idm mode) rather than the image alone."""
        return self.wam.action_infer_mode == "idm"

    def state(
        self,
        image: Tensor | None,
        proprio: Tensor,
        instructions: Sequence[str],
        video: Tensor | None = None,
    ) -> WAMState:
        """Encode a batch of observations.

        Args:
            image: uint8 [B,3,H,W], both cameras side by side; None where the video's keys and
                values are known already, and nothing will look at the picture.
            proprio: float32 [B,P], normalised.
            instructions: B task instructions.
            video: [B,C_lat,f,h,w] that :meth:`imagine` made of these observations; the image is its
                first frame and is not encoded again.
        """
        context, mask, rows = self.shared_context(instructions)
        first_frame = None
        if video is None and image is not None:
            with torch.no_grad():
                pixels = pixels_to_unit(image.to(self.device), self.dtype)
                first_frame = self.vae.encode(pixels.unsqueeze(2)).to(self.dtype)
        elif video is not None:
            video = video.to(self.device)
            first_frame = video[:, :, :1]
        return WAMState(
            first_frame=first_frame,
            context=context,
            context_mask=mask,
            context_rows=rows,
            proprio=proprio.to(self.device, self.dtype),
            video=video,
        )

    def imagine(self, state: WAMState, streams: Sequence[torch.Generator]) -> Tensor:
        """Imagine what happens next, from noise of one random stream per sample.

        Args:
            state: B observations.
            streams: B generators on the CPU.

        Returns:
            Latents [B,C_lat,f,h,w] in float16, the precision in which they are recorded: whoever
            computes with them here or in the learner reads the same numbers.
        """
        _, channels, _, height, width = state.first_frame.shape
        shape = (channels, self.wam.num_latent_frames, height, width)
        noise = torch.stack([torch.randn(shape, generator=stream) for stream in streams])
        settings = self.settings
        return self.wam.imagine(
            state, settings.imagination_steps, noise=noise, shift=settings.shift
        ).half()

    def context(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the text embeddings [B,L,D] and mask [B,L]; each instruction is encoded once."""
        missing = sorted(set(instructions) - self._contexts.keys())
        if missing:
            with torch.no_grad():
                embeddings, masks = self.text_encoder.encode(missing)
            for row, instruction in enumerate(missing):
                self._contexts[instruction] = (embeddings[row], masks[row])
        pairs = [self._contexts[instruction] for instruction in instructions]
        context = torch.stack([embedding for embedding, _ in pairs])
        mask = torch.stack([mask for _, mask in pairs])
        return context.to(self.device, self.dtype), mask.to(self.device)

    def shared_context(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """Return :meth:`context` of the U distinct instructions, and which one each has, [B]."""
        known = {text: row for row, text in enumerate(dict.fromkeys(instructions))}
        context, mask = self.context(list(known))
        rows = torch.tensor([known[text] for text in instructions], device=self.device)
        return context, mask, rows

    def recorded_state(self, records: Mapping[str, Tensor]) -> WAMState:
        """Encode the observations of recorded macro-steps.

        Raises:
            ValueError: the record has no imagined video, but the model acts on one.
        """
        video = records.get("video_latents") if self.imagines else None
        if self.imagines and video is None:
            raise ValueError(
                "the record has no video_latents, but actions in idm mode depend on the imagined "
                "video: it was written with another actor.model.action_infer_mode"
            )
        instructions = self.instructions_of(records)
        return self.state(records["image"], records["proprio"], instructions, video)

    @torch.no_grad()
    def predict_action_batch(
        self, env_obs: Mapping[str, Any], mode: str = "train", **_: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Choose the next chunk for B environments.

        Args:
            env_obs: ``main_images`` and ``wrist_images`` uint8 [B,H,W,3], ``states`` [B,P] raw,
                ``task_descriptions`` (B strings); ``episode_id`` and ``elapsed_steps`` int64 [B]
                key the random stream of each sample, so that a chunk depends on its episode and
                not on the batch it was computed in (without them, the own generator serves).
            mode: ``train`` samples by Flow-SDE; ``eval`` follows the ODE.

        Returns:
            Actions for the simulator, float32 [B,C,A], and RLinf's result dict; its
            ``prev_logprobs`` are [B,C,A] and its ``forward_inputs`` the record of a macro-step.
        """
        if mode not in ("train", "eval"):
            raise ValueError(f"mode must be 'train' or 'eval', got {mode!r}")
        settings = self.settings
        image = self.processor.images(env_obs["main_images"], env_obs["wrist_images"])
        proprio = self.processor.proprio(env_obs["states"])
        instructions = list(env_obs["task_descriptions"])
        keys = self._stream_keys(env_obs, len(instructions))
        shared = self._shared_keys(env_obs, keys) if mode == "train" else keys
        state = self.state(image, proprio, instructions)
        if self.imagines:
            streams = [random_stream(settings.seed, mode, "video", *key) for key in shared]
            state = replace(state, video=self.imagine(state, streams))
        cache = self.wam.prefill(state)
        noise = self._noise(
            [random_stream(settings.seed, mode, *key) for key in keys],
            None if shared is keys else [random_stream(settings.seed, *key) for key in shared],
        )
        if mode == "eval":
            grid = self._grid(settings.eval_denoising_steps)
            final = flow_sde.sample_ode(self._replayed or self.wam, cache, grid, noise.initial)
            return self.processor.executable_actions(final[:, : settings.num_executed].cpu()), {}
        chain, elements = flow_sde.sample_chain_elements(
            self._replayed or self.wam,
            cache,
            self._grid(settings.denoising_steps),
            noise,
            settings.noise_level,
            num_executed=settings.num_executed,
            variant=settings.variant,
            basis=self._basis_here(),
        )
        actions = self.processor.executable_actions(chain[:, -1, : settings.num_executed].cpu())
        record = {
            "action": actions.flatten(1),
            "chain": chain,
            "k_star": noise.k_star,
            "logp_old": flow_sde.reduce_logprob(elements, None, "sum"),
            "image": image,
            "proprio": proprio,
            "instruction": pack_instructions(instructions),
        }
        if state.video is not None:
            record["video_latents"] = state.video
        if settings.keep_video_cache:
            layers = zip(cache.video_keys, cache.video_values, strict=True)
            record["video_cache"] = stack_keys_values(list(layers))
        for name in RECORD_IDS:
            if name in env_obs:
                record[name] = torch.as_tensor(env_obs[name])
        return actions, {
            "prev_logprobs": elements.sum(dim=1),
            "prev_values": None,
            "forward_inputs": {key: value.cpu() for key, value in record.items()},
        }

    def forward(self, forward_type: ForwardType | str = ForwardType.DEFAULT, **kwargs: Any) -> Any:
        """Dispatch on ``forward_type``: the only call that a sharded model hooks."""
        if forward_type == ForwardType.DEFAULT:
            return self.default_forward(**kwargs)
        if forward_type not in TRAINING_FORWARDS:
            raise ValueError(f"WAMPolicy has no forward of type {forward_type!r}")
        return TRAINING_FORWARDS[forward_type](self, **kwargs)

    @staticmethod
    def instructions_of(records: Mapping[str, Tensor]) -> list[str]:
        """Return the instructions of a batch of records."""
        return unpack_instructions(records["instruction"])

    def default_forward(
        self, forward_inputs: Mapping[str, Tensor], **_: Any
    ) -> dict[str, Tensor | None]:
        """Score recorded chunks, with gradients to the action expert and the proprio encoder.

        Args:
            forward_inputs: a batch of the records of :meth:`predict_action_batch`; with
                ``executed_mask`` bool [B,C], actions that did not run score 0; with
                ``video_cache`` [B,layers,2,S,I] neither autoencoder nor video expert is run.

        Returns:
            ``logprobs`` float32 [B,C,A]; ``values`` and ``entropy`` are None.

        Raises:
            ValueError: see :meth:`recorded_state`.
        """
        settings = self.settings
        device = self.device
        known = forward_inputs.get("video_cache")
        if known is None:
            cache = self.wam.prefill(self.recorded_state(forward_inputs))
        else:
            instructions = self.instructions_of(forward_inputs)
            cache = self.wam.prefill(
                self.state(None, forward_inputs["proprio"], instructions),
                known_video=unstack_keys_values(known.to(device)),
            )
        elements = flow_sde.logprob_chain_elements(
            self.wam,
            cache,
            self._grid(settings.denoising_steps),
            forward_inputs["chain"].to(device),
            forward_inputs["k_star"].to(device),
            settings.noise_level,
            num_executed=settings.num_executed,
            variant=settings.variant,
            basis=self._basis_here(),
        )
        logprobs = elements.sum(dim=1)
        executed = forward_inputs.get("executed_mask")
        if executed is not None:
            logprobs = logprobs * executed.to(device).unsqueeze(-1)
        return {"logprobs": logprobs, "values": None, "entropy": None}

    def _grid(self, num_steps: int) -> flow_sde.FlowGrid:
        return flow_sde.inference_grid(
            self.wam, num_steps, shift=self.settings.shift, device=self.device
        )

    def _basis_here(self) -> NoiseBasis | None:
        return None if self._basis is None else self._basis.to(self.device)

    def _stream_keys(self, env_obs: Mapping[str, Any], batch_size: int) -> list[tuple[int, ...]]:
        """Return what the random streams of each sample depend on."""
        if "episode_id" not in env_obs:
            drawn = torch.randint(_KEY_BOUND, (batch_size,), generator=self._generator)
            return [(key,) for key in drawn.tolist()]
        episodes = torch.as_tensor(env_obs["episode_id"]).tolist()
        steps = torch.as_tensor(env_obs["elapsed_steps"]).tolist()
        return list(zip(episodes, steps, strict=True))

    def _shared_keys(self, env_obs: Mapping[str, Any], keys: list[tuple]) -> list[tuple]:
        """Return ``keys``, or keys that the members of a group have in common."""
        if self.settings.initial_noise == "episode":
            return keys
        groups = torch.as_tensor(env_obs["group_id"]).tolist()
        steps = torch.as_tensor(env_obs["elapsed_steps"]).tolist()
        return [("group", group, step) for group, step in zip(groups, steps, strict=True)]

    def _noise(
        self,
        streams: Sequence[torch.Generator],
        initial_streams: Sequence[torch.Generator] | None,
    ) -> ChainNoise:
        settings = self.settings
        noise = draw_chain_noise(
            streams,
            batch_size=len(streams),
            horizon=self.wam.action_horizon,
            action_dim=self.wam.action_dim,
            num_steps=settings.denoising_steps,
            stochastic_steps=settings.stochastic_steps,
            ignore_last=settings.ignore_last,
            initial_generators=initial_streams,
        )
        return ChainNoise(
            initial=noise.initial.to(self.device),
            step=noise.step.to(self.device),
            k_star=noise.k_star.to(self.device),
        )
