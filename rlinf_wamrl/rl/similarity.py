"""How imagined frames are compared with executed ones.

A similarity maps pairs of pictures to an error per place, 0 where they agree; where it counts how
much is decided apart from it (:func:`motion_weight`). To add one, write a builder and name it in
the configuration as ``module:function``, or register it.

Shapes: N pictures of one camera and one frame each, h and w pixels, p and q places.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "SIMILARITIES",
    "FramePairs",
    "Similarity",
    "build_similarity",
    "motion_weight",
    "pixel_mse",
    "register_similarity",
    "weighted_mean",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class FramePairs:
    """Pictures to compare, float32 in [0, 1]."""

    current: Tensor  # [N, 3, h, w] seen before the chunk
    imagined: Tensor  # [N, 3, h, w]
    executed: Tensor  # [N, 3, h, w]


Similarity = Callable[[FramePairs], Tensor]
"""Error [N, p, q] >= 0 of each pair at each of p x q places, which tile the picture."""

SIMILARITIES: dict[str, Callable[..., Similarity]] = {}
"""Name -> builder, called with ``model_folder``, ``device`` and ``dtype``."""


def register_similarity(name: str) -> Callable[[Callable[..., Similarity]], Callable]:
    """Add the decorated builder to :data:`SIMILARITIES`."""

    def add(builder: Callable[..., Similarity]) -> Callable[..., Similarity]:
        SIMILARITIES[name] = builder
        return builder

    return add


def build_similarity(
    name: str,
    *,
    model_folder: str | Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Similarity:
    """Make a registered similarity.

    Args:
        name: ``pixel_mse``, ``optical_flow``, ``dino``, ``vjepa`` or one that was registered;
            or ``module:function``, a builder to import.
        model_folder: for those with a learned encoder, its folder in transformers' format.
        device: where an encoder runs.
        dtype: of an encoder's weights.

    Raises:
        ValueError: an unknown name, a module without that function, or no folder where one is
            needed.
        FileNotFoundError: the folder lacks what is needed; nothing is ever downloaded.
    """
    module, _, function = name.partition(":")
    if name in SIMILARITIES:
        builder = SIMILARITIES[name]
    elif function:
        builder = getattr(importlib.import_module(module), function, None)
        if builder is None:
            raise ValueError(f"the similarity {name!r} does not exist: {module} has no {function}")
    else:
        raise ValueError(
            f"unknown similarity {name!r}; known are {', '.join(SIMILARITIES)}, and module:function"
        )
    return builder(model_folder=model_folder, device=device, dtype=dtype)


def motion_weight(pairs: FramePairs) -> Tensor:
    """Weigh places by how much moves there, so that a static background does not drown it.

    Half of the weight is spread evenly, half goes where the executed or the imagined frame differs
    from the current one, in proportion to the larger squared change. What was imagined counts, too:
    otherwise motion that was imagined and did not happen would cost next to nothing.

    Returns:
        [N, h, w], mean 1; uniform where nothing moves.
    """
    change = torch.maximum(
        (pairs.executed - pairs.current).square().mean(dim=1),
        (pairs.imagined - pairs.current).square().mean(dim=1),
    )
    mean = change.mean(dim=(1, 2), keepdim=True)
    moving = torch.where(mean > 0, change / mean.clamp(min=torch.finfo(mean.dtype).tiny), 1.0)
    return 0.5 + 0.5 * moving


def weighted_mean(error: Tensor, weight: Tensor | None) -> Tensor:
    """Average an error over places.

    Args:
        error: [N, p, q].
        weight: [N, h, w] of pixels, averaged onto the places; None weighs all alike.

    Returns:
        [N].
    """
    if weight is None:
        return error.mean(dim=(1, 2))
    weight = F.adaptive_avg_pool2d(weight.unsqueeze(1), error.shape[-2:]).squeeze(1)
    return (error * weight).sum(dim=(1, 2)) / weight.sum(dim=(1, 2))


def pixel_mse(pairs: FramePairs) -> Tensor:
    """Squared error [N, h, w] of a pixel, averaged over its colours."""
    return (pairs.imagined - pairs.executed).square().mean(dim=1)


@register_similarity("pixel_mse")
def _pixel_mse(**_: Any) -> Similarity:
    return pixel_mse


@register_similarity("optical_flow")
def _optical_flow(**_: Any) -> Similarity:
    return OpticalFlowError()


class OpticalFlowError:
    """Distance in pixels between the motion that was imagined and the motion that happened.

    Motion is the dense optical flow from the current frame to the later one (OpenCV, dense inverse
    search, arXiv 1603.03590), so what the picture looks like matters less than where things go.
    """

    def __init__(self) -> None:
        try:
            import cv2  # needs system libraries that a headless machine may lack
        except ImportError as error:
            raise ImportError(
                f"the similarity optical_flow needs OpenCV (pip install opencv-python): {error}"
            ) from error
        self._to_grey = lambda picture: cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
        self._flow = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)

    def __call__(self, pairs: FramePairs) -> Tensor:
        """Return the end-point error [N, h, w]."""
        current, imagined, executed = (
            self._grey(pictures) for pictures in (pairs.current, pairs.imagined, pairs.executed)
        )
        errors = [
            np.linalg.norm(
                self._flow.calc(before, dreamt, None) - self._flow.calc(before, seen, None), axis=-1
            )
            for before, dreamt, seen in zip(current, imagined, executed, strict=True)
        ]
        shape = (0, *pairs.current.shape[-2:])
        stacked = np.stack(errors) if errors else np.zeros(shape, np.float32)
        return torch.from_numpy(stacked).to(pairs.current)

    def _grey(self, pictures: Tensor) -> list[np.ndarray]:
        scaled = (pictures * 255.0).round().to(torch.uint8).permute(0, 2, 3, 1)
        return [self._to_grey(picture) for picture in scaled.cpu().contiguous().numpy()]


@register_similarity("dino")
def _dino(
    *, model_folder: str | Path | None, device: torch.device | str, dtype: torch.dtype
) -> Similarity:
    return _EncoderDistance(_DinoFeatures(*_load_encoder("dino", model_folder, device, dtype)))


@register_similarity("vjepa")
def _vjepa(
    *, model_folder: str | Path | None, device: torch.device | str, dtype: torch.dtype
) -> Similarity:
    return _EncoderDistance(_VJEPAFeatures(*_load_encoder("vjepa", model_folder, device, dtype)))


class _EncoderDistance:
    """``1 - cos`` between the features of both frames at each place."""

    def __init__(self, features: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._features = features

    @torch.no_grad()
    def __call__(self, pairs: FramePairs) -> Tensor:
        imagined = self._features(pairs.current, pairs.imagined)
        executed = self._features(pairs.current, pairs.executed)
        return 1.0 - F.cosine_similarity(imagined.float(), executed.float(), dim=-1)


@dataclass(frozen=True)
class _Pixels:
    """The mean and standard deviation of each colour that an encoder was trained with."""

    mean: Tensor  # [3, 1, 1] float32
    std: Tensor  # [3, 1, 1] float32
    dtype: torch.dtype  # of the encoder

    def prepare(self, pictures: Tensor, size: tuple[int, int]) -> Tensor:
        """Resize pictures [N, 3, h, w] in [0, 1] and normalise their colours."""
        pictures = pictures.to(self.mean)
        if tuple(pictures.shape[-2:]) != size:
            pictures = F.interpolate(pictures, size=size, mode="bilinear", antialias=True)
        return ((pictures - self.mean) / self.std).to(self.dtype)


class _DinoFeatures:
    """Patch features of a vision transformer whose tokens end in the patches (DINOv2, DINOv3)."""

    def __init__(self, encoder: Any, pixels: _Pixels) -> None:
        self._encoder, self._pixels = encoder, pixels
        self._patch = encoder.config.patch_size

    def __call__(self, current: Tensor, frame: Tensor) -> Tensor:
        """Return features [N, p, q, D] of ``frame``; the current frame plays no part."""
        rows, columns = (max(round(side / self._patch), 1) for side in frame.shape[-2:])
        pictures = self._pixels.prepare(frame, (rows * self._patch, columns * self._patch))
        tokens = self._encoder(pixel_values=pictures).last_hidden_state
        return tokens[:, -rows * columns :].unflatten(1, (rows, columns))


class _VJEPAFeatures:
    """Features of a video encoder (V-JEPA 2) for the clip from the current frame to the later."""

    def __init__(self, encoder: Any, pixels: _Pixels) -> None:
        self._encoder, self._pixels = encoder, pixels
        self._side = encoder.config.crop_size
        self._patches = self._side // encoder.config.patch_size
        self._before = encoder.config.tubelet_size // 2
        self._after = encoder.config.tubelet_size - self._before

    def __call__(self, current: Tensor, frame: Tensor) -> Tensor:
        """Return features [N, p, q, D] of one tubelet, half current frame, half later frame."""
        size = (self._side, self._side)
        before, after = (self._pixels.prepare(part, size) for part in (current, frame))
        clip = torch.stack([before] * self._before + [after] * self._after, dim=1)
        output = self._encoder(pixel_values_videos=clip, skip_predictor=True)
        return output.last_hidden_state.unflatten(1, (self._patches, self._patches))


def _load_encoder(
    name: str,
    model_folder: str | Path | None,
    device: torch.device | str,
    dtype: torch.dtype,
) -> tuple[Any, _Pixels]:
    if model_folder is None:
        raise ValueError(
            f"the similarity {name} needs model_folder: the folder of an encoder in transformers' "
            "format (config.json, weights, preprocessor_config.json)"
        )
    folder = Path(model_folder)
    candidates = [folder / f"{kind}preprocessor_config.json" for kind in ("", "video_")]
    found = [file for file in candidates if file.is_file()]
    if not (folder / "config.json").is_file() or not found:
        raise FileNotFoundError(
            f"{folder} is no encoder for the similarity {name}: it needs config.json, weights and "
            f"{' or '.join(file.name for file in candidates)}; nothing is downloaded"
        )
    from transformers import AutoModel  # takes seconds, and only learned similarities need it

    encoder = AutoModel.from_pretrained(folder, local_files_only=True, dtype=dtype)
    encoder = encoder.eval().requires_grad_(False).to(device)
    preprocessing = json.loads(found[0].read_text())
    missing = [key for key in ("image_mean", "image_std") if key not in preprocessing]
    if missing:
        raise ValueError(f"{found[0]} lacks {', '.join(missing)}")
    mean, std = (
        torch.tensor(preprocessing[key], device=device).view(3, 1, 1)
        for key in ("image_mean", "image_std")
    )
    return encoder, _Pixels(mean, std, dtype)
