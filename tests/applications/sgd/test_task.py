"""Tasks of a training, and the errors of tasks that cannot be trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpigrad_apps.sgd import Settings, Task, load_task, read_digits
from mpigrad_apps.sgd.evaluation import make_evaluator

FACTORIES = """
import jax.numpy as jnp
import numpy as np
from neighbour import SLOPE
from mpigrad_apps.sgd import Task

X = np.linspace(-1, 1, 30, dtype=np.float32)


def loss(model, x, y):
    return jnp.mean((model["a"] * x + model["b"] - y) ** 2)


def line():
    return {"a": jnp.zeros(()), "b": jnp.zeros(())}, loss, (X, SLOPE * X)


def task():
    return Task(line()[0], loss, (X, SLOPE * X), held_out=(X[:5], SLOPE * X[:5]))


def uneven():
    return line()[0], loss, (X, X[:-1])


def words():
    return {"a": "zero"}, loss, (X, X)


def numbers():
    return line()[0], loss, (3.0, 4.0)


def nothing():
    return line()[0], loss, (X[:0], X[:0])


def two():
    return line()[:2]


def failing():
    return 1 / 0


def no_loss():
    return line()[0], "mse", (X, X)


not_a_function = 3
"""


@pytest.fixture
def file(directory, comm):
    if comm.rank == 0:
        (directory / "mine.py").write_text(FACTORIES)
        (directory / "neighbour.py").write_text("SLOPE = 2\n")
        (directory / "broken.py").write_text("import no_such_module\n")
    comm.mpi.Barrier()
    return directory / "mine.py"


@pytest.mark.ranks(1)
def test_digits_are_shuffled_and_scaled():
    (pictures, labels), (held_out, known) = read_digits()
    assert len(labels) + len(known) == 1797
    assert pictures.min() == -1
    assert pictures.max() == 1
    assert len(held_out) == 357
    counts = np.bincount(labels)
    assert len(counts) == 10
    assert counts.min() > 120


@pytest.mark.ranks(1)
def test_the_network_of_the_digits_learns():
    """A step along the gradient lowers the loss of a guess among ten digits."""
    task = load_task(Settings())
    pictures, digits = map(jnp.asarray, task.batch(np.arange(8)))

    @jax.jit
    def learn(network):
        value, slope = jax.value_and_grad(task.loss)(network, pictures, digits)
        moved = jax.tree.map(lambda a, g: a - 0.05 * g, network, slope)
        return value, task.loss(moved, pictures, digits), task.score(moved, pictures, digits)

    before, after, score = map(float, learn(task.model))
    assert after < before == pytest.approx(np.log(10), rel=0.1)
    assert 0 <= score <= 1


@pytest.mark.ranks(1)
def test_a_factory_gives_a_task(file):
    task = load_task(Settings(module=f"{file}:line"))
    assert isinstance(task, Task)
    assert (task.framework, task.rows) == ("jax", 30)
    x, y = task.batch(np.array([3, 1]))
    assert np.array_equal(y, 2 * x)
    assert float(task.loss(task.model, x, y)) == pytest.approx(float(jnp.mean(y**2)))
    assert len(load_task(Settings(module=f"{file}:task")).held_out) == 2


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("uneven", "same number of samples in each array, got 30, 29"),
        ("words", r"model\['a'\] is str"),
        ("numbers", "arrays whose first axis are the samples"),
        ("nothing", "there are no samples"),
        ("two", r"must return \(model, loss, data\)"),
        ("failing", r"failing\(\) failed with ZeroDivisionError"),
        ("no_loss", "loss"),
        ("not_a_function", "no function not_a_function in mine.py"),
        ("missing", "no function missing in mine.py"),
    ],
)
def test_rejects_factories_with_an_invalid_result(file, name, said):
    with pytest.raises((ValueError, TypeError), match=said):
        load_task(Settings(module=f"{file}:{name}"))


@pytest.mark.ranks(2)
def test_a_score_that_fails_on_one_rank_is_raised_by_all(comm):
    def failing(model, x):
        raise ValueError("no such score")

    one = (np.zeros((1, 1)),)  # the other rank has none
    task = Task({"a": jnp.zeros(())}, failing, one, held_out=one)
    with pytest.raises(ValueError, match="no such score"):
        make_evaluator(task, 4, comm)(task.model)


@pytest.mark.ranks(1)
def test_rejects_a_file_that_cannot_be_imported(file):
    broken = file.with_name("broken.py")
    with pytest.raises(ValueError, match="cannot be imported: ModuleNotFoundError"):
        load_task(Settings(module=f"{broken}:line"))
    with pytest.raises(ValueError, match="--framework: expected jax"):
        load_task(Settings(module=f"{file}:line", framework="torch"))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epochs": 0}, "--epochs: expected at least 1"),
        ({"batch": 0}, "--batch: expected at least 1"),
        ({"learning_rate": 0.0}, "--learning-rate: expected a positive number"),
        ({"momentum": 1.0}, "--momentum: expected in"),
        ({"seed": -1}, "--seed: expected in"),
        ({"clip": -1.0}, "--clip: expected a positive norm"),
        ({"staleness": ()}, "--staleness: expected numbers of updates"),
        ({"staleness": (-1,)}, "--staleness: expected numbers of updates"),
        ({"mode": ("local", "local")}, "--mode: expected different values"),
        ({"mode": ("local",), "clip": 1.0}, "--clip: expected --mode synchronous with it, got 1.0"),
        ({"module": "mine.py"}, "--module: expected file.py:factory"),
        ({"module": "none.py:task"}, "there is no file none.py"),
    ],
)
def test_rejects_invalid_settings(changes, said):
    with pytest.raises((ValueError, OSError), match=said):
        dataclasses.replace(Settings(), **changes).check()
