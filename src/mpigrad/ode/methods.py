"""Runge-Kutta methods for stiff equations: their coefficients, under diffrax's names."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

__all__ = ["ImplicitEuler", "KenCarp3", "KenCarp4", "KenCarp5", "Kvaerno3", "Kvaerno5", "Method"]

Rows = tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True)
class Method:
    """A singly diagonally implicit method whose first stage is explicit (ESDIRK).

    The last stage is the result of the step. All implicit stages have the same diagonal
    coefficient, so that one matrix serves the whole step. Subclass it for a method of your own.

    Attributes
    ----------
    order
        The order of the result.
    implicit
        The rows of the coefficients a_ij of the implicit stages, each with its diagonal.
    error
        The weights of the error estimate: the result's minus those of the embedded method.
    error_order
        The order of the error estimate of one step.
    explicit
        The rows of the coefficients of the explicit part, for a method that has one. The weights of
        its result are the last row of `implicit`.

    Examples
    --------
    >>> from mpigrad import ode
    >>> method = ode.Kvaerno3()
    >>> method.order, method.stages, round(method.diagonal, 4)
    (3, 4, 0.4359)
    """

    order: ClassVar[int]
    implicit: ClassVar[Rows]
    error: ClassVar[tuple[float, ...]]
    error_order: ClassVar[int]
    explicit: ClassVar[Rows | None] = None

    @property
    def stages(self) -> int:
        """The number of stages with the explicit first one."""
        return len(self.implicit) + 1

    @property
    def diagonal(self) -> float:
        """The diagonal coefficient of all implicit stages."""
        return self.implicit[0][-1]

    def below_diagonal(self) -> np.ndarray:
        """Return the coefficients of earlier stages, shape (stages - 1, stages)."""
        return _table([row[:-1] for row in self.implicit], self.stages)

    def explicit_rows(self) -> np.ndarray:
        """Return the explicit coefficients, and then the weights minus the last row."""
        assert self.explicit is not None
        last = np.array(self.implicit[-1]) - _table(self.explicit[-1:], self.stages)[0]
        return np.concatenate([_table(self.explicit, self.stages), last[None]])

    def nodes(self) -> np.ndarray:
        """Return the times of the implicit stages, in parts of the step."""
        return np.array([sum(row) for row in self.implicit])

    def predictors(self) -> np.ndarray:
        """Return the weights of earlier slopes in the first guess of a stage's slope.

        The guess is the slope of an earlier stage at the same time, or else the line through the
        slopes at the start and at the latest stage so far.
        """
        c = np.concatenate([[0.0], self.nodes()])
        rows = np.zeros((self.stages - 1, self.stages))
        for i in range(1, self.stages):
            same = np.flatnonzero(np.abs(c[:i] - c[i]) < 1e-12)
            latest = int(np.argmax(c[:i]))
            if len(same):
                rows[i - 1, same[-1]] = 1
            else:
                slope = c[i] / c[latest] if latest else 0.0
                rows[i - 1, 0] += 1 - slope
                rows[i - 1, latest] += slope
        return rows


def _table(rows: list[tuple[float, ...]] | Rows, width: int) -> np.ndarray:
    return np.array([(*row, *(0.0,) * (width - len(row))) for row in rows])


def _minus(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(x - y for x, y in zip(a, (*b, *(0.0,) * (len(a) - len(b))), strict=True))


class ImplicitEuler(Method):
    """Backward Euler's method, of order 1. The error is estimated by the trapezoidal rule.

    Examples
    --------
    >>> from mpigrad import ode
    >>> ode.ImplicitEuler().order
    1
    """

    order = 1
    implicit = ((0.0, 1.0),)
    error = (-0.5, 0.5)
    error_order = 2


class Kvaerno3(Method):
    """Kværnø's method of order 3 with 3 implicit stages.

    (A. Kværnø, Singly diagonally implicit Runge-Kutta methods with an explicit first stage, BIT
    Numerical Mathematics 44, 2004.) It and its embedded method are stable at infinity.

    Examples
    --------
    >>> from mpigrad import ode
    >>> ode.Kvaerno3().order
    3
    """

    _g = 0.43586652150
    order = 3
    implicit = (
        (_g, _g),
        ((-4 * _g**2 + 6 * _g - 1) / (4 * _g), (-2 * _g + 1) / (4 * _g), _g),
        (
            (6 * _g - 1) / (12 * _g),
            -1 / ((24 * _g - 12) * _g),
            (-6 * _g**2 + 6 * _g - 1) / (6 * _g - 3),
            _g,
        ),
    )
    error = _minus(implicit[2], implicit[1])
    error_order = 3


class Kvaerno5(Method):
    """Kværnø's method of order 5 with 6 implicit stages (2004, see `Kvaerno3`).

    Examples
    --------
    >>> from mpigrad import ode
    >>> ode.Kvaerno5().order
    5
    """

    _g = 0.26
    order = 5
    implicit = (
        (_g, _g),
        (0.13, 0.84033320996790809, _g),
        (0.22371961478320505, 0.47675532319799699, -0.06470895363112615, _g),
        (0.16648564323248321, 0.10450018841591720, 0.03631482272098715, -0.13090704451073998, _g),
        (
            0.13855640231268224, 0.0, -0.04245337201752043, 0.02446657898003141,
            0.61943039072480676, _g,
        ),
        (
            0.13659751177640291, 0.0, -0.05496908796538376, -0.04118626728321046,
            0.62993304899016403, 0.06962479448202728, _g,
        ),
    )  # fmt: skip
    error = _minus(implicit[5], implicit[4])
    error_order = 5


class KenCarp3(Method):
    """Kennedy and Carpenter's method ARK3(2)4L[2]SA of order 3, with an explicit part.

    (C. A. Kennedy, M. H. Carpenter, Additive Runge-Kutta schemes for convection-diffusion-reaction
    equations, Applied Numerical Mathematics 44, 2003.)

    Examples
    --------
    >>> from mpigrad import ode
    >>> ode.KenCarp3().order
    3
    """

    _g = 1767732205903 / 4055673282236
    order = 3
    implicit = (
        (_g, _g),
        (2746238789719 / 10658868560708, -640167445237 / 6845629431997, _g),
        (
            1471266399579 / 7840856788654,
            -4482444167858 / 7529755066697,
            11266239266428 / 11593286722821,
            _g,
        ),
    )
    explicit = (
        (2 * _g,),
        (5535828885825 / 10492691773637, 788022342437 / 10882634858940),
        (
            6485989280629 / 16251701735622,
            -4246266847089 / 9704473918619,
            10755448449292 / 10357097424841,
        ),
    )
    error = _minus(
        implicit[2],
        (
            2756255671327 / 12835298489170,
            -10771552573575 / 22201958757719,
            9247589265047 / 10645013368117,
            2193209047091 / 5459859503100,
        ),
    )
    error_order = 3


class KenCarp4(Method):
    """Kennedy and Carpenter's method ARK4(3)6L[2]SA of order 4, with an explicit part (2003).

    See `KenCarp3`.

    Examples
    --------
    >>> from mpigrad import ode
    >>> ode.KenCarp4().order
    4
    """

    _g = 0.25
    order = 4
    implicit = (
        (_g, _g),
        (8611 / 62500, -1743 / 31250, _g),
        (5012029 / 34652500, -654441 / 2922500, 174375 / 388108, _g),
        (
            15267082809 / 155376265600,
            -71443401 / 120774400,
            730878875 / 902184768,
            2285395 / 8070912,
            _g,
        ),
        (82889 / 524892, 0.0, 15625 / 83664, 69875 / 102672, -2260 / 8211, _g),
    )
    explicit = (
        (0.5,),
        (13861 / 62500, 6889 / 62500),
        (
            -116923316275 / 2393684061468,
            -2731218467317 / 15368042101831,
            9408046702089 / 11113171139209,
        ),
        (
            -451086348788 / 2902428689909,
            -2682348792572 / 7519795681897,
            12662868775082 / 11960479115383,
            3355817975965 / 11060851509271,
        ),
        (
            647845179188 / 3216320057751,
            73281519250 / 8382639484533,
            552539513391 / 3454668386233,
            3354512671639 / 8306763924573,
            4040 / 17871,
        ),
    )
    error = _minus(
        implicit[4],
        (
            4586570599 / 29645900160,
            0.0,
            178811875 / 945068544,
            814220225 / 1159782912,
            -3700637 / 11593932,
            61727 / 225920,
        ),
    )
    error_order = 4


class KenCarp5(Method):
    """Kennedy and Carpenter's method ARK5(4)8L[2]SA of order 5, with an explicit part (2003).

    See `KenCarp3`.

    Examples
    --------
    >>> from mpigrad import ode
    >>> ode.KenCarp5().order
    5
    """

    _g = 41 / 200
    order = 5
    implicit = (
        (_g, _g),
        (41 / 400, -567603406766 / 11931857230679, _g),
        (683785636431 / 9252920307686, 0.0, -110385047103 / 1367015193373, _g),
        (
            3016520224154 / 10081342136671,
            0.0,
            30586259806659 / 12414158314087,
            -22760509404356 / 11113319521817,
            _g,
        ),
        (
            218866479029 / 1489978393911,
            0.0,
            638256894668 / 5436446318841,
            -1179710474555 / 5321154724896,
            -60928119172 / 8023461067671,
            _g,
        ),
        (
            1020004230633 / 5715676835656,
            0.0,
            25762820946817 / 25263940353407,
            -2161375909145 / 9755907335909,
            -211217309593 / 5846859502534,
            -4269925059573 / 7827059040719,
            _g,
        ),
        (
            -872700587467 / 9133579230613,
            0.0,
            0.0,
            22348218063261 / 9555858737531,
            -1143369518992 / 8141816002931,
            -39379526789629 / 19018526304540,
            32727382324388 / 42900044865799,
            _g,
        ),
    )
    explicit = (
        (41 / 100,),
        (367902744464 / 2072280473677, 677623207551 / 8224143866563),
        (1268023523408 / 10340822734521, 0.0, 1029933939417 / 13636558850479),
        (
            14463281900351 / 6315353703477,
            0.0,
            66114435211212 / 5879490589093,
            -54053170152839 / 4284798021562,
        ),
        (
            14090043504691 / 34967701212078,
            0.0,
            15191511035443 / 11219624916014,
            -18461159152457 / 12425892160975,
            -281667163811 / 9011619295870,
        ),
        (
            19230459214898 / 13134317526959,
            0.0,
            21275331358303 / 2942455364971,
            -38145345988419 / 4862620318723,
            -1 / 8,
            -1 / 8,
        ),
        (
            -19977161125411 / 11928030595625,
            0.0,
            -40795976796054 / 6384907823539,
            177454434618887 / 12078138498510,
            782672205425 / 8267701900261,
            -69563011059811 / 9646580694205,
            7356628210526 / 4942186776405,
        ),
    )
    error = _minus(
        implicit[6],
        (
            -975461918565 / 9796059967033,
            0.0,
            0.0,
            78070527104295 / 32432590147079,
            -548382580838 / 3424219808633,
            -33438840321285 / 15594753105479,
            3629800801594 / 4656183773603,
            4035322873751 / 18575991585200,
        ),
    )
    error_order = 5
