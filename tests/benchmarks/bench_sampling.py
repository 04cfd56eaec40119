"""Milliseconds per action chunk: a batch with caches against one observation at a time.

The baseline is this project's model called for one observation at a time, with nothing kept between
denoising steps; in between lies what FastWAM's own inference does, which keeps the video's keys and
values but projects the text anew in each step. All start from the same noise, and equal chains are
asserted.

    python tests/benchmarks/bench_sampling.py [--batch 16] [--steps 10] [--repeats 5] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rlinf_wamrl.rl import flow_sde
from rlinf_wamrl.wam.config import ActionExpertConfig, VideoExpertConfig, WAMConfig
from rlinf_wamrl.wam.state import ActionCache, WAMState
from rlinf_wamrl.wam.wam import WAM

HORIZON, TEXT_TOKENS, TEXT_WIDTH = 32, 128, 4096
TOLERANCE = 1e-4
BASELINE = "one at a time, no caches"
VIDEO_CACHE = "one at a time, video cached"
OURS = "batched, video and text cached"


class WithoutCaches:
    """A model that computes everything in every denoising step."""

    def __init__(self, model: WAM) -> None:
        self.model = model
        self.infer_action_scheduler = model.infer_action_scheduler

    def prefill(self, state: WAMState) -> WAMState:
        return state

    def action_velocity(self, actions, timestep, state):
        return self.model.action_velocity(actions, timestep, self.model.prefill(state))


class WithoutTextCache(WithoutCaches):
    """A model that keeps the video's keys and values only."""

    def prefill(self, state: WAMState) -> tuple[WAMState, ActionCache]:
        return state, self.model.prefill(state)

    def action_velocity(self, actions, timestep, kept):
        context, _ = self.model.encode_context(kept[0])
        projected = self.model.action_expert.context_keys_values(context)
        cache = replace(
            kept[1],
            context_keys=tuple(key for key, _ in projected),
            context_values=tuple(value for _, value in projected),
        )
        return self.model.action_velocity(actions, timestep, cache)


@dataclass(frozen=True)
class Timing:
    """Median seconds of each way, per chunk or per velocity."""

    chain: Mapping[str, float]
    velocity: Mapping[str, float]

    @property
    def chain_ratio(self) -> float:
        return self.chain[BASELINE] / self.chain[OURS]

    @property
    def velocity_ratio(self) -> float:
        return self.velocity["text projected anew"] / self.velocity["text cached"]


def timing_model() -> WAM:
    """Video 256 wide, 6 layers, 8 heads x 32, random weights."""
    shared = {"num_heads": 8, "attn_head_dim": 32, "num_layers": 6, "text_dim": TEXT_WIDTH}
    torch.manual_seed(0)
    config = WAMConfig(
        video_dit_config=VideoExpertConfig(hidden_dim=256, ffn_dim=1024, **shared),
        action_dit_config=ActionExpertConfig(hidden_dim=128, ffn_dim=512, **shared),
        proprio_dim=8,
        action_horizon=HORIZON,
    )
    return WAM(config).requires_grad_(False)


def observations(batch: int) -> WAMState:
    """Latents of two 64 x 64 cameras, 128 text tokens and a proprio token."""
    return WAMState(
        first_frame=torch.randn(batch, 48, 1, 4, 8),
        context=torch.randn(batch, TEXT_TOKENS, TEXT_WIDTH),
        context_mask=torch.ones(batch, TEXT_TOKENS, dtype=torch.bool),
        proprio=torch.randn(batch, 8),
    )


def row(state: WAMState, index: int) -> WAMState:
    chosen = slice(index, index + 1)
    return WAMState(
        first_frame=state.first_frame[chosen],
        context=state.context[chosen],
        context_mask=state.context_mask[chosen],
        proprio=state.proprio[chosen],
    )


def medians(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each way; they take turns, after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, function in ways.items():
            start = time.perf_counter()
            function()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure(batch: int = 16, steps: int = 10, repeats: int = 5) -> Timing:
    """Time the chains of ``batch`` observations, and single velocities of the whole batch."""
    model, state = timing_model(), observations(batch)

    def chains(chosen, part: WAMState, rows: Sequence[int]) -> torch.Tensor:
        streams = [torch.Generator().manual_seed(index) for index in rows]
        sample = flow_sde.sample_chain(
            chosen, part, steps, 0.5, streams, horizon=HORIZON, action_dim=model.action_dim
        )
        return sample.chain

    def one_at_a_time(chosen) -> torch.Tensor:
        return torch.cat([chains(chosen, row(state, i), [i]) for i in range(batch)])

    ways = {
        BASELINE: lambda: one_at_a_time(WithoutCaches(model)),
        VIDEO_CACHE: lambda: one_at_a_time(WithoutTextCache(model)),
        OURS: lambda: chains(model, state, range(batch)),
    }
    expected = ways[BASELINE]()
    for name, way in ways.items():
        error = (way() - expected).abs().max().item()
        assert error <= TOLERANCE, f"chains of {name!r} differ by {error:.1e}"

    actions, timestep = torch.randn(batch, HORIZON, model.action_dim), torch.full((batch,), 500.0)
    cache, anew = model.prefill(state), WithoutTextCache(model)
    kept = anew.prefill(state)
    velocities = {
        "text projected anew": lambda: anew.action_velocity(actions, timestep, kept),
        "text cached": lambda: model.action_velocity(actions, timestep, cache),
    }
    assert torch.equal(*[way() for way in velocities.values()]), "velocities differ"
    return Timing(
        chain={name: value / batch for name, value in medians(ways, repeats).items()},
        velocity=medians(velocities, 4 * repeats),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    timing = measure(options.batch, options.steps, options.repeats)
    print(
        f"{options.steps}-step chains of {options.batch} observations, {options.threads} threads, "
        f"medians of {options.repeats} and {4 * options.repeats}; chains equal to {TOLERANCE:g}, "
        "velocities bit for bit"
    )
    for title, results in (
        ("ms per chain", timing.chain),
        (f"ms per velocity of {options.batch} observations", timing.velocity),
    ):
        slowest = next(iter(results))
        print(f"\n{title:44}{'ms':>9}   against {slowest!r}")
        for name, seconds in results.items():
            print(f"{name:44}{1e3 * seconds:9.1f}{results[slowest] / seconds:9.2f} x")


if __name__ == "__main__":
    main()
