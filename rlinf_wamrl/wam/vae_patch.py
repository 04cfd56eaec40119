"""A linear patch autoencoder, fitted in closed form: the small model's VAE.

Principal component analysis of image patches keeps more of a small picture than a convolutional
autoencoder of the same compression does after minutes of training, and needs none. The first
image of a video has its own basis; each later group of ``temporal_factor`` images is projected
jointly, so that the layout of time is that of the Wan2.2 autoencoder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rlinf_wamrl.files import atomic_path
from rlinf_wamrl.wam.vae import check_video

__all__ = ["PatchVAE", "PatchVAEConfig", "PatchVAEFit"]

EIGENVALUE_FLOOR = 1e-6
"""Smallest channel variance, relative to the largest, that a scale is taken from: below it a
channel holds rounding noise, which dividing by its own scale would turn into a signal."""


FIT_BATCH = 64
"""Videos whose moments are taken at once: adding up matrices of a group's width squared costs as
much as a few videos do."""


@dataclass(frozen=True, kw_only=True)
class PatchVAEConfig:
    """Shape and normalisation of a :class:`PatchVAE`."""

    image_height: int
    """Height of an image in pixels (cameras side by side count as one image)."""
    image_width: int
    """Width of an image in pixels."""
    spatial_factor: int = 16
    """Side of a square patch in pixels; one latent cell per patch."""
    temporal_factor: int = 4
    """Images projected jointly after the first."""
    latent_channels: int = 48
    """Principal components kept, for the first image and for a group alike."""
    per_position_mean: bool = True
    """Subtract the mean picture (right for fixed cameras) rather than one mean patch."""
    scale: Literal["channel", "global"] = "channel"
    """``channel``: every latent channel has variance 1, so the model weighs all alike.
    ``global``: one divisor per basis gives mean variance 1 and keeps the channels' ratios, so
    that details weigh as little as they contribute to the picture."""

    def __post_init__(self) -> None:
        for name in ("image_height", "image_width", "spatial_factor", "temporal_factor"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.image_height % self.spatial_factor or self.image_width % self.spatial_factor:
            raise ValueError(
                f"image size {self.image_height}x{self.image_width} is no multiple of the patch "
                f"size spatial_factor={self.spatial_factor}"
            )
        if not 1 <= self.latent_channels <= self.patch_size:
            raise ValueError(
                f"latent_channels={self.latent_channels} must lie in 1..{self.patch_size}, the "
                f"values of one {self.spatial_factor}x{self.spatial_factor} colour patch"
            )
        if self.scale not in ("channel", "global"):
            raise ValueError(f"scale must be 'channel' or 'global', got {self.scale!r}")

    @property
    def patch_size(self) -> int:
        """Values of one patch of one image."""
        return 3 * self.spatial_factor**2

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image_height // self.spatial_factor, self.image_width // self.spatial_factor


class PatchVAE(nn.Module):
    """Linear :class:`~rlinf_wamrl.wam.vae.VideoVAE` whose weights are buffers, not parameters.

    Buffers (p = patch values, g = temporal_factor * p, k = channels, h x w = patch grid):
    ``mean`` [h,w,p] (or [1,1,p] without per-position mean), ``image_basis`` [p,k],
    ``image_scale`` [k], ``group_basis`` [g,k], ``group_scale`` [k].
    """

    def __init__(self, config: PatchVAEConfig) -> None:
        super().__init__()
        self.config = config
        self.spatial_factor = config.spatial_factor
        self.temporal_factor = config.temporal_factor
        self.latent_channels = config.latent_channels
        patch, channels = config.patch_size, config.latent_channels
        cells = config.grid if config.per_position_mean else (1, 1)
        self.register_buffer("mean", torch.zeros(*cells, patch))
        self.register_buffer("image_basis", torch.zeros(patch, channels))
        self.register_buffer("image_scale", torch.ones(channels))
        self.register_buffer("group_basis", torch.zeros(config.temporal_factor * patch, channels))
        self.register_buffer("group_scale", torch.ones(channels))

    @classmethod
    def fit(cls, videos: Iterable[Tensor], config: PatchVAEConfig) -> PatchVAE:
        """Fit the two bases to ``videos``, seen once and batch by batch.

        Args:
            videos: batches [B,3,T,H,W] in [-1,1], T = 1 + temporal_factor * n with n >= 1.
            config: what to fit.

        Raises:
            ValueError: no videos, wrong shapes, or videos without any later image.
        """
        fit = PatchVAEFit(config)
        for video in _joined(videos):
            fit.update(video)
        return fit.finish()

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> PatchVAE:
        """Load what :meth:`save` wrote.

        Args:
            path: the safetensors file.
            device: where the buffers go.
            dtype: dtype of the buffers, and of the arithmetic.

        Raises:
            FileNotFoundError: no such file.
            ValueError: the file is not a patch VAE.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no patch VAE at {path}")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        if "patch_vae" not in metadata:
            raise ValueError(f"{path} holds no patch VAE: its metadata lack 'patch_vae'")
        vae = cls(PatchVAEConfig(**json.loads(metadata["patch_vae"])))
        vae.load_state_dict(tensors)
        return vae.to(device=device, dtype=dtype)

    def save(self, path: str | Path) -> None:
        """Write buffers and configuration to one safetensors file, atomically."""
        tensors = {name: value.contiguous().cpu() for name, value in self.state_dict().items()}
        metadata = {"patch_vae": json.dumps(asdict(self.config))}
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, metadata=metadata)

    def encode(self, video: Tensor) -> Tensor:
        """Project ``video`` [B,3,T,H,W] in [-1,1] to latents [B,C_lat,f,h,w]."""
        check_video(self, video)
        _check_image_size(self.config, video)
        patches = _patchify(video.to(self.mean.dtype), self.spatial_factor) - self.mean
        first = (patches[:, :1] @ self.image_basis) / self.image_scale
        groups = _join_groups(patches[:, 1:], self.temporal_factor)
        later = (groups @ self.group_basis) / self.group_scale
        return torch.cat([first, later], dim=1).permute(0, 4, 1, 2, 3)

    def decode(self, latents: Tensor) -> Tensor:
        """Reconstruct a video [B,3,T,H,W] from ``latents`` [B,C_lat,f,h,w].

        Values are not clamped: the nearest picture may lie outside [-1,1] by a little.
        """
        rows, columns = self.config.grid
        if latents.dim() != 5 or latents.shape[1] != self.latent_channels:
            raise ValueError(
                f"latents have shape [B,{self.latent_channels},f,h,w], got {list(latents.shape)}"
            )
        if latents.shape[3:] != (rows, columns):
            raise ValueError(
                f"latents of this VAE have {rows}x{columns} cells, got {list(latents.shape[3:])}"
            )
        cells = latents.to(self.mean.dtype).permute(0, 2, 3, 4, 1)
        first = (cells[:, :1] * self.image_scale) @ self.image_basis.T
        later = (cells[:, 1:] * self.group_scale) @ self.group_basis.T
        patches = torch.cat([first, _split_groups(later, self.temporal_factor)], dim=1)
        return _unpatchify(patches + self.mean, self.spatial_factor)


