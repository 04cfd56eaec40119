"""What RLinf finds after the plugin is registered, checked through RLinf's own functions."""

import pytest
import torch
from omegaconf import OmegaConf
from rlinf.algorithms.registry import calculate_adv_and_returns, policy_loss
from rlinf.config import SupportedModel
from rlinf.envs import SupportedEnvType
from rlinf.workers.env import env_worker

import rlinf_wamrl
from rlinf_wamrl.rl.losses import ppo_flow_loss
from rlinf_wamrl.runtime import rlinf_compat
from rlinf_wamrl.runtime.rlinf_compat import CompatibilityError


@pytest.fixture(autouse=True)
def registered():
    rlinf_wamrl.register()


def test_registering_twice_changes_nothing():
    lookup = env_worker.get_env_cls
    rlinf_wamrl.register()
    assert env_worker.get_env_cls is lookup
    assert [member.value for member in SupportedEnvType].count("wamrl_libero") == 1


def test_rlinf_knows_model_and_environment():
    assert SupportedModel("wamrl").value == "wamrl"
    assert SupportedEnvType("wamrl_libero").value == "wamrl_libero"
    assert env_worker.get_env_cls("wamrl_libero").__name__ == "WAMLiberoEnv"


def test_other_environments_still_go_through_rlinf():
    with pytest.raises(ValueError, match="not a valid SupportedEnvType"):
        env_worker.get_env_cls("nothing")


def test_the_worker_platform_is_usable_without_an_accelerator():
    from rlinf.scheduler import Worker

    if torch.cuda.is_available():
        pytest.skip("this machine has an accelerator")
    assert Worker.torch_device_type == "cpu"
    Worker.torch_platform.empty_cache()
    Worker.torch_platform.synchronize()
    assert Worker.torch_platform.current_device() == "cpu"
    assert Worker.torch_platform.memory_allocated() == 0


def rollout():
    """Two groups of two; episode 1 ends with success in chunk 0, episode 2 in chunk 1."""
    T, B, C = 2, 4, 3
    rewards = torch.zeros(T, B, C)
    rewards[0, 1, 2] = 1.0
    rewards[1, 2, 0] = 1.0
    dones = torch.zeros(T + 1, B, C, dtype=torch.bool)
    dones[1, 1, 2] = dones[2, 1] = True
    dones[2, 2] = dones[2, 0, 2] = dones[2, 3, 2] = True
    alive = torch.ones(T, B, 1, dtype=torch.bool)
    alive[1, 1] = False
    return rewards, dones, alive


def test_group_advantages_come_out_of_rlinfs_own_entry_point():
    rewards, dones, alive = rollout()
    result = calculate_adv_and_returns(
        task_type="embodied",
        adv_type="wamrl_group",
        rewards=rewards,
        dones=dones,
        gamma=1.0,
        gae_lambda=1.0,
        group_size=2,
        reward_type="chunk_level",
        loss_mask=alive,
        loss_mask_sum=alive.sum(0, keepdim=True).expand_as(alive),
    )
    expected = torch.tensor([[-1.0, 1.0, 1.0, -1.0], [-1.0, 0.0, 1.0, -1.0]])
    torch.testing.assert_close(result["advantages"].squeeze(-1), expected)


def test_per_step_parts_leave_out_what_has_no_reward_and_groups_that_are_dropped():
    rewards, dones, alive = rollout()
    rewards[0, 0, 0] = 1.0  # the first group succeeds as a whole and teaches nothing
    reconstruction = torch.tensor([[5.0, 1.0, 4.0, 9.0], [1.0, 0.0, 1.0, 2.0]])
    exists = torch.tensor([[True, True, True, False], [True, False, True, True]])
    options = {
        "task_type": "embodied",
        "adv_type": "wamrl_group",
        "rewards": rewards,
        "dones": dones,
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "group_size": 2,
        "reward_type": "chunk_level",
        "loss_mask": alive,
        "loss_mask_sum": alive.sum(0, keepdim=True).expand_as(alive),
        "reconstruction_reward": reconstruction,
        "reconstruction_mask": exists,
        "lambda_step": 0.5,
    }
    result = calculate_adv_and_returns(**options)["advantages"].squeeze(-1)
    # +1 and -1 of success and failure; step 0 has one reward only, step 1 two around 1.5
    expected = torch.tensor([[0.0, 0.0, 1.0, -1.0], [0.0, 0.0, 1.0 - 0.25, -1.0 + 0.25]])
    torch.testing.assert_close(result, expected)
    alike = calculate_adv_and_returns(**options, weigh_by="episode")["advantages"].squeeze(-1)
    length = torch.tensor([2.0, 1.0, 2.0, 2.0])  # of episodes; their mean is 1.75
    torch.testing.assert_close(alike, expected * 1.75 / length)


def test_flow_ppo_comes_out_of_rlinfs_own_entry_point():
    generator = torch.Generator().manual_seed(0)
    new, old = torch.randn(2, 5, 3, 7, generator=generator).mul(0.01).unbind(0)
    advantages = torch.randn(5, 1, generator=generator)
    mask = torch.tensor([[True], [True], [False], [True], [True]])
    loss, metrics = policy_loss(
        task_type="embodied",
        loss_type="wamrl_flow_ppo",
        logprob_type="chunk_level",
        reward_type="chunk_level",
        single_action_dim=7,
        logprobs=new,
        old_logprobs=old,
        advantages=advantages,
        loss_mask=mask,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_c=3.0,
    )
    direct, _ = ppo_flow_loss(
        new.sum((1, 2)), old.sum((1, 2)), advantages[:, 0], 0.2, 0.2, mask[:, 0]
    )
    assert loss.item() == pytest.approx(direct.item())
    assert metrics["actor/ratio"] == pytest.approx(
        (new - old).sum((1, 2))[mask[:, 0]].exp().mean().item(), rel=1e-5
    )


def test_a_missing_target_of_a_patch_is_loud():
    with pytest.raises(CompatibilityError, match="RLinf has no .*gone"):
        rlinf_compat._require(OmegaConf, "gone")
