"""The programs that XLA compiles.

JAX reports each program that it asks XLA for, also if a cache on disk has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Yield a list of the names of the programs that are compiled in this context."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **details: Any) -> None:
        if event == _EVENT:
            names.append(str(details.get("fun_name", "?")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
