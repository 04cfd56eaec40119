"""A run of a released checkpoint at a tiny size, as a user would write it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import yaml
from example_statistics import statistics
from omegaconf import DictConfig
from tiny_parts import ACTION_SIZES, IMAGE_HEIGHT, IMAGE_WIDTH, VIDEO_SIZES

import rlinf_wamrl.envs
from rlinf_wamrl.config.compose import compose_run

EXAMPLES = Path(__file__).parents[1] / "examples"


def tiny_model_keys(folder: Path, model_path: Path | str) -> dict:
    """What a user sets for a FastWAM file in ``folder``, and the sizes that make it tiny."""
    return {
        "model_path": str(model_path),
        "vae_path": str(folder / "vae"),
        "text_encoder_path": str(folder / "text_encoder"),
        "text_embedding_cache_dir": str(folder / "text_embeddings"),
        "precision": "fp32",
        "video_size": [IMAGE_HEIGHT, IMAGE_WIDTH],
        "video_dit_config": VIDEO_SIZES,
        "action_dit_config": ACTION_SIZES,
    }


def compose_tiny(folder: Path, model: dict, *overrides: str) -> DictConfig:
    """Compose a run of the demo suite with ``actor.model`` keys."""
    captured = {"action_video_freq_ratio": 2, "num_future_frames": 4}
    content = {
        "defaults": ["rl/libero_wamrl", {"override /env": "wamrl_demo"}, "_self_"],
        "env": {"train": captured, "eval": captured},
        "actor": {"model": model},
    }
    file = folder / "run.yaml"
    file.write_text("# @package _global_\n" + yaml.safe_dump(content, sort_keys=False))
    return compose_run(file, overrides)


def compose_5b(example: str, folder: Path, *overrides: str) -> DictConfig:
    """Compose a 5B example with empty files in place of everything that has to be downloaded."""
    assets = json.loads((Path(rlinf_wamrl.envs.__file__).parent / "libero_files.json").read_text())
    files = [f"libero/assets/{name}" for name in assets["suites"]["libero_spatial"]]
    for name in (*files, "vae/config.json", "text_encoder/config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    torch.save({}, folder / "libero_optional_idm_2cam224.pt")
    statistics().save(folder / "dataset_stats.json")
    paths = {
        "env.train.assets_dir": folder / "libero",
        "actor.model.model_path": folder / "libero_optional_idm_2cam224.pt",
        "actor.model.vae_path": folder / "vae",
        "actor.model.text_encoder_path": folder / "text_encoder",
    }
    given = [f"{key}={value}" for key, value in paths.items()]
    return compose_run(EXAMPLES / f"{example}.yaml", [*given, *overrides])
