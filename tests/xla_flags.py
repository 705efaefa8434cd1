"""What makes tests compile quickly: XLA flags for the installed jaxlib, and kept MLIR contexts."""

from __future__ import annotations

import importlib.metadata
import threading

# jaxlib 0.11 and later know no other code generator, and end where they are given this flag.
_RELEASE = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
QUICK_TO_COMPILE = (
    "--xla_cpu_use_fusion_emitters=false "
    * (_RELEASE < (0, 11))
    + "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1 "
)


def keep_mlir_contexts(programs: int = 64) -> None:
    """Let JAX lower this many programs of a thread in one MLIR context.

    Making a context takes 2 to 4 ms, longer than lowering a small program into it. A program that
    is lowered while another one is being lowered has a context of its own, because what is made in
    the context of the other one would become a part of it.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    make = getattr(mlir, "make_ir_context", None)
    if make is None:  # another JAX: each program has its own
        return
    kept = threading.local()

    def make_ir_context() -> object:
        if ir.Context.current is not None:
            return make()
        if getattr(kept, "count", programs) == programs:
            kept.context, kept.count = make(), 0
        kept.count += 1
        return kept.context

    mlir.make_ir_context = make_ir_context
