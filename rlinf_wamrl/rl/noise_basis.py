"""Exploring along few directions of a chunk instead of in every action by itself.

White noise over C executed actions and A dimensions is C·A directions, most of which the later
denoising steps remove again: they change nothing in the outcome, but their scores are noise in the
policy gradient. Here a stochastic step is Gaussian along the slowest M cosine modes of the chosen
dimensions, and follows the ODE along everything else; its density is over these M coordinates.

Shapes: B samples, H actions in a chunk, C of them executed, A action width, M modes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["NoiseBasis", "cosine_basis"]


@dataclass(frozen=True, kw_only=True, eq=False)
class NoiseBasis:
    """The directions in which stochastic steps are noisy."""

    modes: Tensor  # [M,H] float32, orthonormal over the first C actions
    dims: Tensor  # [A] float32, 1 where the dimension gets noise, else 0
    num_executed: int  # C

    def coordinates(self, actions: Tensor) -> Tensor:
        """Return the coordinates [B,M,A] of the executed part of [B,H,A]."""
        executed = actions[:, : self.num_executed]
        return torch.einsum("mc,bca->bma", self.modes[:, : self.num_executed], executed) * self.dims

    def actions(self, coordinates: Tensor) -> Tensor:
        """Return the actions [B,H,A] with these coordinates; what is not executed goes on alike."""
        return torch.einsum("mh,bma->bha", self.modes, coordinates * self.dims)

    def step(self, ode: Tensor, mean: Tensor, std: Tensor, noise: Tensor) -> Tensor:
        """Return the next entry of a chain.

        Args:
            ode: [B,H,A], where the deterministic step goes.
            mean: [B,H,A] of the stochastic step.
            std: [B,1,1] of it.
            noise: [B,H,A] standard normal, of which the first M rows are used.
        """
        drawn = std * noise[:, : len(self.modes)]
        return ode + self.actions(self.coordinates(mean - ode) + drawn)

    def logprob(self, x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Return the log-density of :meth:`step` at its result ``x``, as [B,C,A].

        Mode m stands in row m, zeros elsewhere. Where fewer than C actions ran, the rows that count
        are as many as the coordinates that these actions determine.
        """
        z = self.coordinates(x - mean) / std
        terms = -0.5 * z * z - torch.log(std) - 0.5 * math.log(2.0 * math.pi)
        rows = x.new_zeros(x.shape[0], self.num_executed, x.shape[2])
        rows[:, : len(self.modes)] = terms * self.dims
        return rows

    def to(self, device: torch.device) -> NoiseBasis:
        """Return the same on a device."""
        return NoiseBasis(
            modes=self.modes.to(device),
            dims=self.dims.to(device),
            num_executed=self.num_executed,
        )


def cosine_basis(
    *,
    horizon: int,
    num_executed: int,
    action_dim: int,
    num_modes: int | None = None,
    dims: Sequence[int] = (),
) -> NoiseBasis | None:
    """Return the slowest modes of the discrete cosine transform (DCT-II) of the executed actions.

    Args:
        horizon: H.
        num_executed: C.
        action_dim: A.
        num_modes: M; None takes all C.
        dims: action dimensions that get noise; none listed means all.

    Returns:
        None where nothing is left out: noise is white then.

    Raises:
        ValueError: more modes than executed actions, or a dimension that does not exist.
    """
    if num_modes is None and not dims:
        return None
    count = num_executed if num_modes is None else num_modes
    if not 1 <= count <= num_executed:
        raise ValueError(f"noise_modes must be within 1..{num_executed}, got {count}")
    if sorted(set(dims)) != sorted(dims) or any(not 0 <= one < action_dim for one in dims):
        raise ValueError(
            f"noise_dims must be distinct and within 0..{action_dim - 1}, got {list(dims)}"
        )
    time = (torch.arange(horizon, dtype=torch.float64) + 0.5) * math.pi / num_executed
    modes = torch.cos(time * torch.arange(count, dtype=torch.float64).unsqueeze(1))
    modes = modes / modes[:, :num_executed].norm(dim=1, keepdim=True)
    chosen = torch.ones(action_dim) if not dims else torch.zeros(action_dim)
    chosen[list(dims)] = 1.0
    return NoiseBasis(modes=modes.float(), dims=chosen, num_executed=num_executed)
