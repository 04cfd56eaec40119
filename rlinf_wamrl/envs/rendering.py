"""Which off-screen renderer MuJoCo uses, decided once and before MuJoCo is imported."""

from __future__ import annotations

import ctypes.util
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["choose_renderer", "egl_device_index", "renderer_environment"]

RENDERERS = ("egl", "osmesa")
_LIBRARIES = {"osmesa": "OSMesa", "egl": "EGL"}
_PACKAGES = {"osmesa": "libosmesa6", "egl": "libegl1 libegl-mesa0"}


def choose_renderer() -> str:
    """Set ``MUJOCO_GL`` (kept if the user set it) and return its value, ``egl`` or ``osmesa``.

    Without a choice: EGL when an NVIDIA GPU and libEGL are present, software rendering otherwise.

    Raises:
        RuntimeError: MuJoCo was imported for another renderer, or the library is missing.
        ValueError: ``MUJOCO_GL`` names a renderer that cannot draw off screen.
    """
    chosen = renderer_environment(
        os.environ,
        has_gpu=_has_nvidia_gpu(),
        libraries={name for name, lib in _LIBRARIES.items() if _library_exists(lib)},
    )
    os.environ.update(chosen)
    if "mujoco" in sys.modules:
        loaded = sys.modules.get("mujoco.osmesa") or sys.modules.get("mujoco.egl")
        if loaded is not None and not loaded.__name__.endswith(chosen["MUJOCO_GL"]):
            raise RuntimeError(
                f"MuJoCo was already imported with {loaded.__name__}, but MUJOCO_GL="
                f"{chosen['MUJOCO_GL']} is wanted: set MUJOCO_GL before anything imports mujoco"
            )
    return chosen["MUJOCO_GL"]


def renderer_environment(
    environ: Mapping[str, str], *, has_gpu: bool, libraries: set[str]
) -> dict[str, str]:
    """Environment variables that select a renderer (a pure function of its arguments).

    Args:
        environ: The process's environment.
        has_gpu: Whether an NVIDIA GPU is visible.
        libraries: Names of :data:`RENDERERS` whose shared library can be loaded.

    Returns:
        ``MUJOCO_GL`` and ``PYOPENGL_PLATFORM``.

    Raises:
        ValueError: ``MUJOCO_GL`` names a renderer that cannot draw off screen.
        RuntimeError: The library of the wanted renderer is missing.
    """
    wanted = environ.get("MUJOCO_GL", "").strip().lower()
    if wanted and wanted not in RENDERERS:
        raise ValueError(
            f"MUJOCO_GL={wanted}: this renderer needs a display; use one of {', '.join(RENDERERS)} "
            "or leave the variable unset"
        )
    if not wanted:
        wanted = "egl" if has_gpu and "egl" in libraries else "osmesa"
        if has_gpu and wanted == "osmesa":
            warnings.warn(
                "a GPU is present but libEGL is not, so pictures are drawn in software, several "
                f"times slower: `apt-get install -y {_PACKAGES['egl']}`",
                RuntimeWarning,
                stacklevel=3,
            )
    if wanted not in libraries:
        raise RuntimeError(
            f"the off-screen renderer '{wanted}' needs lib{_LIBRARIES[wanted]}, which is not "
            f"installed: `apt-get install -y {_PACKAGES[wanted]}`"
        )
    return {"MUJOCO_GL": wanted, "PYOPENGL_PLATFORM": wanted}


def egl_device_index(
    local_rank: int, cuda_visible_devices: str | None, egl_cuda_ids: Sequence[int | None]
) -> int:
    """EGL device that draws on the GPU a CUDA process calls ``local_rank``.

    CUDA renumbers the GPUs listed in ``CUDA_VISIBLE_DEVICES`` from 0; EGL does not look at that
    variable, may list devices in another order, and also lists devices that are no GPU.

    Args:
        local_rank: CUDA ordinal inside the process.
        cuda_visible_devices: Value of the variable, None or "" when unset. Entries must be
            integers (a UUID cannot be matched to an EGL device).
        egl_cuda_ids: For each EGL device, its physical CUDA number, None if it has none.

    Returns:
        Index into ``egl_cuda_ids``.

    Raises:
        ValueError: The GPU is not visible, or no EGL device belongs to it.
    """
    physical = local_rank
    if cuda_visible_devices:
        entries = [entry.strip() for entry in cuda_visible_devices.split(",")]
        if not all(entry.isdigit() for entry in entries):
            raise ValueError(
                f"CUDA_VISIBLE_DEVICES={cuda_visible_devices}: rendering needs GPU numbers, not "
                "UUIDs; set MUJOCO_EGL_DEVICE_ID to choose the EGL device yourself"
            )
        if not 0 <= local_rank < len(entries):
            raise ValueError(
                f"GPU {local_rank} is asked for, but CUDA_VISIBLE_DEVICES={cuda_visible_devices} "
                f"shows only {len(entries)}"
            )
        physical = int(entries[local_rank])
    if physical in egl_cuda_ids:
        return list(egl_cuda_ids).index(physical)
    visible = [number for number in egl_cuda_ids if number is not None]
    # In a container the driver hides the other GPUs from EGL and numbers the rest from 0.
    if cuda_visible_devices and len(visible) == len(cuda_visible_devices.split(",")):
        return list(egl_cuda_ids).index(sorted(visible)[local_rank])
    raise ValueError(
        f"no EGL device draws on GPU {physical} (EGL devices belong to GPUs {visible}); check the "
        "driver, or set MUJOCO_GL=osmesa to draw in software"
    )


def _has_nvidia_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _library_exists(name: str) -> bool:
    return ctypes.util.find_library(name) is not None
