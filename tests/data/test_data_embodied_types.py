"""Messages of the embodied data interface: construction, rewards."""

import pytest
import torch
from embodied_messages import env_part, policy_output, transition

from rlinf_wamrl.data.embodied_types import (
    EnvOutput,
    EnvTransition,
    PolicyInput,
    PolicyOutput,
    TrajectoryStep,
)


def test_the_transition_is_the_one_source_of_reward_and_boundary_fields():
    inner = transition(
        intervene_actions=torch.ones(4, 6),
        intervene_flags=torch.ones(4, 2, dtype=torch.bool),
        rlt_switch_flags=torch.zeros(4, 2),
    )
    output = EnvOutput(obs={}, transition=inner)
    for name in (
        "rewards",
        "dones",
        "terminations",
        "truncations",
        "intervene_actions",
        "intervene_flags",
        "rlt_switch_flags",
    ):
        assert getattr(output, name) is getattr(inner, name)
    assert EnvOutput(obs={}).rewards is None


def test_prepared_observations_are_what_policies_read():
    output = EnvOutput(obs={})
    obs = {
        "states": torch.zeros(2, 3),
        "main_images": torch.zeros(2, 4, 4, 3),
        "task_descriptions": ("a", "b"),
        "private": 1,
    }
    prepared = output.prepare_observations(obs)
    assert set(prepared) == {
        "main_images",
        "wrist_images",
        "extra_view_images",
        "states",
        "task_descriptions",
    }
    assert prepared["task_descriptions"] == ["a", "b"] and prepared["wrist_images"] is None
    mask = torch.ones(2, dtype=torch.bool)
    assert output.prepare_observations({**obs, "reset_mask": mask})["reset_mask"] is mask


def test_environment_output_as_dict():
    output = EnvOutput(obs={"states": torch.zeros(1, 2)}, env_infos={"x": 1})
    as_dict = output.to_dict()
    assert set(as_dict) == {"obs", "final_obs", "env_infos", *EnvTransition().to_dict()}
    assert as_dict["final_obs"] is None and as_dict["env_infos"] == {"x": 1}
    assert "executed_mask" not in as_dict


def test_messages_keep_containers_and_detach_only_policy_outputs():
    obs = {"states": torch.zeros(2, 3)}
    assert PolicyInput(obs=obs).obs is obs
    grad = torch.zeros(2, 3, requires_grad=True)
    assert (
        not PolicyOutput(forward_inputs={"a": {"b": [grad]}})
        .forward_inputs["a"]["b"][0]
        .requires_grad
    )
    assert not hasattr(policy_output(), "actions")
    base = torch.zeros(3, 2)
    assert EnvTransition(rewards=base.T).rewards.is_contiguous()


@pytest.mark.parametrize("mask", [torch.ones(4, 2), torch.ones(4, dtype=torch.bool)])
def test_executed_mask_must_be_bool_per_action(mask):
    with pytest.raises(ValueError, match=r"executed_mask must be a bool tensor \[B, C\]"):
        transition(executed_mask=mask)


def test_trajectory_data_is_replaced_as_a_whole_and_shared():
    original = transition(reward_model_output=torch.ones(4, 2))
    enriched = original.with_trajectory_data(reward_assign_lengths=[1, 2, 1, 1])
    assert enriched.reward_model_output is None
    assert enriched.reward_assign_lengths == [1, 2, 1, 1]
    assert enriched.rewards is original.rewards
    assert original.reward_assign_lengths is None


# ---------------------------------------------------------------- rewards


def rewards_of(part: EnvTransition, **options):
    values = {
        "bootstrap_values": None,
        "env_reward_weight": 0.0,
        "reward_weight": 1.0,
        "auto_reset": True,
        "bootstrap_type": "standard",
        "gamma": 0.5,
    }
    return part.compute_rewards(**{**values, **options})


def test_rewards_without_scores_are_not_weighted_and_have_own_storage():
    part = transition()
    rewards = rewards_of(part)
    assert torch.equal(rewards, part.rewards)
    rewards += 1
    assert not torch.equal(rewards, part.rewards)
    assert rewards_of(EnvTransition()) is None


def test_rewards_with_scores_are_a_weighted_sum():
    part = transition(reward_model_output=torch.full((4, 2), 10.0, dtype=torch.float64))
    rewards = rewards_of(part, env_reward_weight=2.0, reward_weight=3.0)
    assert torch.equal(rewards, 2 * part.rewards + 30)
    assert rewards.dtype == part.rewards.dtype


@pytest.mark.parametrize("bootstrap_type", ["standard", "always"])
def test_bootstrap_goes_to_the_last_slot_of_cut_off_chunks(bootstrap_type):
    truncations = torch.tensor([[0, 1], [1, 0], [0, 0], [0, 0]], dtype=torch.bool)
    dones = truncations | torch.tensor([[0, 0], [0, 0], [0, 1], [0, 0]], dtype=torch.bool)
    part = transition(truncations=truncations, dones=dones)
    values = torch.tensor([[8.0], [16.0], [32.0], [64.0]])
    rewards = rewards_of(part, bootstrap_values=values, bootstrap_type=bootstrap_type)
    added = torch.zeros(4, 2)
    added[0, 1] = 4.0  # truncated on the last slot; row 1 is on an earlier one and doesn't count
    if bootstrap_type == "always":
        added[2, 1] = 16.0
    assert torch.equal(rewards - part.rewards, added)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"auto_reset": False}, {}),
        ({}, {"dones": None}),
        ({}, {"truncations": None}),
        ({"bootstrap_values": None}, {}),
    ],
)
def test_no_bootstrap_without_its_conditions(options, fields):
    ended = torch.ones(4, 2, dtype=torch.bool)
    part = transition(**{"dones": ended, "truncations": ended, **fields})
    values = {"bootstrap_values": torch.ones(4, 1), **options}
    assert torch.equal(rewards_of(part, **values), part.rewards)


def test_an_environment_part_uses_its_own_bootstrap_values():
    ended = torch.ones(4, 2, dtype=torch.bool)
    part = env_part(transition=transition(dones=ended, truncations=ended))
    rewards = part.compute_rewards(
        env_reward_weight=0.0,
        reward_weight=1.0,
        auto_reset=True,
        bootstrap_type="standard",
        gamma=1.0,
    )
    assert torch.equal(rewards[:, -1], part.transition.rewards[:, -1] + torch.arange(4.0))


def test_delayed_scores_reach_the_steps_before_the_newest():
    steps = [TrajectoryStep(rewards=torch.zeros(3, 2)) for _ in range(4)]
    steps.insert(2, TrajectoryStep())  # without rewards: not counted
    part = transition(
        3,
        reward_model_output=torch.tensor([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]]),
        reward_assign_lengths=[1, 3, 9],
    )
    part.assign_history_rewards(steps, reward_weight=0.5)
    first_columns = [step.rewards[:, 0].tolist() for step in steps if step.rewards is not None]
    assert first_columns == [[0, 0, 2], [0, 1, 2], [0, 1, 2], [0, 0, 0]]


def test_delayed_scores_need_scores_and_rewards():
    with pytest.raises(ValueError, match="needs a reward_model_output"):
        transition(reward_assign_lengths=[1] * 4).assign_history_rewards([], reward_weight=1.0)
    with pytest.raises(ValueError, match="the step has none"):
        TrajectoryStep().add_reward(0, torch.ones(2))
