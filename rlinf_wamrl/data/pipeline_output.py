"""Pipeline mode: micro-batches with advantages for each actor, one rollout epoch at a time.

Shape symbols: T chunks of an epoch, B environments of one batch, N = T * B flat rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable
from typing import Any

import torch
from omegaconf import DictConfig

from rlinf_wamrl.data.batch_values import split_batch_value
from rlinf_wamrl.data.collector_outputs import Emission, ResolvedStep, ScopedOutput, StepResolver
from rlinf_wamrl.data.parts import EnvPart, PolicyPart
from rlinf_wamrl.data.plan import RolloutGeometry, option, required_option
from rlinf_wamrl.data.sources import TrajectoryKey
from rlinf_wamrl.data.trajectory import Trajectory

__all__ = ["PipelineOutput"]

_BOUNDARY_KEYS = ("dones", "terminations", "truncations", "prev_values")


class PipelineOutput(ScopedOutput[ResolvedStep]):
    """Emits flat, shuffled, packed micro-batches as soon as an epoch is complete.

    Advantages are computed on the whole batch of a source and only then cut for the actors, so that
    no routing can separate the members of a group.

    Args:
        cfg: Run config.
        geometry: Routing geometry.
        sources: Logical ranks (environment worker times stages plus stage) to wait for; all of them
            by default. An actor that drains only its own sources names them here.
    """

    def __init__(
        self,
        cfg: DictConfig,
        geometry: RolloutGeometry,
        sources: Collection[int] | None = None,
    ) -> None:
        self._sources = set(range(geometry.source_count) if sources is None else sources)
        if not self._sources <= set(range(geometry.source_count)):
            raise ValueError(
                f"sources {sorted(self._sources)} are not all among the {geometry.source_count} "
                "environment sources of the run."
            )
        super().__init__(chunks_per_scope=len(self._sources) * geometry.chunk_count)
        self._cfg = cfg
        self._geometry = geometry
        self._resolver = StepResolver(cfg, geometry.chunk_count)
        if not self._resolver.collect_prev_infos:
            raise ValueError(
                "pipeline mode trains on recorded log-probs: set rollout.collect_prev_infos: True."
            )
        self._total_envs = int(required_option(cfg, "env.train.total_num_envs"))
        self._adv_type = str(required_option(cfg, "algorithm.adv_type"))
        self._group_size = int(option(cfg, "algorithm.group_size", 8))
        rows = geometry.rows_per_source(self._total_envs)
        if self._adv_type != "gae" and rows % self._group_size:
            raise ValueError(
                f"algorithm.group_size ({self._group_size}) must divide the {rows} environments of "
                "a source (env.train.total_num_envs / env workers / pipeline stages)."
            )
        self._stages = int(required_option(cfg, "rollout.pipeline_stage_num"))
        self._micro_batch = int(required_option(cfg, "actor.micro_batch_size"))
        self._seed = int(required_option(cfg, "actor.seed"))
        self._shuffle = bool(option(cfg, "algorithm.shuffle_rollout", True))
        self._normalise = bool(option(cfg, "algorithm.normalize_advantages", True))
        self._generators: dict[int, torch.Generator] = {}

    def scope(self, key: TrajectoryKey) -> Hashable:
        """One rollout epoch over all sources."""
        return key.step_id, key.epoch_id

    def record(self, key: TrajectoryKey, policy: PolicyPart, env: EnvPart) -> ResolvedStep:
        """Resolve the pair at once, so that bad data is refused when it arrives."""
        source = self._logical_rank(key)
        if source not in self._sources:
            raise ValueError(
                f"{key} is of source {source}, this collector takes {sorted(self._sources)}."
            )
        return self._resolver.resolve(key, policy, env)

    def _logical_rank(self, key: TrajectoryKey) -> int:
        return key.env_rank * self._stages + key.stage_id

    def emit(self, records: dict[TrajectoryKey, ResolvedStep]) -> list[Emission]:
        """Micro-batches under each actor's key; actors in the order they are first routed to."""
        # RLinf's scheduler takes seconds to import and only this mode needs it.
        from rlinf.scheduler import CommMapper

        chunks_by_source: dict[int, list[ResolvedStep]] = defaultdict(list)
        for key, resolved in records.items():
            chunks_by_source[self._logical_rank(key)].append(resolved)
        batches_by_actor: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for source in sorted(chunks_by_source):
            batch = self._train_batch(self._resolver.stack(chunks_by_source[source]))
            routes = CommMapper.get_dst_ranks(
                self._total_envs,
                self._geometry.source_count,
                self._geometry.actor_world_size,
                source,
            )
            shards = split_batch_value(batch, [size for _, size in routes], dim=1)
            for (actor, _), shard in zip(routes, shards, strict=True):
                batches_by_actor[actor].append(shard)
        if self._normalise:
            for batches in batches_by_actor.values():
                _normalise_advantages(batches)
        for batches in batches_by_actor.values():
            for batch in batches:
                self._check_rows(batch)
        return [
            (CommMapper.build_channel_key(actor, actor, "pipeline_actor"), micro_batch)
            for actor, batches in batches_by_actor.items()
            for batch in batches
            for micro_batch in self._micro_batches(batch, actor)
        ]

    def _train_batch(self, trajectory: Trajectory) -> dict[str, Any]:
        """Batch [T, B, ...] of one source with loss masks, advantages and returns."""
        import rlinf.algorithms  # noqa: F401 - registers the advantage estimators
        from rlinf.algorithms.registry import calculate_adv_and_returns
        from rlinf.utils.utils import preprocess_embodied_batch

        cfg = self._cfg
        if trajectory.rewards is None or trajectory.prev_logprobs is None:
            raise ValueError("pipeline mode needs rewards and prev_logprobs on every chunk.")
        if self._adv_type == "gae" and trajectory.prev_values is None:
            raise ValueError("algorithm.adv_type gae needs prev_values, the policy returned none.")
        batch = preprocess_embodied_batch(
            Trajectory.to_batch([trajectory]),
            rollout_epoch=1,
            auto_reset=bool(required_option(cfg, "env.train.auto_reset")),
            ignore_terminations=bool(required_option(cfg, "env.train.ignore_terminations")),
            reward_type=required_option(cfg, "algorithm.reward_type"),
            filter_rewards=bool(option(cfg, "algorithm.filter_rewards", False)),
            group_size=self._group_size,
            rewards_lower_bound=option(cfg, "algorithm.rewards_lower_bound", None),
            rewards_upper_bound=option(cfg, "algorithm.rewards_upper_bound", None),
        )
        advantages = calculate_adv_and_returns(
            task_type=required_option(cfg, "runner.task_type"),
            adv_type=self._adv_type,
            rewards=batch["rewards"],
            dones=batch["dones"],
            values=batch.get("prev_values"),
            gamma=option(cfg, "algorithm.gamma", 1),
            gae_lambda=option(cfg, "algorithm.gae_lambda", 1),
            group_size=self._group_size,
            reward_type=required_option(cfg, "algorithm.reward_type"),
            loss_mask=batch.get("loss_mask"),
            loss_mask_sum=batch.get("loss_mask_sum"),
            normalize_advantages=False,
        )
        return {**batch, **advantages}

    def _check_rows(self, batch: dict[str, Any]) -> None:
        chunks, environments = batch["prev_logprobs"].shape[:2]
        for key in _BOUNDARY_KEYS:
            if key in batch and len(batch[key]) != chunks + 1:
                raise ValueError(
                    f"{key} has {len(batch[key])} entries for {chunks} chunks; "
                    "the epoch's boundary entry is missing."
                )
        if chunks * environments % self._micro_batch:
            raise ValueError(
                f"pipeline batch of {chunks * environments} rows ({chunks} chunks of "
                f"{environments} environments) is not divisible by actor.micro_batch_size "
                f"({self._micro_batch})."
            )

    def _micro_batches(self, batch: dict[str, Any], actor: int) -> list[dict[str, torch.Tensor]]:
        """Flat packed micro-batches of one batch; nested keys are joined by ``::``."""
        from rlinf.utils.utils import flatten_embodied_batch, pack_batch

        chunks, environments = batch["prev_logprobs"].shape[:2]
        rows = chunks * environments
        if self._shuffle:
            generator = self._generators.get(actor)
            if generator is None:
                generator = torch.Generator().manual_seed(self._seed + actor)
                self._generators[actor] = generator
            order = torch.randperm(rows, generator=generator)
        else:
            order = torch.arange(rows)
        # Indexing per micro-batch gives each one storage of its own, without a shuffled whole.
        return [
            pack_batch(flatten_embodied_batch(batch, part))
            for part in order.split(self._micro_batch)
        ]


def _normalise_advantages(batches: list[dict[str, Any]]) -> None:
    """Give one actor's advantages zero mean and unit variance over all its batches, in place."""
    from rlinf.utils.distributed import masked_stats, normalize_from_stats

    stats = sum(
        masked_stats(batch["advantages"], _mask_like(batch.get("loss_mask"), batch["advantages"]))
        for batch in batches
    )
    for batch in batches:
        batch["advantages"] = normalize_from_stats(batch["advantages"], stats)


def _mask_like(mask: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor | None:
    return None if mask is None else mask.expand_as(values)
