"""Flow matching with a shifted schedule: noise at sigma = 1, data at sigma = 0."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FlowMatchScheduler", "NUM_TRAIN_TIMESTEPS", "shift_time"]

NUM_TRAIN_TIMESTEPS = 1000
"""Network timestep at sigma = 1."""
_WEIGHT_EPS = 1e-10


def shift_time(u: Tensor, shift: float) -> Tensor:
    """``phi(u) = s u / (1 + (s - 1) u)``: spends more of the path near the noise for s > 1."""
    return shift * u / (1.0 + (shift - 1.0) * u)


def _bell(timestep: Tensor) -> Tensor:
    return torch.exp(-2.0 * ((timestep - NUM_TRAIN_TIMESTEPS / 2) / NUM_TRAIN_TIMESTEPS) ** 2)


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    values = values.to(device=like.device, dtype=like.dtype)
    return values.reshape(-1, *(1,) * (like.ndim - 1)) if values.ndim else values


class FlowMatchScheduler:
    """Timesteps, noising and loss weights, as in Wan2.2 and FastWAM.

    The path is ``x = (1 - sigma) data + sigma noise`` with velocity ``noise - data``; the network
    is given the timestep ``1000 sigma``.
    """

    def __init__(self, shift: float = 5.0):
        """Args: shift: s of :func:`shift_time`, for training and inference."""
        if shift <= 0:
            raise ValueError(f"The schedule's shift must be positive, got {shift}.")
        self.shift = float(shift)
        self.num_train_timesteps = NUM_TRAIN_TIMESTEPS
        u = torch.arange(1, NUM_TRAIN_TIMESTEPS + 1, dtype=torch.float64, device="cpu")
        bell = _bell(NUM_TRAIN_TIMESTEPS * shift_time(u / NUM_TRAIN_TIMESTEPS, self.shift))
        self._weight_floor = bell.min().item()
        self._weight_scale = (bell - bell.min()).mean().item() + _WEIGHT_EPS

    def build_inference_schedule(
        self,
        num_inference_steps: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        shift_override: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The denoising grid ``sigma_k = phi(1 - k / K)``, k = 0..K.

        The grid is computed in float32. Casting it to bfloat16 (as the official inference does)
        moves timesteps by up to 2 and the sum of the deltas off -1: for log-probabilities keep
        float32.

        Args:
            num_inference_steps: K >= 1.
            device: of the result.
            dtype: of the result.
            shift_override: shift in place of the scheduler's own.

        Returns:
            Timesteps ``1000 sigma_k`` [K] and deltas ``sigma_{k+1} - sigma_k < 0`` [K].
        """
        if num_inference_steps < 1:
            raise ValueError(
                f"The number of denoising steps must be >= 1, got {num_inference_steps}."
            )
        shift = self.shift if shift_override is None else float(shift_override)
        if shift <= 0:
            raise ValueError(f"The schedule's shift must be positive, got {shift}.")
        u = torch.linspace(1.0, 0.0, num_inference_steps + 1, dtype=torch.float32, device=device)
        sigma = shift_time(u, shift)
        timesteps = sigma[:-1] * float(NUM_TRAIN_TIMESTEPS)
        return timesteps.to(dtype), (sigma[1:] - sigma[:-1]).to(dtype)

    def step(self, velocity: Tensor, delta: Tensor, sample: Tensor) -> Tensor:
        """One Euler step ``sample + velocity * delta``; delta is a scalar or [B]."""
        return sample + velocity * _per_sample(delta, sample)

    def sample_training_t(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draws training timesteps ``1000 phi(u)``, u ~ U(0, 1) in float32.

        Args:
            batch_size: B.
            device: of the result; the draw is made on the generator's device when one is given.
            dtype: of the result.
            generator: source of randomness; None is the global one of the device.

        Returns:
            [B] in 0..1000.
        """
        source = device if generator is None else generator.device
        u = torch.rand(batch_size, generator=generator, device=source, dtype=torch.float32)
        return (shift_time(u, self.shift) * NUM_TRAIN_TIMESTEPS).to(device=device, dtype=dtype)

    def training_weight(self, timestep: Tensor) -> Tensor:
        """Loss weight of timesteps [B]: a bell, 0 at both ends, about 1 on average; float32."""
        return (_bell(timestep.float()) - self._weight_floor) / self._weight_scale

    def add_noise(self, data: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """The point of the path at timestep [B] (or scalar) between data and noise [B, ...]."""
        sigma = _per_sample(timestep / NUM_TRAIN_TIMESTEPS, data)
        return (1 - sigma) * data + sigma * noise

    def training_target(self, data: Tensor, noise: Tensor) -> Tensor:
        """The velocity ``noise - data``."""
        return noise - data
