"""A run of a released checkpoint at a tiny size, as a user would write it."""

from __future__ import annotations

from pathlib import Path

import yaml
from omegaconf import DictConfig
from tiny_parts import ACTION_SIZES, IMAGE_HEIGHT, IMAGE_WIDTH, VIDEO_SIZES

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


def write_libero_assets(folder: Path, suite: str = "libero_spatial") -> Path:
    """Empty files under the names of a suite's meshes and textures."""
    from rlinf_wamrl.envs.assets import _manifest

    for name in _manifest()["suites"][suite]:
        file = folder / "assets" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return folder
