"""Every change this plugin makes to RLinf, each with its reason and the release it is for.

RLinf 0.3.0. A patch whose target is gone raises :class:`CompatibilityError`: a newer RLinf either
made it unnecessary or moved it, and silence would hide which.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

__all__ = [
    "CompatibilityError",
    "CpuPlatform",
    "add_environment_type",
    "install_cpu_platform",
    "let_fsdp1_run_on_cpu",
    "own_actor_channel",
    "report_worker_failures",
    "share_gloo_devices",
]


class CompatibilityError(RuntimeError):
    """The installed RLinf lacks something this plugin relies on or changes."""


def _require(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise CompatibilityError(
            f"RLinf has no {getattr(owner, '__name__', owner)}.{name} (expected in 0.3.0); this "
            "version of rlinf-wamrl does not know the installed RLinf"
        ) from None


class CpuPlatform:
    """What RLinf expects of an accelerator module (``torch.cuda``), on a machine without one."""

    def __getattr__(self, name: str) -> Any:
        """Fall back to ``torch.cpu`` (streams, synchronize, set_device)."""
        return getattr(torch.cpu, name)

    @staticmethod
    def current_device() -> str:
        """Return the device string."""
        return "cpu"

    @staticmethod
    def is_initialized() -> bool:
        """RLinf asks before creating streams; there are none."""
        return False

    @staticmethod
    def empty_cache() -> None:
        """Do nothing: the CPU allocator keeps no cache to empty."""

    @staticmethod
    def ipc_collect() -> None:
        """Do nothing: no device memory is shared between processes."""

    @staticmethod
    def memory_allocated(*_: Any) -> int:
        """Return 0: device memory."""
        return 0

    @staticmethod
    def memory_reserved(*_: Any) -> int:
        """Return 0: device memory."""
        return 0

    @staticmethod
    def get_rng_state(*_: Any) -> torch.Tensor:
        """Return the CPU generator's state."""
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *_: Any) -> None:
        """Set the CPU generator's state."""
        torch.set_rng_state(state)


def install_cpu_platform() -> None:
    """Let RLinf run without an accelerator.

    0.3.0 sets ``Worker.torch_platform`` and ``torch_device_type`` to None there and then uses both
    unguarded (rollout worker, FSDP manager, metrics). The workers copy them to the instance before
    the plugin is loaded, hence the wrapped ``__init__``.
    """
    from rlinf.scheduler.hardware.accelerators.accelerator import AcceleratorType, AcceleratorUtil
    from rlinf.scheduler.worker.worker import Worker

    get_platform = _require(AcceleratorUtil, "get_torch_platform")
    get_device = _require(AcceleratorUtil, "get_device_type")
    if getattr(get_device, "knows_cpu", False):
        return
    platform = CpuPlatform()

    def torch_platform(kind: Any) -> Any:
        return platform if kind == AcceleratorType.NO_ACCEL else get_platform(kind)

    def device_type(kind: Any) -> Any:
        return "cpu" if kind == AcceleratorType.NO_ACCEL else get_device(kind)

    device_type.knows_cpu = True
    AcceleratorUtil.get_torch_platform = staticmethod(torch_platform)
    AcceleratorUtil.get_device_type = staticmethod(device_type)
    if Worker.torch_platform is None:
        Worker.torch_platform = platform
        Worker.torch_device_type = "cpu"
    original = _require(Worker, "__init__")

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(self, "torch_platform", None) is None:
            self.torch_platform = Worker.torch_platform
            self.torch_device_type = Worker.torch_device_type
        original(self, *args, **kwargs)

    Worker.__init__ = init


def let_fsdp1_run_on_cpu() -> None:
    """Give FSDP1 a CPU device on machines without an accelerator.

    0.3.0 passes an accelerator's index, and asks for a broadcast that CPU parameters cannot have.
    """
    from rlinf.hybrid_engines.fsdp.strategy import fsdp
    from rlinf.scheduler import Worker

    original = _require(fsdp, "FSDP")
    if Worker.torch_device_type != "cpu" or getattr(original, "on_cpu", False):
        return

    class CpuFSDP(original):
        on_cpu = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.update(device_id=torch.device("cpu"), sync_module_states=False)
            super().__init__(*args, **kwargs)

    fsdp.FSDP = CpuFSDP


