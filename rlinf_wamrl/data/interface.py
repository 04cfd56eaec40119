"""The embodied data interface: RLinf's own classes where it has them, this package's elsewhere.

RLinf 0.3.0 does not have the interface; later versions do. Which one is installed is asked once,
here, by capability; everything else imports the names from this module (or from ``embodied_types``
and ``embodied_trajectory`` beside it, named like RLinf's modules) and works with either.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

from rlinf_wamrl.data import (
    batch_values,
    collector,
    parts,
    plan,
    policy_input,
    sources,
    trajectory,
    trajectory_step,
    transition,
)

_TYPES_MODULE = "rlinf.data.schema.embodied_types"
_TRAJECTORY_MODULE = "rlinf.data.schema.embodied_trajectory"
_HOOKS_MODULE = "rlinf.scheduler.channel.hooks"


def _import_if_present(name: str) -> ModuleType | None:
    """Import a module of RLinf that some versions lack; errors inside it are not hidden."""
    try:
        present = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a parent package is there and lacks something it needs
        return None
    return importlib.import_module(name) if present else None


def _native_modules() -> tuple[ModuleType, ModuleType] | None:
    """RLinf's two modules, when they have the interface as documented."""
    types = _import_if_present(_TYPES_MODULE)
    if not hasattr(getattr(types, "EnvTransition", None), "with_trajectory_data"):
        return None
    collection = _import_if_present(_TRAJECTORY_MODULE)
    return (types, collection) if hasattr(collection, "TrajectoryCollector") else None


_native = _native_modules()
NATIVE_INTERFACE = _native is not None
"""Whether the names below are RLinf's own, whose channels then run the collector themselves."""

_types, _collection = _native or (None, None)
_hooks = _import_if_present(_HOOKS_MODULE) if NATIVE_INTERFACE else None


def _documented(native: ModuleType | None, own: ModuleType, name: str) -> type:
    """A name that the interface documents: all of these come from one side."""
    return getattr(own if native is None else native, name)


def _helper(native: ModuleType | None, own: ModuleType, name: str) -> Any:
    """A name that the interface does not document, so that RLinf's module may lack it."""
    return getattr(native, name, None) or getattr(own, name)


EnvOutput = _documented(_types, transition, "EnvOutput")
EnvTransition = _documented(_types, transition, "EnvTransition")
PolicyInput = _documented(_types, policy_input, "PolicyInput")
PolicyOutput = _documented(_types, parts, "PolicyOutput")
PolicyPart = _documented(_types, parts, "PolicyPart")
EnvPart = _documented(_types, parts, "EnvPart")
TrajectoryKey = _documented(_types, sources, "TrajectoryKey")
TrajectorySource = _documented(_types, sources, "TrajectorySource")
TrajectoryStep = _documented(_types, trajectory_step, "TrajectoryStep")
Trajectory = _documented(_types, trajectory, "Trajectory")
split_batch_value = _helper(_types, batch_values, "split_batch_value")
merge_batch_values = _helper(_types, batch_values, "merge_batch_values")
split_episode_data = _helper(_types, batch_values, "split_episode_data")
merge_episode_data = _helper(_types, batch_values, "merge_episode_data")

TrajectoryMode = _documented(_collection, plan, "TrajectoryMode")
TrajectoryPlan = _documented(_collection, plan, "TrajectoryPlan")
TrajectoryCollector = _documented(_collection, collector, "TrajectoryCollector")
RolloutGeometry = _helper(_collection, plan, "RolloutGeometry")
select_trajectory_collector = _helper(_collection, collector, "select_trajectory_collector")
select_trajectory_dispatcher = _helper(_collection, collector, "select_trajectory_dispatcher")
ChannelContext = _helper(_hooks, collector, "ChannelContext")

__all__ = [
    "NATIVE_INTERFACE",
    "ChannelContext",
    "EnvOutput",
    "EnvPart",
    "EnvTransition",
    "PolicyInput",
    "PolicyOutput",
    "PolicyPart",
    "RolloutGeometry",
    "Trajectory",
    "TrajectoryCollector",
    "TrajectoryKey",
    "TrajectoryMode",
    "TrajectoryPlan",
    "TrajectorySource",
    "TrajectoryStep",
    "merge_batch_values",
    "merge_episode_data",
    "select_trajectory_collector",
    "select_trajectory_dispatcher",
    "split_batch_value",
    "split_episode_data",
]
