"""Rank 0's stores listen on one address; who listens where is read from the kernel."""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from dflop.jobs.rank_setup import joined
from dflop.train import wire
from tests.train.ranks import start

LISTENING = "0A"


def listening_on(port: int) -> set[str]:
    """Addresses of this machine that listen on a port, as the kernel lists them."""
    found = set()
    for name, words in (("tcp", 1), ("tcp6", 4)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            digits, _, hex_port = address.partition(":")
            if int(hex_port, 16) == port and state == LISTENING:
                raw = b"".join(bytes.fromhex(digits[8 * w : 8 * w + 8])[::-1] for w in range(words))
                found.add(str(ipaddress.ip_address(raw)))
    return found


def own_address() -> str:
    """An address of this machine that is not the loopback device's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            pytest.skip("no network but the loopback device")
        return str(probe.getsockname()[0])


def test_on_one_machine_only_the_loopback_device(tmp_path):
    store = wire.open_store("127.0.0.1", 0, is_server=True, timeout_s=20)
    assert listening_on(store.port) == {"127.0.0.1"}
    other = wire.open_store("127.0.0.1", store.port, is_server=False, timeout_s=20)
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_between_machines_the_address_the_others_know():
    address = own_address()
    store = wire.open_store(address, 0, is_server=True, timeout_s=20)
    assert listening_on(store.port) == {address}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port), timeout=5).close()


@pytest.mark.parametrize("host", ["localhost", "no-such-host.invalid", "192.0.2.1"])
def test_where_no_one_address_is_right_it_can_still_be_reached(host):
    """A node whose name leads to itself alone, to nowhere, or to an address that is not its own."""
    with wire.listen(host, 0) as listening:
        port = listening.getsockname()[1]
        assert listening_on(port) & {"::", "0.0.0.0"}
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        with pytest.raises(OSError, match="in use"):
            wire.listen("127.0.0.1", port)


@pytest.mark.parametrize(
    ("local", "world", "expected"), [("4", "4", "127.0.0.1"), ("2", "4", "node1"), (None, "4", "node1")]
)
def test_where_rank_0_is(local, world, expected):
    environ = {"WORLD_SIZE": world, "MASTER_ADDR": "node1"} | ({"LOCAL_WORLD_SIZE": local} if local else {})
    assert wire.master_host(environ) == expected


def meet(rank, place, folder):
    """What rank 0 sees, into a file."""
    os.environ |= place | {"RANK": str(rank)}
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 1024) - 1, most))
    with joined("gloo", 60):
        seen = [None, None]
        dist.all_gather_object(seen, dist.get_rank())
        if rank == 0:
            (folder / "seen").write_text(f"{seen} {sorted(listening_on(int(place['MASTER_PORT'])))}")
            (folder / "files").write_text(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == most))
        dist.barrier()


def test_ranks_of_a_job_find_each_other_there(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": str(port)}
    start(meet, 2, place, tmp_path)
    assert (tmp_path / "seen").read_text() == "[0, 1] ['127.0.0.1']"
    assert (tmp_path / "files").read_text() == "True", "every process group takes a file per rank"
