"""Time and memory per macro-step of sampling and of a PPO step, over batch sizes.

Memory is the peak of live tensors that a call makes, counted at the dispatcher: the same on every
machine. That it grows no faster than the batch is asserted; of time it is printed.

    python tests/benchmarks/bench_model_scaling.py [--model small] [--repeats 5]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from bench_learner import gradients_of, learner_of
from lone_learner import recorded_rows
from model_parts import MODELS, medians, observations

sys.path.insert(0, str(Path(__file__).parents[1] / "wam"))
from live_bytes import LiveBytes

BATCHES = (1, 2, 4, 8, 16, 32)
SAMPLING, PPO = "predict_action_batch", "PPO step, known video"


@dataclass(frozen=True)
class Cost:
    """Of one call on a batch."""

    seconds: float
    peak_bytes: int


def measure(
    model: str = "small", batches: Sequence[int] = BATCHES, repeats: int = 5
) -> dict[str, dict[int, Cost]]:
    """Return costs by what is done and batch size; all batches take turns in each round."""
    calls = {}
    for batch in batches:
        learner = learner_of(model, batch, "store")
        seen = observations(batch)
        rows = recorded_rows(learner.model, seen)
        calls[SAMPLING, batch] = lambda p=learner.model, s=seen: p.predict_action_batch(s)
        calls[PPO, batch] = lambda a=learner, r=rows: gradients_of(a, r)
    seconds = medians(calls, repeats)
    costs: dict[str, dict[int, Cost]] = {SAMPLING: {}, PPO: {}}
    for (what, batch), call in calls.items():
        with LiveBytes() as live:
            call()
        costs[what][batch] = Cost(seconds[what, batch], live.peak)
    for what, by_batch in costs.items():
        for small, large in zip(batches, batches[1:], strict=False):
            growth = by_batch[large].peak_bytes / by_batch[small].peak_bytes
            assert growth <= 1.02 * large / small, f"{what}: memory grows {growth:.2f} x"
    return costs


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    costs = measure(options.model, repeats=options.repeats)
    print(f"{options.model} model, {options.threads} threads, medians of {options.repeats}")
    for what, by_batch in costs.items():
        print(f"\n{what:28}{'ms':>10}{'ms / row':>10}{'KiB':>12}{'KiB / row':>12}")
        for batch, cost in by_batch.items():
            time, memory = 1e3 * cost.seconds, cost.peak_bytes / 1024
            print(
                f"batch {batch:<22}{time:10.2f}{time / batch:10.2f}{memory:12.0f}"
                f"{memory / batch:12.0f}"
            )


if __name__ == "__main__":
    main()
