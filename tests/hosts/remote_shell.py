"""`remote_shell.py SOCKET HOST COMMAND ...`: what ssh is on a cluster.

The command runs on the host, with this process's input and output, by network.py behind the socket.
"""

import json
import socket
import sys

path, host, *words = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(path)
    request = json.dumps([host, " ".join(words)]).encode()
    socket.send_fds(connection, [request], [0, 1, 2])
    sys.exit(int(connection.recv(16) or b"255"))
