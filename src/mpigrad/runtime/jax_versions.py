"""The releases of JAX that this release of mpigrad supports and was tested with."""

from __future__ import annotations

__all__ = ["NEWEST_TESTED", "OLDEST"]

OLDEST = (0, 8)
NEWEST_TESTED = (0, 12)
