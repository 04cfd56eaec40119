"""The one public collector: joins trajectory parts and emits what the run's plan asks for.

It is independent of where it runs. RLinf with channel collectors calls it inside its channel;
anywhere else, whoever drains a channel iterates it::

    collector = TrajectoryCollector()
    collector.setup(ChannelContext(cfg=cfg))
    for key, item in collector.collect(channel.get(), "default_queue"):
        channel_to_actor.put(item, key=key)
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig

from rlinf_wamrl.data.collector_outputs import RolloutOutput, ScopedOutput
from rlinf_wamrl.data.lerobot_output import LeRobotOutput
from rlinf_wamrl.data.parts import EnvPart, PolicyPart
from rlinf_wamrl.data.pipeline_output import PipelineOutput
from rlinf_wamrl.data.plan import TrajectoryMode, TrajectoryPlan, dispatcher_for, required_option
from rlinf_wamrl.data.sources import TrajectoryKey
from rlinf_wamrl.data.trajectory_join import PartJoiner, UnjoinedPart

__all__ = [
    "ChannelContext",
    "TrajectoryCollector",
    "select_trajectory_collector",
    "select_trajectory_dispatcher",
]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ChannelContext:
    """What a collector is set up with; the shape of RLinf's own context."""

    name: str = ""
    cfg: DictConfig | None = None
    producers: tuple[str, ...] = ()
    consumers: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


class TrajectoryCollector:
    """Join trajectory parts and emit outputs selected by one validated plan.

    Beyond RLinf's own collector: a second copy of a half that differs from the waiting one is an
    error (an identical one is accepted), a failed emission can be repeated by sending one half of
    its last chunk again, and what stays unjoined is reported by :meth:`unjoined` and
    :meth:`finish_step`.

    Args:
        plan: Mode and geometry; read from the config on :meth:`setup` when not given, which needs a
            running Ray cluster.
        sources: In pipeline mode, the logical sources that reach this collector, all by default.
    """

    def __init__(
        self, plan: TrajectoryPlan | None = None, sources: Collection[int] | None = None
    ) -> None:
        self._plan = plan
        self._sources = sources
        self._joiner: PartJoiner | None = None
        self._output: ScopedOutput[Any] | None = None

    def setup(self, ctx: ChannelContext) -> None:
        """Initialize the join state and the output strategy of the plan's mode.

        Args:
            ctx: Channel context; only its ``cfg`` is read.

        Raises:
            ValueError: No config, or one that doesn't fit.
        """
        cfg = ctx.cfg
        if cfg is None:
            raise ValueError("the trajectory collector needs the run config: ctx.cfg is None.")
        plan = TrajectoryPlan.from_cfg(cfg) if self._plan is None else self._plan
        total = int(required_option(cfg, "env.train.total_num_envs"))
        self._joiner = PartJoiner(plan.geometry.rows_per_source(total))
        if plan.mode is TrajectoryMode.PIPELINE:
            self._output = PipelineOutput(cfg, plan.geometry, self._sources)
        elif plan.mode is TrajectoryMode.LEROBOT:
            self._output = LeRobotOutput(cfg, plan.geometry)
        else:
            self._output = RolloutOutput(cfg, plan.geometry)

    def collect(self, item: Any, key: str) -> Iterable[tuple[str, Any]]:
        """Accept one part and yield any actor outputs it completes.

        Nothing happens before the result is iterated.

        Args:
            item: A ``PolicyPart`` or an ``EnvPart``.
            key: Key the item came with; routing is by the part's own sources.

        Yields:
            Pairs of channel key and item: trajectories, packed micro-batches or lists of episodes.

        Raises:
            ValueError: An item of another type, or one that contradicts what was collected. The
                collector then is as before the item, except that the item's pair waits for one of
                its halves to be sent again.
        """
        joiner, output = self._ready()
        if not isinstance(item, PolicyPart | EnvPart):
            raise ValueError(
                f"the trajectory collector takes PolicyPart and EnvPart, not {type(item).__name__}."
            )
        yield from self._emissions(joiner, output, item)

    @staticmethod
    def _emissions(
        joiner: PartJoiner, output: ScopedOutput[Any], part: PolicyPart | EnvPart
    ) -> Iterator[tuple[str, Any]]:
        for chunk_key, policy, env in joiner.offer(part):
            _check_initial_state(chunk_key, env)
            emissions = output.take(chunk_key, policy, env)
            joiner.release(chunk_key)
            yield from emissions

    def unjoined(self, step_id: int | None = None) -> list[UnjoinedPart]:
        """Everything that arrived and has not been emitted, with what it waits for.

        Args:
            step_id: Only this and earlier iterations; all of them by default.
        """
        joiner, output = self._ready()
        waiting = joiner.waiting(step_id)
        held = [
            UnjoinedPart(key, "joined, but other chunks of its scope are missing")
            for key in output.open_chunks(step_id)
        ]
        return waiting + held

    def finish_step(self, step_id: int) -> list[UnjoinedPart]:
        """Close an iteration: report and drop what never became training data.

        Args:
            step_id: The iteration that is over; earlier ones are closed too.

        Returns:
            The dropped parts; also logged as a warning with their keys.
        """
        joiner, output = self._ready()
        dropped = self.unjoined(step_id)
        if dropped:
            listing = "; ".join(f"{part.key}: {part.reason}" for part in dropped)
            _logger.warning(
                "%d parts of step %d or before were never used and are dropped: %s",
                len(dropped),
                step_id,
                listing,
            )
        joiner.forget(step_id)
        output.forget(step_id)
        return dropped

    def _ready(self) -> tuple[PartJoiner, ScopedOutput[Any]]:
        if self._joiner is None or self._output is None:
            raise RuntimeError("TrajectoryCollector.setup(ctx) has to be called first.")
        return self._joiner, self._output


def _check_initial_state(key: TrajectoryKey, env: EnvPart) -> None:
    if key.chunk_id == 0 and env.initial_transition is None:
        raise ValueError(f"{key} starts an epoch but is missing its initial state.")
    if key.chunk_id != 0 and env.initial_transition is not None:
        raise ValueError(f"Only chunk zero of an epoch carries an initial state, not {key}.")


def select_trajectory_collector(cfg: DictConfig) -> type[TrajectoryCollector]:
    """Validate the configured mode and return the collector class that implements it.

    Raises:
        ValueError: The config combines modes that exclude each other.
    """
    TrajectoryPlan.mode_from_cfg(cfg)
    return TrajectoryCollector


def select_trajectory_dispatcher(cfg: DictConfig) -> str | None:
    """Name of the channel dispatcher for the configured mode, ``None`` for pipeline training."""
    return dispatcher_for(TrajectoryPlan.mode_from_cfg(cfg))
