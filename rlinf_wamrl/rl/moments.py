"""Mean and variance of a stream of values, gathered in pieces; and what they normalise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Moments", "RunningNormaliser"]


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, mean and sum of squared deviations of values of one shape, in float64.

    Pieces merge by the pairwise update of Chan, Golub and LeVeque (1983), which is Welford's for a
    piece of one value: the same result, up to rounding, in whatever pieces the values came.
    """

    count: Tensor  # [] float64
    mean: Tensor  # [*] float64
    squares: Tensor  # [*] float64, sum of squared deviations from the mean

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """Of values [n, *], which may be none."""
        values = values.detach().double()
        count = values.new_tensor(float(len(values)))
        mean = values.sum(dim=0) / count.clamp(min=1.0)
        return cls(count, mean, (values - mean).square().sum(dim=0))

    @property
    def variance(self) -> Tensor:
        """Population variance [*]; 0 without values."""
        return self.squares / self.count.clamp(min=1.0)

    def merge(self, other: Moments) -> Moments:
        """Of the values of both."""
        count = self.count + other.count
        divisor = count.clamp(min=1.0)
        delta = other.mean - self.mean
        return Moments(
            count,
            self.mean + delta * (other.count / divisor),
            self.squares + other.squares + delta.square() * (self.count * other.count / divisor),
        )

    def to_vector(self) -> Tensor:
        """All numbers as one float64 vector, which ranks can gather."""
        return torch.cat([self.count.view(1), self.mean.flatten(), self.squares.flatten()])

    def with_vector(self, vector: Tensor) -> Moments:
        """Invert :meth:`to_vector` for moments of the same shape."""
        size = self.mean.numel()
        if vector.shape != (1 + 2 * size,):
            raise ValueError(
                f"moments of shape {list(self.mean.shape)} have {1 + 2 * size} numbers, got "
                f"{list(vector.shape)}"
            )
        count, mean, squares = vector.double().split([1, size, size])
        return Moments(count[0], mean.view_as(self.mean), squares.view_as(self.mean))


@dataclass
class RunningNormaliser:
    """Centres and scales rewards by what all iterations so far have seen.

    Once per iteration, before any use, all its rewards go into the mean and variance; so the same
    two numbers serve all samples of an iteration.
    """

    moments: Moments = field(default_factory=lambda: Moments.of(torch.empty(0)))
    min_std: float = 1e-3  # floor of the divisor
    bound: float = 5.0  # of the result

    @property
    def mean(self) -> float:
        """Mean of all rewards so far; 0 before the first."""
        return self.moments.mean.item()

    @property
    def std(self) -> float:
        """Population standard deviation of all rewards so far."""
        return self.moments.variance.sqrt().item()

    def update(self, pieces: Sequence[Moments]) -> None:
        """Take in one iteration.

        Args:
            pieces: of each rank, in the order of ranks: ``Moments.of(reward[mask])``, gathered by
                ``to_vector`` and ``with_vector``.

        Raises:
            ValueError: a mean or a variance that is not finite.
        """
        merged = self.moments
        for piece in pieces:
            merged = merged.merge(piece)
        if not torch.isfinite(merged.to_vector()).all():
            raise ValueError(
                f"rewards are not finite: mean {merged.mean.item()}, count {merged.count.item()}"
            )
        self.moments = merged

    def normalise(self, reward: Tensor, mask: Tensor) -> Tensor:
        """Return ``clip((r - mean) / max(std, min_std), +-bound)`` float32; 0 where masked out."""
        scaled = (reward.double() - self.mean) / max(self.std, self.min_std)
        return torch.where(mask, scaled.clamp(-self.bound, self.bound), 0.0).float()

    def state_dict(self) -> dict[str, Tensor]:
        """Count, mean and squared deviations, for a checkpoint."""
        return {"moments": self.moments.to_vector()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from :meth:`state_dict`."""
        self.moments = self.moments.with_vector(state["moments"])
