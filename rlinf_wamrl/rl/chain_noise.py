"""Every random number of a Flow-SDE chain, drawn beforehand.

Which steps are stochastic, and by what noise.

Shapes: B observations, H actions in a chunk, A action width, K denoising steps, S stochastic steps
per sample (1 for ``one_random``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ChainNoise", "check_num_steps", "draw_chain_noise", "stochastic_candidates"]

_SEED_BOUND = 2**62


@dataclass(frozen=True, kw_only=True)
class ChainNoise:
    """Every random number of a batch of chains, drawn beforehand."""

    initial: Tensor  # [B,H,A] float32, the chain's first entry
    step: Tensor  # [B,S,H,A] float32, noise of the stochastic steps
    k_star: Tensor  # [B,S] int64, ascending


def check_num_steps(num_steps: int) -> None:
    """Raise ValueError unless there is at least one denoising step."""
    if num_steps < 1:
        raise ValueError(f"the number of denoising steps must be at least 1, got {num_steps}")


def stochastic_candidates(
    num_steps: int, stochastic_steps: str | Sequence[int], *, ignore_last: bool | None = None
) -> tuple[int, ...]:
    """List the denoising steps that may be stochastic.

    Args:
        num_steps: K.
        stochastic_steps: ``one_random`` (each sample draws one of the candidates), ``all``, or the
            listed steps (the window variant).
        ignore_last: leave out step K−1, whose noise stays on the executed action; None means
            "when K > 1". Not applied to an explicit list.
    """
    check_num_steps(num_steps)
    if isinstance(stochastic_steps, str):
        if stochastic_steps not in ("one_random", "all"):
            raise ValueError(
                "stochastic_steps must be 'one_random', 'all' or a list of step indices, got "
                f"{stochastic_steps!r}"
            )
        drop_last = num_steps > 1 if ignore_last is None else ignore_last
        if drop_last and num_steps == 1:
            raise ValueError("ignore_last leaves no stochastic step when K = 1")
        return tuple(range(num_steps - 1 if drop_last else num_steps))
    steps = tuple(int(step) for step in stochastic_steps)
    if not steps or list(steps) != sorted(set(steps)) or steps[0] < 0 or steps[-1] >= num_steps:
        raise ValueError(
            f"stochastic_steps must be ascending, distinct and within 0..{num_steps - 1}, "
            f"got {list(steps)}"
        )
    return steps


def draw_chain_noise(
    generator: torch.Generator | Sequence[torch.Generator],
    *,
    batch_size: int,
    horizon: int,
    action_dim: int,
    num_steps: int,
    stochastic_steps: str | Sequence[int] = "one_random",
    ignore_last: bool | None = None,
    initial_generators: Sequence[torch.Generator] | None = None,
) -> ChainNoise:
    """Draw all randomness of a batch of chains on the CPU.

    Each sample has its own stream, seeded by one draw from ``generator``, so a batch of 8 equals
    eight batches of 1 that share the generator.

    Args:
        generator: one CPU generator for the batch, or one per sample (equal ones give equal noise).
        batch_size: B.
        horizon: H.
        action_dim: A.
        num_steps: K.
        stochastic_steps: see :func:`stochastic_candidates`.
        ignore_last: see :func:`stochastic_candidates`.
        initial_generators: one per sample, for the initial noise alone (equal ones let the members
            of a group start from equal noise); None draws it from the sample's own stream.
    """
    candidates = stochastic_candidates(num_steps, stochastic_steps, ignore_last=ignore_last)
    if isinstance(generator, torch.Generator):
        streams = []
        for _ in range(batch_size):
            seed = torch.randint(_SEED_BOUND, (1,), generator=generator).item()
            streams.append(torch.Generator().manual_seed(seed))
    else:
        streams = list(generator)
        if len(streams) != batch_size:
            raise ValueError(f"{len(streams)} generators for a batch of {batch_size}")
    one_random = stochastic_steps == "one_random"
    initial, step, k_star = [], [], []
    for row, stream in enumerate(streams):
        first = stream if initial_generators is None else initial_generators[row]
        initial.append(torch.randn(horizon, action_dim, generator=first))
        if one_random:
            pick = torch.randint(len(candidates), (1,), generator=stream).item()
            k_star.append([candidates[pick]])
        else:
            k_star.append(list(candidates))
        step.append(torch.randn(len(k_star[-1]), horizon, action_dim, generator=stream))
    return ChainNoise(
        initial=torch.stack(initial), step=torch.stack(step), k_star=torch.tensor(k_star)
    )
