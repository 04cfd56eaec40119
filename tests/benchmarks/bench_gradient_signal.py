"""How much of a policy gradient is signal, and in which directions of the exploration noise.

The example's policy plays several iterations without being trained. Each gives a policy gradient of
its own; the mean inner product of two of them is the signal that they have in common, and its share
of their mean squared norm says how much of one gradient is signal. Directions of a chunk's noise
are scored apart: cosine modes over the executed actions, slowest first, and dimensions of an
action. The baseline is the gradient of the whole noise, of which the others are parts.

    python tests/benchmarks/bench_gradient_signal.py [--iterations 8] [KEY=VALUE ...]

with keys of the example, for instance ``RL.window=[0] RL.noise_level=1.0``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from model_parts import example_run
from torch import Tensor

from rlinf_wamrl.data.batch_values import merge_batch_values
from rlinf_wamrl.envs.rlinf_env import WAMLiberoEnv
from rlinf_wamrl.policy import WAMPolicy
from rlinf_wamrl.policy_builder import build_policy
from rlinf_wamrl.rl.advantage import group_advantages
from rlinf_wamrl.rl.flow_sde import inference_grid, step_moments
from rlinf_wamrl.rl.noise_basis import cosine_basis
from rlinf_wamrl.wam.lora import select_trainable
from rlinf_wamrl.workers.batches import select_rows

XYZ, GRIPPER = (0, 1, 2), (6,)
DIRECTIONS = {  # modes (None: all), dimensions (none given: all)
    "all": (None, ()),
    "slowest mode": (1, ()),
    "two slowest modes": (2, ()),
    "two slowest modes of x, y, z": (2, XYZ),
    "gripper, all modes": (None, GRIPPER),
}


@dataclass(frozen=True, kw_only=True)
class Signal:
    """Of gradients [I,P]: what one is made of."""

    squared_norm: float
    share: float
    share_error: float  # standard error over the iterations

    @classmethod
    def of(cls, gradients: Tensor) -> Signal:
        """Measure gradients [I,P] of I independent iterations."""
        count = len(gradients)
        products = (gradients.double() @ gradients.double().T).fill_diagonal_(0.0)
        squared_norm = gradients.double().pow(2).sum(dim=1).mean()
        shares = products.sum(dim=1) / (count - 1) / squared_norm
        return cls(
            squared_norm=squared_norm.item(),
            share=shares.mean().item(),
            share_error=(shares.std(correction=0) / count**0.5).item(),
        )


def play_iteration(env: WAMLiberoEnv, policy: WAMPolicy, rounds: int) -> dict[str, Tensor]:
    """Play ``rounds`` episodes per environment.

    Returns:
        Records of the macro-steps [N, ...], with their ``advantage`` [N].
    """
    parts, solved = [], []
    for _ in range(rounds):
        before, _ = env.reset()
        steps, over = [], False
        while not over:
            actions, chosen = policy.predict_action_batch(before, mode="train")
            (before,), _, terminated, truncated, (info,) = env.chunk_step(actions)
            steps.append({**chosen["forward_inputs"], "executed_mask": before["executed_mask"]})
            over = bool((terminated[:, -1] | truncated[:, -1]).all())
        success = info["episode"]["success_once"].float()
        solved.append(int(success.sum()))
        advantage = group_advantages(success, success, env.group_size).advantage
        for step in steps:
            ran = step["executed_mask"].any(dim=1).nonzero().squeeze(1)
            parts.append(select_rows({**step, "advantage": advantage}, ran))
        env.update_reset_state_ids()
    print(f"{sum(solved)} of {rounds * env.num_envs} episodes succeeded", file=sys.stderr)
    return merge_batch_values(parts)


def scores(policy: WAMPolicy, records: Mapping[str, Tensor], steps: Sequence[int]):
    """Yield, per direction, the log-density [N] of the noise along it, up to a constant."""
    settings = policy.settings
    cache = policy.wam.prefill(policy.recorded_state(records))
    grid = inference_grid(
        policy.wam, settings.denoising_steps, shift=settings.shift, device=policy.device
    )
    chain = records["chain"]
    executed = records["executed_mask"].unsqueeze(-1)
    noises = []
    for step in steps:
        now = chain[:, step]
        size = len(now)
        velocity = policy.wam.action_velocity(now, grid.timesteps[step].expand(size), cache)
        moments = step_moments(
            now,
            velocity.float(),
            grid.sigma[step].expand(size),
            grid.delta[step].expand(size),
            settings.noise_level,
            settings.variant,
        )
        noise = (chain[:, step + 1] - moments.mean) / moments.std
        noises.append(noise[:, : settings.num_executed] * executed)
    for modes, dims in DIRECTIONS.values():
        basis = cosine_basis(
            horizon=settings.num_executed,
            num_executed=settings.num_executed,
            action_dim=chain.shape[-1],
            num_modes=modes or settings.num_executed,
            dims=dims,
        )
        yield -0.5 * sum(basis.coordinates(noise).pow(2).sum(dim=(1, 2)) for noise in noises)


def gradients(
    policy: WAMPolicy, records: Mapping[str, Tensor], steps: Sequence[int], rows: int = 128
) -> dict[str, Tensor]:
    """Return, per direction, the policy gradient [P] of one iteration."""
    trained = [p for name, p in policy.named_parameters() if p.requires_grad]
    totals = {name: torch.zeros(sum(p.numel() for p in trained)) for name in DIRECTIONS}
    for chosen in torch.arange(len(records["advantage"])).split(rows):
        part = select_rows(records, chosen)
        scored = list(scores(policy, part, steps))
        for total, score in zip(totals.values(), scored, strict=True):
            found = torch.autograd.grad(
                (score * part["advantage"]).sum(), trained, retain_graph=True, allow_unused=True
            )
            flat = [
                torch.zeros(p.numel()) if g is None else g.flatten()
                for p, g in zip(trained, found, strict=True)
            ]
            total += torch.cat(flat)
    return totals


def measure(overrides: Sequence[str], iterations: int) -> dict[str, Signal]:
    """Play ``iterations`` times with the example's policy held still."""
    run = example_run("+ablation=actor_only", "env.train.num_future_frames=0", *overrides)
    if run.RL.stochastic_steps != "window" or run.RL.noise_modes is not None:
        raise SystemExit(
            "the noise is taken apart here: RL.stochastic_steps=window, no noise_modes"
        )
    policy = build_policy(run.actor.model, torch.float32).eval()
    select_trainable(policy.wam, policy.trained_parts)
    env = WAMLiberoEnv(run.env.train, run.env.train.total_num_envs, 0, 1)
    found: dict[str, list[Tensor]] = {name: [] for name in DIRECTIONS}
    try:
        for _ in range(iterations):
            records = play_iteration(env, policy, run.env.train.rollout_epoch)
            for name, gradient in gradients(policy, records, list(run.RL.window)).items():
                found[name].append(gradient)
    finally:
        env.close()
    return {name: Signal.of(torch.stack(parts)) for name, parts in found.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=8, help="independent gradients")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the example")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| scored part of the noise | squared norm | share of signal |\n|---|---:|---:|")
    for name, signal in measure(options.overrides, options.iterations).items():
        share = f"{100 * signal.share:.1f} % ± {100 * signal.share_error:.1f}"
        print(f"| {name} | {signal.squared_norm:,.0f} | {share} |")


if __name__ == "__main__":
    main()
