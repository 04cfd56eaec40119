"""Which off-screen renderer MuJoCo uses, decided once and before MuJoCo is imported."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["choose_renderer", "egl_device_index", "renderer_environment"]

_LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa"}
_PACKAGES = {"egl": "libegl1 libegl-mesa0", "osmesa": "libosmesa6"}
_EGL_CUDA_DEVICE_NV = 0x323A


def choose_renderer() -> str:
    """Set ``MUJOCO_GL`` and what belongs to it; return ``egl`` or ``osmesa``.

    What the user set stays. Without a choice: EGL on an NVIDIA GPU if libEGL is there, software
    otherwise. With EGL on GPUs, ``MUJOCO_EGL_DEVICE_ID`` becomes the device of this process's first
    CUDA GPU.

    Raises:
        RuntimeError: The library is missing, or MuJoCo was imported for another renderer.
        ValueError: ``MUJOCO_GL`` names a renderer that needs a display, or a GPU has no EGL device.
    """
    libraries = {name for name, lib in _LIBRARIES.items() if ctypes.util.find_library(lib)}
    chosen = renderer_environment(os.environ, has_gpu=_has_nvidia_gpu(), libraries=libraries)
    renderer = chosen["MUJOCO_GL"]
    if "mujoco" in sys.modules and os.environ.get("MUJOCO_GL") != renderer:
        raise RuntimeError(
            f"MuJoCo was imported before the renderer was chosen: set MUJOCO_GL={renderer} in the "
            "environment, or import mujoco later"
        )
    os.environ.update(chosen)
    if renderer == "egl" and "MUJOCO_EGL_DEVICE_ID" not in os.environ:
        cuda_ids = _cuda_ids_of_egl_devices()
        if any(number is not None for number in cuda_ids):
            device = egl_device_index(0, os.environ.get("CUDA_VISIBLE_DEVICES"), cuda_ids)
            os.environ["MUJOCO_EGL_DEVICE_ID"] = str(device)
    return renderer


def renderer_environment(
    environ: Mapping[str, str], *, has_gpu: bool, libraries: set[str]
) -> dict[str, str]:
    """Environment variables that select a renderer (a function of its arguments alone).

    Args:
        environ: The process's environment.
        has_gpu: Whether an NVIDIA GPU is present.
        libraries: Those of ``egl``, ``osmesa`` whose shared library can be loaded.

    Returns:
        ``MUJOCO_GL`` and ``PYOPENGL_PLATFORM``.

    Raises:
        ValueError: ``MUJOCO_GL`` names a renderer that needs a display.
        RuntimeError: The library of the wanted renderer is missing.
    """
    wanted = environ.get("MUJOCO_GL", "").strip().lower()
    if wanted and wanted not in _LIBRARIES:
        raise ValueError(
            f"MUJOCO_GL={wanted}: this renderer needs a display; use one of "
            f"{', '.join(_LIBRARIES)}, or leave the variable unset"
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
        cuda_visible_devices: Value of the variable, None or "" when unset. Entries must be numbers
            (a UUID cannot be matched to an EGL device).
        egl_cuda_ids: For each EGL device its CUDA number, None if it has none.

    Returns:
        Index into ``egl_cuda_ids``.

    Raises:
        ValueError: The GPU is not visible, or no EGL device belongs to it.
    """
    on_gpus = sorted(number for number in egl_cuda_ids if number is not None)
    entries = [entry.strip() for entry in (cuda_visible_devices or "").split(",") if entry.strip()]
    if not all(entry.isdigit() for entry in entries):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={cuda_visible_devices}: rendering needs GPU numbers, not UUIDs; "
            "set MUJOCO_EGL_DEVICE_ID to choose the EGL device yourself"
        )
    if entries and not 0 <= local_rank < len(entries):
        raise ValueError(
            f"GPU {local_rank} is asked for, but CUDA_VISIBLE_DEVICES={cuda_visible_devices} "
            f"shows only {len(entries)}"
        )
    number = int(entries[local_rank]) if entries else local_rank
    if entries and number not in on_gpus and len(entries) == len(on_gpus):
        # A container may hide the other GPUs from EGL, which then counts the rest from 0.
        number = on_gpus[local_rank]
    if number not in on_gpus:
        raise ValueError(
            f"no EGL device draws on GPU {number} (EGL devices belong to GPUs {on_gpus}); check "
            "the driver, or set MUJOCO_GL=osmesa to draw in software"
        )
    return list(egl_cuda_ids).index(number)


def _has_nvidia_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _cuda_ids_of_egl_devices() -> list[int | None]:
    """CUDA number of each EGL device, None for one that is no NVIDIA GPU."""
    egl = ctypes.CDLL(ctypes.util.find_library("EGL"))
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    egl.eglGetProcAddress.argtypes = [ctypes.c_char_p]
    pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
    query_devices = _egl_function(egl, b"eglQueryDevicesEXT", ctypes.c_int, pointer, pointer)
    query_attribute = _egl_function(
        egl, b"eglQueryDeviceAttribEXT", pointer, ctypes.c_int32, pointer
    )
    devices = (ctypes.c_void_p * 64)()
    count = ctypes.c_int()
    if not query_devices(len(devices), devices, ctypes.byref(count)):
        return []
    numbers: list[int | None] = []
    for device in devices[: count.value]:
        value = size()
        known = query_attribute(device, _EGL_CUDA_DEVICE_NV, ctypes.byref(value))
        numbers.append(value.value if known else None)
    return numbers


def _egl_function(egl: ctypes.CDLL, name: bytes, *argument_types):
    return ctypes.CFUNCTYPE(ctypes.c_uint, *argument_types)(egl.eglGetProcAddress(name))