def share_gloo_devices() -> None:
    """Let one thread serve all gloo groups of a process.

    0.3.0 gives each pair of workers three groups of their own, and torch gives each group a device
    whose thread wakes a hundred times a second: on two cores some 6 % of the CPU time of a run.
    Interfaces are chosen as torch does.
    """
    from torch.distributed import distributed_c10d

    gloo = _require(distributed_c10d, "ProcessGroupGloo")
    if isinstance(gloo, _SharedDevices):
        return
    distributed_c10d.ProcessGroupGloo = _SharedDevices("ProcessGroupGloo", (), {"gloo": gloo})


class _SharedDevices(type):
    """Stands in for torch's class: makes its groups on devices that all of them share."""

    def __call__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = cls.gloo._Options()
        options._timeout = timeout
        options._devices = _gloo_devices(cls.gloo)
        options._threads = 2 * len(options._devices)
        return cls.gloo(store, rank, size, options)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.gloo)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.gloo, name)


@functools.cache
def _gloo_devices(gloo: Any) -> list[Any]:
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if not interfaces:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=name) for name in interfaces.split(",")]


def add_environment_type(name: str, class_path: str) -> None:
    """Teach RLinf an environment type.

    0.3.0 has a closed Enum and an if-chain, and its env worker imports the lookup by name.

    Args:
        name: the ``env_type`` of the configuration.
        class_path: ``module:Class`` of the environment, imported when first asked for.
    """
    import importlib

    from rlinf import envs
    from rlinf.workers.env import env_worker

    kinds = _require(envs, "SupportedEnvType")
    if name not in kinds._value2member_map_:
        member = object.__new__(kinds)
        member._name_, member._value_ = name.upper(), name
        kinds._member_map_[member._name_] = member
        kinds._member_names_.append(member._name_)
        kinds._value2member_map_[name] = member
    lookup = _require(env_worker, "get_env_cls")
    added = getattr(lookup, "added", None)
    if added is None:
        added = {}

        @functools.wraps(lookup)
        def get_env_cls(env_type: str, env_cfg: Any = None) -> type:
            if env_type not in added:
                return lookup(env_type, env_cfg)
            module, _, attribute = added[env_type].partition(":")
            return getattr(importlib.import_module(module), attribute)

        get_env_cls.added = added
        envs.get_env_cls = get_env_cls
        env_worker.get_env_cls = get_env_cls
    added[name] = class_path


def report_worker_failures() -> None:
    """Keep the exception of a failed worker instead of printing it and losing its type.

    0.3.0 prints the text, signals the driver and ends the waiting thread. Its threads also wait
    without end, through a shutdown of Ray, which then ends the process with a status of its own.
    """
    from rlinf.scheduler.worker import worker_group

    from rlinf_wamrl.runtime.failures import record_failure, waiting_thread

    result = _require(worker_group, "WorkerGroupFuncResult")
    _require(result, "_wait_for_results")

    def wait_for_results(self: Any) -> None:
        import ray

        with waiting_thread() as stopping:
            while not stopping.is_set():
                try:
                    self._local_results = ray.get(self._remote_results, timeout=0.5)
                except Exception as error:
                    if type(error) is ray.exceptions.GetTimeoutError:  # a worker's own is another
                        continue
                    record_failure(self._cls_name, self._func_name, error)
                    return
                self._wait_done = True
                return

    result._wait_for_results = wait_for_results


@contextmanager
def own_actor_channel(cfg: Any) -> Iterator[None]:
    """Let RLinf's runner create its actor channel with a trajectory collector inside.

    0.3.0's ``Channel.create`` knows no collector. The env and rollout channels stay RLinf's own.
    """
    from rlinf.runners import embodied_runner

    from rlinf_wamrl.workers.trajectory_channel import create_trajectory_channel

    original = _require(embodied_runner, "Channel")

    class Channels:
        @staticmethod
        def create(name: str) -> Any:
            if name == "Actor":
                return create_trajectory_channel(name, cfg)
            return original.create(name)

    embodied_runner.Channel = Channels
    try:
        yield
    finally:
        embodied_runner.Channel = original
