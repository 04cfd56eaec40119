"""What the benchmarks of sampler and learner share: two policies, observations, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from rlinf_wamrl.config.compose import compose_run
from rlinf_wamrl.policy import WAMPolicy
from rlinf_wamrl.policy_builder import build_policy
from rlinf_wamrl.wam.config import ActionExpertConfig, VideoExpertConfig, WAMConfig
from rlinf_wamrl.wam.context import joined
from rlinf_wamrl.wam.lora import inject_lora, select_trainable
from rlinf_wamrl.wam.state import ActionCache, WAMState
from rlinf_wamrl.wam.text import HashedWordEncoder
from rlinf_wamrl.wam.wam import WAM

EXAMPLE = Path(__file__).parents[2] / "examples" / "libero_wamrl.yaml"
INSTRUCTION = "lift the red cube"
MODELS = ("small", "wide")
"""``small`` ships with the package. ``wide`` has random weights and FastWAM's context (128 text
tokens of 4096) and horizon (32): 6 layers, video 256 wide, actions 128."""


def example_run(*overrides: str):
    """Compose the example of the small model."""
    return compose_run(EXAMPLE, overrides)


def policy_of(name: str, run, wrap: Callable | None = None, **settings) -> WAMPolicy:
    """Build one of :data:`MODELS`, the same weights each time.

    Args:
        name: of the model.
        run: says how to sample, and whether there are adapters.
        wrap: put around the model.
        **settings: sampling that differs from the run's.
    """
    policy = build_policy(run.actor.model, torch.float32).eval()
    settings = replace(policy.settings, **settings)
    wam, text_encoder = policy.wam, policy.text_encoder
    if name == "wide":
        text_encoder = HashedWordEncoder(dim=4096, length=128)
        wam = _wide_wam(policy.vae.latent_channels)
        if run.RL.video_sft.enabled:
            inject_lora(wam, generator=torch.Generator().manual_seed(0))
        wam.vae = policy.vae
    select_trainable(wam, policy.trained_parts)
    return WAMPolicy(
        wam=wam if wrap is None else wrap(wam),
        vae=policy.vae,
        text_encoder=text_encoder,
        processor=policy.processor,
        settings=settings,
    ).eval()


def _wide_wam(channels: int) -> WAM:
    shared = {"num_heads": 8, "attn_head_dim": 32, "num_layers": 6, "text_dim": 4096}
    config = WAMConfig(
        video_dit_config=VideoExpertConfig(
            hidden_dim=256, ffn_dim=1024, in_dim=channels, out_dim=channels, **shared
        ),
        action_dit_config=ActionExpertConfig(hidden_dim=128, ffn_dim=512, **shared),
        proprio_dim=8,
        action_horizon=32,
    )
    torch.manual_seed(0)
    return WAM(config)


def observations(batch: int, first_episode: int = 0) -> dict:
    """What ``batch`` environments show to the policy, pictures of noise."""
    draw = torch.Generator().manual_seed(first_episode)
    size = (batch, 64, 64, 3)
    episodes = torch.arange(batch) + first_episode
    return {
        "main_images": torch.randint(0, 256, size, dtype=torch.uint8, generator=draw),
        "wrist_images": torch.randint(0, 256, size, dtype=torch.uint8, generator=draw),
        "states": 0.2 * torch.randn(batch, 8, generator=draw),
        "task_descriptions": [INSTRUCTION] * batch,
        "episode_id": episodes,
        "group_id": episodes // 8,
        "elapsed_steps": torch.zeros(batch, dtype=torch.int64),
    }


def row_of(seen: Mapping, index: int) -> dict:
    """One of several observations, as a batch of its own."""
    return {name: value[index : index + 1] for name, value in seen.items()}


class OfficialPattern(nn.Module):
    """A model called as FastWAM's own inference calls it, with nothing shared between tokens.

    The video's keys and values are made once per observation, but its time embedding is computed
    for each token, and the text is embedded and projected anew in every denoising step.

    Args:
        model: the one called.
        video_gradient: the video's keys and values get a gradient.
        video_in_each_call: nothing is kept of the video: every velocity runs its layers again.
    """

    def __init__(
        self, model: WAM, *, video_gradient: bool = False, video_in_each_call: bool = False
    ) -> None:
        super().__init__()
        self.inner = model
        self._video_gradient = video_gradient
        self._video_in_each_call = video_in_each_call
        expert = model.video_expert

        def embed_tokens(timestep: Tensor | None, frames: int) -> tuple[Tensor, Tensor]:
            assert timestep is None or frames == 1, "this is about the first frame alone"
            tokens = self._tokens
            embedded = expert.embed_time(torch.zeros(tokens.numel()))
            return tuple(part.unflatten(0, tokens.shape) for part in embedded)

        self._embed_tokens = embed_tokens

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def prefill(self, state: WAMState) -> WAMState | tuple[Tensor, ActionCache]:
        """As the model's, with a text per observation; or the state itself, if nothing is kept."""
        return state if self._video_in_each_call else self._run_video(state)

    def _run_video(self, state: WAMState) -> tuple[Tensor, ActionCache]:
        model, rows = self.inner, state.context_rows
        state = replace(
            state,
            context=state.context[rows],
            context_mask=state.context_mask[rows],
            context_rows=None,
        )
        _, rows, columns = model.video_expert.grid(state.first_frame)
        self._tokens = torch.empty(len(state.context), rows * columns)
        model.video_expert._embed_frames = self._embed_tokens
        try:
            cache = model.prefill(state, video_gradient=self._video_gradient)
        finally:
            del model.video_expert._embed_frames
        return joined(model.encode_context(state)[0]), cache

    def action_velocity(self, actions: Tensor, timestep: Tensor, kept) -> Tensor:
        """As the model's, with the text projected anew."""
        context, cache = self._run_video(kept) if self._video_in_each_call else kept
        projected = self.inner.action_expert.context_keys_values(context)
        keys, values = zip(*projected, strict=True)
        return self.inner.action_velocity(
            actions, timestep, replace(cache, context_keys=keys, context_values=values)
        )


def medians(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each way; see :func:`rounds`."""
    return {name: statistics.median(values) for name, values in rounds(ways, repeats).items()}


def overhead(seconds: Mapping[str, list[float]], way: str, baseline: str) -> float:
    """How much more time ``way`` takes, as the median over rounds: the machine's moods cancel."""
    pairs = zip(seconds[way], seconds[baseline], strict=True)
    return statistics.median(slow / fast for slow, fast in pairs) - 1.0


def rounds(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each way in each round; they take turns, after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, function in ways.items():
            start = time.perf_counter()
            function()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def print_table(title: str, seconds: Mapping[str, float], unit: float = 1e3) -> None:
    """Print seconds as milliseconds, and how many times as fast as the first row each is."""
    baseline = next(iter(seconds))
    print(f"\n{title:52}{'ms':>9}   against {baseline!r}")
    for name, value in seconds.items():
        print(f"{name:52}{unit * value:9.2f}{seconds[baseline] / value:9.2f} x")
