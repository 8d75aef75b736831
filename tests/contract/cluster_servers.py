"""A cluster of real servers without replicas, for tests of routing."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from redis import Redis

from demo.ports import free_ports
from tests.redis_servers import start_server

SLOTS = 16384


@contextmanager
def cluster(kind: str, size: int = 3) -> Iterator[list[int]]:
    """The ports of a cluster's nodes, each with its share of the slots."""
    ports = free_ports(size)
    with ExitStack() as stack:
        for port in ports:
            # The bus port is 10,000 above by default, which may be taken or too high.
            options = {"cluster-enabled": "yes", "cluster-port": str(free_ports(1)[0])}
            stack.enter_context(start_server(kind, options, port=port))
        nodes = [stack.enter_context(Redis(port=port, protocol=2)) for port in ports]
        for index, node in enumerate(nodes):
            first, last = index * SLOTS // size, (index + 1) * SLOTS // size - 1
            node.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            bus = int(nodes[0].config_get("cluster-port")["cluster-port"])
            node.execute_command("CLUSTER", "MEET", "127.0.0.1", ports[0], bus)
        _wait_until_whole(nodes)
        yield ports


def move_slot(slot: int, source: int, target: int, ports: list[int]) -> None:
    """Gives a slot and its names from one port's node to another's."""
    with ExitStack() as stack:
        nodes = {port: stack.enter_context(Redis(port=port, protocol=2)) for port in ports}
        ids = {port: node.execute_command("CLUSTER", "MYID").decode() for port, node in nodes.items()}
        nodes[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        nodes[source].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        while names := nodes[source].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            nodes[source].execute_command("MIGRATE", "127.0.0.1", target, "", 0, 5000, "KEYS", *names)
        for node in nodes.values():
            node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])


def take_slot(slot: int, target: int, ports: list[int]) -> None:
    """Gives a slot to one port's node without asking its holder; `ports` are of those that are told."""
    with ExitStack() as stack:
        nodes = {port: stack.enter_context(Redis(port=port, protocol=2)) for port in ports}
        target_id = nodes[target].execute_command("CLUSTER", "MYID").decode()
        nodes[target].execute_command("CLUSTER", "BUMPEPOCH")
        for node in nodes.values():
            node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)


def _wait_until_whole(nodes: list[Redis]) -> None:
    deadline = time.monotonic() + 20
    while not all(b"cluster_state:ok" in _info(node) and _knows_all(node, len(nodes)) for node in nodes):
        assert time.monotonic() < deadline, "the cluster does not come together"
        time.sleep(0.05)


def _info(node: Redis) -> bytes:
    reply = node.execute_command("CLUSTER INFO")
    return reply if isinstance(reply, bytes) else repr(reply).replace("': '", ":").encode()


def _knows_all(node: Redis, size: int) -> bool:
    return len(node.execute_command("CLUSTER", "SLOTS")) == size
