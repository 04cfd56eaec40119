"""Flow-SDE: a stochastic sampler for a flow-matching action expert, with exact log-probabilities.

A flow-matching policy is a deterministic ODE; PPO needs a density. Flow-SDE (arXiv 2505.05470,
arXiv 2510.25889) makes chosen denoising steps Gaussian without changing the marginals, and scores
only those. Notation: ``x`` are noisy actions, σ is the flow time (1 = noise, 0 = data), ``v`` the
network's velocity (noise − data), δ > 0 the step, ``a`` the noise level.

Shapes: B observations, H actions in a chunk, C of them executed, A action width, K denoising
steps, S stochastic steps per sample (1 for ``one_random``).

The exactness contract: :func:`sample_chain` and :func:`logprob_chain` share the grid, the moments
and the density below, all in float32, so equal weights give equal log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rlinf_wamrl.rl.chain_noise import ChainNoise, check_num_steps, draw_chain_noise
from rlinf_wamrl.rl.noise_basis import NoiseBasis

__all__ = [
    "ChainSample",
    "FlowGrid",
    "FlowModel",
    "StepMoments",
    "gaussian_logprob",
    "inference_grid",
    "logprob_chain",
    "logprob_chain_elements",
    "reduce_logprob",
    "sample_chain",
    "sample_chain_elements",
    "sample_ode",
    "step_moments",
]

_LOG_2PI = math.log(2.0 * math.pi)


class FlowModel(Protocol):
    """What the sampler asks of a World-Action Model."""

    infer_action_scheduler: Any  # .build_inference_schedule(K, device, dtype, shift)

    def prefill(self, state: Any) -> Any:
        """Return what stays constant over the K steps (video keys and values, text)."""

    def action_velocity(self, actions: Tensor, timestep: Tensor, cache: Any) -> Tensor:
        """Return the velocity [B,H,A] of ``actions`` [B,H,A] at ``timestep`` [B] in 0..1000."""


@dataclass(frozen=True, kw_only=True)
class FlowGrid:
    """The denoising grid, in float32 whatever the model's dtype."""

    timesteps: Tensor  # [K] network timesteps, 1000 σ
    sigma: Tensor  # [K] flow time before each step, 1 = noise
    delta: Tensor  # [K] step sizes, positive; they sum to 1

    def __len__(self) -> int:
        return self.sigma.shape[0]


class StepMoments(NamedTuple):
    """Mean and standard deviation of one Gaussian denoising step."""

    mean: Tensor  # [B,H,A]
    std: Tensor  # [B,1,1]


class ChainSample(NamedTuple):
    """What :func:`sample_chain` returns, in the order of the WAM-RL code map."""

    actions: Tensor  # [B,H,A] float32, the last entry of the chain
    chain: Tensor  # [B,K+1,H,A] float32
    k_star: Tensor  # [B] int64 for one_random, else [B,S]
    logp_old: Tensor  # [B,S] float32


def inference_grid(
    model: FlowModel, num_steps: int, *, shift: float | None = None, device: Any = "cpu"
) -> FlowGrid:
    """Build the denoising grid of ``num_steps`` steps in float32.

    Sampler and learner both call this, so σ and δ are bit-identical. In bf16 the grid itself would
    be wrong (Σδ = 0.99976 at K = 10, shift 5).

    Args:
        model: owner of ``infer_action_scheduler``.
        num_steps: K.
        shift: overrides the scheduler's own sigma shift; None keeps it.
        device: where the grid lives.
    """
    check_num_steps(num_steps)
    timesteps, deltas = model.infer_action_scheduler.build_inference_schedule(
        num_steps, device, torch.float32, shift
    )
    return FlowGrid(timesteps=timesteps, sigma=timesteps / 1000.0, delta=-deltas)


