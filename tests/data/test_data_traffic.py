"""The bytes of a macro-step, against the messages that the workers send."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from rlinf_wamrl.config.checkpoints import resolve_checkpoint
from rlinf_wamrl.config.compose import compose_run
from rlinf_wamrl.data import traffic
from rlinf_wamrl.data.interface import EnvOutput, EnvTransition
from rlinf_wamrl.data.traffic import bytes_per_macro_step, crossing_bytes, run_shapes
from rlinf_wamrl.data.wire import packed_nbytes
from rlinf_wamrl.envs.rlinf_env import WAMLiberoEnv
from rlinf_wamrl.policy_builder import build_policy
from rlinf_wamrl.workers.env_worker import WAMEnvWorker
from rlinf_wamrl.workers.rollout_worker import WAMRolloutWorker

EXAMPLE = Path(__file__).parents[2] / "examples" / "libero_wamrl.yaml"
BATCH = 2


@pytest.fixture(scope="module")
def run():
    return compose_run(
        EXAMPLE,
        ["env.train.total_num_envs=2", "RL.group_size=2", "env.train.num_processes=1"],
    )


@pytest.fixture(scope="module")
def counted(run):
    shapes = run_shapes(run, resolve_checkpoint(run.actor.model).config, (64, 128))
    return bytes_per_macro_step(shapes, BATCH)


@pytest.fixture(scope="module")
def sent(run):
    """What the workers hand to RLinf for one macro-step of the real environment and policy."""
    messages = {"observations": [], "actions": [], "trajectories": []}
    policy = build_policy(run.actor.model, torch.float32).eval()
    env = WAMEnvWorker.__new__(WAMEnvWorker)
    env.cfg, env._iteration, env._rank, env._keeps_future = run, 0, 0, True
    env.train_num_envs_per_stage = env.train_batch_size = BATCH
    env.model_cfg, env.stage_num, env.env_list = run.actor.model, 1, []
    env._timer_metrics, env._accelerator_type = {}, None
    env.send_to = lambda **kw: messages["observations"].append(kw)
    rollout = WAMRolloutWorker.__new__(WAMRolloutWorker)
    rollout.cfg, rollout.hf_model, rollout._records_episodes = run, policy, False
    rollout.train_batch_size, rollout.version, rollout._rollout_mode = BATCH, 0, "train"
    rollout.send_to = lambda **kw: messages["actions"].append(kw["data"])
    rollout.predict = lambda obs, mode: policy.predict_action_batch(obs, mode=mode)

    class Actor:
        def put(self, item, async_op):
            messages["trajectories"].append(item)

    with torch.no_grad():
        simulator = WAMLiberoEnv(OmegaConf.create(dict(run.env.train)), BATCH, 0, 1, None)
        try:
            env.env_list = [simulator]
            [first] = env._bootstrap_epoch(None, 0)
            request = messages["observations"].pop()["data"]
            rollout._answer(request, 0, None, Actor())
            actions = messages["actions"][0]
            observations, rewards, ended, cut, _ = simulator.chunk_step(actions.numpy())
        finally:
            simulator.close()
    transition = EnvTransition(
        rewards=rewards,
        dones=ended | cut,
        terminations=ended,
        truncations=cut,
        executed_mask=observations[-1]["executed_mask"],
    )
    output = EnvOutput(obs=observations[-1], transition=transition)
    env._send_train_input(None, output, 0, 0, 1, None, False)
    call = messages["observations"][0]
    messages["observations"] = call["split_fn"](call["data"], [BATCH])
    rollout._publish_env_parts(call["data"], Actor())
    return messages


def nbytes(message):
    if isinstance(message, torch.Tensor):
        return message.numel() * message.element_size()
    return packed_nbytes(message)


@pytest.mark.parametrize("kind", ["observations", "actions", "trajectories"])
def test_counted_bytes_are_those_of_real_messages(kind, sent, counted):
    """Exactly in the tensors; the skeletons hold an instruction of another length."""
    real = sum(nbytes(message) for message in sent[kind]) / BATCH
    assert counted[kind] == pytest.approx(real, abs=120)


def test_a_message_crosses_once_for_each_end_that_is_not_on_node_0():
    traffic_of = {"observations": 100.0, "actions": 1.0, "trajectories": 10.0}
    assert crossing_bytes(traffic_of, {"env": 0, "rollout": 0, "actor": 1}) == 10.0
    assert crossing_bytes(traffic_of, {"env": 1, "rollout": 1, "actor": 0}) == 212.0
    assert crossing_bytes(traffic_of, {"env": 0, "rollout": 1, "actor": 1}) == 121.0


def test_an_imagined_video_and_scores_add_what_they_are(run):
    shapes = run_shapes(run, resolve_checkpoint(run.actor.model).config, (64, 128))
    base = bytes_per_macro_step(shapes, BATCH)
    imagined = bytes_per_macro_step(replace(shapes, latents=(48, 2, 4, 8)), BATCH)
    video = 2 * 48 * 2 * 4 * 8
    assert video <= imagined["trajectories"] - base["trajectories"] < video + 100
    scored = bytes_per_macro_step(replace(shapes, scores=True), BATCH)
    assert scored["scores"] == 4 * shapes.executed
    assert set(scored) == set(traffic.ENDS) and set(base) < set(scored)
