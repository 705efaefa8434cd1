"""The door for whoever builds on messages: own primitives, activity, call sites, native code.

`mpigrad.waves`, `fem`, `fft`, `sparse`, `jobs` and the other packages above the operations stand on
these names and on other public packages only. A package of your own can do what they do. The names
are explained in docs/extend.md, and examples/tridiagonal is such a package.
"""

from typing import TYPE_CHECKING, Any

from jax.extend.core import Primitive

from mpigrad.collective_errors import (
    assert_same_on_all_ranks,
    call_on_root,
    raise_error,
    raise_on_all_ranks,
)
from mpigrad.communicator import resolve
from mpigrad.extend.implicit_solve import implicit_solve
from mpigrad.operations._jax_compat import (
    concrete_value,
    constants_as_operands,
    has_messages,
    is_top_level,
)
from mpigrad.operations.carrier import (
    CARRIER,
    allow_messages_in_rules,
    carrier,
    forbid_messages,
    keep_in_backward,
    mark_common_branch,
    opaque_zero,
    outer_carrier,
    set_carrier,
    tie_in,
    with_carrier,
    without_carriers,
)
from mpigrad.operations.collectives import alltoall_p
from mpigrad.operations.computation import Activity, NativeCall, primitive
from mpigrad.operations.custom import Function, HostCall, array_at
from mpigrad.operations.local_programs import (
    as_array,
    index_array,
    jit_local,
    keep_in_order,
    put,
    take,
)
from mpigrad.operations.native_targets import KeptArray
from mpigrad.operations.nonblocking import in_order_of_posts, post
from mpigrad.operations.norms import noise, root_of_sums, sums_of_squares, two_norms
from mpigrad.operations.primitive import linear_map
from mpigrad.operations.pytree_packing import arrays, bind_packed
from mpigrad.operations.reduce_operators import check_op
from mpigrad.operations.stored_states import StateFolder, known_again
from mpigrad.operations.v_collectives import (
    NEIGHBOR_TAG,
    check_counts,
    exchange_with_neighbors,
    neighbor_alltoallv_p,
)
from mpigrad.runtime.call_sites import at_call_site, call_site, describe, pass_over
from mpigrad.runtime.files import name_in_errors, write_atomically
from mpigrad.runtime.native import (
    NO_REDUCTION,
    NO_ROOT,
    SUM,
    TAG_LIMIT,
    at_exit,
    native_library,
)

# Annotations of shapes by jaxtyping, or empty names if it is not installed.
if TYPE_CHECKING:
    from jaxtyping import Array, Complex, Float, Int
else:
    try:
        from jaxtyping import Array, Complex, Float, Int
    except ImportError:

        class _Shape:
            def __class_getitem__(cls, item: Any) -> Any:
                return Any

        Array = Any
        Complex = Float = Int = _Shape

__all__ = [
    "CARRIER",
    "NEIGHBOR_TAG",
    "NO_REDUCTION",
    "NO_ROOT",
    "SUM",
    "TAG_LIMIT",
    "Activity",
    "Array",
    "Complex",
    "Float",
    "Function",
    "HostCall",
    "Int",
    "KeptArray",
    "NativeCall",
    "Primitive",
    "StateFolder",
    "allow_messages_in_rules",
    "alltoall_p",
    "array_at",
    "arrays",
    "as_array",
    "assert_same_on_all_ranks",
    "at_call_site",
    "at_exit",
    "bind_packed",
    "call_on_root",
    "call_site",
    "carrier",
    "check_counts",
    "check_op",
    "concrete_value",
    "constants_as_operands",
    "describe",
    "exchange_with_neighbors",
    "forbid_messages",
    "has_messages",
    "implicit_solve",
    "in_order_of_posts",
    "index_array",
    "is_top_level",
    "jit_local",
    "keep_in_backward",
    "keep_in_order",
    "known_again",
    "linear_map",
    "mark_common_branch",
    "name_in_errors",
    "native_library",
    "neighbor_alltoallv_p",
    "noise",
    "opaque_zero",
    "outer_carrier",
    "pass_over",
    "post",
    "primitive",
    "put",
    "raise_error",
    "raise_on_all_ranks",
    "resolve",
    "root_of_sums",
    "set_carrier",
    "sums_of_squares",
    "take",
    "tie_in",
    "two_norms",
    "with_carrier",
    "without_carriers",
    "write_atomically",
]
