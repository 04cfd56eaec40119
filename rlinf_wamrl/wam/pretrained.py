"""A model with everything it needs, in one folder: the format of the small checkpoints.

========================  =======================================================================
``model.safetensors``     weights, under the names of the official payload (``mot.mixtures...``)
``vae.safetensors``       the autoencoder
``dataset_stats.json``    statistics of the training data, FastWAM's format
``config.json``           model, processing, text encoder, kind of autoencoder, and its training
``README.md``             the model card
========================  =======================================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlinf_wamrl.files import atomic_folder
from rlinf_wamrl.normalisation import DatasetStatistics
from rlinf_wamrl.processing import Processor, ProcessorConfig
from rlinf_wamrl.wam.checkpoint_files import FORMAT_VERSION, read_folder_config
from rlinf_wamrl.wam.config import WAMConfig
from rlinf_wamrl.wam.text import HashedWordEncoder, TextEncoder, build_text_encoder
from rlinf_wamrl.wam.vae import VideoVAE, load_vae
from rlinf_wamrl.wam.vae_patch import PatchVAE
from rlinf_wamrl.wam.wam import WAM
from rlinf_wamrl.wam.weights import wam_from_state

__all__ = ["PretrainedWAM", "load_pretrained", "model_card", "save_pretrained"]


@dataclass(frozen=True, kw_only=True)
class PretrainedWAM:
    """A model and what turns observations into its input and its output into actions."""

    model: WAM
    vae: VideoVAE
    text_encoder: TextEncoder
    processor: Processor
    training: Mapping[str, Any] = field(default_factory=dict)
    """How it came about, in plain values: data, steps, seeds, measured success. Free in form."""

    def __post_init__(self) -> None:
        video = self.model.config.video_dit_config
        for what, model_has, part_has in (
            ("latent channels", video.in_dim, self.vae.latent_channels),
            ("text dimensions", video.text_dim, self.text_encoder.dim),
            (
                "action dimensions",
                self.model.config.action_dit_config.action_dim,
                self.processor.action_normaliser.width,
            ),
            (
                "proprio dimensions",
                self.model.config.proprio_dim or self.processor.proprio_normaliser.width,
                self.processor.proprio_normaliser.width,
            ),
        ):
            if model_has != part_has:
                raise ValueError(
                    f"the model takes {model_has} {what}, but what surrounds it has {part_has}"
                )


def save_pretrained(
    pretrained: PretrainedWAM, folder: str | Path, *, overwrite: bool = False
) -> None:
    """Write the folder, all or nothing.

    Args:
        pretrained: the model; its autoencoder must be a :class:`PatchVAE` and its text encoder a
            :class:`HashedWordEncoder`, the kinds that fit in the folder.
        folder: where to; it must not exist unless ``overwrite``.
        overwrite: replace an existing folder.

    Raises:
        FileExistsError: the folder exists.
        ValueError: a part does not fit in the folder.
    """
    if not isinstance(pretrained.vae, PatchVAE) or not isinstance(
        pretrained.text_encoder, HashedWordEncoder
    ):
        raise ValueError(
            "a checkpoint folder holds a PatchVAE and a HashedWordEncoder, got "
            f"{type(pretrained.vae).__name__} and {type(pretrained.text_encoder).__name__}: "
            "save a model of the Wan2.2 parts with save_fastwam"
        )
    config = {
        "format_version": FORMAT_VERSION,
        "model": asdict(pretrained.model.config),
        "processor": asdict(pretrained.processor.config),
        "text_encoder": pretrained.text_encoder.settings,
        "vae": {"kind": "patch"},
        "training": dict(pretrained.training),
    }
    weights = {
        key: value.detach().cpu().contiguous()
        for key, value in pretrained.model.state_dict().items()
    }
    with atomic_folder(folder, overwrite=overwrite) as temporary:
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        pretrained.vae.save(temporary / "vae.safetensors")
        pretrained.processor.statistics.save(temporary / "dataset_stats.json")
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (temporary / "README.md").write_text(model_card(pretrained, Path(folder).name))


def load_pretrained(
    folder: str | Path,
    *,
    config: WAMConfig | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> PretrainedWAM:
    """Read what :func:`save_pretrained` wrote.

    Args:
        folder: the checkpoint folder.
        config: switches of the model to use in place of the stored ones; the sizes must agree.
        device: where the weights go.
        dtype: dtype of the weights.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: a file is damaged, or the parts do not fit together.
    """
    folder = Path(folder)
    stored = read_folder_config(folder)
    try:
        state = load_file(folder / "model.safetensors")
    except SafetensorError as error:
        raise ValueError(f"{folder / 'model.safetensors'} is damaged: {error}") from error
    source = folder / "model.safetensors"
    try:
        model_config = WAMConfig.from_dict(stored["model"])
        processor_config = ProcessorConfig(**stored["processor"])
        text_encoder = build_text_encoder(**stored["text_encoder"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error
    model = wam_from_state(config or model_config, state, source, device=device, dtype=dtype)
    vae = load_vae(stored["vae"]["kind"], folder / "vae.safetensors", device=device, dtype=dtype)
    model.vae = vae
    statistics = DatasetStatistics.load(
        folder / "dataset_stats.json", processor_config.statistics_key
    )
    return PretrainedWAM(
        model=model,
        vae=vae,
        text_encoder=text_encoder,
        processor=Processor.build(processor_config, statistics),
        training=stored["training"],
    )


def model_card(pretrained: PretrainedWAM, name: str) -> str:
    """Describe the model in Markdown."""
    config, processor = pretrained.model.config, pretrained.processor.config
    parts = {
        part: sum(value.numel() for value in module.parameters())
        for part, module in (
            ("video expert", pretrained.model.video_expert),
            ("action expert", pretrained.model.action_expert),
        )
    }
    rows = {
        "variant": config.variant,
        "parameters": ", ".join(f"{part} {count:,}" for part, count in parts.items()),
        "images": f"two of {processor.image_height} x {processor.image_width}, side by side",
        "latents": f"{pretrained.vae.latent_channels} channels, "
        f"x{pretrained.vae.spatial_factor} in space, x{pretrained.vae.temporal_factor} in time",
        "video": f"{config.num_video_frames} frames",
        "actions": f"{config.action_horizon} per chunk, "
        f"{config.action_dit_config.action_dim} dimensions",
        "sigma shift at inference": f"{config.action_infer_shift} (actions), "
        f"{config.video_infer_shift} (video)",
        "normalisation": processor.normalisation,
        "gripper in the data": processor.gripper_convention,
        "text encoder": pretrained.text_encoder.identity,
        "training data": f"{pretrained.processor.statistics.num_episodes} episodes, "
        f"{pretrained.processor.statistics.num_transitions} steps",
    }
    lines = [
        f"# {name}",
        "",
        "A World-Action Model: a video expert imagines the next frames, an action expert reads the "
        "video expert's keys and values and denoises a chunk of actions.",
        "",
        *_table(rows),
    ]
    if pretrained.training:
        lines += ["", "## Training", "", *_table(pretrained.training)]
    return "\n".join(lines) + "\n"


def _table(rows: Mapping[str, Any]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in _flat(rows))]


def _flat(rows: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Rows with nested mappings spelled out as dotted names."""
    for key, value in rows.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
