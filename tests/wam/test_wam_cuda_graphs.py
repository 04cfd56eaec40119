"""What is copied into CUDA graphs and when, with eager code in place of a graph."""

import pytest
import torch
from tiny_parts import HORIZON, observations, tiny_policy

from rlinf_wamrl.wam.cuda_graphs import ReplayedActions


class EagerGraphs:
    """Runs the captured function on its own inputs, as a graph would on its static memory."""

    def __init__(self):
        self.specs, self.copied = {}, []

    def __contains__(self, name):
        return name in self.specs

    def capture(self, spec):
        self.specs[spec.name] = spec

    def replay(self, name, inputs):
        spec = self.specs[name]
        self.copied.append(sorted(inputs))
        assert set(inputs) <= spec.external_inputs
        _copy(spec.inputs, inputs)
        return spec.func(spec.inputs)


def _copy(kept, given):
    if isinstance(given, torch.Tensor):
        assert kept.data_ptr() != given.data_ptr(), "a graph must not read the caller's memory"
        kept.copy_(given)
        return
    for key in given if isinstance(given, dict) else range(len(given)):
        _copy(kept[key], given[key])


@torch.no_grad()
def test_replayed_velocities_are_those_of_the_model():
    policy, graphs = tiny_policy(), EagerGraphs()
    model = policy.wam
    replayed = ReplayedActions(model, (3, 2), graphs)

    def state(seed):
        seen = observations(seed=seed)
        image = policy.processor.images(seen["main_images"], seen["wrist_images"])
        proprio = policy.processor.proprio(seen["states"])
        return policy.state(image, proprio, seen["task_descriptions"])

    for seed in (0, 1):
        cache = model.prefill(state(seed))
        for time in (900.0, 400.0):
            actions, timestep = torch.randn(3, HORIZON, 7), torch.full((3,), time)
            expected = model.action_velocity(actions, timestep, cache)
            assert torch.equal(replayed.action_velocity(actions, timestep, cache), expected)
    # the cache is copied once per prefill, not once per denoising step
    assert ["cache" in inputs for inputs in graphs.copied] == [True, False, True, False]
    assert list(graphs.specs) == ["action_velocity_3"]


@torch.no_grad()
def test_other_batch_sizes_run_without_a_graph():
    policy, graphs = tiny_policy(), EagerGraphs()
    replayed = ReplayedActions(policy.wam, (16,), graphs)
    plain = policy.predict_action_batch(observations())[0]
    policy._replayed = replayed
    assert torch.equal(policy.predict_action_batch(observations())[0], plain)
    assert not graphs.specs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_graphs_on_a_cuda_device_give_the_same_chunks():
    policy = tiny_policy().to("cuda")
    expected = policy.predict_action_batch(observations())[0]
    policy.capture_cuda_graph(train_batch_size=3, eval_batch_size=3)
    torch.testing.assert_close(policy.predict_action_batch(observations())[0], expected)
    policy.release_cuda_graph()
    torch.testing.assert_close(policy.predict_action_batch(observations())[0], expected)
