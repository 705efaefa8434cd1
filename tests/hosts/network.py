"""Hosts on one machine: namespaces of their own, joined by cables (veth pairs) and a switch.

A host has a name, an address, processes and a /dev/shm which the others do not see; the file system
is shared. This process is the switch: run it in namespaces of its own (run.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
_OWN = ("--net", "--uts", "--ipc", "--mount", "--pid")
# Its first process: everything of the host ends with it.
_BOOT = """
exec 2>&1
hostname "$1" && mount -t tmpfs tmpfs /dev/shm && mount --bind "$2" /etc/hosts && ip link set lo up
echo "$?"
exec sleep infinity
"""


def _run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, timeout=20)


class Host:
    """A machine, seen by its processes."""

    def __init__(self, name: str, number: int, names: pathlib.Path) -> None:
        self.name, self.number, self.names = name, number, names
        self.address = f"192.168.71.{number}"
        self._entered: list[subprocess.Popen[str]] = []
        self.boot()

    def boot(self) -> None:
        """Start the machine and connect its cable."""
        words = [*_OWN, "--fork", "--kill-child=KILL", "--mount-proc"]
        self._outer = subprocess.Popen(
            ["unshare", *words, "sh", "-c", _BOOT, "boot", self.name, str(self.names)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._outer.stdout is not None
        said = self._outer.stdout.readline()
        assert said == "0\n", f"{self.name} does not start: {said}"
        (self.init,) = children(self._outer.pid)
        port = self._port
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", self.init)
        _run("ip", "link", "set", port, "master", "switch", "up")
        inside = ("nsenter", f"--target={self.init}", "--net", "ip")
        _run(*inside, "address", "add", f"{self.address}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")

    @property
    def _port(self) -> str:
        return f"port{self.number}"

    def start(
        self, words: Sequence[str], environment: dict[str, str], **streams: Any
    ) -> subprocess.Popen[str]:
        """Start a program on this host. The returned process controls it from outside."""
        flags = [f"--target={self.init}", *_OWN, f"--wdns={os.getcwd()}"]
        entered = subprocess.Popen(
            ["nsenter", *flags, "--", *words], env=environment, text=True, **streams
        )
        self._entered.append(entered)
        return entered

    def cut(self) -> None:
        """Disconnect the cable, without any message to the processes."""
        _run("ip", "link", "set", self._port, "down")

    def mend(self) -> None:
        """Connect the cable again."""
        _run("ip", "link", "set", self._port, "up")

    def freeze(self) -> None:
        """Stop all processes (SIGSTOP), but not the kernel."""
        for pid in self.processes():
            os.kill(pid, signal.SIGSTOP)

    def shut_down(self) -> None:
        """End all processes, which closes their connections."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        for process in self._entered:  # nsenter stops with what it has started
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
        self._entered.clear()
        self._outer.wait(20)

    def reboot(self) -> None:
        """Start the machine again, from any state."""
        self.shut_down()
        subprocess.run(["ip", "link", "delete", self._port], check=False, capture_output=True)
        self.boot()

    def processes(self) -> list[int]:
        """Return the processes that are alive, except the first."""
        found: list[int] = []
        try:
            mine = os.readlink(f"/proc/{self.init}/ns/pid")
        except OSError:
            return found
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.init:
                with contextlib.suppress(OSError):  # it has gone
                    dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
                    if not dead and os.readlink(entry / "ns" / "pid") == mine:
                        found.append(int(entry.name))
        return found


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    return [int(p) for p in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Network:
    """Hosts by name, and the remote shell between them."""

    def __init__(self, names: Sequence[str], shared: pathlib.Path) -> None:
        self._names, self.shared = names, shared
        self._socket = shared / "shell"

    def __enter__(self) -> Network:
        _run("ip", "link", "add", "switch", "type", "bridge")
        _run("ip", "link", "set", "switch", "up")
        table = self.shared / "names"
        lines = [f"192.168.71.{i} {name}\n" for i, name in enumerate(self._names, start=1)]
        table.write_text("127.0.0.1 localhost\n" + "".join(lines))
        self.hosts = {n: Host(n, i, table) for i, n in enumerate(self._names, start=1)}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._socket))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            host.shut_down()
        _run("ip", "link", "delete", "switch")
        self._socket.unlink()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    @property
    def shell(self) -> str:
        """Return the command that replaces ssh."""
        return f"{sys.executable} {HERE / 'remote_shell.py'} {self._socket}"

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        """Run a command on a host with the environment of a login."""
        with connection, contextlib.suppress(OSError):
            request, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
            name, words = json.loads(request)
            environment = {n: os.environ[n] for n in ("PATH", "HOME") if n in os.environ}
            environment |= {"TMPDIR": "/dev/shm", "SHELL": "/bin/sh"}
            try:
                process = self.hosts[name].start(
                    ["sh", "-c", words],
                    environment,
                    stdin=streams[0],
                    stdout=streams[1],
                    stderr=streams[2],
                )
            finally:
                for stream in streams:
                    os.close(stream)
            connection.sendall(str(process.wait() % 256).encode())