class PatchVAEFit:
    """Running moments of patches: a fit over any number of videos in bounded memory.

    Patches are centred by the first batch's mean before they are accumulated (in float64), so
    that subtracting the final mean at the end loses no digits.
    """

    def __init__(self, config: PatchVAEConfig) -> None:
        self.config = config
        patch, group = config.patch_size, config.temporal_factor * config.patch_size
        self._reference: Tensor | None = None  # [h,w,p]
        self._images = 0
        self._image_sum = torch.zeros(*config.grid, patch, dtype=torch.float64)
        self._image_square = torch.zeros(patch, patch, dtype=torch.float64)
        self._groups = 0
        self._group_sum = torch.zeros(*config.grid, group, dtype=torch.float64)
        self._group_square = torch.zeros(group, group, dtype=torch.float64)

    def update(self, video: Tensor) -> None:
        """Add a batch of videos [B,3,T,H,W] in [-1,1]; every image also feeds the image basis."""
        _check_image_size(self.config, video)
        if (video.shape[2] - 1) % self.config.temporal_factor:
            raise ValueError(
                f"a video has 1 + {self.config.temporal_factor}n images, got {video.shape[2]}"
            )
        patches = _patchify(video.float(), self.config.spatial_factor)
        if self._reference is None:
            self._reference = patches.mean((0, 1))
        patches = patches - self._reference
        flat = patches.flatten(0, 3)
        self._images += video.shape[0] * video.shape[2]
        self._image_sum += patches.sum((0, 1), dtype=torch.float64)
        self._image_square += (flat.T @ flat).double()
        groups = _join_groups(patches[:, 1:], self.config.temporal_factor)
        flat = groups.flatten(0, 3)
        self._groups += groups.shape[0] * groups.shape[1]
        self._group_sum += groups.sum((0, 1), dtype=torch.float64)
        self._group_square += (flat.T @ flat).double()

    def finish(self) -> PatchVAE:
        """Solve both eigenproblems.

        Raises:
            ValueError: nothing was added, or no video had later images.
        """
        if self._reference is None or not self._groups:
            raise ValueError(
                "a patch VAE is fitted to videos of at least "
                f"{1 + self.config.temporal_factor} images; got {self._images} images and "
                f"{self._groups} groups of {self.config.temporal_factor}"
            )
        config = self.config
        offset = self._image_sum / self._images  # mean minus reference, [h,w,p]
        if not config.per_position_mean:
            # One mean patch for all positions, in absolute terms: the references cancel.
            offset = (self._reference + offset).mean((0, 1), keepdim=True) - self._reference
        vae = PatchVAE(config)
        mean = self._reference + offset
        vae.mean.copy_(mean if config.per_position_mean else mean[:1, :1])
        image_moment = _moment(self._image_square, self._image_sum, self._images, offset)
        vae.image_basis[:], vae.image_scale[:] = _principal(image_moment, config)
        repeated = offset.repeat(1, 1, config.temporal_factor)
        group_moment = _moment(self._group_square, self._group_sum, self._groups, repeated)
        vae.group_basis[:], vae.group_scale[:] = _principal(group_moment, config)
        return vae


