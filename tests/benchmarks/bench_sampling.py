"""Milliseconds per action chunk of ``predict_action_batch`` against FastWAM's own call pattern.

The baseline is the same policy asked for one observation at a time, its model called as FastWAM's
inference calls it: the text embedded and projected in every denoising step, the video's time
embedding computed per token. Equal chunks are asserted. The second table is what the stochastic
step, random streams and the record cost beside plain ODE sampling; with ``--compile`` a third shows
torch.compile.

    python tests/benchmarks/bench_sampling.py [--model small] [--batch 16] [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from model_parts import (
    MODELS,
    OfficialPattern,
    example_run,
    medians,
    observations,
    overhead,
    policy_of,
    print_table,
    rounds,
    row_of,
)

TOLERANCE = 1e-4
BASELINE = "official call pattern, one at a time"
ALONE = "ours, one at a time"
OURS = "ours, batched"
ODE = "plain ODE: encode, prefill, K steps"
PREDICT_ODE = "predict_action_batch, eval"
PREDICT_SDE = "predict_action_batch, train"


@dataclass(frozen=True)
class Timing:
    """Median seconds of each way, of a chunk or of a batch, and what is compared round by round."""

    chunk: Mapping[str, float]
    batch: Mapping[str, float]
    compiled: Mapping[str, float]  # empty unless asked for
    stochastic_overhead: float  # of predict_action_batch on plain ODE sampling

    @property
    def ratio(self) -> float:
        return self.chunk[BASELINE] / self.chunk[OURS]


def measure(
    model: str = "small",
    batch: int = 16,
    steps: int = 10,
    repeats: int = 5,
    *,
    with_compile: bool = False,
) -> Timing:
    """Time queries of ``batch`` observations."""
    settings = {"denoising_steps": steps, "eval_denoising_steps": steps, "noise_level": 0.5}
    run = example_run("RL.video_sft.enabled=false", f"RL.denoising_steps={steps}", "RL.window=[0]")
    ours = policy_of(model, run, **settings)
    official = policy_of(model, run, **settings)
    official.wam.load_state_dict(ours.wam.state_dict())
    plain_wam = official._modules.pop("wam")
    official.wam = OfficialPattern(plain_wam)
    seen = observations(batch)
    rows = [row_of(seen, index) for index in range(batch)]

    def chains(policy, batches) -> torch.Tensor:
        results = [policy.predict_action_batch(each)[1] for each in batches]
        return torch.cat([result["forward_inputs"]["chain"] for result in results])

    ways = {
        BASELINE: lambda: chains(official, rows),
        ALONE: lambda: chains(ours, rows),
        OURS: lambda: chains(ours, [seen]),
    }
    expected = ways[BASELINE]()
    for name, way in ways.items():
        error = (way() - expected).abs().max().item()
        assert error <= TOLERANCE, f"chains of {name!r} differ by {error:.1e}"
    chunk = {name: value / batch for name, value in medians(ways, repeats).items()}
    noise = torch.randn(batch, ours.wam.action_horizon, ours.wam.action_dim)

    @torch.no_grad()
    def plain_ode() -> None:
        image = ours.processor.images(seen["main_images"], seen["wrist_images"])
        proprio = ours.processor.proprio(seen["states"])
        state = ours.state(image, proprio, seen["task_descriptions"])
        ours.wam.infer_action(state, steps, noise=noise)

    modes = {
        ODE: plain_ode,
        PREDICT_ODE: lambda: ours.predict_action_batch(seen, mode="eval"),
        PREDICT_SDE: lambda: ours.predict_action_batch(seen),
    }
    seconds, compiled = rounds(modes, 8 * repeats), {}
    if with_compile:
        faster = policy_of(model, run, **settings)
        faster.wam.load_state_dict(ours.wam.state_dict())
        faster.enable_torch_compile()
        error = (chains(faster, [seen]) - chains(ours, [seen])).abs().max().item()
        assert error <= TOLERANCE, f"compiled chains differ by {error:.1e}"
        compiled = medians(
            {
                "eager": modes[PREDICT_SDE],
                "torch.compile": lambda: faster.predict_action_batch(seen),
            },
            repeats,
        )
    return Timing(
        chunk=chunk,
        batch={name: statistics.median(values) for name, values in seconds.items()},
        compiled=compiled,
        stochastic_overhead=overhead(seconds, PREDICT_SDE, ODE),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    timing = measure(
        options.model, options.batch, options.steps, options.repeats, with_compile=options.compile
    )
    print(
        f"{options.model} model, {options.steps} steps, batch {options.batch}, "
        f"{options.threads} threads, medians of {options.repeats} and {8 * options.repeats}; "
        f"chains equal to {TOLERANCE:g}"
    )
    print_table("per chunk", timing.chunk)
    print_table(f"per batch of {options.batch}", timing.batch)
    print(f"stochastic step, random streams and record: {100 * timing.stochastic_overhead:+.1f} %")
    if timing.compiled:
        print_table(f"per batch of {options.batch}", timing.compiled)


if __name__ == "__main__":
    main()
