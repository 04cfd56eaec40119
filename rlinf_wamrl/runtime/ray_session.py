"""A private Ray for one run, or the user's own cluster when one is named.

RLinf's ``Cluster`` attaches to any Ray it finds on the machine, and starts one of its own with all
defaults otherwise. Here a run either joins the cluster of ``RAY_ADDRESS``, or gets a small private
one in a folder of its own that ends with it.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rlinf_wamrl.runtime.failures import record_failure, stop_waiting
from rlinf_wamrl.runtime.worker_template import worker_template

__all__ = ["check_ray_answers", "ray_session"]

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "RLINF_LOG_LEVEL": "WARNING",
}
"""Nothing calls out at run time, and RLinf reports no routine, unless the user sets otherwise."""


@contextmanager
def ray_session(cluster: DictConfig, log_folder: Path) -> Iterator[None]:
    """Provide Ray for the body; afterwards stop what was started and keep the worker logs.

    Args:
        cluster: the run's ``cluster`` section.
        log_folder: where the workers' logs go when Ray was private.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    os.environ["RLINF_EXT_MODULE"] = "rlinf_wamrl"
    if os.environ.get("RAY_ADDRESS"):
        check_ray_answers(os.environ["RAY_ADDRESS"])
        import ray

        try:
            yield
        finally:
            stop_waiting()
            ray.shutdown()
        return
    if cluster.num_nodes > 1:
        raise ConnectionError(
            f"cluster.num_nodes = {cluster.num_nodes} needs a running Ray cluster; start Ray on "
            "each node and set RAY_ADDRESS to the head's address"
        )
    # unix sockets in it must stay below 108 bytes, so not in the run folder
    folder = Path(tempfile.mkdtemp(prefix="wamrl_"))
    try:
        with (
            worker_template(folder, _template_failed) as launcher,
            _private_ray(cluster, folder, launcher),
        ):
            yield
    finally:
        with suppress(OSError):
            _keep_logs(folder, log_folder)
        shutil.rmtree(folder, ignore_errors=True)


def _template_failed(status: int) -> None:
    record_failure(
        "worker template", "start", RuntimeError(f"it ended with status {status}; see above")
    )


@contextmanager
def _private_ray(cluster: DictConfig, folder: Path, launcher: Path) -> Iterator[None]:
    """Let ``ray.init`` start a small Ray in ``folder``, whose workers ``launcher`` starts."""
    import ray
    from ray._private import ray_constants

    original, setup_worker = ray.init, ray_constants.SETUP_WORKER_FILENAME

    def private_init(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("address") == "auto":
            raise ConnectionError("this run starts its own Ray")
        kwargs["logging_level"] = "ERROR"
        return original(
            *args,
            num_cpus=cluster.num_cpus or os.cpu_count(),
            object_store_memory=int(cluster.object_store_gib * 2**30),
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=str(folder),
            **kwargs,
        )

    ray.init = private_init
    ray_constants.SETUP_WORKER_FILENAME = str(launcher)  # joined to a folder: absolute, it stays
    try:
        yield
    finally:
        ray.init, ray_constants.SETUP_WORKER_FILENAME = original, setup_worker
        stop_waiting()
        ray.shutdown()


def check_ray_answers(address: str, timeout: float = 5.0) -> None:
    """Raise ConnectionError, in words, unless something listens at a ``host:port`` address.

    Ray itself would try for minutes. Other forms (``auto``, ``local``) are left to Ray.
    """
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()
    except OSError as error:
        raise ConnectionError(
            f"RAY_ADDRESS={address}, but nothing answers there ({error}): start Ray on that "
            "machine, or unset RAY_ADDRESS to let the run start its own"
        ) from error


def _keep_logs(ray_folder: Path, log_folder: Path) -> None:
    """Copy what workers printed; Ray's own service logs stay behind."""
    for session in ray_folder.glob("session_2*"):
        for log in sorted((session / "logs").glob("worker-*")):
            if log.stat().st_size:
                log_folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(log, log_folder / log.name)
