"""What the caches and batching are worth, as ratios within one run."""

import time

import pytest
import torch

from rlinf_wamrl.wam.config import ActionExpertConfig, VideoExpertConfig, WAMConfig
from rlinf_wamrl.wam.state import ActionCache, WAMState
from rlinf_wamrl.wam.wam import WAM

pytestmark = pytest.mark.slow

BATCH, STEPS, HORIZON, TEXT_TOKENS, TEXT_WIDTH = 16, 10, 32, 128, 4096


@pytest.fixture(scope="module")
def model():
    shared = {"num_heads": 8, "attn_head_dim": 32, "num_layers": 6, "text_dim": TEXT_WIDTH}
    torch.manual_seed(0)
    return WAM(
        WAMConfig(
            video_dit_config=VideoExpertConfig(hidden_dim=256, ffn_dim=1024, **shared),
            action_dit_config=ActionExpertConfig(hidden_dim=128, ffn_dim=512, **shared),
            proprio_dim=8,
            action_horizon=HORIZON,
        )
    ).requires_grad_(False)


def observations(batch):
    return WAMState(
        first_frame=torch.randn(batch, 48, 1, 4, 8),
        context=torch.randn(batch, TEXT_TOKENS, TEXT_WIDTH),
        context_mask=torch.ones(batch, TEXT_TOKENS, dtype=torch.bool),
        proprio=torch.randn(batch, 8),
    )


def seconds(function, repeats=3):
    """The best of a few runs on one thread, after one to warm up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        function()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return min(times)


def test_batched_chain_against_one_observation_at_a_time_without_caches(model):
    state, noise = observations(BATCH), torch.randn(BATCH, HORIZON, 7)
    one = observations(1)
    timesteps, deltas = model.infer_action_scheduler.build_inference_schedule(STEPS)

    def uncached():
        actions = noise[:1]
        for timestep, delta in zip(timesteps, deltas, strict=True):
            velocity = model.action_velocity(actions, timestep.expand(1), model.prefill(one))
            actions = model.infer_action_scheduler.step(velocity, delta, actions)

    batched = seconds(lambda: model.infer_action(state, STEPS, noise=noise)) / BATCH
    single = seconds(uncached)
    print(f"per chain: batched {1e3 * batched:.1f} ms, alone {1e3 * single:.1f} ms")
    assert single / batched >= 3.0


def test_velocity_with_and_without_the_cached_context(model):
    state, actions = observations(BATCH), torch.randn(BATCH, HORIZON, 7)
    timestep, cache = torch.full((BATCH,), 500.0), model.prefill(state)
    context, mask = model.encode_context(state)

    def with_context_recomputed():
        projected = model.action_expert.context_keys_values(context)
        fresh = ActionCache(
            video_keys=cache.video_keys,
            video_values=cache.video_values,
            context_keys=tuple(key for key, _ in projected),
            context_values=tuple(value for _, value in projected),
            context_mask=mask,
        )
        model.action_velocity(actions, timestep, fresh)

    cached = seconds(lambda: model.action_velocity(actions, timestep, cache), repeats=10)
    recomputed = seconds(with_context_recomputed, repeats=10)
    print(f"velocity at batch {BATCH}: {1e3 * cached:.1f} ms, {1e3 * recomputed:.1f} ms")
    assert recomputed / cached >= 1.7
