"""Milliseconds of the learner's steps: PPO against the naive way, video SFT against a bare loop.

PPO: the naive step encodes the picture, and for every scored denoising step runs the video expert
with gradient and projects the text, in every pass; equal gradients of the action expert are
asserted. (Through the video expert the naive way also reaches the adapters and, once more, the
proprio encoder, which PPO leaves out on purpose.) An update re-scores a batch and trains on it in
``RL.update_epochs`` epochs. The example scores a window of steps; the method as published one
(``RL.stochastic_steps=one_random RL.window=[]``).

Video: the baseline is a loop of ``training_loss``, ``backward`` and AdamW on the same windows.

    python tests/benchmarks/bench_learner.py [--model small] [--rows 32] [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from lone_learner import LoneLearner, recorded_rows
from model_parts import (
    INSTRUCTION,
    MODELS,
    OfficialPattern,
    example_run,
    medians,
    observations,
    overhead,
    policy_of,
    print_table,
    rounds,
)

from rlinf_wamrl.data.success_buffer import VideoWindows
from rlinf_wamrl.policy_training import training_sample
from rlinf_wamrl.rl.losses import FeatureStatistics

TOLERANCE = 1e-6
NAIVE = "naive: video with gradient, text, per scored step"
ONCE = "the same once per macro-step and pass"
CACHES = ("none", "recompute", "store")
BARE = "bare training_loss loop"
SFT = "video SFT step"
SFT_KL = "video SFT step with feature KL"


@dataclass(frozen=True)
class Timing:
    """Median seconds, and what is compared round by round."""

    step: Mapping[str, float]
    update: Mapping[str, float]
    video: Mapping[str, float]
    sft_overhead: float  # on the bare loop
    kl_overhead: float  # on the SFT step

    @property
    def step_ratio(self) -> float:
        return self.step[NAIVE] / self.step["known video"]


def learner_of(model: str, rows: int, cache: str, wrap=None, overrides=()) -> LoneLearner:
    """A learner whose mini-batches are one micro-batch of ``rows``."""
    run = example_run(
        *overrides,
        f"RL.wam_cache={cache}",
        f"actor.micro_batch_size={rows}",
        f"actor.global_batch_size={rows}",
    )
    policy = policy_of(model, run, wrap, keep_video_cache=cache == "store")
    return LoneLearner(run, policy)


def gradients_of(learner: LoneLearner, rows: Mapping) -> dict[str, torch.Tensor]:
    """Take a PPO step on rows and return the gradients it was taken with, before clipping."""
    part = dict(rows, weight=1.0)
    learner.optimizer.zero_grad()
    learner.train_micro_batch(part, {}, is_last=True)
    named = learner.model.named_parameters()
    return {
        name.replace("wam.inner.", "wam."): parameter.grad
        for name, parameter in named
        if "mixtures.action" in name
    }


def assert_equal_gradients(found: Mapping, expected: Mapping, what: str) -> None:
    """Compare gradients, each in units of the largest one."""
    scale = max(gradient.abs().max().item() for gradient in expected.values())
    assert found.keys() == expected.keys() and scale > 0
    for name, gradient in expected.items():
        error = (found[name] - gradient).abs().max().item() / scale
        assert error <= TOLERANCE, f"{what}: the gradient of {name} differs by {error:.1e}"


def measure_ppo(
    model: str, rows: int, repeats: int, overrides: Sequence[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Time single PPO steps on ``rows`` macro-steps, and whole updates on as many."""
    pattern = partial(OfficialPattern, video_gradient=True)
    once = learner_of(model, rows, "none", pattern, overrides)
    pattern = partial(pattern, video_in_each_call=True)
    naive = learner_of(model, rows, "none", pattern, overrides)
    ours = {cache: learner_of(model, rows, cache, overrides=overrides) for cache in CACHES}
    batch = recorded_rows(ours["store"].model, observations(rows))
    known = copy.copy(batch)
    unknown = dict(batch, forward_inputs=dict(batch["forward_inputs"]))
    del unknown["forward_inputs"]["video_cache"]
    ways = {
        NAIVE: (naive, unknown),
        ONCE: (once, unknown),
        "video run in each pass": (ours["none"], unknown),
        "known video": (ours["store"], known),
    }
    gradients = {}
    for name, (learner, given) in ways.items():
        rescored = dict(given)  # as in an update: ratios start at exactly 1
        learner._rescore(rescored, {})
        gradients[name] = gradients_of(learner, rescored)
        assert_equal_gradients(gradients[name], gradients[NAIVE], name)
    steps = {name: partial(gradients_of, *way) for name, way in ways.items()}

    def update(learner: LoneLearner, given: Mapping) -> None:
        fresh = dict(given, forward_inputs=dict(given["forward_inputs"]))
        learner.set_global_step(0)  # what was recorded counts as this learner's own again
        learner._provide_video_caches(fresh, {})
        learner._rescore(fresh, {})
        for _ in range(learner.cfg.RL.update_epochs):
            gradients_of(learner, fresh)

    updates = {NAIVE: lambda: update(naive, unknown), ONCE: lambda: update(once, unknown)}
    for cache in CACHES:
        given = known if cache == "store" else unknown
        updates[f"wam_cache: {cache}"] = partial(update, ours[cache], given)
    return medians(steps, repeats), medians(updates, repeats)


