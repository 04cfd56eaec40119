"""Released files at a tiny size: a FastWAM checkpoint, the Wan2.2 parts around it, a policy."""

from __future__ import annotations

from pathlib import Path

import torch
from example_statistics import statistics
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from rlinf_wamrl.policy import SamplingSettings, WAMPolicy
from rlinf_wamrl.processing import Processor, ProcessorConfig
from rlinf_wamrl.wam.config import ActionExpertConfig, VideoExpertConfig, WAMConfig
from rlinf_wamrl.wam.loading import save_fastwam
from rlinf_wamrl.wam.text import FASTWAM_PROMPT, HashedWordEncoder
from rlinf_wamrl.wam.vae_wan22 import Wan22VAE, build_wan22_model
from rlinf_wamrl.wam.wam import WAM

LIFT = "lift the red cube"
IMAGE_HEIGHT, IMAGE_WIDTH = 32, 64  # two cameras of 32 x 32
LATENT_SIZE = (2, 4)
HORIZON, EXECUTED, STEPS = 8, 5, 4
BATCH = 3

_SHARED = {"num_heads": 2, "attn_head_dim": 12, "num_layers": 2, "text_dim": 16, "freq_dim": 8}
VIDEO_SIZES = {"hidden_dim": 32, "ffn_dim": 48, **_SHARED}
ACTION_SIZES = {"hidden_dim": 24, "ffn_dim": 32, **_SHARED}


def tiny_config(**changes) -> WAMConfig:
    values = {
        "video_dit_config": VideoExpertConfig(**VIDEO_SIZES),
        "action_dit_config": ActionExpertConfig(**ACTION_SIZES),
        "proprio_dim": 8,
        "action_horizon": HORIZON,
        "num_video_frames": 9,
    }
    return WAMConfig(**(values | changes))


def tiny_wam(**changes) -> WAM:
    torch.manual_seed(0)
    return WAM(tiny_config(**changes))


def tiny_vae() -> Wan22VAE:
    """The architecture of the Wan2.2 autoencoder, 4 channels wide, one block per stage."""
    torch.manual_seed(1)
    shapes = {
        "encoder.conv1.weight": torch.empty(4),
        "decoder.head.0.gamma": torch.empty(4),
        "conv2.weight": torch.empty(48),
        "encoder.downsamples.0.downsamples.0.residual.0.gamma": torch.empty(4),
    }
    return Wan22VAE(build_wan22_model(shapes))


def tiny_policy(wam: WAM | None = None, vae=None, **settings) -> WAMPolicy:
    """A policy on random weights; keyword arguments change its sampling."""
    values = {
        "num_executed": EXECUTED,
        "denoising_steps": STEPS,
        "eval_denoising_steps": 3,
        "imagination_steps": 2,
        "noise_level": 0.5,
    }
    processor = ProcessorConfig(image_height=IMAGE_HEIGHT, image_width=IMAGE_WIDTH // 2)
    return WAMPolicy(
        wam=tiny_wam() if wam is None else wam,
        vae=tiny_vae() if vae is None else vae,
        text_encoder=HashedWordEncoder(dim=16, length=6),
        processor=Processor.build(processor, statistics()),
        settings=SamplingSettings(**(values | settings)),
    )


def observations(batch: int = BATCH, seed: int = 0, elapsed: int = 0) -> dict:
    """What an environment shows to the policy, three episodes at most."""
    draw = torch.Generator().manual_seed(seed)
    size = (batch, IMAGE_HEIGHT, IMAGE_WIDTH // 2, 3)
    return {
        "main_images": torch.randint(0, 256, size, dtype=torch.uint8, generator=draw),
        "wrist_images": torch.randint(0, 256, size, dtype=torch.uint8, generator=draw),
        "states": torch.rand(batch, 8, generator=draw) * 2 - 1,
        "task_descriptions": [LIFT, "push the cube", "lift it"][:batch],
        "task_id": torch.arange(batch),
        "seed": torch.arange(batch) + 5,
        "group_id": torch.zeros(batch, dtype=torch.int64),
        "episode_id": torch.arange(batch) + 100,
        "elapsed_steps": torch.full((batch,), elapsed),
    }


def write_umt5(folder: Path, width: int = 16) -> Path:
    """A UMT5 of a few thousand random weights with a word tokeniser, as transformers saves them."""
    words = ["<pad>", "</s>", "<unk>", *FASTWAM_PROMPT.split(), *LIFT.split(), "video", "robot"]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    config = UMT5Config(
        vocab_size=len(vocabulary), d_model=width, d_kv=4, d_ff=32, num_layers=2, num_heads=4
    )
    UMT5EncoderModel(config).save_pretrained(folder / "text_encoder")
    return folder / "text_encoder"


def write_release(folder: Path, name: str = "mine.pt", **changes) -> Path:
    """A FastWAM file with its statistics and the parts of Wan2.2-TI2V-5B-Diffusers beside it."""
    save_fastwam(tiny_wam(**changes), folder / name, statistics=statistics())
    tiny_vae().model.save_pretrained(folder / "vae")
    write_umt5(folder)
    return folder / name
