"""The task of a training: the digits, or the result of a user's factory."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad_apps.sgd.digits import read_digits
from mpigrad_apps.sgd.settings import Settings

__all__ = ["Task", "load_task"]


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its loss, and the samples.

    Attributes
    ----------
    model
        A `torch.nn.Module`, or a pytree of arrays for JAX, equal on all ranks.
    loss
        `loss(model, *batch)`, the mean over the batch's samples.
    data
        Arrays (of NumPy, JAX or torch) whose first axis are the samples, the same on all ranks. A
        batch consists of some of their rows.
    held_out
        Arrays of samples for tests, not used for training.
    score
        `score(model, *batch)`, a mean over samples such as an accuracy. If it is None, tests only
        compute the loss.
    optimizer
        A `torch.optim.Optimizer` of the model's parameters, or an optax transformation. If it is
        None, the settings name the optimizer.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> from mpigrad_apps.sgd import Task
    >>> x = np.linspace(0, 1, 8)
    >>> def loss(model, x, y):
    ...     return jnp.mean((model["a"] * x - y) ** 2)
    >>> task = Task({"a": jnp.zeros(())}, loss, (x, 2 * x))
    >>> task.rows, task.framework
    (8, 'jax')
    """

    model: Any
    loss: Callable[..., Any]
    data: tuple[Any, ...]
    held_out: tuple[Any, ...] = ()
    score: Callable[..., Any] | None = None
    optimizer: Any = None

    @property
    def rows(self) -> int:
        """The number of samples to train on."""
        return len(self.data[0])

    @property
    def framework(self) -> str:
        """'torch' or 'jax'."""
        return "torch" if _is_module(self.model) else "jax"

    def batch(self, rows: np.ndarray) -> tuple[Any, ...]:
        """Return the samples of the training data at these rows."""
        return tuple(array[rows] for array in self.data)


def load_task(settings: Settings) -> Task:
    """Make and check a new task from the settings, so that every training has the same start.

    Raises
    ------
    ValueError, TypeError
        If the factory does not exist, fails, or returns something that cannot be trained.
    """
    if settings.module is None:
        return _digits(settings)
    task = _call_factory(settings.module, settings.seed)
    if settings.framework not in (None, task.framework):
        raise ValueError(
            f"--framework: expected {task.framework}, the framework of the model of "
            f"{settings.module}, got {settings.framework}. Leave --framework out."
        )
    _check(task, settings.module)
    return task


def _digits(settings: Settings) -> Task:
    train, test = read_digits()
    if settings.framework == "torch":
        import torch  # pyright: ignore[reportMissingImports]

        from mpigrad_apps.sgd import network_torch as network

        train, test = (tuple(map(torch.from_numpy, samples)) for samples in (train, test))
        model = network.network(settings.seed)
    else:
        from mpigrad_apps.sgd import network_jax as network

        model = network.Network(settings.seed)
    return Task(model, network.loss, train, test, network.accuracy)


def _call_factory(module: str, seed: int) -> Task:
    """Call the factory. If PyTorch is imported, its random generator starts from `seed`."""
    file, _, name = module.rpartition(":")
    path = pathlib.Path(file).resolve()
    factory = getattr(_import_file(path, module), name, None)
    if not callable(factory):
        raise ValueError(f"--module {module}: there is no function {name} in {path.name}.")
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    try:
        made = factory()
    except Exception as error:
        raise ValueError(
            f"--module {module}: {name}() failed with {type(error).__name__}: {error}"
        ) from error
    if isinstance(made, Task):
        return made
    if not (isinstance(made, tuple) and len(made) == 3):
        raise TypeError(
            f"--module {module}: {name}() must return (model, loss, data) or an "
            f"mpigrad_apps.sgd.Task, got {type(made).__name__}"
            + (f" of {len(made)}" if isinstance(made, tuple) else "")
        )
    model, loss, data = made
    return Task(model, loss, data if isinstance(data, tuple) else (data,))


def _import_file(path: pathlib.Path, module: str) -> Any:
    name = f"mpigrad_module_{path.stem}"  # differs from the names of all other modules
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--module {module}: {path.name} is not a Python file")
    if str(path.parent) not in sys.path:
        sys.path.insert(
            0, str(path.parent)
        )  # so that it can import the files next to it, as under `python file.py`
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    try:
        spec.loader.exec_module(loaded)
    except Exception as error:
        raise ValueError(
            f"--module {module}: {path.name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return loaded


def _check(task: Task, module: str) -> None:
    where = f"--module {module}"
    if not callable(task.loss):
        raise TypeError(f"{where}: the loss must be a function, got {type(task.loss).__name__}.")
    for what, samples in (("data", task.data), ("held_out", task.held_out)):
        if not isinstance(samples, tuple):
            raise TypeError(
                f"{where}: {what} must be a tuple of arrays, got {type(samples).__name__}."
            )
        shapes: list[Any] = [getattr(array, "shape", ()) for array in samples]
        if not all(shapes):
            raise TypeError(
                f"{where}: {what} must be arrays whose first axis are the samples, got shapes "
                f"{', '.join(map(str, shapes))}."
            )
        if len({shape[0] for shape in shapes}) > 1:
            raise ValueError(
                f"{where}: {what} must have the same number of samples in each array, got "
                f"{', '.join(str(shape[0]) for shape in shapes)}."
            )
    if not (task.data and task.rows > 0):
        raise ValueError(f"{where}: there are no samples in the data. Give at least one.")
    if task.framework == "torch":
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(task.model):
        if not (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)):
            what = f"of {leaf.dtype}" if hasattr(leaf, "dtype") else type(leaf).__name__
            raise TypeError(
                f"{where}: the model must be a torch.nn.Module or a pytree of floating arrays, but "
                f"model{jax.tree_util.keystr(path)} is {what}."
            )


def _is_module(model: Any) -> bool:
    torch = sys.modules.get("torch")  # a module of it comes with torch imported
    return torch is not None and isinstance(model, torch.nn.Module)
