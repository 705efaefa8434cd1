"""Queries between hosts: the states of ranks of other hosts, after the time limit.

Ranks of one host share a board. For the states of other ranks, the first rank of each host listens
on its own TCP port, independent of MPI and of its program. If a host does not answer, it is stopped
or its link is cut.

A host answers only who knows its secret, which is exchanged by MPI and never sent over this port.
The asker shows a digest of the secret and of a number that the host chose, and the host's answer
has a digest of the secret and of both sides' numbers. A process that listens on the port of another
host is therefore not believed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import hmac
import json
import platform
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from mpi4py import MPI

from mpigrad.guard import board as b
from mpigrad.guard.wait_graph import grouped

__all__ = ["LIMIT", "HostQuery", "open_host_query"]

LIMIT = 2.0  # seconds to wait for an answer
_SECRET, _DIGEST, _LENGTH = 16, 32, 4  # bytes, also of numbers and of the length of an answer
_MOST = 1 << 20  # bytes of an answer
_CLIENTS = 16  # that are answered at once
_NO_REPORT = 2**32 - 1  # in place of the asker's index: it only asks whether the host answers
_SIOCGIFADDR = 0x8915


@dataclasses.dataclass(frozen=True)
class _Address:
    """The address of a board: host, TCP port and secret."""

    host: str
    ranks: tuple[int, ...]
    addresses: tuple[str, ...]
    port: int
    secret: bytes


class HostQuery:
    """Queries the other boards, and answers for this one.

    Parameters
    ----------
    board
        The board of this rank.
    boards
        The addresses of all boards of the job, in the order of their first ranks.
    """

    def __init__(self, board: b.Board, boards: Sequence[_Address]) -> None:
        self.board, self.boards = board, boards
        self.own_index = next(i for i, other in enumerate(boards) if other.ranks == board.ranks)
        self.reached_before: set[int] = set()  # the boards to which a connection was made

    def rank_states(
        self, own_states: Callable[[], list[str]]
    ) -> tuple[list[str], list[str]] | None:
        """Return lines with the states of all ranks, and the hosts that do not answer.

        If several boards ask at once, only the first reports, and the others get None.
        `own_states` returns the lines for this board.
        """
        answers, _ = asyncio.run(self._ask(self.own_index))
        if any(i < self.own_index and answer["asks"] for i, answer in answers.items()):
            return None
        lines, missing = [], []
        for i, other in enumerate(self.boards):
            if i == self.own_index or i in answers:
                lines.append(f"on {other.host}:")
                lines += own_states() if i == self.own_index else answers[i]["lines"]
            else:
                missing.append(other.host)
                ranks = grouped((f"rank {r}", "unknown") for r in other.ranks)
                lines += [f"on {other.host}, which does not answer:", *ranks]
        return lines, missing

    def lost_hosts(self, *, must_answer: bool) -> list[str]:
        """Return the hosts that were reached before, and now are not or do not answer if they must.

        The system of a host accepts a connection for a process that is stopped, or that has held
        Python's lock for long. A host behind a firewall is never reached, and so never lost. No
        board leaves a report to another one because of this.
        """
        answers, reached = asyncio.run(self._ask(_NO_REPORT))
        self.reached_before |= reached
        lost = self.reached_before - set(answers if must_answer else reached)
        return [self.boards[i].host for i in sorted(lost)]

    async def _ask(self, asker: int) -> tuple[dict[int, dict], set[int]]:
        """Return the answers of boards, and the boards to which a connection was made."""
        answers: dict[int, dict] = {}
        reached: set[int] = set()
        tasks = [
            asyncio.create_task(self._ask_one(i, address, asker, answers, reached))
            for i in range(len(self.boards))
            for address in self._addresses_of(i)
        ]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=LIMIT)
            for task in late:
                task.cancel()
        return answers, reached

    def _addresses_of(self, i: int) -> list[str]:
        """Return where to ask another board.

        Addresses that this host has too, such as those of virtual bridges, lead to this host.
        """
        me, other = self.boards[self.own_index], self.boards[i]
        if i == self.own_index:
            return []
        if other.host == me.host:
            return [*other.addresses, "127.0.0.1"]
        return [address for address in other.addresses if address not in me.addresses]

    async def _ask_one(
        self, i: int, address: str, asker: int, answers: dict[int, dict], reached: set[int]
    ) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):
            board, own_number = self.boards[i], secrets.token_bytes(_SECRET)
            reader, writer = await asyncio.open_connection(address, board.port)
            reached.add(i)
            number = await reader.readexactly(_SECRET)
            writer.write(_question(board.secret, number, own_number, asker))
            head = await reader.readexactly(_DIGEST + _LENGTH)
            length = int.from_bytes(head[_DIGEST:])
            if length <= _MOST:
                text = await reader.readexactly(length)
                expected = _answer(board.secret, number, own_number, text)
                if hmac.compare_digest(head + text, expected):
                    answers[i] = json.loads(text)
            writer.close()

    def answer(self, listener: socket.socket, own_states: Callable[[], list[str]]) -> None:
        """Answer queries about this board until the process ends."""
        free = threading.Semaphore(_CLIENTS)
        while True:
            free.acquire()
            try:
                connection, _ = listener.accept()
                # Each has a thread of its own: a client that says nothing holds up nobody.
                threading.Thread(
                    target=self._answer_one, args=(connection, own_states, free), daemon=True
                ).start()
            except (OSError, RuntimeError):  # this process has no descriptors or threads now
                free.release()
                time.sleep(0.1)

    def _answer_one(
        self,
        connection: socket.socket,
        own_states: Callable[[], list[str]],
        free: threading.Semaphore,
    ) -> None:
        secret, number = self.boards[self.own_index].secret, secrets.token_bytes(_SECRET)
        with connection, contextlib.suppress(Exception):
            connection.settimeout(LIMIT / 2)
            connection.sendall(number)
            question = connection.recv(_SECRET + 4 + _DIGEST, socket.MSG_WAITALL)
            theirs, asker = struct.unpack(f"!{_SECRET}sI", question[:-_DIGEST])
            if hmac.compare_digest(question, _question(secret, number, theirs, asker)):
                reports = asker != _NO_REPORT
                states = {
                    "asks": reports and self._leave_to(asker),
                    "lines": own_states() if reports else [],
                }
                text = json.dumps(states).encode()
                connection.sendall(_answer(secret, number, theirs, text))
        free.release()

    def _leave_to(self, asker: int) -> bool:
        """Return True if a rank of this board reports. If not, let the asking board report."""
        with self.board.locked():
            cause = int(self.board.header["cause"])
            if cause == 0:
                self.board.header["cause"] = -1 - asker
            return cause > 0


def _question(secret: bytes, number: bytes, own_number: bytes, asker: int) -> bytes:
    """Return the question of board `asker` to the host with this secret, which chose `number`."""
    begin = own_number + struct.pack("!I", asker)
    return begin + hmac.digest(secret, b"question" + number + begin, "sha256")


def _answer(secret: bytes, number: bytes, their_number: bytes, text: bytes) -> bytes:
    """Return an answer: digest, length and text."""
    digest = hmac.digest(secret, b"answer" + number + their_number + text, "sha256")
    return digest + len(text).to_bytes(_LENGTH) + text


def open_host_query(board: b.Board, own_states: Callable[[], list[str]]) -> HostQuery | None:
    """Exchange the addresses of all boards (collective). None for a single board."""
    world = MPI.COMM_WORLD
    if len(board.slots) == world.size:
        return None
    listener, own_address = None, None
    if board.own_index == 0:
        listener, port = _listen()
        secret = secrets.token_bytes(_SECRET)
        own_address = _Address(platform.node(), board.ranks, tuple(_addresses()), port, secret)
    boards = [address for address in world.allgather(own_address) if address is not None]
    query = HostQuery(board, boards)
    if listener is not None:
        answering = threading.Thread(
            target=query.answer, args=(listener, own_states), daemon=True, name="mpigrad-host-query"
        )
        answering.start()
    return query


def _listen() -> tuple[socket.socket | None, int]:
    with contextlib.suppress(OSError):
        listener = socket.create_server(("", 0), backlog=64)
        return listener, listener.getsockname()[1]
    return None, 0


def _addresses() -> list[str]:
    """Return the IPv4 addresses of this host's network interfaces."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
                addresses.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in addresses if not address.startswith("127.")]
