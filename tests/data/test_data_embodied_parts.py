"""Messages of the embodied data interface: splitting and merging under every partition."""

import pickle

import pytest
import torch
from embodied_messages import KEY, OTHER_KEY, env_part, policy_output, transition
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_wamrl.data.batch_values import batch_values_equal
from rlinf_wamrl.data.embodied_types import (
    EnvPart,
    EnvTransition,
    PolicyInput,
    PolicyOutput,
    PolicyPart,
    TrajectoryKey,
    TrajectorySource,
)

row_partitions = st.lists(st.integers(1, 3), min_size=1, max_size=4)


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
