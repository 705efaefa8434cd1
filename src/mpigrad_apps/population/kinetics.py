"""A drug in the body: two compartments and first-order absorption."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mpigrad_apps.population.sensitivities import by_forward_mode

__all__ = ["PARAMETERS", "UNITS", "Kinetics", "decay_rate"]

PARAMETERS = ("ka", "CL", "V1", "Q", "V2")
UNITS = ("1/h", "L/h", "L", "L/h", "L")


def decay_rate(parameters: Sequence[float] | Float[Array | np.ndarray, " 5"]) -> Float[Array, ""]:
    """Compute the larger of the two rates at which a dose in the blood decays, in 1/h.

    The eigenvalues of the kinetics are -ka and minus the two decay rates.

    Parameters
    ----------
    parameters
        ka (1/h), CL (L/h), V1 (L), Q (L/h), V2 (L).

    Examples
    --------
    >>> from mpigrad_apps.population import decay_rate
    >>> print(f"{decay_rate([1.0, 5.0, 30.0, 10.0, 50.0]):.3f}")
    0.649
    """
    _, cl, v1, q, v2 = parameters
    rates, product = cl / v1 + q / v1 + q / v2, cl / v1 * q / v2
    return 0.5 * (rates + jnp.sqrt(rates**2 - 4 * product))


@dataclasses.dataclass(frozen=True)
class Kinetics:
    """The amounts of a drug in the depot (gut), the central and the peripheral compartment.

        depot'      = -ka depot
        central'    =  ka depot - CL/V1 central - Q/V1 central + Q/V2 peripheral
        peripheral' =                             Q/V1 central - Q/V2 peripheral

    A dose goes into the depot; the concentration is central / V1.

    Attributes
    ----------
    stiff
        Integrate by the implicit method of Kvaerno, of order 5, instead of the explicit method of
        Tsitouras. Use it if absorption or exchange is much faster than the time between doses.
    rtol
        Error of a step, relative to the amounts. Amounts below 1/1000 of the largest dose count as
        1/1000 of it.
    max_steps
        Limit of the steps between two doses. If an integration needs more, its concentrations are
        NaN.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from mpigrad_apps.population import Kinetics
    >>> with jax.enable_x64(True):
    ...     parameters = jnp.log(jnp.array([1.0, 5.0, 30.0, 10.0, 50.0]))
    ...     times = jnp.array([0.0, 1.0, 8.0])
    ...     c = Kinetics().concentrations(
    ...         parameters, jnp.array([0.0]), jnp.array([100.0]), times
    ...     )
    >>> c.shape, float(c[0]), bool(c[1] > c[2])
    ((3,), 0.0, True)
    """

    stiff: bool = False
    rtol: float = 1e-6
    max_steps: int = 2000

    def concentrations(
        self,
        log_parameters: Float[Array, " 5"],
        dose_times: Float[Array | np.ndarray, " k"],
        doses: Float[Array | np.ndarray, " k"],
        times: Float[Array | np.ndarray, " n"],
    ) -> Float[Array, " n"]:
        """Compute the concentrations in the central compartment, shape (n,), in mg/L.

        At the time of a dose, it is the concentration before the dose. The result is
        differentiable in the parameters, to any order, in both modes.

        Parameters
        ----------
        log_parameters
            Logarithms of ka (1/h), CL (L/h), V1 (L), Q (L/h), V2 (L).
        dose_times
            Times of the doses in h, in ascending order.
        doses
            Doses in mg.
        times
            Times of the concentrations in h, in ascending order, not before the first dose.
        """
        data = (jnp.asarray(part) for part in (dose_times, doses, times))
        return by_forward_mode(self._integrate)(log_parameters, *data)

    def _integrate(self, log_parameters: Array, starts: Array, doses: Array, times: Array) -> Array:
        constants = tuple(jnp.exp(log_parameters))
        unit = jnp.max(doses)  # unit of the amounts, so that tolerances fit
        ends = jnp.append(starts[1:], jnp.maximum(starts[-1], times[-1]))

        def between_doses(amounts: Array, interval: tuple[Array, Array, Array]) -> Any:
            start, end, dose = interval
            length = end - start
            # Time is scaled to [0, 1]. This is right for a length of zero, too.
            places = jnp.clip((times - start) / jnp.where(length > 0, length, 1.0), 0.0, 1.0)

            def rates(_: Array, now: Array, constants: tuple[Array, ...]) -> Array:
                ka, cl, v1, q, v2 = constants
                depot, central, peripheral = now
                absorbed, exchanged = ka * depot, q / v1 * central - q / v2 * peripheral
                return length * jnp.stack(
                    [-absorbed, absorbed - cl / v1 * central - exchanged, exchanged]
                )

            solution = diffrax.diffeqsolve(
                diffrax.ODETerm(rates),  # type: ignore[arg-type]
                diffrax.Kvaerno5() if self.stiff else diffrax.Tsit5(),
                0.0,
                1.0,
                None,
                amounts.at[0].add(dose / unit),
                constants,
                saveat=diffrax.SaveAt(
                    subs=[
                        diffrax.SubSaveAt(t1=True),
                        diffrax.SubSaveAt(ts=places, fn=lambda t, now, _: now[1]),
                    ]
                ),
                stepsize_controller=diffrax.PIDController(self.rtol, 1e-3 * self.rtol),
                adjoint=diffrax.ForwardMode(),
                max_steps=self.max_steps,
                throw=False,
            )
            solved = solution.result == diffrax.RESULTS.successful
            last, central = solution.ys  # type: ignore[misc]
            return last[0], jnp.where(solved, central, jnp.nan)

        _, central = jax.lax.scan(between_doses, jnp.zeros(3), (starts, ends, doses))
        interval = jnp.searchsorted(starts, times, side="left") - 1
        seen = jnp.take_along_axis(central, jnp.maximum(interval, 0)[None], axis=0)[0]
        return unit / constants[2] * seen
