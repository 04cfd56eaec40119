"""The two-node example on paper: it composes, and RLinf places its components as it says."""

import pytest
from rlinf.scheduler.cluster.node import NodeGroupInfo, NodeInfo
from rlinf.scheduler.hardware import Accelerator, AcceleratorType, HardwareInfo, HardwareResource
from rlinf.utils.placement import HybridComponentPlacement
from tiny_run import compose_5b

from rlinf_wamrl.config.checkpoints import resolve_checkpoint
from rlinf_wamrl.config.placement import world_size
from rlinf_wamrl.data.traffic import bytes_per_macro_step, crossing_bytes, run_shapes


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return compose_5b("libero_wamrl_5b_two_nodes", tmp_path_factory.mktemp("two_nodes"))


def test_it_composes_with_the_sizes_its_placement_needs(run):
    ranks = {name: world_size(run, name) for name in ("env", "rollout", "reward", "actor")}
    assert ranks == {"env": 8, "rollout": 4, "reward": 4, "actor": 8}
    assert run.cluster.num_nodes == 2 and run.algorithm.staleness_threshold == 1


def node(rank):
    model = f"{AcceleratorType.NV_GPU.value}:GPU"
    infos = [HardwareInfo(type=Accelerator.HW_TYPE, model=model) for _ in range(8)]
    return NodeInfo(
        node_labels=[],
        node_rank=rank,
        ray_id=str(rank),
        node_ip=f"10.0.0.{rank}",
        num_cpus=64,
        python_interpreter_path="python",
        default_env_vars={},
        env_vars={},
        hardware_resources=[HardwareResource(type=Accelerator.HW_TYPE, infos=infos)],
    )


class TwoNodes:
    """What RLinf's placement asks of a cluster, for two nodes of 8 GPUs."""

    def __init__(self):
        self.nodes = [node(0), node(1)]
        self.num_nodes, self.num_accelerators = 2, 16
        self.group = NodeGroupInfo(label=NodeGroupInfo.DEFAULT_GROUP_LABEL, nodes=self.nodes)

    def get_node_group(self, _label=None):
        return self.group

    def get_node_info(self, rank):
        return self.nodes[rank]


def test_rlinf_puts_the_learner_on_a_node_of_its_own(run):
    cluster = TwoNodes()
    placement = HybridComponentPlacement(run, cluster)
    nodes = {
        name: {p.cluster_node_rank for p in placement.get_strategy(name).get_placement(cluster)}
        for name in ("env", "rollout", "reward", "actor")
    }
    assert nodes == {"env": {0}, "rollout": {0}, "reward": {0}, "actor": {1}}


def test_only_trajectories_cross_the_network(run):
    shapes = run_shapes(run, resolve_checkpoint(run.actor.model).config, (224, 448))
    counted = bytes_per_macro_step(shapes)
    nodes = {"env": 0, "rollout": 0, "reward": 0, "actor": 1}
    assert crossing_bytes(counted, nodes) == counted["trajectories"]
    pictures = (1 + shapes.frames) * 3 * 224 * 448  # the current one and those inside the chunk
    assert pictures < counted["trajectories"] < 1.02 * pictures
