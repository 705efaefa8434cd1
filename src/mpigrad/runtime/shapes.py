"""Annotations of shapes by jaxtyping, or empty names if it is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Array", "Bool", "Complex", "Float", "Inexact", "Int", "Shaped"]

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Complex, Float, Inexact, Int, Shaped
else:
    try:
        from jaxtyping import Array, Bool, Complex, Float, Inexact, Int, Shaped
    except ImportError:

        class _Shape:
            def __class_getitem__(cls, item: Any) -> Any:
                return Any

        Array = Any
        Bool = Complex = Float = Inexact = Int = Shaped = _Shape