def step_moments(
    x: Tensor, velocity: Tensor, sigma: Tensor, delta: Tensor, a: float, variant: str = "sde"
) -> StepMoments:
    """Return the Gaussian of one stochastic denoising step.

    With ``x̂0 = x − σ v`` (data) and ``x̂1 = x + (1−σ) v`` (noise), ``sde`` is
    ``s = a sqrt(σ/(1−σ))``, ``mean = x̂0 (1−(σ−δ)) + x̂1 (σ−δ − s² δ/(2σ))``, ``std = s sqrt(δ)``,
    which equals Flow-GRPO's Euler–Maruyama step (arXiv 2505.05470, eq. 12). At σ = 1 the
    denominator takes the next grid point, and std is exactly ``a``. ``cps`` keeps the total noise
    level instead (arXiv 2509.05952): x̂1 weight ``(σ−δ) cos(aπ/2)``, std ``(σ−δ) sin(aπ/2)``.

    Args:
        x: [B,H,A] float32.
        velocity: [B,H,A] float32.
        sigma: [B] flow time before the step.
        delta: [B] step size.
        a: noise level.
        variant: ``sde`` or ``cps``.
    """
    sigma = sigma.view(-1, 1, 1)
    delta = delta.view(-1, 1, 1)
    data = x - sigma * velocity
    noise = x + (1.0 - sigma) * velocity
    sigma_next = sigma - delta
    if variant == "cps":
        mean = data * (1.0 - sigma_next) + noise * (sigma_next * math.cos(a * math.pi / 2))
        return StepMoments(mean, sigma_next * math.sin(a * math.pi / 2))
    if variant != "sde":
        raise ValueError(f"the stochastic step must be 'sde' or 'cps', got {variant!r}")
    at_noise = torch.isclose(sigma, torch.ones_like(sigma))
    variance_rate = a * a * sigma / torch.where(at_noise, 1.0 - sigma_next, 1.0 - sigma)
    noise_weight = sigma_next - variance_rate * delta / (2.0 * sigma)
    mean = data * (1.0 - sigma_next) + noise * noise_weight
    return StepMoments(mean, torch.sqrt(variance_rate * delta))


def gaussian_logprob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the elementwise log-density of N(mean, std²) at ``x``, in float32."""
    z = (x - mean) / std
    return -0.5 * z * z - torch.log(std) - 0.5 * _LOG_2PI


def reduce_logprob(elements: Tensor, executed_mask: Tensor | None, reduction: str) -> Tensor:
    """Reduce [..., C, A] log-probs over the executed actions and the action width.

    Args:
        elements: [B, ..., C, A].
        executed_mask: [B,C] bool, True where the action ran; None for all.
        reduction: ``sum`` is the density of what was executed; ``mean`` divides it by the number of
            terms (tempered, Flow-GRPO).

    Returns:
        [B, ...]; 0 where nothing was executed.
    """
    if reduction not in ("sum", "mean"):
        raise ValueError(f"the log-prob reduction must be 'sum' or 'mean', got {reduction!r}")
    if executed_mask is not None:
        middle = (1,) * (elements.dim() - 3)
        mask = executed_mask.view(elements.shape[0], *middle, executed_mask.shape[1], 1)
        total = (elements * mask).sum(dim=(-2, -1))
        count = mask.sum(dim=(-2, -1)) * elements.shape[-1]
    else:
        total = elements.sum(dim=(-2, -1))
        count = torch.tensor(elements.shape[-1] * elements.shape[-2], device=elements.device)
    return total / count.clamp(min=1) if reduction == "mean" else total


def _velocity(model: FlowModel, x: Tensor, timestep: Tensor, cache: Any) -> Tensor:
    return model.action_velocity(x, timestep, cache).float()


def _step_logprob(
    x: Tensor, mean: Tensor, std: Tensor, executed: int, basis: NoiseBasis | None
) -> Tensor:
    """Return the log-probs [B,C,A] of one stochastic step."""
    if basis is None:
        return gaussian_logprob(x, mean, std)[:, :executed]
    return basis.logprob(x, mean, std)


def _check_noise(variant: str, a: float, k_star: Tensor, grid: FlowGrid) -> None:
    if a <= 0:
        raise ValueError(f"the noise level a must be positive, got {a}")
    if variant == "cps" and bool((k_star == len(grid) - 1).any()):
        raise ValueError("cps has no noise at the last step: set ignore_last or leave it out")


@torch.no_grad()
def sample_chain_elements(
    model: FlowModel,
    cache: Any,
    grid: FlowGrid,
    noise: ChainNoise,
    a: float,
    *,
    num_executed: int | None = None,
    variant: str = "sde",
    basis: NoiseBasis | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the K denoising steps of a batch from noise that is already drawn.

    Args:
        model: the World-Action Model.
        cache: what ``model.prefill`` returned for the batch.
        grid: the denoising grid, on the model's device.
        noise: all random numbers, on the model's device.
        a: noise level of the stochastic steps.
        num_executed: C; log-probs are kept for the first C actions only (None keeps all H).
        variant: see :func:`step_moments`.
        basis: directions of the noise, over the same C actions; None for white noise.

    Returns:
        The chain [B,K+1,H,A] and the log-probs of the stochastic steps [B,S,C,A], float32.
    """
    _check_noise(variant, a, noise.k_star, grid)
    x = noise.initial
    batch = x.shape[0]
    executed = x.shape[1] if num_executed is None else num_executed
    chain = [x]
    logp = x.new_zeros(batch, noise.k_star.shape[1], executed, x.shape[2])
    somewhere_stochastic = set(noise.k_star.unique().tolist())
    for k in range(len(grid)):
        velocity = _velocity(model, x, grid.timesteps[k].expand(batch), cache)
        x_next = x - grid.delta[k] * velocity
        if k in somewhere_stochastic:
            sigma, delta = grid.sigma[k].expand(batch), grid.delta[k].expand(batch)
            moments = step_moments(x, velocity, sigma, delta, a, variant)
            # [B,S], at most one True per row
            row, slot = (noise.k_star == k).nonzero(as_tuple=True)
            mean, std = moments.mean[row], moments.std[row]
            drawn = noise.step[row, slot]
            if basis is None:
                stepped = mean + std * drawn
            else:
                stepped = basis.step(x_next[row], mean, std, drawn)
            x_next = x_next.index_copy(0, row, stepped)
            logp[row, slot] = _step_logprob(stepped, mean, std, executed, basis)
        x = x_next
        chain.append(x)
    return torch.stack(chain, dim=1), logp


