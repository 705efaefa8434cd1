"""One rank that waits for messages to itself which nobody sends, and goes on after each error."""

import os
import signal
import threading

import jax.numpy as jnp

import mpigrad as mg

LARGE = 1_000_000  # elements of a message that waits for its receive


def stopped(wait):
    """The last words of the error that ends a wait."""
    try:
        wait()
    except Exception as error:
        return "limit" if "an operation has waited" in str(error) else str(error)
    except KeyboardInterrupt:
        return "interrupted"
    return "ended"


def full(value, n=3):
    return jnp.full(n, float(value))


for _ in range(2):
    print(stopped(lambda: mg.recv(full(0), source=0)))
# A send of a stopped exchange is not received later.
for n in (3, LARGE):
    print(stopped(lambda n=n: mg.sendrecv(full(1, n), dest=0, source=0, sendtag=1, recvtag=2)))
print(mg.sendrecv(full(5), dest=0, source=0, sendtag=1, recvtag=1)[0])
# A request whose wait was stopped can be waited for again.
request = mg.isend(full(7, LARGE), dest=0, tag=3)
first = stopped(lambda: mg.wait(request))
received = mg.recv(full(0, LARGE), source=0, tag=3)[0]
print(first, received, first if first == "ended" else stopped(lambda: mg.wait(request)))
request = mg.irecv(full(0), source=0, tag=4)
print(stopped(lambda: mg.wait(request)))
mg.send(full(8), dest=0, tag=4)
print(mg.wait(request)[0])
# Programs that a shell starts in the background ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
print(stopped(lambda: mg.recv(full(0), source=0)))
print(mg.allreduce(full(9))[0])
