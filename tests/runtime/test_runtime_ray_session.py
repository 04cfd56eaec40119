"""Which Ray a run uses, and what is said when it is not there."""

import socket

import pytest
from omegaconf import OmegaConf

from rlinf_wamrl.runtime.ray_session import check_ray_answers, ray_session


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_an_address_where_nothing_listens_is_an_error_at_once():
    with pytest.raises(ConnectionError, match="nothing answers there.*unset RAY_ADDRESS"):
        check_ray_answers(f"127.0.0.1:{free_port()}")


def test_an_address_where_something_listens_passes():
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_ray_answers(f"127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize("address", ["auto", "local"])
def test_other_forms_are_left_to_ray(address):
    check_ray_answers(address)


def test_several_nodes_need_a_named_cluster(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cluster = OmegaConf.create({"num_nodes": 2})
    with (
        pytest.raises(ConnectionError, match="cluster.num_nodes = 2 needs a running Ray cluster"),
        ray_session(cluster, tmp_path),
    ):
        pass
