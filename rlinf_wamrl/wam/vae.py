"""Video autoencoders: the one interface, its implementations by name, and how good one is.

A World-Action Model never sees pixels. It sees latents, and every autoencoder that can be read as
``encode``/``decode`` below may stand behind it. Adding one is a file and a line in ``VAE_KINDS``.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = [
    "VAE_KINDS",
    "ReconstructionPSNR",
    "VideoVAE",
    "check_video",
    "latent_shape",
    "load_vae",
    "reconstruction_psnr",
]

VAE_KINDS: dict[str, str] = {
    "patch": "rlinf_wamrl.wam.vae_patch:PatchVAE",
    "wan22": "rlinf_wamrl.wam.vae_wan22:Wan22VAE",
}
"""Kind of autoencoder -> ``module:class``; the class has a ``load(path, device=, dtype=)``."""


@runtime_checkable
class VideoVAE(Protocol):
    """A video autoencoder with causal time: latent frame 0 holds image 0 alone.

    Time is compressed by ``temporal_factor`` after the first image, so a video of
    ``T = 1 + temporal_factor * n`` images has ``f = 1 + n`` latent frames, and one image (T = 1)
    encodes to exactly latent frame 0 of any video that starts with it.

    Attributes:
        spatial_factor: pixels per latent cell along height and width (16 for Wan2.2).
        temporal_factor: images per latent frame after the first (4).
        latent_channels: channels of a latent cell (48).
    """

    spatial_factor: int
    temporal_factor: int
    latent_channels: int

    def encode(self, video: Tensor) -> Tensor:
        """Encode ``video`` [B,3,T,H,W] in [-1,1] to normalised latents [B,C_lat,f,h,w].

        Deterministic: the mean of the posterior where the autoencoder has one.
        """
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Decode normalised ``latents`` [B,C_lat,f,h,w] to a video [B,3,T,H,W] in about [-1,1]."""
        ...


def load_vae(
    kind: str,
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> VideoVAE:
    """Load an autoencoder of a registered kind.

    Args:
        kind: a key of :data:`VAE_KINDS`.
        path: what that kind loads from (its class documents it).
        device: where the weights go.
        dtype: dtype of the weights.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind not in VAE_KINDS:
        raise ValueError(f"unknown kind of VAE {kind!r}; known kinds: {', '.join(VAE_KINDS)}")
    return pkgutil.resolve_name(VAE_KINDS[kind]).load(path, device=device, dtype=dtype)


def latent_shape(vae: VideoVAE, video_shape: tuple[int, ...]) -> tuple[int, int, int, int, int]:
    """Shape [B,C_lat,f,h,w] of the latents of a video of shape [B,3,T,H,W].

    Raises:
        ValueError: the shape is not a video this autoencoder can encode.
    """
    if len(video_shape) != 5 or video_shape[1] != 3:
        raise ValueError(f"a video has shape [B,3,T,H,W], got {list(video_shape)}")
    batch, _, frames, height, width = video_shape
    if frames % vae.temporal_factor != 1 % vae.temporal_factor:
        raise ValueError(
            f"a video has 1 + {vae.temporal_factor}n images, got {frames}; "
            "cut it or repeat its last image"
        )
    if height % vae.spatial_factor or width % vae.spatial_factor:
        raise ValueError(
            f"image height and width must be multiples of {vae.spatial_factor}, "
            f"got {height}x{width}"
        )
    return (
        batch,
        vae.latent_channels,
        1 + (frames - 1) // vae.temporal_factor,
        height // vae.spatial_factor,
        width // vae.spatial_factor,
    )


def check_video(vae: VideoVAE, video: Tensor) -> None:
    """Refuse what is not a video [B,3,T,H,W] of floats in [-1,1] that ``vae`` can encode.

    Raises:
        ValueError: wrong shape, or pixels that were not scaled to floats.
    """
    latent_shape(vae, tuple(video.shape))
    if not video.is_floating_point():
        raise ValueError(f"a video holds floats in [-1,1], got {video.dtype}; scale it first")


@dataclass(frozen=True)
class ReconstructionPSNR:
    """Peak signal-to-noise ratio of decode(encode(video)) in dB, peak 2 (pixels in [-1,1]).

    Single images and the groups of images behind one latent frame are reported apart, because
    the policy conditions on the former and imagines the latter. A pixel moves when any colour
    changes by more than a threshold to the neighbouring image of the video: a static background
    is easy, and most of the picture. A figure without any such pixel is NaN.
    """

    first_image: float
    """Image 0, all pixels."""
    first_image_moving: float
    """Image 0, pixels that differ from image 1."""
    later_images: float
    """Images 1..T-1, all pixels."""
    later_images_moving: float
    """Images 1..T-1, pixels that differ from the image before."""
    moving_share: float
    """Share of moving pixels, 0..1."""


@torch.no_grad()
def reconstruction_psnr(
    vae: VideoVAE, videos: Iterable[Tensor], motion_threshold: float = 0.1
) -> ReconstructionPSNR:
    """Measure how well ``vae`` keeps ``videos``.

    Args:
        vae: the autoencoder.
        videos: batches of videos [B,3,T,H,W] in [-1,1], best held out from its training.
        motion_threshold: change of a colour, in units of [-1,1], above which a pixel moves.
    """
    squares = torch.zeros(4, dtype=torch.float64)
    counts = torch.zeros(4, dtype=torch.float64)
    for video in videos:
        error = (vae.decode(vae.encode(video)).clamp(-1, 1) - video).double().square().mean(1)
        moving = _moving_pixels(video, motion_threshold)
        parts = [
            (error[:, :1], None),
            (error[:, :1], moving[:, :1]),
            (error[:, 1:], None),
            (error[:, 1:], moving[:, 1:]),
        ]
        for index, (part, mask) in enumerate(parts):
            squares[index] += part.sum() if mask is None else part[mask].sum()
            counts[index] += part.numel() if mask is None else mask.sum()
    psnr = [
        10 * math.log10(4 * count / max(square, 1e-30)) if count else math.nan
        for square, count in zip(squares.tolist(), counts.tolist(), strict=True)
    ]
    pixels = float(counts[0] + counts[2])
    share = float(counts[1] + counts[3]) / pixels if pixels else math.nan
    return ReconstructionPSNR(*psnr, moving_share=share)


def _moving_pixels(video: Tensor, threshold: float) -> Tensor:
    """Mask [B,T,H,W] of pixels that change between neighbouring images of [B,3,T,H,W]."""
    change = (video[:, :, 1:] - video[:, :, :-1]).abs().amax(1) > threshold
    if change.shape[1] == 0:
        return torch.zeros_like(video[:, 0], dtype=torch.bool)
    return torch.cat([change[:, :1], change], dim=1)
