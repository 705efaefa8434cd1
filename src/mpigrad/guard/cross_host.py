"""The roll call: where the ranks of other hosts are, when an operation has waited too long.

Ranks that share a board see each other; between boards they can only be asked. The first rank of
each board answers on a TCP port of its own, beside MPI, whatever its program does. A board that
does not answer is that of a host which has stopped, or to which the link is cut.

The answer goes to those only who know the board's secret, which travels by MPI.
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
from collections.abc import Callable, Sequence

from mpi4py import MPI

from mpigrad.guard import board as b
from mpigrad.guard.wait_graph import grouped

__all__ = ["LIMIT", "RollCall", "roll_call"]

LIMIT = 2.0  # seconds that an answer may take
_SECRET = 16  # bytes
_SIOCGIFADDR = 0x8915


@dataclasses.dataclass(frozen=True)
class _Place:
    """A board, and where it can be asked."""

    host: str
    ranks: tuple[int, ...]
    addresses: tuple[str, ...]
    port: int
    secret: bytes


class RollCall:
    """Asks the other boards, and answers for this one.

    Parameters
    ----------
    board
        Of this rank.
    places
        All boards of the job, in the order of their first ranks.
    """

    def __init__(self, board: b.Board, places: Sequence[_Place]) -> None:
        self.board, self.places = board, places
        self.mine = next(i for i, place in enumerate(places) if place.ranks == board.ranks)

    def where(self, here: Callable[[], list[str]]) -> tuple[list[str], list[str]] | None:
        """Where all ranks are, in lines, and the hosts that do not answer.

        None where another board has the word: of several that ask at once, the first. `here` says
        where the ranks of this board are.
        """
        answers = asyncio.run(self._ask())
        if any(i < self.mine and answer["asks"] for i, answer in answers.items()):
            return None
        lines, missing = [], []
        for i, place in enumerate(self.places):
            if i == self.mine or i in answers:
                lines.append(f"on {place.host}:")
                lines += here() if i == self.mine else answers[i]["lines"]
            else:
                missing.append(place.host)
                ranks = grouped((f"rank {r}", "unknown") for r in place.ranks)
                lines += [f"on {place.host}, which does not answer:", *ranks]
        return lines, missing

    async def _ask(self) -> dict[int, dict]:
        answers: dict[int, dict] = {}
        me = self.places[self.mine]
        tasks = []
        for i, place in enumerate(self.places):
            near = ("127.0.0.1",) if place.host == me.host else ()
            for address in (*place.addresses, *near) if i != self.mine else ():
                tasks.append(asyncio.create_task(self._ask_one(i, address, answers)))
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=LIMIT)
            for task in late:
                task.cancel()
        return answers

    async def _ask_one(self, i: int, address: str, answers: dict[int, dict]) -> None:
        with contextlib.suppress(OSError, ValueError):
            place = self.places[i]
            reader, writer = await asyncio.open_connection(address, place.port)
            writer.write(place.secret + struct.pack("!I", self.mine))
            answers[i] = json.loads(await reader.read())
            writer.close()

    def answer(self, listener: socket.socket, here: Callable[[], list[str]]) -> None:
        """Answer for this board, for as long as the process lives."""
        secret = self.places[self.mine].secret
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(LIMIT / 2)
                question = connection.recv(_SECRET + 4, socket.MSG_WAITALL)
                if len(question) == _SECRET + 4 and hmac.compare_digest(question[:-4], secret):
                    (asker,) = struct.unpack("!I", question[-4:])
                    answer = {"asks": self._leave_to(asker), "lines": here()}
                    connection.sendall(json.dumps(answer).encode())

    def _leave_to(self, asker: int) -> bool:
        """Whether a rank of this board has the word; if not, the asking board has it."""
        with self.board.locked():
            cause = int(self.board.header["cause"])
            if cause == 0:
                self.board.header["cause"] = -1 - asker
            return cause > 0


def roll_call(board: b.Board, here: Callable[[], list[str]]) -> RollCall | None:
    """Open the way to the other boards; None where there is one board only (collective)."""
    world = MPI.COMM_WORLD
    if len(board.slots) == world.size:
        return None
    listener, place = None, None
    if board.mine == 0:
        listener, port = _listen()
        secret = secrets.token_bytes(_SECRET)
        place = _Place(platform.node(), board.ranks, tuple(_addresses()), port, secret)
    places = [found for found in world.allgather(place) if found is not None]
    call = RollCall(board, places)
    if listener is not None:
        answering = threading.Thread(
            target=call.answer, args=(listener, here), daemon=True, name="mpigrad-roll-call"
        )
        answering.start()
    return call


def _listen() -> tuple[socket.socket | None, int]:
    with contextlib.suppress(OSError):
        listener = socket.create_server(("", 0), backlog=64)
        return listener, listener.getsockname()[1]
    return None, 0


def _addresses() -> list[str]:
    """The IPv4 addresses of this host's network interfaces."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]