def _joined(videos: Iterable[Tensor]) -> Iterator[Tensor]:
    """Join batches to at least ``FIT_BATCH`` videos: the last may be smaller, shapes stay apart."""
    waiting: list[Tensor] = []
    for video in videos:
        if waiting and video.shape[1:] != waiting[0].shape[1:]:
            yield torch.cat(waiting)
            waiting = []
        waiting.append(video)
        if sum(map(len, waiting)) >= FIT_BATCH:
            yield torch.cat(waiting)
            waiting = []
    if waiting:
        yield torch.cat(waiting)


def _check_image_size(config: PatchVAEConfig, video: Tensor) -> None:
    expected = (config.image_height, config.image_width)
    if video.dim() != 5 or tuple(video.shape[3:]) != expected:
        raise ValueError(
            f"this patch VAE takes images of {expected[0]}x{expected[1]} pixels, "
            f"got a video of shape {list(video.shape)}"
        )


def _moment(square: Tensor, total: Tensor, count: int, offset: Tensor) -> Tensor:
    """Second moment about ``offset`` [h,w,n], averaged over samples and positions, [n,n]."""
    positions = total.shape[0] * total.shape[1]
    mean, offset = (total / count).flatten(0, 1), offset.flatten(0, 1)
    cross = mean.T @ offset
    return (square / count - cross - cross.T + offset.T @ offset) / positions


def _principal(moment: Tensor, config: PatchVAEConfig) -> tuple[Tensor, Tensor]:
    """Leading eigenvectors [n,k] and the divisors [k] of their projections."""
    values, vectors = torch.linalg.eigh(moment)
    values = values.flip(0)[: config.latent_channels]
    vectors = vectors.flip(1)[:, : config.latent_channels]
    # An eigenvector's sign is arbitrary; this makes the same data give the same latents anywhere.
    peaks = vectors.abs().argmax(0, keepdim=True)
    vectors = vectors * vectors.gather(0, peaks).sign()
    if values[0] <= 0:
        raise ValueError("the videos are constant: nothing to fit a patch VAE to")
    variance = values.clamp(min=EIGENVALUE_FLOOR * values[0].item())
    if config.scale == "global":
        variance = variance.mean().expand_as(variance)
    return vectors.float(), variance.sqrt().float()


def _patchify(video: Tensor, size: int) -> Tensor:
    """[B,3,T,H,W] -> [B,T,h,w,3*size*size]."""
    batch, colours, frames, height, width = video.shape
    blocks = video.reshape(batch, colours, frames, height // size, size, width // size, size)
    return blocks.permute(0, 2, 3, 5, 1, 4, 6).flatten(4)


def _unpatchify(patches: Tensor, size: int) -> Tensor:
    """[B,T,h,w,3*size*size] -> [B,3,T,H,W]."""
    batch, frames, rows, columns, _ = patches.shape
    blocks = patches.reshape(batch, frames, rows, columns, 3, size, size)
    return blocks.permute(0, 4, 1, 2, 5, 3, 6).reshape(
        batch, 3, frames, rows * size, columns * size
    )


def _join_groups(patches: Tensor, length: int) -> Tensor:
    """[B,n*length,h,w,p] -> [B,n,h,w,length*p], time slowest within a group."""
    groups = patches.unflatten(1, (patches.shape[1] // length, length))
    return groups.permute(0, 1, 3, 4, 2, 5).flatten(4)


def _split_groups(groups: Tensor, length: int) -> Tensor:
    """Inverse of :func:`_join_groups`."""
    patches = groups.unflatten(4, (length, groups.shape[4] // length))
    return patches.permute(0, 1, 4, 2, 3, 5).flatten(1, 2)
