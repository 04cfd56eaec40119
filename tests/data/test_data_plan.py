"""Validated output mode and routing geometry."""

import sys

import pytest
from omegaconf import OmegaConf
from synthetic_rollout import run_config

from rlinf_wamrl.data.embodied_trajectory import (
    RolloutGeometry,
    TrajectoryCollector,
    TrajectoryMode,
    TrajectoryPlan,
    select_trajectory_collector,
    select_trajectory_dispatcher,
)

LEROBOT = {"algorithm__dagger__online_lerobot__enabled": True}
PIPELINE = {"runner__use_training_pipeline": True}


@pytest.mark.parametrize(
    ("options", "mode", "dispatcher"),
    [
        ({}, "rollout", "least_loaded"),
        (LEROBOT, "lerobot", "least_loaded"),
        (PIPELINE, "pipeline", None),
        ({"algorithm__adv_type": "opd"}, "rollout", "least_loaded"),
        ({**LEROBOT, "runner__enable_decoupled_mode": True}, "lerobot", "least_loaded"),
    ],
)
def test_the_config_selects_one_mode(options, mode, dispatcher):
    cfg = run_config(**options)
    assert TrajectoryPlan.mode_from_cfg(cfg) == mode
    assert select_trajectory_collector(cfg) is TrajectoryCollector
    assert select_trajectory_dispatcher(cfg) == dispatcher
    geometry = RolloutGeometry.from_world_sizes(cfg, env_world_size=1, actor_world_size=1)
    assert TrajectoryPlan(TrajectoryMode(mode), geometry).dispatcher == dispatcher


@pytest.mark.parametrize(
    "options",
    [LEROBOT, {"runner__enable_decoupled_mode": True}, {"algorithm__adv_type": "opd"}],
)
def test_pipeline_training_excludes_some_features(options):
    cfg = run_config(**PIPELINE, **options)
    for function in (
        TrajectoryPlan.mode_from_cfg,
        select_trajectory_collector,
        select_trajectory_dispatcher,
    ):
        with pytest.raises(ValueError, match="does not support"):
            function(cfg)


def test_every_level_of_the_config_may_be_absent():
    assert TrajectoryPlan.mode_from_cfg(OmegaConf.create({})) is TrajectoryMode.ROLLOUT


@pytest.mark.parametrize(
    ("env_ranks", "stages", "actors", "sources", "shards"),
    [(1, 1, 1, 1, 1), (2, 2, 2, 4, 1), (1, 2, 4, 2, 2), (1, 1, 2, 1, 2), (3, 1, 2, 3, 2)],
)
def test_every_actor_reads_equally_many_shards(env_ranks, stages, actors, sources, shards):
    cfg = run_config(rollout__pipeline_stage_num=stages)
    geometry = RolloutGeometry.from_world_sizes(
        cfg, env_world_size=env_ranks, actor_world_size=actors
    )
    assert geometry == RolloutGeometry(sources, 3, shards, actors)
    assert sources * shards % actors == 0
    assert geometry.rows_per_source(4 * sources) == 4


@pytest.mark.parametrize(
    ("options", "sizes", "words"),
    [
        ({}, (0, 1), "env world size must be positive, got 0"),
        ({"rollout__pipeline_stage_num": 0}, (1, 1), "pipeline_stage_num must be positive"),
        ({"env__train__max_steps_per_rollout_epoch": 1}, (1, 1), r"\(1\) is shorter than one"),
        ({"actor__model__num_action_chunks": None}, (1, 1), "num_action_chunks, which is not set"),
    ],
)
def test_impossible_geometry_is_named(options, sizes, words):
    env_ranks, actors = sizes
    with pytest.raises(ValueError, match=words):
        RolloutGeometry.from_world_sizes(
            run_config(**options), env_world_size=env_ranks, actor_world_size=actors
        )


def test_environments_must_be_dealt_out_equally():
    geometry = RolloutGeometry(
        source_count=4, chunk_count=1, shards_per_source=1, actor_world_size=1
    )
    with pytest.raises(
        ValueError, match=r"total_num_envs \(6\) must be a positive multiple of the 4"
    ):
        geometry.rows_per_source(6)


def test_world_sizes_come_from_the_placement_on_a_live_cluster(monkeypatch):
    ray = pytest.importorskip("ray")
    cfg = run_config()
    with pytest.raises(RuntimeError, match="not connected to one"):
        RolloutGeometry.from_cfg(cfg)

    class Placement:
        def __init__(self, config, cluster):
            assert config is cfg

        def get_world_size(self, component):
            return {"env": 2, "actor": 4}[component]

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    import rlinf.scheduler
    import rlinf.utils.placement

    monkeypatch.setattr(rlinf.scheduler, "Cluster", object)
    monkeypatch.setattr(rlinf.utils.placement, "HybridComponentPlacement", Placement)
    assert TrajectoryPlan.from_cfg(cfg).geometry == RolloutGeometry(2, 3, 2, 4)
    assert "ray" in sys.modules
