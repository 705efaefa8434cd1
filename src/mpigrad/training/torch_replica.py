# pyright: reportMissingImports=false
"""A replica of a PyTorch module and its optimizer."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import sys
import traceback
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch

from mpigrad.training.flat_buffer import FlatBuffer, Parameter
from mpigrad.training.replica import Batch, Replica

__all__ = ["TorchReplica"]


class TorchReplica(Replica):
    """The replica of a PyTorch module, see `trainer`.

    The parameters that the optimizer holds are trained. All of them must belong to the module.

    A parameter's gradient is copied once, when the backward pass has computed it, to its place in
    `gradients`, and `.grad` becomes a view of that place. `values` becomes the memory of contiguous
    CPU parameters at its first use.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., Any],
        weight: Callable[..., float] | None = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "trainer: expected an optimizer of torch.optim for a module, got "
                f"{type(optimizer).__name__}. Pass for instance "
                "torch.optim.SGD(model.parameters(), lr=0.1)."
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "trainer: torch.optim.LBFGS cannot be used, because it evaluates the loss several "
                "times in a step, on this rank's batch only. Use mpigrad.optimize.minimize for an "
                "L-BFGS of all ranks."
            )
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad and id(p) in held]
        strangers = len(held - {id(p) for p in module.parameters()})
        if strangers:
            raise ValueError(
                f"trainer: the optimizer holds {strangers} parameters that do not belong to the "
                "module. Put all trained parameters into one torch.nn.Module."
            )
        if not named:
            raise ValueError(
                "trainer: the optimizer must hold at least one parameter that requires a gradient, "
                "got none. Pass model.parameters() to the optimizer."
            )
        super().__init__(
            [Parameter(n, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in named],
            weight,
        )
        self._module, self._optimizer, self._loss = module, optimizer, loss
        self._tensors: list[torch.Tensor] = [p for _, p in named]
        self._places = _tensors(self.gradients, self._tensors)
        self._ready: Callable[[int], None] | None = None
        self._add = self._computing = False
        self._seen: set[int] = set()
        # The module may outlive the trainer, so its hooks have weak references only.
        keep = weakref.WeakMethod(self._keep)
        handles = [
            tensor.register_post_accumulate_grad_hook(functools.partial(_called, keep, index))
            for index, tensor in enumerate(self._tensors)
        ]
        weakref.finalize(self, _remove, handles)

    @property
    def model(self) -> torch.nn.Module:
        return self._module

    def gradient(
        self,
        batch: Batch,
        weight: float,
        ready: Callable[[int], None] | None = None,
        *,
        add: bool = False,
    ) -> float:
        self._check_trained()
        for tensor in self._tensors:
            tensor.grad = None
        self._ready, self._add, self._computing = ready, add, True
        self._seen.clear()
        try:
            with _own_messages():
                loss = self._loss(self._module, *batch)
                _check_loss(loss)
                if loss.requires_grad or _recorded():  # other ranks may depend on its messages
                    torch.autograd.backward(loss, torch.full_like(loss, weight))
        finally:
            self._computing = False
        unused = frozenset(range(len(self._tensors))) - self._seen
        for index in self.gradients.order:
            if index in unused:
                if not add:
                    self._places[index].zero_()
                if ready is not None:
                    ready(index)
        self.unused = unused & self.unused if add else unused
        return loss.item()

    def _keep(self, index: int, tensor: torch.Tensor) -> None:
        """Copy a parameter's gradient, which the backward pass has computed, to its place."""
        if not self._computing:
            return  # a backward pass of the user's program
        gradient, place = tensor.grad, self._places[index]
        again, shared = index in self._seen, place.device == tensor.device
        if again and self._ready is not None:
            raise RuntimeError(
                f"trainer: the gradient of {self.parameters[index].name} was computed twice in one "
                "backward pass, after the first one had been sent. With activation checkpoints "
                "pass use_reentrant=False, or train with Synchronous(overlap=False)."
            )
        if again and shared:
            return  # PyTorch has added it to the place already
        assert gradient is not None
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if self._add or again:
            place.add_(gradient.to(place.device))
        else:
            place.copy_(gradient)
        self._seen.add(index)
        tensor.grad = place if shared else None  # if None, a later part arrives separately
        if self._ready is not None:
            self._ready(index)

    def _check_trained(self) -> None:
        """Raise if the optimizer would change parameters whose gradients are not exchanged."""
        known = {id(tensor) for tensor in self._tensors}
        held = {id(p) for g in self._optimizer.param_groups for p in g["params"] if p.requires_grad}
        if more := held - known:
            names = [n for n, p in self._module.named_parameters() if id(p) in more]
            raise ValueError(
                "trainer: the optimizer holds parameters that were frozen, or not in it, when the "
                f"trainer was made: {', '.join(names[:5]) or 'outside of the module'}. Make a new "
                "trainer."
            )

    def update(self, skip: frozenset[int] = frozenset()) -> None:
        if len(skip) == len(self._tensors):
            raise ValueError(
                "trainer: the loss does not depend on any parameter that the optimizer holds. "
                "Compute it outside of torch.no_grad(), and do not detach it."
            )
        for index, (tensor, place) in enumerate(zip(self._tensors, self._places, strict=True)):
            tensor.grad = None if index in skip else place.to(tensor.device)
        self._optimizer.step()

    @functools.cached_property
    def values(self) -> FlatBuffer:
        flat = FlatBuffer(self.parameters)
        with torch.no_grad():
            for tensor, place in zip(self._tensors, _tensors(flat, self._tensors), strict=True):
                if tensor.device == place.device and tensor.is_contiguous():
                    place.copy_(tensor)
                    tensor.data = place
        return flat

    def read(self) -> None:
        with torch.no_grad():
            for tensor, place in self._apart():
                place.copy_(tensor)

    def write(self) -> None:
        with torch.no_grad():
            for tensor, place in self._apart():
                tensor.copy_(place)

    def _apart(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the parameters whose memory is not `values`, with their places in it."""
        pairs = zip(self._tensors, _tensors(self.values, self._tensors), strict=True)
        return [(t, place) for t, place in pairs if t.data_ptr() != place.data_ptr()]

    def arrange(self, order: Sequence[int]) -> None:
        super().arrange(order)
        self._places = _tensors(self.gradients, self._tensors)

    # ---- state ----

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for tensor in self._module.state_dict().values():
            if isinstance(tensor, torch.Tensor):
                numbers = tensor.detach().cpu().contiguous().view(-1)
                digest.update(numbers.view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def settings(self) -> dict[str, str]:
        names = {id(p): n for n, p in self._module.named_parameters()}
        settings = {"the class": type(self._optimizer).__name__}
        for number, group in enumerate(self._optimizer.param_groups):
            settings[f"params of group {number}"] = ", ".join(names[id(p)] for p in group["params"])
            for key, value in _numbers(group).items():
                settings[f"{key} of group {number}"] = str(value)
        return settings

    def checksum(self) -> int:
        groups = [_numbers(group) for group in self._optimizer.param_groups]
        return zlib.crc32(str(groups).encode())

    def buffers(self) -> bytes:
        buffers = self._buffers()
        return _written(buffers) if buffers else b""

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return the persistent buffers, without caches whose shapes may differ between ranks."""
        saved = self._module.state_dict()
        return {name: b for name, b in self._module.named_buffers() if name in saved}

    def load_buffers(self, buffers: bytes) -> None:
        here, there = self._buffers(), _read(buffers)
        for name, value in there.items():
            shape = tuple(here[name].shape) if name in here else None
            if shape != tuple(value.shape):
                raise ValueError(
                    f"trainer: the shape of the buffer {name} must be the same on all ranks, got "
                    f"{tuple(value.shape)} and {shape}. Register buffers that differ between ranks "
                    "with persistent=False."
                )
        with torch.no_grad():
            for name, value in there.items():
                here[name].copy_(value)

    def state(self) -> bytes:
        optimizer = self._optimizer.state_dict()
        optimizer["param_groups"] = jax.tree.map(  # torch.load does not accept NumPy scalars
            lambda x: x.item() if isinstance(x, np.generic) else x, optimizer["param_groups"]
        )
        optimizer["class"] = type(self._optimizer).__name__
        return _written({"module": self._module.state_dict(), "optimizer": optimizer})

    def load(self, state: bytes) -> None:
        contents = _read(state)
        there, here = contents["optimizer"].pop("class"), type(self._optimizer).__name__
        if there != here:
            raise ValueError(
                f"trainer: the saved state belongs to the optimizer {there}, but this trainer has "
                f"{here}. Use the saved optimizer."
            )
        self._module.load_state_dict(contents["module"])
        self._optimizer.load_state_dict(contents["optimizer"])

    def random_state(self) -> bytes:
        states = [torch.get_rng_state()]
        if torch.cuda.is_available():
            states.append(torch.cuda.get_rng_state())
        return _written(states)

    def load_random_state(self, state: bytes) -> None:
        cpu, *cuda = _read(state)
        torch.set_rng_state(cpu)
        for generator in cuda if torch.cuda.is_available() else ():
            torch.cuda.set_rng_state(generator)


def _check_loss(loss: Any) -> None:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return
    what = (
        f"a tensor of {loss.dtype} and shape {tuple(loss.shape)}"
        if isinstance(loss, torch.Tensor)
        else f"a {type(loss).__name__}"
    )
    raise TypeError(
        f"trainer: loss(model, *batch) must return one real number (a torch scalar), got {what}. "
        "Return the mean over the batch's samples."
    )


@contextlib.contextmanager
def _own_messages() -> Iterator[None]:
    """Separate messages from earlier ones, such as those of a failed step.

    An error after messages is printed at once, because other ranks may wait for the adjoints of
    these messages and never raise it.
    """
    chain = sys.modules.get("mpigrad.torch.chain")
    with contextlib.nullcontext() if chain is None else chain.messages():
        try:
            yield
        except Exception:
            if count := _recorded():
                print(
                    f"mpigrad: trainer: the loss failed after {count} "
                    f"message{'s' * (count > 1)}. Other ranks may wait for the adjoints:\n"
                    f"{traceback.format_exc()}",
                    file=sys.stderr,
                    flush=True,
                )
            raise


def _recorded() -> int:
    """Return the count of messages that a backward pass would reverse here."""
    chain = sys.modules.get("mpigrad.torch.chain")
    return 0 if chain is None else chain.current().count


def _called(keep: weakref.WeakMethod[Any], index: int, tensor: torch.Tensor) -> None:
    if (method := keep()) is not None:
        method(index, tensor)


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an optimizer's group, without parameters, as Python numbers."""
    return jax.tree.map(
        lambda x: x.tolist() if isinstance(x, np.generic | torch.Tensor) else x,
        {key: value for key, value in group.items() if key != "params"},
    )


def _tensors(flat: FlatBuffer, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the places of a flat buffer's parameters as tensors that share its memory."""
    places = []
    for (section, start, stop), tensor in zip(flat.places, like, strict=True):
        raw = torch.from_numpy(flat.sections[section][start:stop].view(np.uint8))
        places.append(raw.view(tensor.dtype).view(tensor.shape))
    return places


def _written(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _read(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
