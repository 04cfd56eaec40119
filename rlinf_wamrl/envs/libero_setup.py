"""One place that makes ``import libero`` safe: no question, no race, no banner, no download.

Everything that touches LIBERO or robosuite calls :func:`bootstrap_libero` first. It may be called
any number of times, from any process, before or after torch is imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlinf_wamrl.envs.rendering import choose_renderer

__all__ = ["bootstrap_libero", "libero_package_root", "point_libero_at"]


def libero_package_root() -> Path:
    """Folder of the installed ``libero.libero`` package, found without importing it.

    Raises:
        ModuleNotFoundError: No LIBERO distribution is installed.
    """
    spec = importlib.util.find_spec("libero")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "LIBERO is not installed: `pip install rlinf-libero==0.1.3` (imports as `libero`)"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "libero"


def bootstrap_libero(*, with_benchmark: bool = False) -> None:
    """Import LIBERO's environments and register this project's demo suite with them.

    Chooses the renderer, writes LIBERO's configuration file in a place of its own (atomically:
    many processes start at once) and silences the banners of gym and robosuite.

    Args:
        with_benchmark: Also register the suite with ``libero.libero.benchmark``, which imports
            torch and is needed only by code that asks LIBERO for its suites.

    Raises:
        RuntimeError: No off-screen renderer can be loaded.
        ModuleNotFoundError: LIBERO is not installed.
    """
    choose_renderer()
    _write_libero_config(_private_folder())
    _choose_numba_cache(_private_folder())
    with _quiet_third_party(), _hidden_gpus():
        importlib.import_module("libero.libero.envs")
    from rlinf_wamrl.envs.demo import domain

    domain.register()
    if with_benchmark:
        from rlinf_wamrl.envs.demo import benchmark

        benchmark.register()


def point_libero_at(root: Path) -> None:
    """Make LIBERO read meshes, textures and scenes from ``root/assets``.

    LIBERO resolves these files against the folder of its own package; the modules keep that folder
    in globals that are read at construction time, so re-pointing them needs no file system change.
    """
    from libero.libero.envs import bddl_base_domain
    from libero.libero.envs.objects import (
        articulated_objects,
        google_scanned_objects,
        hope_objects,
        turbosquid_objects,
    )

    bddl_base_domain.DIR_PATH = str(root / "envs")
    for module in (articulated_objects, google_scanned_objects, hope_objects, turbosquid_objects):
        module.absolute_path = root


def _private_folder() -> Path:
    """Folder of this user and this installation of LIBERO."""
    tag = hashlib.sha256(str(libero_package_root()).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"rlinf_wamrl_libero_{os.getuid()}_{tag}"


def _choose_numba_cache(folder: Path) -> None:
    # Numba compiles robosuite's controller once and keeps it beside the source, if it can write
    # there. If not, and without a home folder, it would refuse to import.
    spec = importlib.util.find_spec("robosuite")
    if spec is not None and not os.access(Path(spec.origin).parent / "utils", os.W_OK):
        os.environ.setdefault("NUMBA_CACHE_DIR", str(folder / "numba"))


def _write_libero_config(folder: Path) -> None:
    if "libero.libero" in sys.modules:
        return
    root = libero_package_root()
    # A configuration left by another installation would point elsewhere, so it is not reused.
    os.environ["LIBERO_CONFIG_PATH"] = str(folder)
    config = folder / "config.yaml"
    if config.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    entries = {
        "assets": root / "assets",
        "bddl_files": root / "bddl_files",
        "benchmark_root": root,
        "datasets": root.parent / "datasets",
        "init_states": root / "init_files",
    }
    partial = folder / f"config.yaml.{os.getpid()}"
    partial.write_text("".join(f"{key}: {value}\n" for key, value in entries.items()))
    partial.replace(config)


@contextlib.contextmanager
def _quiet_third_party() -> Iterator[None]:
    """Drop gym's end-of-life notice and robosuite's advice about private macro files."""
    if importlib.util.find_spec("gym_notices") is not None:
        importlib.import_module("gym_notices.notices").notices.clear()
    logger = logging.getLogger("robosuite_logs")
    logger.addFilter(_is_not_macro_advice)
    try:
        yield
    finally:
        logger.removeFilter(_is_not_macro_advice)


@contextlib.contextmanager
def _hidden_gpus() -> Iterator[None]:
    """Keep from robosuite what it would misread: it takes the EGL device for a CUDA number."""
    visible = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        yield
    finally:
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


def _is_not_macro_advice(record: logging.LogRecord) -> bool:
    return "macro" not in record.getMessage()
