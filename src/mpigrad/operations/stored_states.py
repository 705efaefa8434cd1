"""States of loops in files: written by a differentiated program, and read again by its gradient.

Also values that are known again when a gradient needs them, and need no memory until then.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpigrad.operations import _jax_compat as compat
from mpigrad.operations._jax_compat import Primitive, ShapedArray, ad, batching, mlir
from mpigrad.operations.native_targets import kernels, register_target

__all__ = ["StateFolder", "known_again"]


@functools.cache
def _library() -> Any:
    lib = kernels()
    lib.mpigrad_kernels_open_states.restype = ctypes.c_int64
    lib.mpigrad_kernels_open_states.argtypes = [ctypes.c_char_p]
    lib.mpigrad_kernels_close_states.argtypes = [ctypes.c_int64]
    register_target("mpigrad_kernels_put_state", lib)
    register_target("mpigrad_kernels_get_state", lib)
    register_target("mpigrad_kernels_pass_state", lib)
    return lib


class StateFolder:
    """Files without names in a directory, which are closed with this object and its programs.

    A state is a sequence of arrays. `withhold` and `recall` do nothing in a program that is not
    differentiated. Otherwise they are `put` and `get`. What follows `recall` or `get` needs the
    ticket of the state and not its values, so XLA keeps no memory for them.

    Parameters
    ----------
    directory
        An existing directory.
    count
        The number of states for which space is reserved at a time.
    head
        The operation and its line, for errors. They are errors of this rank: other ranks learn of
        them from the guard. With `agrees`, a ticket of -1 stands for a state that was not written.
    """

    def __init__(self, directory: str, count: int, head: str, agrees: bool = False) -> None:
        self.directory, self.count, self.head, self.agrees = directory, count, head, agrees
        self.number = _library().mpigrad_kernels_open_states(os.fsencode(directory))
        weakref.finalize(self, _library().mpigrad_kernels_close_states, self.number).atexit = False

    @staticmethod
    def at(*settings: Any) -> StateFolder:
        """Return the folder with these parameters: one for each, while a program uses it."""
        folder = _folders.get(settings)
        if folder is None:
            folder = _folders[settings] = StateFolder(*settings)
        return folder

    def withhold(self, state: Sequence[Any]) -> Any:
        """Return the ticket of a state for `recall`, of int32."""
        return _withhold_p.bind(*state, folder=self)

    def recall(self, ticket: Any, state: Sequence[Any]) -> list[Any]:
        """Return the state that was withheld."""
        return _recall_p.bind(ticket, *state, folder=self)

    def put(self, state: Sequence[Any], own: Any = None) -> Any:
        """Write a state, and return its ticket, of int32.

        The last `own` states, by default `count`, never give way to it on a full disk.
        """
        own = jnp.asarray(self.count if own is None else own, "int32")
        return _put_p.bind(own, *state, folder=self)

    def get(self, ticket: Any, like: Sequence[Any]) -> list[Any]:
        """Read a state. Its tangents are those of `like`, whose values are not used."""
        return _first_get_p.bind(ticket, *like, folder=self)


_folders: weakref.WeakValueDictionary[tuple[Any, ...], StateFolder] = weakref.WeakValueDictionary()


def _put(own: Any, *state: Any, folder: StateFolder) -> Any:
    call = jax.ffi.ffi_call("mpigrad_kernels_put_state", jax.ShapeDtypeStruct((), "int32"))
    head = "" if folder.agrees else folder.head
    return call(
        own, *state, number=np.int64(folder.number), count=np.int64(folder.count), head=head
    )


def _get(ticket: Any, *state: Any, folder: StateFolder) -> Any:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in state]
    call = jax.ffi.ffi_call("mpigrad_kernels_get_state", shapes)
    return call(ticket, number=np.int64(folder.number), head=folder.head)


def _primitive(name: str, run: Callable[..., Any], gets: bool) -> Primitive:
    """Make a primitive (ticket, *state) -> state if it gets one, else (*state) -> ticket."""
    primitive = Primitive(f"mpigrad_{name}")
    primitive.multiple_results = gets

    def program(folder: StateFolder) -> Any:
        return jax.jit(lambda *operands: primitive.bind(*operands, folder=folder))

    def lower(ctx: Any, *operands: Any, folder: StateFolder) -> Any:
        ctx.module_context.add_keepalive(folder)  # the program may outlive the loop
        rule = mlir.lower_fun(functools.partial(run, folder=folder), multiple_results=gets)
        return rule(ctx, *operands)

    def batch(operands: Sequence[Any], dims: Sequence[Any], folder: StateFolder) -> Any:
        moved = [
            x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)
        ]
        results = primitive.bind(*moved, folder=folder)
        after = [d if d is None else 0 for d in dims[1:]]
        return results, after if gets else None

    def shapes(*avals: Any, folder: StateFolder) -> Any:
        states = [ShapedArray(a.shape, a.dtype) for a in avals[1:]]
        return states if gets else ShapedArray((), np.dtype("int32"))

    primitive.def_impl(lambda *operands, folder: program(folder)(*operands))
    primitive.def_abstract_eval(shapes)
    compat.register_lowering(primitive, lower)
    batching.primitive_batchers[primitive] = batch
    return primitive


compat.hold_weakly(StateFolder)
_put_p = _primitive("put_state", _put, gets=False)
_get_p = _primitive("get_state", _get, gets=True)
_first_get_p = _primitive("first_get_state", _get, gets=True)  # not yet differentiated
_withhold_p = _primitive("withhold", lambda *state, folder: jnp.zeros((), "int32"), gets=False)
_recall_p = _primitive("recall", lambda ticket, *state, folder: state, gets=True)


def _put_jvp(operands: Sequence[Any], tangents: Sequence[Any], folder: StateFolder) -> Any:
    ticket = _put_p.bind(*operands, folder=folder)
    return ticket, ad.Zero(compat.tangent_aval(ticket))


def _withhold_jvp(state: Sequence[Any], tangents: Sequence[Any], folder: StateFolder) -> Any:
    ticket = folder.put(state)
    return ticket, ad.Zero(compat.tangent_aval(ticket))


def _get_jvp(operands: Sequence[Any], tangents: Sequence[Any], folder: StateFolder) -> Any:
    return _get_p.bind(*operands, folder=folder), list(tangents[1:])


def _first_get_jvp(operands: Sequence[Any], tangents: Sequence[Any], folder: StateFolder) -> Any:
    results, tangents = _get_jvp(operands, tangents, folder)
    return results, [
        t if type(t) is ad.Zero or not t.size else _pass_p.bind(operands[0], t, folder=folder)
        for t in tangents
    ]


ad.primitive_jvps[_put_p] = _put_jvp
ad.primitive_jvps[_withhold_p] = _withhold_jvp
ad.primitive_jvps[_get_p] = _get_jvp
ad.primitive_jvps[_first_get_p] = ad.primitive_jvps[_recall_p] = _first_get_jvp


# (ticket, tangent or adjoint of an array of a state) -> the same. It frees the place of the state.
# If it is differentiated, that is left to its own derivative.


def _pass(ticket: Any, x: Any, *, folder: StateFolder) -> Any:
    call = jax.ffi.ffi_call(
        "mpigrad_kernels_pass_state",
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        input_output_aliases={1: 0},
    )
    return call(ticket, x, number=np.int64(folder.number))


def _pass_jvp(operands: Sequence[Any], tangents: Sequence[Any], folder: StateFolder) -> Any:
    (ticket, x), t = operands, tangents[1]
    return x, t if type(t) is ad.Zero else _pass_p.bind(ticket, t, folder=folder)


def _pass_transpose(ct: Any, ticket: Any, x: Any, folder: StateFolder) -> list[Any]:
    return [None, ct if type(ct) is ad.Zero else _pass_p.bind(ticket, ct, folder=folder)]


def _pass_batch(operands: Sequence[Any], dims: Sequence[Any], folder: StateFolder) -> Any:
    return _pass_p.bind(*operands, folder=folder), dims[1]


def _run_pass(*operands: Any, folder: StateFolder) -> Any:
    return jax.jit(lambda *operands: _pass_p.bind(*operands, folder=folder))(*operands)


_pass_p = Primitive("mpigrad_pass_state")
_pass_p.def_impl(_run_pass)
_pass_p.def_abstract_eval(lambda ticket, x, folder: ShapedArray(x.shape, x.dtype))
compat.register_lowering(_pass_p, mlir.lower_fun(_pass, multiple_results=False))
ad.primitive_jvps[_pass_p] = _pass_jvp
ad.primitive_transposes[_pass_p] = _pass_transpose
batching.primitive_batchers[_pass_p] = _pass_batch


# ---- values that are known again ----


def known_again(value: Any, x: Any) -> Any:
    """Return `value`, which equals x, with the tangents of x.

    What follows does not need the values of x, so XLA keeps no memory for them.
    """
    return _known_p.bind(value, x)


def _known_batch(operands: Sequence[Any], dims: Sequence[Any]) -> Any:
    n = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    value, x = (
        jnp.broadcast_to(x, (n, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    )
    return _known_p.bind(value, x), 0


def _known_jvp(operands: Sequence[Any], tangents: Sequence[Any]) -> Any:
    return _known_p.bind(*operands), tangents[1]


_known_p = Primitive("mpigrad_known_again")
_known_p.def_impl(lambda value, x: value)
_known_p.def_abstract_eval(lambda value, x: ShapedArray(value.shape, value.dtype))
compat.register_lowering(_known_p, lambda ctx, value, x: [value])
batching.primitive_batchers[_known_p] = _known_batch
ad.primitive_jvps[_known_p] = _known_jvp
