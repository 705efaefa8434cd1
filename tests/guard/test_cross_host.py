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
        cross_host._Address(f"node{i}", (i,), ("127.0.0.1",), port, bytes([i] * 16))
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
