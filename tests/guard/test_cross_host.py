"""Queries between hosts: who is answered, and who holds up whom."""

import dataclasses
import socket
import threading
import time

import numpy as np
import pytest

from mpigrad.guard import board as b
from mpigrad.guard import cross_host
from mpigrad.guard.cross_host import HostQuery

pytestmark = pytest.mark.ranks(1)


@pytest.fixture
def hosts():
    """The queries of two hosts with one rank each, of which the second answers."""
    listener, port = cross_host._listen()
    assert listener is not None
    addresses = [
        cross_host._Address(f"node{i}", (i,), ("127.0.0.1",) * i, port, bytes([i] * 16))
        for i in range(2)
    ]
    queries = [
        HostQuery(b.Board(np.zeros((), b.HEADER), None, 0, (i,)), addresses) for i in range(2)
    ]
    args = listener, lambda: [f"state of {listener.getsockname()[1]}"]
    threading.Thread(target=queries[1].answer, args=args, daemon=True).start()
    return queries


def test_a_host_is_asked_and_answers(hosts):
    lines, missing = hosts[0].rank_states(lambda: ["own state"])
    assert missing == []
    assert lines[:3] == ["on node0:", "own state", "on node1:"]
    assert lines[3].startswith("state of ")


def test_clients_that_say_nothing_hold_up_nobody(hosts):
    silent = [socket.create_connection(("127.0.0.1", hosts[0].boards[1].port)) for _ in range(8)]
    start = time.monotonic()
    assert hosts[0].rank_states(lambda: [])[1] == []
    assert time.monotonic() - start < cross_host.LIMIT
    for client in silent:
        client.close()


def test_the_secret_is_needed_and_not_sent(hosts, monkeypatch):
    sent = []
    question = cross_host._question
    monkeypatch.setattr(
        cross_host, "_question", lambda *args: sent.append(question(*args)) or sent[-1]
    )
    assert hosts[0].rank_states(lambda: [])[1] == []
    assert sent and all(bytes([1] * 16) not in text for text in sent)
    hosts[0].boards = [
        hosts[0].boards[0],
        dataclasses.replace(hosts[0].boards[1], secret=bytes(16)),
    ]
    assert hosts[0].rank_states(lambda: [])[1] == ["node1"]


def test_whether_hosts_answer(hosts):
    port = hosts[1].boards[1].port
    hosts[0].boards[1] = dataclasses.replace(hosts[0].boards[1], port=1)
    assert hosts[0].lost_hosts(must_answer=True) == []  # it was never there
    hosts[0].boards[1] = dataclasses.replace(hosts[0].boards[1], port=port)
    for must_answer in (True, False):
        assert hosts[0].lost_hosts(must_answer=must_answer) == []
    assert int(hosts[1].board.header["cause"]) == 0  # it has left its report to nobody
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # the system accepts connections
        port = stopped.getsockname()[1]
        hosts[0].boards[1] = dataclasses.replace(hosts[0].boards[1], port=port)
        assert hosts[0].lost_hosts(must_answer=False) == []
        assert hosts[0].lost_hosts(must_answer=True) == ["node1"]
    assert hosts[0].lost_hosts(must_answer=False) == ["node1"]


def test_a_stranger_on_the_port_is_not_believed(hosts):
    """It does not know the secret, whatever it answers."""
    text = b'{"asks": true, "lines": ["false"]}'
    real = cross_host._answer(bytes(16), bytes(16), bytes(16), text)
    for answer in (text, real, real[: -len(text) - 4] + b"\xff\xff\xff\xff"):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            hosts[0].boards[1] = dataclasses.replace(
                hosts[0].boards[1], port=listener.getsockname()[1]
            )

            def stranger(listener=listener, answer=answer):
                client, _ = listener.accept()
                with client:
                    client.sendall(bytes(16))
                    client.recv(100)
                    client.sendall(answer)

            threading.Thread(target=stranger, daemon=True).start()
            lines, missing = hosts[0].rank_states(lambda: [])
            assert missing == ["node1"] and "false" not in lines


def test_addresses_of_the_own_host_are_not_asked(hosts):
    own, other = hosts[0].boards
    hosts[0].boards[0] = dataclasses.replace(own, addresses=("172.17.0.1", "10.0.0.1"))
    hosts[0].boards[1] = dataclasses.replace(other, addresses=("172.17.0.1", "10.0.0.2"))
    assert hosts[0]._addresses_of(1) == ["10.0.0.2"]


def test_few_clients_at_once(hosts):
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", hosts[0].boards[1].port)) for _ in range(40)]
    time.sleep(0.2)
    assert threading.active_count() - before <= cross_host._CLIENTS
    for client in silent:
        client.close()
