"""Messages of the embodied data interface: construction, splitting, merging, rewards."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_wamrl.data.batch_values import batch_values_equal
from rlinf_wamrl.data.embodied_types import (
    EnvOutput,
    EnvPart,
    EnvTransition,
    PolicyInput,
    PolicyOutput,
    PolicyPart,
    TrajectoryKey,
    TrajectorySource,
    TrajectoryStep,
)

KEY = TrajectoryKey(1, 0, 0, 0, 0)
OTHER_KEY = TrajectoryKey(1, 0, 1, 0, 0)


def transition(rows: int = 4, chunk: int = 2, **fields) -> EnvTransition:
    values = {
        "rewards": torch.arange(rows * chunk, dtype=torch.float32).reshape(rows, chunk),
        "dones": torch.zeros(rows, chunk, dtype=torch.bool),
        "terminations": torch.zeros(rows, chunk, dtype=torch.bool),
        "truncations": torch.zeros(rows, chunk, dtype=torch.bool),
    }
    return EnvTransition(**{**values, **fields})


def policy_output(rows: int = 4, **fields) -> PolicyOutput:
    forward_inputs = {
        "action": torch.arange(rows * 4.0).reshape(rows, 4),
        "hidden": torch.arange(rows * 2.0).reshape(rows, 2).bfloat16(),
        "nested": {"ids": torch.arange(rows)},
    }
    values = {
        "prev_logprobs": torch.arange(rows * 2.0).reshape(rows, 2),
        "prev_values": torch.arange(rows * 1.0).reshape(rows, 1),
        "versions": torch.zeros(rows, 2),
    }
    return PolicyOutput(forward_inputs=forward_inputs, **{**values, **fields})


def env_part(rows: int = 4, **fields) -> EnvPart:
    values = {
        "sources": [TrajectorySource(KEY, rows)],
        "transition": transition(rows),
        "next_obs": {"states": torch.arange(rows * 3.0).reshape(rows, 3)},
        "requires_inference": True,
        "bootstrap_values": torch.arange(rows * 1.0).reshape(rows, 1),
        "initial_transition": transition(rows),
    }
    return EnvPart(**{**values, **fields})


row_partitions = st.lists(st.integers(1, 3), min_size=1, max_size=4)


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


# ---------------------------------------------------------------- sources


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
@settings(max_examples=100, deadline=None)
def test_sources_split_and_merge_like_the_rows_they_name(source_sizes, data):
    sources = [
        TrajectorySource(TrajectoryKey(0, 0, index, 0, 0), size)
        for index, size in enumerate(source_sizes)
    ]
    total = sum(source_sizes)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=4)))
    bounds = [0, *cuts, total]
    sizes = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    shards = TrajectorySource.split(sources, sizes)
    assert [sum(piece.size for piece in shard) for shard in shards] == sizes
    rows = [
        (piece.key, piece.offset + row)
        for shard in shards
        for piece in shard
        for row in range(piece.size)
    ]
    assert rows == [(source.key, row) for source in sources for row in range(source.size)]
    assert TrajectorySource.merge(shards) == sources


def test_nested_source_splits_keep_offsets_of_the_whole():
    (_, second) = TrajectorySource.split([TrajectorySource(KEY, 6, offset=10)], [2, 4])
    (_, third) = TrajectorySource.split(second, [1, 3])
    assert third == [TrajectorySource(KEY, 3, offset=13)]


def test_source_edge_cases():
    assert TrajectorySource.split([], [2, 0]) == [[], []]
    assert TrajectorySource.merge([[], []]) == []
    with pytest.raises(ValueError, match="cannot split sources of 3 rows"):
        TrajectorySource.split([TrajectorySource(KEY, 3)], [2])
    swapped = [TrajectorySource(KEY, 1, offset=1), TrajectorySource(KEY, 1)]
    assert TrajectorySource.merge([[swapped[0]], [swapped[1]]]) == swapped
    assert len({KEY, OTHER_KEY, TrajectoryKey(1, 0, 0, 0, 0)}) == 2


# ---------------------------------------------------------------- split and merge of messages


@given(row_partitions)
@settings(max_examples=40, deadline=None)
def test_parts_split_and_merge_under_every_partition(sizes):
    rows = sum(sizes)
    part = env_part(
        rows,
        final_prev_values=torch.arange(rows * 1.0).reshape(rows, 1),
        transition=transition(
            rows,
            executed_mask=torch.ones(rows, 2, dtype=torch.bool),
            reward_assign_lengths=list(range(rows)),
        ),
    )
    shards = part.split(sizes)
    assert [shard.sources[0].size for shard in shards] == sizes
    assert all(shard.requires_inference for shard in shards)
    assert batch_values_equal(EnvPart.merge(shards), part)

    output = policy_output(rows)
    assert batch_values_equal(PolicyOutput.merge(output.split(sizes)), output)

    source_shards = TrajectorySource.split([TrajectorySource(KEY, rows)], sizes)
    fragments = [
        PolicyPart(sources=shard, obs={}, output=piece)
        for shard, piece in zip(source_shards, output.split(sizes), strict=True)
    ]
    whole = PolicyPart(sources=[TrajectorySource(KEY, rows)], obs={}, output=output)
    assert batch_values_equal(PolicyPart.merge(fragments), whole)


@given(row_partitions)
@settings(max_examples=40, deadline=None)
def test_requests_split_and_merge_under_every_partition(sizes):
    rows = sum(sizes)
    request = PolicyInput(
        obs={
            "states": torch.arange(rows * 1.0).reshape(rows, 1),
            "task_descriptions": ["t"] * rows,
        },
        intervene_flags=torch.ones(rows, 2, dtype=torch.bool),
        sources=[TrajectorySource(KEY, rows)],
        env_parts=[env_part(rows)],
        request_sizes=[rows],
        is_last=True,
    )
    shards = request.split(sizes)
    assert [shard.request_sizes for shard in shards] == [[size] for size in sizes]
    assert all(shard.is_last and len(shard.env_parts) == 1 for shard in shards)
    merged = PolicyInput.merge(shards)
    assert merged.request_sizes == sizes and merged.sources == request.sources
    assert batch_values_equal(merged.obs, request.obs)
    assert batch_values_equal(EnvPart.merge(merged.env_parts), request.env_parts[0])


@given(row_partitions)
@settings(max_examples=30, deadline=None)
def test_messages_survive_pickling_and_shards_are_small(sizes):
    rows = sum(sizes)
    part = env_part(rows, next_obs={"images": torch.zeros(rows, 64, 64, dtype=torch.uint8)})
    for size, shard in zip(sizes, part.split(sizes), strict=True):
        data = pickle.dumps(shard)
        assert batch_values_equal(pickle.loads(data), shard)
        assert len(data) < size * 64 * 64 + 6000


def test_pickling_keeps_two_names_of_one_tensor():
    action = torch.arange(8.0).reshape(4, 2)[1:]
    copy = pickle.loads(
        pickle.dumps(PolicyOutput(forward_inputs={"action": action, "again": action}))
    )
    assert copy.forward_inputs["action"] is copy.forward_inputs["again"]


def test_a_policy_part_has_one_origin():
    source = [TrajectorySource(KEY, 4)]
    with pytest.raises(ValueError, match="exactly one"):
        PolicyPart(sources=source, obs={})
    with pytest.raises(ValueError, match="exactly one"):
        PolicyPart(
            sources=source, obs={}, output=policy_output(), external_actions=torch.zeros(4, 2)
        )
    external = PolicyPart(sources=source, obs={}, external_actions=torch.zeros(4, 2))
    assert not external.inferred
    assert batch_values_equal(PolicyPart.merge(external.split()), external)


def test_a_routed_part_splits_by_its_sources():
    part = PolicyPart(
        sources=[TrajectorySource(KEY, 1), TrajectorySource(OTHER_KEY, 3, offset=2)],
        obs={"states": torch.arange(4.0)},
        output=policy_output(),
    )
    first, second = part.split()
    assert first.sources == part.sources[:1] and second.sources == part.sources[1:]
    assert second.obs["states"].tolist() == [1, 2, 3]
    assert second.output.prev_values.flatten().tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("fragments", "words"),
    [
        ([], "nothing to merge"),
        ([env_part(2), env_part(2, sources=[TrajectorySource(KEY, 2, 3)])], "join to one source"),
        (
            [
                env_part(2),
                env_part(2, sources=[TrajectorySource(KEY, 2, 2)], requires_inference=False),
            ],
            "Conflicting requires_inference",
        ),
        (
            [
                env_part(2),
                env_part(2, sources=[TrajectorySource(KEY, 2, 2)], initial_transition=None),
            ],
            "1 of 2 have an initial transition",
        ),
    ],
)
def test_environment_fragments_that_contradict_do_not_merge(fragments, words):
    with pytest.raises(ValueError, match=words):
        EnvPart.merge(fragments)


def test_policy_fragments_that_contradict_do_not_merge():
    source = TrajectorySource.split([TrajectorySource(KEY, 4)], [2, 2])
    inferred = PolicyPart(sources=source[0], obs={}, output=policy_output(2))
    external = PolicyPart(sources=source[1], obs={}, external_actions=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="some are inferred, some are external"):
        PolicyPart.merge([inferred, external])


def test_completing_a_part_replaces_what_rollout_owns():
    part = env_part(final_prev_values=torch.zeros(4, 1), next_rlt_obs={"z": torch.zeros(4, 1)})
    obs = {"states": torch.ones(4, 3)}
    values = torch.arange(8.0).reshape(4, 2)
    done = part.complete(next_obs=obs, next_rlt_obs=None, final_prev_values=values)
    assert done is not part and part.requires_inference and not done.requires_inference
    assert done.transition is part.transition and done.initial_transition is part.initial_transition
    assert done.next_obs is obs and done.next_rlt_obs is None
    assert done.bootstrap_values.tolist() == [[0.0], [2.0], [4.0], [6.0]]
    cleared = part.complete(next_obs=None, next_rlt_obs=None)
    assert cleared.bootstrap_values is None and cleared.final_prev_values is None


def test_merged_requests_fill_absent_flags_with_zeros():
    with_flags = PolicyInput(
        obs={"states": torch.zeros(2, 1)}, intervene_flags=torch.ones(2, 3, dtype=torch.bool)
    )
    without = PolicyInput(obs={"states": torch.zeros(1, 1)})
    merged = PolicyInput.merge([without, with_flags])
    assert merged.intervene_flags.tolist() == [[False] * 3, [True] * 3, [True] * 3]
    assert merged.intervene_flags.dtype == torch.bool and merged.rlt_switch_flags is None
    nameless = PolicyInput(obs={"other": torch.zeros(1, 1)})
    flagged = PolicyInput(
        obs={"other": torch.zeros(1, 1)}, intervene_flags=torch.ones(1, 3, dtype=torch.bool)
    )
    with pytest.raises(ValueError, match="cannot tell the rows"):
        PolicyInput.merge([nameless, flagged])


def test_requests_that_contradict_do_not_merge_or_split():
    asking = PolicyInput(obs={})
    given_actions = PolicyInput(obs={}, external_actions=torch.zeros(1, 2))
    assert asking.requires_inference and not given_actions.requires_inference
    with pytest.raises(ValueError, match="only some of them have external actions"):
        PolicyInput.merge([asking, given_actions])
    with pytest.raises(ValueError, match="nothing to merge"):
        PolicyInput.merge([])
    with pytest.raises(ValueError, match="only a producer's own request"):
        PolicyInput(obs={}, env_parts=[None, None]).split([1])
    assert PolicyInput(obs={}).split([1, 2])[1].env_parts == [None]


def test_transitions_that_contradict_do_not_merge():
    with pytest.raises(ValueError, match="nothing to merge"):
        EnvTransition.merge([])
    with pytest.raises(ValueError, match="1 of 2 shards are None"):
        EnvTransition.merge([transition(), transition(rewards=None)])
    payload = {
        "chunk_actions": torch.zeros(4, 1),
        "obs_list": [],
        "terminations": torch.zeros(4),
        "truncations": torch.zeros(4),
        "infos_list": [],
    }
    with pytest.raises(ValueError, match="1 of 2 have episode data"):
        EnvTransition.merge([transition(episode_data=payload), transition()])
