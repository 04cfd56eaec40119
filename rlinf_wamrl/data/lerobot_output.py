"""LeRobot mode: finished episodes, per source and iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from rlinf_wamrl.data.collector_outputs import DEFAULT_KEY, Emission, SourceOutput
from rlinf_wamrl.data.lerobot_episodes import Episode, EpisodeRecorder
from rlinf_wamrl.data.parts import EnvPart, PolicyOutput, PolicyPart
from rlinf_wamrl.data.plan import RolloutGeometry, option, required_option
from rlinf_wamrl.data.sources import TrajectoryKey

__all__ = ["EpisodeChunk", "LeRobotOutput"]


@dataclass(frozen=True)
class EpisodeChunk:
    """What one joined chunk adds to the episodes of its source."""

    payload: dict[str, Any]
    policy_output: PolicyOutput | None


class LeRobotOutput(SourceOutput[EpisodeChunk]):
    """Emits the episodes that ended in an iteration, dealt out over the source's shards.

    Unfinished episodes go on in the next iteration.
    """

    def __init__(self, cfg: DictConfig, geometry: RolloutGeometry) -> None:
        super().__init__(cfg, geometry)
        total = int(required_option(cfg, "env.train.total_num_envs"))
        self._new_recorder = EpisodeRecorder(
            num_envs=geometry.rows_per_source(total),
            action_dim=int(required_option(cfg, "actor.model.action_dim")),
            only_success=bool(option(cfg, "algorithm.dagger.online_lerobot.only_success", False)),
        )
        self._recorders: dict[tuple[int, int], EpisodeRecorder] = {}

    def record(self, key: TrajectoryKey, policy: PolicyPart, env: EnvPart) -> EpisodeChunk:
        """Keep the episode payload; parts that skipped inference are welcome here."""
        payload = env.transition.episode_data
        if payload is None:
            raise ValueError(
                f"lerobot mode needs episode_data on every transition, {key} has none."
            )
        return EpisodeChunk(payload, policy.output)

    def emit(self, records: dict[TrajectoryKey, EpisodeChunk]) -> list[Emission]:
        """Lists of episodes, one per shard, the i-th episode to shard i modulo their number."""
        first = next(iter(records))
        source = (first.env_rank, first.stage_id)
        recorder = self._recorders.get(source, self._new_recorder)
        episodes: list[Episode] = []
        for chunk in records.values():
            recorder, finished = recorder.append(chunk.payload, chunk.policy_output)
            episodes += finished
        self._recorders[source] = recorder
        return [(DEFAULT_KEY, episodes[shard :: self._shards]) for shard in range(self._shards)]
