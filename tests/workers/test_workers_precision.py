"""bf16 arithmetic with float32 weights under FSDP2: recorded log-probs are reproduced exactly."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from rlinf.workers.actor.fsdp_actor_worker import EmbodiedFSDPActor
from tiny_parts import observations, tiny_policy, tiny_wam
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rlinf_wamrl.workers.learner import WAMLearner


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def bf16_policy(mode="first_frame"):
    policy = tiny_policy(tiny_wam(variant="optional_idm", action_infer_mode=mode))
    policy.wam.video_expert.requires_grad_(False)
    policy.trained_parts = ("action_expert", "proprio_encoder")
    return policy.to(torch.bfloat16)


def learner_of(policy, param_dtype, monkeypatch):
    """A learner that has built its policy, and nothing else."""
    monkeypatch.setattr(EmbodiedFSDPActor, "model_provider_func", lambda self: policy)
    learner = object.__new__(WAMLearner)
    precision = {"param_dtype": param_dtype}
    learner.cfg = OmegaConf.create({"actor": {"fsdp_config": {"mixed_precision": precision}}})
    learner.model = learner.model_provider_func()
    return learner


def test_what_trains_is_kept_in_float32_where_fsdp_casts(monkeypatch):
    dtypes = {
        param_dtype: {
            p.requires_grad: p.dtype
            for p in learner_of(bf16_policy(), param_dtype, monkeypatch).model.parameters()
        }
        for param_dtype in ("bf16", None)
    }
    assert dtypes["bf16"] == {True: torch.float32, False: torch.bfloat16}
    assert dtypes[None] == {True: torch.bfloat16, False: torch.bfloat16}


@pytest.mark.parametrize("mode", ["first_frame", "idm"])
def test_a_sharded_policy_scores_a_rollout_exactly_and_trains_in_float32(mesh, monkeypatch, mode):
    rollout = bf16_policy(mode)
    _, result = rollout.predict_action_batch(observations())
    record = result["forward_inputs"]
    learner = learner_of(bf16_policy(mode), "bf16", monkeypatch)
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True
    )
    fully_shard(learner.model, mesh=mesh, mp_policy=precision)
    scored = learner._forward(forward_inputs=record)["logprobs"]
    assert torch.equal(scored, result["prev_logprobs"])
    cast = learner.model(forward_inputs=record)["logprobs"]
    assert (cast - result["prev_logprobs"]).abs().max() > 1e-3  # what the views are for
    scored.sum().backward()
    trained = [p for p in learner.model.parameters() if p.requires_grad]
    assert {p.grad.dtype for p in trained} == {torch.float32}


def test_other_arguments_pass_as_they_are():
    seen = {}
    learner = SimpleNamespace(model=lambda **arguments: seen.update(arguments))
    windows = object()
    WAMLearner._forward(learner, forward_type="video_loss", windows=windows, records={"a": 1})
    assert seen["forward_type"] == "video_loss"
    assert seen["windows"] is windows
    assert seen["records"]["a"] == 1
