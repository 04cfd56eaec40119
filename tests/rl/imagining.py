"""A model that imagines what it is told to, and an autoencoder without loss: to see each step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlinf_wamrl.rl.reward import RewardBatch


class ExactVAE:
    """Keeps every pixel; a latent frame after the first holds four pictures as channels."""

    temporal_factor = 4

    def __init__(self, blur: float = 0.0):
        self.blur = blur  # share of each decoded picture that is replaced by its mean
        self.encoded: list[tuple[int, ...]] = []
        self.decoded: list[tuple[int, ...]] = []

    def encode(self, video: Tensor) -> Tensor:
        self.encoded.append(tuple(video.shape))
        first = torch.cat(
            (video[:, :, :1], torch.zeros_like(video[:, :, :1].repeat(1, 3, 1, 1, 1))), 1
        )
        groups = video[:, :, 1:].unflatten(2, (-1, 4)).transpose(2, 3).flatten(1, 2)
        return torch.cat((first, groups), dim=2)

    def decode(self, latents: Tensor) -> Tensor:
        self.decoded.append(tuple(latents.shape))
        groups = latents[:, :, 1:].unflatten(1, (3, 4)).transpose(2, 3).flatten(2, 3)
        video = torch.cat((latents[:, :3, :1], groups), dim=2)
        return torch.lerp(video, video.mean(dim=(-2, -1), keepdim=True), self.blur)


class Imagining:
    """Imagines ``future`` [B, n, 3, H, W] in [-1, 1] of its batch, or noise where that is None."""

    def __init__(self, num_latent_frames: int = 3, blur: float = 0.0):
        self.device = torch.device("cpu")
        self.num_latent_frames = num_latent_frames
        self.vae = ExactVAE(blur)
        self.video_expert = nn.Linear(1, 1).requires_grad_(False)
        self.future: Tensor | None = None
        self.calls: list[dict] = []

    def imagine(self, state, num_steps, *, noise, shift, actions):
        rows = len(noise)
        self.calls.append({"rows": rows, "steps": num_steps, "shift": shift, "state": state})
        if self.future is None:
            return torch.cat((state.first_frame, noise[:, :, 1:].clamp(-1, 1)), dim=2)
        current = state.first_frame[:, :3]
        pictures, self.future = self.future[:rows], self.future[rows:]
        count = 4 * (self.num_latent_frames - 1)
        rest = pictures[:, -1:].expand(-1, count - pictures.shape[1], -1, -1, -1)
        later = torch.cat((pictures, rest), dim=1).transpose(1, 2)
        video = torch.cat((current, later), dim=2)
        return ExactVAE().encode(video)


def batch(rows: int = 3, *, frames: int = 2, actions: int = 10, seed: int = 0, **changes):
    """A batch of random pictures 8 x 16, every frame reached."""
    generator = torch.Generator().manual_seed(seed)

    def pixels(*shape: int) -> Tensor:
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)

    values = {
        "image": pixels(rows, 3, 8, 16),
        "future_frames": pixels(rows, frames, 3, 8, 16),
        "future_frames_exist": torch.ones(rows, frames, dtype=torch.bool),
        "executed_mask": torch.ones(rows, actions, dtype=torch.bool),
        "context": torch.zeros(1, 2, 4),
        "context_mask": torch.ones(1, 2, dtype=torch.bool),
        "context_index": torch.zeros(rows, dtype=torch.int64),
    }
    return RewardBatch(**(values | changes))


def streams(rows: int, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(1000 * seed + row) for row in range(rows)]


def unit(pixels: Tensor) -> Tensor:
    return pixels.double() / 127.5 - 1