def logprob_chain_elements(
    model: FlowModel,
    cache: Any,
    grid: FlowGrid,
    chains: Tensor,
    k_star: Tensor,
    a: float,
    *,
    num_executed: int | None = None,
    variant: str = "sde",
    basis: NoiseBasis | None = None,
) -> Tensor:
    """Score the stochastic steps of recorded chains, with gradients.

    One velocity per stochastic step, at ``chain[k*]``, scored at ``chain[k*+1]``.

    Args:
        model: the World-Action Model.
        cache: what ``model.prefill`` returned for the batch.
        grid: the denoising grid the chains were sampled on.
        chains: [B,K+1,H,A] float32.
        k_star: [B] or [B,S] int64.
        a: noise level the chains were sampled with.
        num_executed: C; None scores all H actions.
        variant: see :func:`step_moments`.
        basis: directions of the noise the chains were sampled with.

    Returns:
        [B,S,C,A] float32.
    """
    k_star = k_star.view(chains.shape[0], -1)
    if chains.dim() != 4 or chains.shape[1] != len(grid) + 1:
        raise ValueError(
            f"chains must be [B, K+1, H, A] with K = {len(grid)}, got {tuple(chains.shape)}"
        )
    _check_noise(variant, a, k_star, grid)
    rows = torch.arange(chains.shape[0], device=chains.device)
    executed = chains.shape[2] if num_executed is None else num_executed
    scored = []
    for k in k_star.unbind(1):
        x, x_next = chains[rows, k], chains[rows, k + 1]
        velocity = _velocity(model, x, grid.timesteps[k], cache)
        moments = step_moments(x, velocity, grid.sigma[k], grid.delta[k], a, variant)
        scored.append(_step_logprob(x_next, *moments, executed, basis))
    return torch.stack(scored, dim=1)


