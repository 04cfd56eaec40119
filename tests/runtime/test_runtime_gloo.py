"""Groups of RLinf's on shared gloo devices: as many as before, one thread, the same tensors."""

import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from rlinf.scheduler.collective.multi_channel_pg import MultiChannelProcessGroup
from torch.distributed import TCPStore, distributed_c10d

from rlinf_wamrl.runtime.rlinf_compat import share_gloo_devices

GROUPS = 5


def send_or_receive(rank, port, is_shared, results):
    if is_shared:
        share_gloo_devices()
        share_gloo_devices()  # a second call changes nothing
    store = TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    groups = [
        MultiChannelProcessGroup._create_process_group(
            backend="gloo",
            world_size=2,
            rank=rank,
            store=store,
            group_name=f"group_{index}",
            timeout=timedelta(seconds=60),
        )
        for index in range(GROUPS)
    ]
    assert isinstance(
        groups[0]._get_backend(torch.device("cpu")), distributed_c10d.ProcessGroupGloo
    )
    received = []
    for index, group in enumerate(groups):
        tensor = torch.full((3,), float(index + 1)) if rank == 0 else torch.zeros(3)
        (group.send([tensor], 1, 0) if rank == 0 else group.recv([tensor], 0, 0)).wait()
        received.append(tensor.tolist())
    threads = [thread.read_text() for thread in Path("/proc/self/task").glob("*/comm")]
    results.put((received, sum(name.startswith("gloo_tcp_loop") for name in threads)))
    groups[0].barrier().wait()


@pytest.mark.parametrize(("is_shared", "loops"), [(False, GROUPS), (True, 1)])
def test_groups_share_one_device(is_shared, loops):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=send_or_receive, args=(rank, port, is_shared, results))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    expected = [[float(index + 1)] * 3 for index in range(GROUPS)]
    assert found == [(expected, loops)] * 2
