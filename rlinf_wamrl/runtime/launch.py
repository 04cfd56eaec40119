"""Starts a run: Ray, worker groups, runner; and ends it whatever happens."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from rlinf_wamrl.files import set_aside
from rlinf_wamrl.report.console import Console, duration
from rlinf_wamrl.runtime.collection import Collection
from rlinf_wamrl.runtime.failures import raise_worker_failures
from rlinf_wamrl.runtime.ray_session import ray_session

__all__ = ["make_room", "run_collection", "run_training"]

OF_A_RUN = ("iterations.jsonl", "success_buffer/*/*")
"""Files that training adds to."""


def run_training(cfg: DictConfig, console: Console) -> None:
    """Run a validated configuration to its end.

    Raises:
        WorkerFailedError: a worker failed or died.
    """
    _run(cfg, console)


def run_collection(cfg: DictConfig, collection: Collection, console: Console) -> None:
    """Roll out the policy of a validated configuration and write its episodes.

    Raises:
        WorkerFailedError: a worker failed or died.
        ValueError: episodes of another size are in the dataset already.
    """
    _run(collection.configure(cfg), console, collection)


def _run(cfg: DictConfig, console: Console, collection: Collection | None = None) -> None:
    started = time.monotonic()
    folder = Path(cfg.runner.logger.log_path) / cfg.runner.logger.experiment_name
    if collection is None and not cfg.runner.only_eval and cfg.runner.resume_dir is None:
        make_room(folder, console)
    folder.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.INFO)  # RLinf's placement logger sets its own level
    OmegaConf.save(cfg, folder / "config.yaml")
    console.line(f"run folder {folder}")
    console.phase("starting Ray")
    raise_worker_failures()
    with ray_session(cfg.cluster, folder / "worker_logs"):
        _run_on_cluster(cfg, console, started, collection)
    console.line(
        f"done in {duration(time.monotonic() - started)}; logs, checkpoints and TensorBoard files "
        f"are in {folder}"
    )


def make_room(folder: Path, console: Console) -> None:
    """Move an earlier run out of the folder of one that begins anew, so that they do not mix."""
    if any(file for name in OF_A_RUN for file in folder.glob(name)):
        console.line(f"the earlier run in {folder} is now {set_aside(folder)}")


def _run_on_cluster(
    cfg: DictConfig, console: Console, started: float, collection: Collection | None
) -> None:
    import rlinf_wamrl
    from rlinf_wamrl.runtime.rlinf_compat import report_worker_failures

    terminate = signal.getsignal(signal.SIGTERM)  # Ray would replace it by one that just exits
    # RLinf swallows errors of a plugin's register(); here they reach the user
    rlinf_wamrl.register()
    report_worker_failures()

    from rlinf.config import validate_cfg
    from rlinf.scheduler import Cluster
    from rlinf.utils.placement import HybridComponentPlacement

    from rlinf_wamrl.runtime.collection_runner import CollectionRunner
    from rlinf_wamrl.runtime.runner import WAMRunner
    from rlinf_wamrl.workers.env_worker import WAMEnvWorker
    from rlinf_wamrl.workers.learner import WAMLearner
    from rlinf_wamrl.workers.reward_worker import WAMRewardWorker
    from rlinf_wamrl.workers.rollout_worker import WAMRolloutWorker

    cfg = _validated_by_rlinf(_for_rlinf(cfg), validate_cfg)
    cluster = Cluster(cluster_cfg=cfg.cluster, distributed_log_dir=None)
    signal.signal(signal.SIGTERM, terminate)
    raise_worker_failures()  # again: RLinf has just put its own handler there
    console.phase("starting workers")
    placement = HybridComponentPlacement(cfg, cluster)
    groups = {}
    uses_reward_worker = cfg.RL.lambda_rec > 0 and cfg.RL.reconstruction.placement == "worker"
    classes = {"rollout": WAMRolloutWorker, "env": WAMEnvWorker}
    if not cfg.runner.only_eval and collection is None:
        classes["actor"] = WAMLearner
        if uses_reward_worker:
            classes["reward"] = WAMRewardWorker
    for component, worker in classes.items():
        groups[component] = worker.create_group(cfg).launch(
            cluster,
            name=cfg[component].group_name,
            placement_strategy=placement.get_strategy(component),
        )
    if collection is None:
        runner = WAMRunner(cfg, console=console, **groups)
    else:
        runner = CollectionRunner(cfg, console=console, collection=collection, **groups)
    console.phase("building models and environments")
    runner.init_workers()
    console.line(f"ready after {duration(time.monotonic() - started)}")
    runner.run()


def _validated_by_rlinf(
    cfg: DictConfig, validate: Callable[[DictConfig], DictConfig]
) -> DictConfig:
    """Run RLinf's own checks, which in 0.3.0 refuse pipeline mode for anything but GAE."""
    uses_pipeline = cfg.runner.use_training_pipeline
    cfg.runner.use_training_pipeline = False
    cfg = validate(cfg)
    cfg.runner.use_training_pipeline = uses_pipeline
    return cfg


def _for_rlinf(cfg: DictConfig) -> DictConfig:
    """Return a copy in RLinf's own terms, which it may extend."""
    copy = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    with open_dict(copy):
        for key in ("num_cpus", "object_store_gib"):
            copy.cluster.pop(key)
        copy.runner.logger.log_path = str(
            Path(cfg.runner.logger.log_path).resolve() / cfg.runner.logger.experiment_name
        )
        # evaluation environments exist only when RLinf thinks it evaluates
        if copy.runner.eval_before_training and copy.runner.val_check_interval <= 0:
            copy.runner.val_check_interval = copy.runner.max_steps + 1
        if copy.runner.only_eval:  # RLinf then reads the whole model section from here
            copy.rollout.model = {**copy.actor.model, **copy.rollout.model}
        copy.rollout.collect_prev_infos = True
        copy.rollout.collect_transitions = copy.RL.lambda_rec > 0 or copy.RL.video_sft.enabled
        copy.actor.wraps_model = copy.actor.fsdp_config.strategy != "plain"
        if not copy.actor.wraps_model:
            copy.actor.fsdp_config.strategy = "fsdp2"  # RLinf knows no third; it wraps nothing
        copy.algorithm.shuffle_rollout = False  # the learner shuffles what counts
    return copy
