"""What a model needs in GPU memory, computed from its configuration before anything is loaded.

On each GPU live a learner (a frozen video expert with LoRA adapters, an action expert and a proprio
encoder trained in full, a frozen autoencoder) and a rollout worker with its own copy of the model.
They work in phases, one after the other, and each GPU does its share of every phase. The text
encoder is absent: its embeddings come from a cache, and it is freed after filling it. Symbols:
B batch, S video tokens, H actions, L context tokens, D width of an expert, I attention width,
F feed-forward width, n layers.

Not counted, but covered by a reserve: the CUDA context, workspaces of kernels, fragmentation, and
the feature KL's own pass through the video expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlinf_wamrl.wam.config import (
    ActionExpertConfig,
    ExpertConfig,
    VideoExpertConfig,
    WAMConfig,
)

__all__ = [
    "MemoryItem",
    "MemoryPlan",
    "MemorySetup",
    "action_parameters",
    "checkpoint_bytes",
    "lora_parameters",
    "memory_table",
    "plan_memory",
    "proprio_parameters",
    "run_setup",
    "video_cache_bytes",
    "video_parameters",
]

GIB = 2**30

VAE_ELEMENTS_PER_PIXEL = {"encode_image": 493, "decode_video": 5418}
"""Peak of live activations of the Wan2.2 autoencoder per pixel of one image, counted by running it
on the meta device. It does not grow with the length of the video: latent frames pass one by one."""

LEARNER_PHASES = ("imagination", "PPO step", "video SFT step")
PHASES = ("rollout", *LEARNER_PHASES)


@dataclass(frozen=True, kw_only=True)
class MemorySetup:
    """How the model is run. The defaults are those of FastWAM on LIBERO with Wan2.2 parts."""

    num_gpus: int = 1
    """GPUs that share the learner's weights by FSDP2, wrapped at the root: storage, gradients and
    optimiser are cut into as many parts, but a forward pass gathers all weights at once."""
    weight_dtype: torch.dtype = torch.bfloat16
    """Dtype of the frozen weights and of the arithmetic."""
    trained_dtype: torch.dtype = torch.float32
    """Dtype of what is trained, of its gradients and of AdamW's two moments."""
    lora_rank: int = 16
    """Rank of the adapters of the video expert."""
    rollout_batch: int = 32
    """Observations per query of the policy, on each GPU."""
    imagination_batch: int = 8
    """Videos imagined and decoded at a time for the reward, on each GPU."""
    micro_batch: int = 32
    """Macro-steps per backward pass of PPO, on each GPU."""
    sft_micro_batch: int = 2
    """Videos per backward pass of the video loss, on each GPU."""
    image_height: int = 224
    """Height of the model's picture in pixels."""
    image_width: int = 448
    """Width of the model's picture in pixels, all cameras."""
    spatial_factor: int = 16
    """Pixels per latent cell."""
    text_length: int = 128
    """Text tokens; a proprio token is added."""
    vae_parameters: int = 704_688_668
    """Of the autoencoder; 0 leaves it out, with its activations."""
    offload_rollout: bool = False
    """Whether the rollout worker's copy leaves the GPU while the learner works."""
    reserve_bytes: int = 4 * GIB
    """For what is not counted."""


@dataclass(frozen=True)
class MemoryItem:
    """One thing that occupies memory."""

    phase: str  # "always" or one of PHASES
    name: str
    bytes: int  # on each GPU


@dataclass(frozen=True)
class MemoryPlan:
    """All items of a setup. Phases follow one another: only one of them is in memory at a time."""

    items: tuple[MemoryItem, ...]

    def total(self, phase: str) -> int:
        """Bytes per GPU during ``phase``, with what is always there."""
        return sum(item.bytes for item in self.items if item.phase in ("always", phase))

    @property
    def peak(self) -> int:
        """Bytes per GPU in the largest phase."""
        return max(self.total(phase) for phase in PHASES)


