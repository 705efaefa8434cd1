"""XLA flags that make tests compile quickly, for the installed jaxlib."""

from __future__ import annotations

import importlib.metadata

# jaxlib 0.11 and later know no other code generator, and end where they are given this flag.
_RELEASE = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
QUICK_TO_COMPILE = (
    "--xla_cpu_use_fusion_emitters=false "
    * (_RELEASE < (0, 11))
    + "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1 "
)
