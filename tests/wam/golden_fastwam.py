"""Numbers of the official FastWAM code on a tiny random model, and the same model in ours."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from rlinf_wamrl.wam.config import WAMConfig
from rlinf_wamrl.wam.state import WAMState
from rlinf_wamrl.wam.wam import WAM

FOLDER = Path(__file__).parents[1] / "golden" / "fastwam_tiny"
TOLERANCE = 1e-5


@functools.cache
def tensors(name: str) -> dict[str, Tensor]:
    return load_file(FOLDER / f"{name}.safetensors")


@functools.cache
def numbers(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


def inputs() -> dict[str, Tensor]:
    return tensors("inputs")


def config(**changes) -> WAMConfig:
    official = numbers("meta")["config"]
    sizes = numbers("meta")["sizes"]
    base = WAMConfig.from_dict(
        official | {"num_video_frames": sizes["frames"], "action_horizon": sizes["horizon"]}
    )
    # A mode the variant fixes must not be carried over from the base configuration.
    return dataclasses.replace(base, **({"action_infer_mode": None} | changes))


def model(**changes) -> WAM:
    """The golden model; keyword arguments change its configuration."""
    wam = WAM(config(**changes))
    missing, unexpected = wam.load_state_dict(tensors("tiny_state"), strict=False)
    assert not unexpected
    assert all("action_embedding" in name for name in missing)
    return wam


def observation(**changes) -> WAMState:
    data = inputs()
    return dataclasses.replace(
        WAMState(
            first_frame=data["latents"][:, :, :1],
            context=data["context"],
            context_mask=data["context_mask"],
            proprio=data["proprio"][:, 0],
        ),
        **changes,
    )


def sample(padded: bool = False) -> dict[str, Tensor]:
    data = inputs()
    chosen = {
        "video_latents": data["latents"],
        "context": data["context"],
        "context_mask": data["context_mask"],
        "action": data["action"],
        "proprio": data["proprio"],
    }
    if padded:
        chosen |= {name: data[name] for name in ("action_is_pad", "image_is_pad")}
    return chosen


def assert_golden(actual: Tensor, reference: Tensor, factor: float = 1.0) -> None:
    """|x - ref| <= 1e-5 max(1, max |ref|)."""
    assert actual.shape == reference.shape
    bound = factor * TOLERANCE * max(1.0, reference.abs().max().item())
    error = (actual - reference).abs().max().item()
    assert error <= bound, f"largest error {error:.2e}, allowed {bound:.2e}"
