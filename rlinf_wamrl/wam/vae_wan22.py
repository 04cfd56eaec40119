"""The Wan2.2 autoencoder (x16, x4, 48 channels) through diffusers, from either file format.

diffusers' own single-file converter knows the key layout of Wan2.1 only; the one below maps the
official ``Wan2.2_VAE.pth``. Architecture and arithmetic are diffusers' ``AutoencoderKLWan``.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rlinf_wamrl.wam.vae import check_video

__all__ = ["WAN22_LATENTS_MEAN", "WAN22_LATENTS_STD", "Wan22VAE", "convert_wan22_keys"]

# fmt: off
WAN22_LATENTS_MEAN = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
    -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
    -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
    -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
    0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)
WAN22_LATENTS_STD = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
    0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
    0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
    0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
    0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)
# fmt: on
"""Mean and standard deviation of each latent channel, constants of the Wan2.2 release."""

_KEY_RULES: tuple[tuple[str, str], ...] = (
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.conv1\.", r"\1.conv_in."),
    (r"^(encoder|decoder)\.head\.0\.", r"\1.norm_out."),
    (r"^(encoder|decoder)\.head\.2\.", r"\1.conv_out."),
    (r"\.middle\.0\.", ".mid_block.resnets.0."),
    (r"\.middle\.1\.", ".mid_block.attentions.0."),
    (r"\.middle\.2\.", ".mid_block.resnets.1."),
    (
        r"\.(down|up)samples\.(\d+)\.\1samples\.\d+\.(resample|time_conv)\.",
        r".\1_blocks.\2.\1sampler.\3.",
    ),
    (r"\.(down|up)samples\.(\d+)\.\1samples\.(\d+)\.", r".\1_blocks.\2.resnets.\3."),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
)
"""Official name -> diffusers name, applied in this order."""


def convert_wan22_keys(state: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the official Wan2.2 VAE's keys to those of diffusers' ``AutoencoderKLWan``."""
    converted = {}
    for key, value in state.items():
        for pattern, replacement in _KEY_RULES:
            key = re.sub(pattern, replacement, key)
        converted[key] = value
    return converted


class Wan22VAE(nn.Module):
    """:class:`~rlinf_wamrl.wam.vae.VideoVAE` around a Wan2.2 ``AutoencoderKLWan``; frozen."""

    spatial_factor = 16
    temporal_factor = 4

    def __init__(self, model: AutoencoderKLWan) -> None:
        """Wrap ``model``, whose configuration carries the latents' mean and std.

        Raises:
            ValueError: the model is not of the Wan2.2 kind.
        """
        super().__init__()
        config = model.config
        if not config.is_residual or config.patch_size != 2:
            raise ValueError(
                "this AutoencoderKLWan is not Wan2.2's: is_residual must be true and patch_size 2, "
                f"got {config.is_residual} and {config.patch_size} (Wan2.1 compresses x8, not x16)"
            )
        if len(config.latents_mean) != config.z_dim or len(config.latents_std) != config.z_dim:
            raise ValueError(
                f"the VAE has {config.z_dim} latent channels, but {len(config.latents_mean)} "
                f"means and {len(config.latents_std)} standard deviations"
            )
        self.model = model.eval().requires_grad_(False)
        self.latent_channels = config.z_dim
        shape = (1, config.z_dim, 1, 1, 1)
        self.register_buffer("latents_mean", torch.tensor(config.latents_mean).view(shape))
        self.register_buffer("latents_std", torch.tensor(config.latents_std).view(shape))

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Wan22VAE:
        """Load from a diffusers folder or from an official single file.

        Args:
            path: a folder with ``config.json`` (``vae`` of ``Wan2.2-TI2V-5B-Diffusers``), or the
                official ``Wan2.2_VAE.pth`` or its safetensors form. Sizes are read off the
                weights.
            device: where the weights go.
            dtype: dtype of the weights.

        Raises:
            FileNotFoundError: nothing is there.
            ValueError: it is not a Wan2.2 VAE.
        """
        path = Path(path)
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise FileNotFoundError(
                    f"{path} is no diffusers VAE folder: config.json is missing"
                )
            model = AutoencoderKLWan.from_pretrained(path, local_files_only=True, torch_dtype=dtype)
            return cls(model).to(device=device, dtype=dtype)
        if not path.is_file():
            raise FileNotFoundError(
                f"no Wan2.2 VAE at {path}: give Wan2.2_VAE.pth or the folder vae of "
                "Wan2.2-TI2V-5B-Diffusers"
            )
        state = _read_single_file(path)
        missing = {"encoder.conv1.weight", "conv2.weight", "decoder.head.0.gamma"} - set(state)
        if missing:
            raise ValueError(f"{path} is no official Wan2.2 VAE: it lacks {sorted(missing)}")
        with torch.device("meta"):
            model = build_wan22_model(state)
        converted = {key: value.to(dtype) for key, value in convert_wan22_keys(state).items()}
        try:
            model.load_state_dict(converted, assign=True)
        except RuntimeError as error:
            raise ValueError(f"{path} is no official Wan2.2 VAE: {error}") from error
        return cls(model).to(device)

    def encode(self, video: Tensor) -> Tensor:
        """Encode ``video`` [B,3,T,H,W] in [-1,1] to (posterior mean - mean) / std."""
        check_video(self, video)
        posterior = self.model.encode(video.to(self.model.dtype)).latent_dist
        return (posterior.mode() - self.latents_mean) / self.latents_std

    def decode(self, latents: Tensor) -> Tensor:
        """Decode ``latents`` [B,48,f,h,w] to a video [B,3,T,H,W], clamped to [-1,1]."""
        if latents.dim() != 5 or latents.shape[1] != self.latent_channels:
            raise ValueError(
                f"latents have shape [B,{self.latent_channels},f,h,w], got {list(latents.shape)}"
            )
        latents = latents.to(self.model.dtype) * self.latents_std + self.latents_mean
        return self.model.decode(latents).sample


def build_wan22_model(state: Mapping[str, Any]) -> AutoencoderKLWan:
    """Build an ``AutoencoderKLWan`` with random weights, sized after an official state dict.

    Args:
        state: official names to anything with a ``shape``.
    """
    blocks = {
        key.split(".")[4]
        for key in state
        if key.startswith("encoder.downsamples.0.downsamples.") and ".residual." in key
    }
    channels = state["conv2.weight"].shape[0]
    if channels != len(WAN22_LATENTS_MEAN):
        raise ValueError(f"a Wan2.2 VAE has 48 latent channels, this one has {channels}")
    return AutoencoderKLWan(
        base_dim=state["encoder.conv1.weight"].shape[0],
        decoder_base_dim=state["decoder.head.0.gamma"].shape[0],
        num_res_blocks=len(blocks),
        z_dim=channels,
        dim_mult=[1, 2, 4, 4],
        temperal_downsample=[False, True, True],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        scale_factor_temporal=4,
        latents_mean=list(WAN22_LATENTS_MEAN),
        latents_std=list(WAN22_LATENTS_STD),
    )


def _read_single_file(path: Path) -> Mapping[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is unreadable as a file of weights: {error}") from error
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(f"{path} holds no state dict of tensors")
    return state