def run_setup(run: Any, num_gpus: int) -> MemorySetup:
    """Read how a run uses its GPUs.

    Args:
        run: the complete configuration of a run of a released model.
        num_gpus: GPUs, each with a rank of learner, rollout worker and environments.
    """
    model, video = run.actor.model, run.RL.video_sft
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    weight_dtype = dtypes[model.precision]
    casts = run.actor.fsdp_config.mixed_precision.param_dtype is not None
    slots = max(run.env.train.total_num_envs, run.env.eval.total_num_envs)
    height, width = model.video_size or (MemorySetup.image_height, MemorySetup.image_width)
    return MemorySetup(
        num_gpus=num_gpus,
        weight_dtype=weight_dtype,
        trained_dtype=torch.float32 if casts else weight_dtype,
        lora_rank=video.lora_rank if video.enabled else 0,
        rollout_batch=slots // (num_gpus * run.rollout.pipeline_stage_num),
        imagination_batch=run.RL.reconstruction.max_batch,
        micro_batch=run.actor.micro_batch_size,
        sft_micro_batch=video.batch_size,
        image_height=height,
        image_width=width,
        offload_rollout=run.rollout.enable_offload,
    )


def plan_memory(config: WAMConfig, setup: MemorySetup) -> MemoryPlan:
    """Compute what ``config`` needs under ``setup``, per GPU.

    In the learner the arithmetic reads a copy of all weights, the autoencoder's included, that
    FSDP2 makes for each pass, on a single GPU too; between several GPUs the buffer they were
    gathered in stays until the forward pass ends.
    """
    weight, trained = setup.weight_dtype.itemsize, setup.trained_dtype.itemsize
    gpus = setup.num_gpus
    base = video_parameters(config.video_dit_config)
    policy = action_parameters(config.action_dit_config) + proprio_parameters(config)
    adapters = lora_parameters(config.video_dit_config, setup.lora_rank)
    copied = base + policy + adapters + setup.vae_parameters

    def gradients(count: int) -> int:
        """Whole in the arithmetic's dtype until they are scattered, then each GPU's share."""
        return count * weight + count * trained // gpus

    tokens = _Tokens(config, setup)
    items = [
        MemoryItem("always", "video expert, frozen", base * weight // gpus),
        MemoryItem("always", "action expert and proprio encoder", policy * trained // gpus),
        MemoryItem("always", "LoRA adapters", adapters * trained // gpus),
        MemoryItem("always", "AdamW moments", 2 * (policy + adapters) * trained // gpus),
        MemoryItem("always", "autoencoder", setup.vae_parameters * weight // gpus),
        MemoryItem(
            "rollout" if setup.offload_rollout else "always",
            "rollout worker's copy of the model",
            copied * weight,
        ),
        MemoryItem("always", "reserve", setup.reserve_bytes),
        MemoryItem("rollout", "K/V cache of the video", tokens.video_cache(setup.rollout_batch)),
        MemoryItem(
            "rollout", "K/V cache of the context", tokens.context_cache(setup.rollout_batch)
        ),
        MemoryItem(
            "rollout", "autoencoder, encoding", tokens.vae("encode_image", setup.rollout_batch)
        ),
        MemoryItem(
            "imagination",
            "autoencoder, decoding",
            tokens.vae("decode_video", setup.imagination_batch),
        ),
        MemoryItem("PPO step", "gradients of action expert and proprio", gradients(policy)),
        MemoryItem("PPO step", "K/V cache of the video", tokens.video_cache(setup.micro_batch)),
        MemoryItem(
            "PPO step", "activations of the action expert", tokens.action(setup.micro_batch)
        ),
        MemoryItem("video SFT step", "gradients of the adapters", gradients(adapters)),
        MemoryItem(
            "video SFT step",
            "activations of the video expert",
            tokens.video(setup.sft_micro_batch, setup.lora_rank),
        ),
    ]
    for phase in LEARNER_PHASES:
        items.append(MemoryItem(phase, "weights as the arithmetic reads them", copied * weight))
        if gpus > 1:
            items.append(MemoryItem(phase, "buffer they were gathered in", copied * weight))
    return MemoryPlan(tuple(items))


def video_cache_bytes(config: WAMConfig, setup: MemorySetup) -> int:
    """Size of the video's keys and values of one macro-step, as ``RL.wam_cache`` keeps them.

    They lie in the learner's host memory until an update ends; with ``store`` they also travel in
    the record, from the rollout worker through the channel.
    """
    return _Tokens(config, setup).video_cache(1)


def checkpoint_bytes(config: WAMConfig, setup: MemorySetup) -> int:
    """Size of a training checkpoint: what is trained, and AdamW's two moments of it."""
    count = (
        action_parameters(config.action_dit_config)
        + proprio_parameters(config)
        + lora_parameters(config.video_dit_config, setup.lora_rank)
    )
    return 3 * count * setup.trained_dtype.itemsize


def memory_table(
    config: WAMConfig, setups: Mapping[str, MemorySetup], budget: int = 80 * 10**9
) -> str:
    """Render plans side by side in Markdown, GiB per GPU.

    Args:
        config: the model.
        setups: a column each, by heading.
        budget: bytes of one GPU; the last row says whether the peak is within it.
    """
    plans = {name: plan_memory(config, setup) for name, setup in setups.items()}
    lines = ["| | | " + " | ".join(plans) + " |", "|---|---|" + "---:|" * len(plans)]

    def row(phase: str, name: str, values: list[str]) -> None:
        lines.append(f"| {phase} | {name} | " + " | ".join(values) + " |")

    def amount(count: int | None) -> str:
        return "" if count is None else f"{count / GIB:.2f}"

    for phase in ("always", *PHASES):
        lists = [[item for item in plan.items if item.phase == phase] for plan in plans.values()]
        for name in dict.fromkeys(item.name for items in lists for item in items):
            found = [{item.name: item.bytes for item in items}.get(name) for items in lists]
            row(phase, name, [amount(count) for count in found])
        if phase != "always":
            totals = [f"**{amount(plan.total(phase))}**" for plan in plans.values()]
            row(phase, "**total with the above**", totals)
    verdicts = [
        f"{amount(plan.peak)}, {'fits' if plan.peak <= budget else 'too much'}"
        for plan in plans.values()
    ]
    row("", f"**peak** (of {budget / GIB:.1f})", verdicts)
    sizes = [amount(checkpoint_bytes(config, setup)) for setup in setups.values()]
    row("", "training checkpoint on disk", sizes)
    return "\n".join(lines) + "\n"


def video_parameters(config: VideoExpertConfig) -> int:
    """Weights of the video expert."""
    width = config.hidden_dim
    patch = config.patch_size[0] * config.patch_size[1] * config.patch_size[2]
    ends = _linear(config.in_dim * patch, width) + _linear(width, config.out_dim * patch)
    actions = _linear(config.action_dim, width) if config.action_conditioned else 0
    return _shared_parameters(config) + ends + 2 * width + actions


def action_parameters(config: ActionExpertConfig) -> int:
    """Weights of the action expert."""
    width = config.hidden_dim
    ends = _linear(config.action_dim, width) + _linear(width, config.action_dim)
    return _shared_parameters(config) + ends


def proprio_parameters(config: WAMConfig) -> int:
    """Weights of the proprio encoder."""
    if config.proprio_dim is None:
        return 0
    return _linear(config.proprio_dim, config.video_dit_config.text_dim)


def lora_parameters(config: ExpertConfig, rank: int) -> int:
    """Weights of adapters on q, k, v, o of both attentions and both feed-forward layers."""
    width, inner = config.hidden_dim, config.attention_dim
    per_block = 2 * 4 * rank * (width + inner) + 2 * rank * (width + config.ffn_dim)
    return config.num_layers * per_block


def _linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def _shared_parameters(config: ExpertConfig) -> int:
    """Blocks, text and time embeddings."""
    width, inner, ffn = config.hidden_dim, config.attention_dim, config.ffn_dim
    attention = 3 * _linear(width, inner) + _linear(inner, width) + 2 * inner
    block = (
        2 * attention
        + _linear(width, ffn)
        + _linear(ffn, width)
        + 2 * width  # norm3
        + 6 * width  # modulation
    )
    embeddings = (
        _linear(config.text_dim, width)
        + _linear(width, width)
        + _linear(config.freq_dim, width)
        + _linear(width, width)
        + _linear(width, 6 * width)
    )
    return config.num_layers * block + embeddings


class _Tokens:
    """Memory that grows with the batch: caches and what a backward pass needs kept."""

    def __init__(self, config: WAMConfig, setup: MemorySetup) -> None:
        self.config = config
        self.setup = setup
        self.size = setup.weight_dtype.itemsize
        _, rows, columns = config.video_dit_config.patch_size
        self.per_frame = (setup.image_height // setup.spatial_factor // rows) * (
            setup.image_width // setup.spatial_factor // columns
        )
        self.video_tokens = config.num_latent_frames * self.per_frame
        whole = config.action_infer_mode == "idm"
        self.seen_tokens = self.video_tokens if whole else self.per_frame
        self.context = setup.text_length + (config.proprio_dim is not None)
        self.inner = config.video_dit_config.attention_dim
        self.layers = config.video_dit_config.num_layers

    def video_cache(self, batch: int) -> int:
        """Keys and values of the video that the actions see."""
        return batch * self.layers * 2 * self.seen_tokens * self.inner * self.size

    def context_cache(self, batch: int) -> int:
        """The action expert's cross-attention keys and values."""
        return batch * self.layers * 2 * self.context * self.inner * self.size

    def vae(self, what: str, batch: int) -> int:
        """Activations of the Wan2.2 autoencoder, none without it."""
        if not self.setup.vae_parameters:
            return 0
        pixels = batch * self.setup.image_height * self.setup.image_width
        return pixels * VAE_ELEMENTS_PER_PIXEL[what] * self.size

    def action(self, batch: int) -> int:
        """Kept by one action velocity, all weights of the action expert trained.

        Per layer and action token: the inputs of 5 linear layers and 3 norms, what 2 modulations
        and 2 gates multiply (10 D in all), both sides of the GELU (2 F), the attentions' queries
        and outputs (4 I), and of 3 RMS norms the input in float32 and the result (3 I each). Keys
        and values of video and actions are joined into a new tensor. The context's keys and
        values are kept with their RMS norm, whether or not layers are recomputed.
        """
        expert, horizon = self.config.action_dit_config, self.config.action_horizon
        width, ffn = expert.hidden_dim, expert.ffn_dim
        token = self.size * (10 * width + 2 * ffn + 7 * self.inner) + 4 * 3 * self.inner
        joined = self.size * 2 * (self.seen_tokens + horizon) * self.inner
        context = self.context * (self.size * 3 + 4) * self.inner
        return batch * self._layers(
            horizon * token + joined, horizon * width * self.size, context, expert
        )

    def video(self, batch: int, rank: int) -> int:
        """Kept by one velocity of the whole video, its weights frozen but for adapters.

        Per layer and token: the inputs of 3 norms and of the adapters (6 D), both sides of the
        GELU (2 F), queries, keys, values and outputs of the attentions (6 I), the inputs of 3 RMS
        norms in float32 (3 I), the adapters' inner values (8 r); per context token keys and
        values. The mask, once per layer, is cast to the arithmetic's dtype.
        """
        expert = self.config.video_dit_config
        width, ffn = expert.hidden_dim, expert.ffn_dim
        token = self.size * (6 * width + 2 * ffn + 6 * self.inner + 8 * rank) + 12 * self.inner
        context = self.context * ((self.size * 2 + 4) * self.inner + self.size * 2 * rank)
        kept = self.video_tokens * token + context
        inputs = self.video_tokens * width * self.size
        mask = self.size * self.video_tokens**2
        masks = mask if expert.use_gradient_checkpointing else mask * self.layers
        return batch * self._layers(kept, inputs, 0, expert) + masks

    def _layers(self, kept: int, inputs: int, outside: int, expert: ExpertConfig) -> int:
        """Over all layers: everything kept, or the inputs of each and everything of one."""
        if expert.use_gradient_checkpointing:
            return self.layers * (inputs + outside) + kept
        return self.layers * (kept + outside)
