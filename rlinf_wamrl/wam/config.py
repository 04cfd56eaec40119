"""Sizes and switches of a World-Action Model; the same class serves tiny, small and 5B models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

__all__ = [
    "ACTION_GROUP_MASKS",
    "ACTION_INFER_MODES",
    "ActionExpertConfig",
    "ActionGroupMask",
    "ActionInferMode",
    "ExpertConfig",
    "TEMPORAL_STRIDE",
    "VARIANTS",
    "VIDEO_MASKS",
    "Variant",
    "VideoExpertConfig",
    "VideoMask",
    "WAMConfig",
    "fastwam_5b",
    "rotary_widths",
]

VideoMask = Literal["first_frame_causal", "bidirectional", "per_frame_causal"]
ActionGroupMask = Literal["group_diagonal", "causal"]
Variant = Literal["uncond", "joint", "idm", "optional_idm"]
ActionInferMode = Literal["first_frame", "idm"]

VIDEO_MASKS = ("first_frame_causal", "bidirectional", "per_frame_causal")
ACTION_GROUP_MASKS = ("group_diagonal", "causal")
VARIANTS = ("uncond", "joint", "idm", "optional_idm")
ACTION_INFER_MODES = ("first_frame", "idm")

TEMPORAL_STRIDE = 4
"""Images per latent frame of the Wan2.2 VAE, after the first image, which has its own."""


def rotary_widths(head_dim: int) -> tuple[int, int, int]:
    """Splits a head into its frame, row and column parts for the video's rotary embedding.

    Row and column get ``2 * (head_dim // 6)`` components each and the frame gets the rest. This
    equals the official split ``d - 2 * (d // 3), d // 3, d // 3`` wherever that one is defined
    (d mod 6 in {0, 2}) and also serves widths such as 16 and 64.
    """
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def _require_positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{owner}.{name} must be positive, got {value}.")


def _require_choice(owner: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{owner}.{name} must be one of {', '.join(choices)}, got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """What both experts have; names as in the official configuration."""

    hidden_dim: int
    """Width D of a token."""
    ffn_dim: int
    """Width of the feed-forward layer."""
    num_heads: int
    """Attention heads; both experts agree."""
    attn_head_dim: int
    """Width of one head, even; both experts agree. All heads together need not have width D."""
    num_layers: int
    """Transformer blocks; both experts agree."""
    text_dim: int = 4096
    """Width of the text embeddings and of the proprio token."""
    freq_dim: int = 256
    """Width of the sinusoid of the timestep, even."""
    eps: float = 1e-6
    """Epsilon of every normalisation."""
    use_gradient_checkpointing: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""

    def __post_init__(self) -> None:
        owner = type(self).__name__
        _require_positive(
            owner,
            hidden_dim=self.hidden_dim,
            ffn_dim=self.ffn_dim,
            num_heads=self.num_heads,
            attn_head_dim=self.attn_head_dim,
            num_layers=self.num_layers,
            text_dim=self.text_dim,
            freq_dim=self.freq_dim,
            eps=self.eps,
        )
        for name, value in (("attn_head_dim", self.attn_head_dim), ("freq_dim", self.freq_dim)):
            if value % 2:
                raise ValueError(
                    f"{owner}.{name} must be even (its components are used in pairs), got {value}."
                )

    @property
    def attention_dim(self) -> int:
        """Width of queries, keys and values over all heads."""
        return self.num_heads * self.attn_head_dim


@dataclass(frozen=True, kw_only=True)
class VideoExpertConfig(ExpertConfig):
    """The video expert: a Wan2.2-TI2V diffusion transformer."""

    in_dim: int = 48
    """Channels of the video latents."""
    out_dim: int = 48
    """Channels of the predicted velocity; equal to ``in_dim``."""
    patch_size: tuple[int, int, int] = (1, 2, 2)
    """Latent frames, rows and columns of one token; the first must be 1."""
    video_attention_mask_mode: VideoMask = "first_frame_causal"
    """Which video tokens see which; see :func:`rlinf_wamrl.wam.masks.video_mask`."""
    action_conditioned: bool = False
    """Whether the video sees the actions as context tokens (uncond variant only)."""
    action_dim: int = 7
    """Width of those actions."""
    action_group_causal_mask_mode: ActionGroupMask = "group_diagonal"
    """Which groups of actions a later frame sees."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "patch_size", tuple(self.patch_size))
        _require_positive("VideoExpertConfig", in_dim=self.in_dim, action_dim=self.action_dim)
        if self.out_dim != self.in_dim:
            raise ValueError(
                "VideoExpertConfig.out_dim must equal in_dim (the velocity has the shape of the "
                f"latents), got {self.out_dim} and {self.in_dim}."
            )
        if len(self.patch_size) != 3 or self.patch_size[0] != 1 or min(self.patch_size) < 1:
            raise ValueError(
                "VideoExpertConfig.patch_size must be (1, rows, columns) with positive entries, "
                f"got {self.patch_size}."
            )
        if self.attn_head_dim < 6:
            raise ValueError(
                "VideoExpertConfig.attn_head_dim must be at least 6 (frame, row and column each "
                f"need a pair), got {self.attn_head_dim}."
            )
        _require_choice(
            "VideoExpertConfig",
            "video_attention_mask_mode",
            self.video_attention_mask_mode,
            VIDEO_MASKS,
        )
        _require_choice(
            "VideoExpertConfig",
            "action_group_causal_mask_mode",
            self.action_group_causal_mask_mode,
            ACTION_GROUP_MASKS,
        )


@dataclass(frozen=True, kw_only=True)
class ActionExpertConfig(ExpertConfig):
    """The action expert: the same kind of transformer over the actions of one chunk."""

    action_dim: int = 7
    """Width A of an action."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("ActionExpertConfig", action_dim=self.action_dim)


@dataclass(frozen=True, kw_only=True)
class WAMConfig:
    """A World-Action Model: two experts, a variant, schedules and loss weights."""

    video_dit_config: VideoExpertConfig
    """The video expert."""
    action_dit_config: ActionExpertConfig
    """The action expert."""
    proprio_dim: int | None = None
    """Width P of the proprioceptive state, or None for a model without the proprio token."""
    variant: Variant = "uncond"
    """What the actions see of the video; see :mod:`rlinf_wamrl.wam.masks`."""
    action_infer_mode: ActionInferMode | None = None
    """What the actions see at inference; None = as trained (optional_idm: first_frame)."""
    num_video_frames: int = 9
    """Images of one video, the current one included; one more than a multiple of 4."""
    action_horizon: int = 32
    """Actions H of a chunk."""
    video_train_shift: float = 5.0
    """Shift of the video's timesteps in training."""
    video_infer_shift: float = 5.0
    """Shift of the video's denoising schedule."""
    action_train_shift: float = 5.0
    """Shift of the actions' timesteps in training."""
    action_infer_shift: float = 5.0
    """Shift of the actions' denoising schedule."""
    loss_lambda_video: float = 1.0
    """Weight of the video loss."""
    loss_lambda_action: float = 1.0
    """Weight of the action loss."""
    video_cond_noise_prob: float | None = None
    """Probability of noising the video that the actions of the idm variants read in training; None
    takes 0.5 for idm and 0, as in the released model, for optional_idm."""
    action_idm_prob: float = 0.5
    """optional_idm: probability that a training sample's actions see the whole video."""

    def __post_init__(self) -> None:
        video, action = self.video_dit_config, self.action_dit_config
        for name in ("num_layers", "num_heads", "attn_head_dim", "text_dim"):
            ours, theirs = getattr(video, name), getattr(action, name)
            if ours != theirs:
                raise ValueError(
                    f"Both experts must have the same {name} (they attend to each other layer by "
                    f"layer and share the context): video_dit_config has {ours}, action_dit_config "
                    f"has {theirs}."
                )
        _require_choice("WAMConfig", "variant", self.variant, VARIANTS)
        if self.video_cond_noise_prob is None and self.variant in ("idm", "optional_idm"):
            probability = 0.5 if self.variant == "idm" else 0.0
            object.__setattr__(self, "video_cond_noise_prob", probability)
        if self.action_infer_mode is None:
            whole_video = self.variant in ("joint", "idm")
            object.__setattr__(self, "action_infer_mode", "idm" if whole_video else "first_frame")
        self._check_modes()
        self._check_sizes()

    def _check_modes(self) -> None:
        _require_choice(
            "WAMConfig", "action_infer_mode", self.action_infer_mode, ACTION_INFER_MODES
        )
        only = {"uncond": "first_frame", "joint": "idm", "idm": "idm"}.get(self.variant)
        if only is not None and self.action_infer_mode != only:
            raise ValueError(
                f"WAMConfig.action_infer_mode must be {only!r} for variant {self.variant!r} (its "
                f"actions were trained to see nothing else), got {self.action_infer_mode!r}."
            )
        if self.video_dit_config.action_conditioned and self.variant != "uncond":
            raise ValueError(
                "WAMConfig: video_dit_config.action_conditioned needs variant 'uncond', got "
                f"{self.variant!r}: elsewhere the actions would see a video that saw them."
            )
        if (
            self.video_dit_config.action_conditioned
            and self.video_dit_config.action_dim != self.action_dit_config.action_dim
        ):
            raise ValueError(
                "WAMConfig: video_dit_config.action_dim must equal action_dit_config.action_dim, "
                f"got {self.video_dit_config.action_dim} and {self.action_dit_config.action_dim}."
            )

    def _check_sizes(self) -> None:
        _require_positive(
            "WAMConfig",
            action_horizon=self.action_horizon,
            num_video_frames=self.num_video_frames,
            video_train_shift=self.video_train_shift,
            video_infer_shift=self.video_infer_shift,
            action_train_shift=self.action_train_shift,
            action_infer_shift=self.action_infer_shift,
        )
        if self.proprio_dim is not None:
            _require_positive("WAMConfig", proprio_dim=self.proprio_dim)
        if self.num_video_frames % TEMPORAL_STRIDE != 1:
            raise ValueError(
                "WAMConfig.num_video_frames must be one more than a multiple of "
                f"{TEMPORAL_STRIDE}, got {self.num_video_frames}."
            )
        for name in ("video_cond_noise_prob", "action_idm_prob"):
            probability = getattr(self, name)
            if probability is not None and not 0.0 <= probability <= 1.0:
                raise ValueError(f"WAMConfig.{name} is a probability in [0, 1], got {probability}.")
        for name in ("loss_lambda_video", "loss_lambda_action"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"WAMConfig.{name} must not be negative, got {getattr(self, name)}."
                )

    @property
    def actions_per_frame(self) -> int:
        """Actions between two frames of the imagined video."""
        return self.action_horizon // (self.num_video_frames - 1)

    @property
    def num_latent_frames(self) -> int:
        """Latent frames f of one video."""
        return 1 + (self.num_video_frames - 1) // TEMPORAL_STRIDE

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> WAMConfig:
        """Builds a configuration from nested mappings with the official field names.

        Fields of the official expert configurations that the architecture fixes are accepted when
        they have the supported value, and are an error otherwise.

        Raises:
            ValueError: an unknown field, a missing one or an impossible value.
        """
        values = dict(values)
        for key, expert in (
            ("video_dit_config", VideoExpertConfig),
            ("action_dit_config", ActionExpertConfig),
        ):
            if key not in values:
                raise ValueError(f"The model configuration lacks {key!r}.")
            if not isinstance(values[key], expert):
                values[key] = _from_mapping(expert, values[key], f"model.{key}")
        return _from_mapping(cls, values, "model")


_FIXED_FIELDS = {
    "has_image_input": False,
    "require_clip_embedding": False,
    "require_vae_embedding": False,
    "seperated_timestep": True,
    "fuse_vae_embedding_in_latents": True,
}
"""Switches of the official Wan2.2 configuration that every FastWAM model sets in one way."""


def _from_mapping(kind: type, values: Mapping[str, Any], where: str) -> Any:
    values = dict(values)
    for name, supported in _FIXED_FIELDS.items():
        if kind is VideoExpertConfig and values.pop(name, supported) != supported:
            raise ValueError(f"{where}.{name} must be {supported}: no other value is implemented.")
    known = {entry.name for entry in fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(
            f"{where} has unknown fields {', '.join(unknown)}; "
            f"known are {', '.join(sorted(known))}."
        )
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from error


def fastwam_5b(**changes: Any) -> WAMConfig:
    """The configuration of the released LIBERO models on Wan2.2-TI2V-5B.

    Args:
        **changes: fields of :class:`WAMConfig` to replace, for example ``variant``, or
            ``action_infer_shift=1.0`` for ``libero_optional_idm_2cam224.pt``.
    """
    shared = {"num_heads": 24, "attn_head_dim": 128, "num_layers": 30}
    values: dict[str, Any] = {
        "video_dit_config": VideoExpertConfig(hidden_dim=3072, ffn_dim=14336, **shared),
        "action_dit_config": ActionExpertConfig(hidden_dim=1024, ffn_dim=4096, **shared),
        "proprio_dim": 8,
    }
    return WAMConfig(**(values | changes))
