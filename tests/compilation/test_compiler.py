"""One rank of a host compiles a program for all ranks, and the guard reports who waits."""

from __future__ import annotations

import json

import pytest

from launching import mpigrad

PROGRAM = """
import json, os, time
import jax, jax.numpy as jnp, numpy as np
import mpigrad as mg
from mpigrad.compilation.compiler import EVENT
from mpigrad.guard.failure import current_board
from mpigrad.guard.watchdog import rank_states

comm, found = mg.default_communicator(), []
result = {"deleted": os.readlink(f"/proc/self/fd/{current_board().lock}").endswith("(deleted)")}
jax.monitoring.register_event_listener(
    lambda name, **_: found.append(name.removeprefix(EVENT)) if name.startswith(EVENT) else None
)

def count(name, program, *arguments):
    comm.mpi.Barrier()
    found.clear()
    value = program(*arguments)
    result[name] = [list(found), np.asarray(value).tolist()]

x = jnp.asarray(np.arange(3.0, dtype=np.float32))
count("same", jax.jit(lambda x: jnp.sin(x) + 1), x)
count("different", jax.jit(lambda x: jnp.sum(x) * (comm.rank + 2)), x)
shape = jax.ShapeDtypeStruct((), np.float32)
back = lambda x: jax.pure_callback(lambda _: np.float32(comm.rank), shape, x)
count("callback", jax.jit(back), x)

def loss(w):
    return mg.allreduce(jnp.sum(w * w) * (1.0 + x[comm.mpi.rank * 0]))

training = mg.jit(mg.value_and_grad(loss, loss="replicated", replicated=0))
for name in ("training", "again"):
    count(name, lambda w: training(w)[1], x)
    jax.clear_caches()

# Rank 0 has compiled, and has the lock until the guard has reported the rank that waits for it.
def watch(name, **_):
    if name == EVENT + "compiled":
        comm.mpi.send(None, 1)
        end = time.monotonic() + 20
        while time.monotonic() < end and "report" not in result:
            wanted = "rank 1", "waiting for rank 0 to compile jit__lambda"
            states = rank_states(current_board())
            lines = [line for line in states if all(words in line for words in wanted)]
            result.update({"report": lines[0]} if lines else {})
            time.sleep(0.05)

if comm.rank == 0:
    jax.monitoring.register_event_listener(watch)
if comm.rank == 1:
    comm.mpi.recv(source=0)
if comm.rank < 2:
    count_waiting = jax.jit(lambda x: jnp.cos(x) - 3)
    count_waiting(x)
results = comm.mpi.gather(result)
if comm.rank == 0:
    print(json.dumps(results))
"""


@pytest.mark.launcher
def test_one_rank_compiles_for_all(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = mpigrad("launch", "-n", 3, program, MPIGRAD_PROGRAMS="job")
    assert done.returncode == 0, done.stderr
    ranks = json.loads(done.stdout)
    for name in ("same", "training"):
        events = sorted(event for rank in ranks for event in rank[name][0])
        assert events.count("compiled") == len(ranks[0][name][0]), events
        assert len({json.dumps(rank[name][1]) for rank in ranks}) == 1
    for rank, result in enumerate(ranks):
        assert result["deleted"]
        assert result["different"] == [["compiled"], 3.0 * (rank + 2)]
        assert result["callback"] == [[], float(rank)]
        assert set(result["again"][0]) == {"from_other_rank"}
        assert result["again"][1] == result["training"][1] == [0.0, 6.0, 12.0]
    report = ranks[0].get("report", "rank 0 has seen nobody wait")
    assert "rank 1" in report and "waiting for rank 0 to compile jit__lambda" in report, report
    assert "program.py:" in report


@pytest.mark.launcher
def test_off_compiles_on_each_rank(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import jax, mpigrad\n"
        "found = []\n"
        "jax.monitoring.register_event_listener(lambda name, **_: found.append(name))\n"
        "jax.jit(lambda x: x + 1)(1.0)\n"
        "events = [name for name in found if name.startswith('/mpigrad/')]\n"
        "print(*(mpigrad.default_communicator().mpi.gather(events) or ()))\n"
    )
    done = mpigrad("launch", "-n", 2, program, MPIGRAD_PROGRAMS="off")
    assert done.stdout.split() == ["[]", "[]"], done.stderr
