"""How many ranks each component has."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from rlinf_wamrl.config.errors import ConfigError

__all__ = ["world_size"]


def world_size(run: DictConfig, component: str) -> int:
    """Return how many ranks a component has under ``cluster.component_placement``."""
    placement = run.cluster.component_placement
    for names, ranks in placement.items():
        if component in [name.strip() for name in str(names).split(",")]:
            return _count_ranks(ranks, f"cluster.component_placement.{names}")
    raise ConfigError(
        f"cluster.component_placement places no {component!r}; add for example '{component}: 0'"
    )


def _count_ranks(ranks: Any, key: str) -> int:
    if isinstance(ranks, DictConfig):
        ranks = ranks.get("placement", 0)
    text = str(ranks)
    if text == "all":
        raise ConfigError(f"{key}: name the ranks instead of 'all', for example '0-7'")
    count = 0
    for part in text.split(","):
        # "resources:processes" places more than one process on a resource
        processes = part.split(":")[-1]
        first, _, last = processes.partition("-")
        if not first.strip().isdigit() or (last and not last.strip().isdigit()):
            raise ConfigError(f"{key}: cannot read the ranks {text!r}; write '0', '0-3' or '0:0-1'")
        count += int(last or first) - int(first) + 1
    return count