def windows_of(policy, count: int) -> VideoWindows:
    """Windows of successes, pictures of noise."""
    config = policy.wam.config
    horizon, frames = config.action_horizon, config.num_video_frames
    draw = torch.Generator().manual_seed(0)
    video = torch.randint(0, 256, (count, 3, frames, 64, 128), generator=draw, dtype=torch.uint8)
    return VideoWindows(
        video=video,
        action=torch.rand(count, horizon, 7, generator=draw) * 2 - 1,
        proprio=0.2 * torch.randn(count, horizon, 8, generator=draw),
        image_is_pad=torch.zeros(count, frames, dtype=torch.bool),
        action_is_pad=torch.zeros(count, horizon, dtype=torch.bool),
        task_id=torch.zeros(count, dtype=torch.int64),
        instruction=[INSTRUCTION] * count,
    )


def measure_video(model: str, count: int, repeats: int) -> dict[str, list[float]]:
    """Time steps of video training on ``count`` windows."""
    learner = learner_of(model, 8, "none")
    policy, parameters = learner.model, learner.video_parameters
    windows = windows_of(policy, count)
    records = recorded_rows(policy, observations(16))["forward_inputs"]
    moments = policy.forward("calibration_moments", records=records)
    statistics = FeatureStatistics.calibrate(moments)

    def bare() -> float:
        learner.video_optimizer.zero_grad()
        loss, _ = policy.wam.training_loss(
            training_sample(policy, windows),
            torch.Generator().manual_seed(0),
            lambda_video=1.0,
            lambda_action=0.0,
        )
        loss.backward()
        learner.video_optimizer.step()
        return loss.item()

    def step(lambda_kl: float) -> float:
        learner.video_optimizer.zero_grad()
        loss = learner._forward(
            forward_type="video_loss",
            windows=windows,
            generator=torch.Generator().manual_seed(0),
            lambda_action=0.0,
            lambda_kl=lambda_kl,
            statistics=statistics,
        )
        loss.total.backward()
        learner._step(learner.video_optimizer, parameters)
        if loss.live is not None:
            statistics.update(loss.live, loss.frozen)
        return loss.total.item()

    rate = learner.video_optimizer.param_groups[0]
    rate["lr"] = 0.0  # the same weights in every repetition
    difference = abs(step(0.0) - bare())
    assert difference <= TOLERANCE, f"the losses differ by {difference:.1e}"
    return rounds({BARE: bare, SFT: lambda: step(0.0), SFT_KL: lambda: step(0.1)}, repeats)


def measure(
    model: str = "small",
    rows: int = 32,
    windows: int = 8,
    repeats: int = 5,
    overrides: Sequence[str] = (),
) -> Timing:
    """Time everything."""
    steps, updates = measure_ppo(model, rows, repeats, overrides)
    video = measure_video(model, windows, 4 * repeats)
    return Timing(
        step=steps,
        update=updates,
        video={name: statistics.median(values) for name, values in video.items()},
        sft_overhead=overhead(video, SFT, BARE),
        kl_overhead=overhead(video, SFT_KL, SFT),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the example")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    timing = measure(
        options.model, options.rows, options.windows, options.repeats, options.overrides
    )
    print(
        f"{options.model} model, {options.threads} threads, medians of {options.repeats} "
        f"(video: {4 * options.repeats}); gradients and losses equal to {TOLERANCE:g}"
    )
    print_table(f"PPO step on {options.rows} macro-steps", timing.step)
    print_table(f"update on {options.rows} macro-steps", timing.update)
    print_table(f"step on {options.windows} windows", timing.video)
    print(
        f"video SFT step {100 * timing.sft_overhead:+.1f} % on the bare loop, "
        f"feature KL {100 * timing.kl_overhead:+.1f} % on the step"
    )


if __name__ == "__main__":
    main()