def sample_chain(
    model: FlowModel,
    state: Any,
    K: int,
    a: float,
    generator: torch.Generator | Sequence[torch.Generator],
    stochastic_steps: str | Sequence[int] = "one_random",
    *,
    horizon: int | None = None,
    action_dim: int | None = None,
    num_executed: int | None = None,
    ignore_last: bool | None = None,
    reduction: str = "sum",
    variant: str = "sde",
    shift: float | None = None,
) -> ChainSample:
    """Sample action chunks for a batch of observations and score their stochastic steps.

    Args:
        model: a :class:`FlowModel`.
        state: the batch of observations ``model.prefill`` accepts.
        K: denoising steps.
        a: noise level.
        generator: see :func:`~rlinf_wamrl.rl.chain_noise.draw_chain_noise`.
        stochastic_steps: see :func:`~rlinf_wamrl.rl.chain_noise.stochastic_candidates`.
        horizon: H; None takes ``model.action_horizon``.
        action_dim: A; None takes ``model.action_dim``.
        num_executed: C, actions that count in ``logp_old``; None counts all H.
        ignore_last: see :func:`~rlinf_wamrl.rl.chain_noise.stochastic_candidates`.
        reduction: see :func:`reduce_logprob`.
        variant: see :func:`step_moments`.
        shift: overrides the scheduler's sigma shift.
    """
    cache = model.prefill(state)
    batch_size, device = _batch_of(state)
    noise = draw_chain_noise(
        generator,
        batch_size=batch_size,
        horizon=model.action_horizon if horizon is None else horizon,
        action_dim=model.action_dim if action_dim is None else action_dim,
        num_steps=K,
        stochastic_steps=stochastic_steps,
        ignore_last=ignore_last,
    )
    noise = ChainNoise(
        initial=noise.initial.to(device), step=noise.step.to(device), k_star=noise.k_star.to(device)
    )
    chain, elements = sample_chain_elements(
        model,
        cache,
        inference_grid(model, K, shift=shift, device=device),
        noise,
        a,
        num_executed=num_executed,
        variant=variant,
    )
    k_star = noise.k_star[:, 0] if stochastic_steps == "one_random" else noise.k_star
    return ChainSample(chain[:, -1], chain, k_star, reduce_logprob(elements, None, reduction))


def logprob_chain(
    model: FlowModel,
    states: Any,
    chains: Tensor,
    k_star: Tensor,
    a: float,
    *,
    num_executed: int | None = None,
    executed_mask: Tensor | None = None,
    reduction: str = "sum",
    variant: str = "sde",
    shift: float | None = None,
) -> Tensor:
    """Return the log-probabilities [B,S] of the stochastic steps, with gradients.

    Args:
        model: a :class:`FlowModel`.
        states: the observations the chains were sampled for.
        chains: [B,K+1,H,A] float32.
        k_star: [B] or [B,S] int64.
        a: noise level of the sampling.
        num_executed: C; None counts all H.
        executed_mask: [B,C] bool, actions that ran.
        reduction: see :func:`reduce_logprob`.
        variant: see :func:`step_moments`.
        shift: sigma shift of the sampling.
    """
    elements = logprob_chain_elements(
        model,
        model.prefill(states),
        inference_grid(model, chains.shape[1] - 1, shift=shift, device=chains.device),
        chains,
        k_star,
        a,
        num_executed=num_executed,
        variant=variant,
    )
    return reduce_logprob(elements, executed_mask, reduction)


@torch.no_grad()
def sample_ode(model: FlowModel, cache: Any, grid: FlowGrid, initial: Tensor) -> Tensor:
    """Run the K deterministic steps (evaluation) from ``initial`` [B,H,A]; returns [B,H,A]."""
    x = initial
    for k in range(len(grid)):
        timestep = grid.timesteps[k].expand(x.shape[0])
        x = x - grid.delta[k] * _velocity(model, x, timestep, cache)
    return x


def _batch_of(state: Any) -> tuple[int, torch.device]:
    """Return the batch size and device of a state bundle, read from its context embeddings.

    ``context_rows`` [B], where there is such a thing, says whose text is which.
    """
    rows = getattr(state, "context_rows", None)
    return len(state.context if rows is None else rows), state.context.device
