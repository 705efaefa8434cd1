"""A drug in the body: two compartments, and absorption of first order."""

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
    """The larger of the two rates at which a dose in the blood decays, in 1/h.

    Of (ka, CL, V1, Q, V2): the kinetics' eigenvalues are -ka, minus this, and minus a smaller one.
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
        Integrate by Kvaerno's implicit method of order 5 instead of Tsitouras' explicit one: for
        absorption or exchange much faster than the time between doses.
    rtol
        Error of a step, relative to the amounts; those below 1/1000 of the largest dose count as
        1/1000 of it.
    max_steps
        Of the integration between two doses; where it needs more, concentrations are NaN.
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
        """Concentrations in the central compartment; at a dose's own time, those before it.

        Differentiable in the parameters, to any order, in both modes.

        Parameters
        ----------
        log_parameters
            Logarithms of ka (1/h), CL (L/h), V1 (L), Q (L/h), V2 (L).
        dose_times
            In h, in ascending order.
        doses
            In mg.
        times
            In h, in ascending order, none of them before the first dose.

        Returns
        -------
        In mg/L.
        """
        data = (jnp.asarray(part) for part in (dose_times, doses, times))
        return by_forward_mode(self._integrate)(log_parameters, *data)

    def _integrate(self, log_parameters: Array, starts: Array, doses: Array, times: Array) -> Array:
        constants = tuple(jnp.exp(log_parameters))
        unit = jnp.max(doses)  # of the amounts, so that tolerances fit
        ends = jnp.append(starts[1:], jnp.maximum(starts[-1], times[-1]))

        def between_doses(amounts: Array, interval: tuple[Array, Array, Array]) -> Any:
            start, end, dose = interval
            length = end - start
            # On [0, 1], whatever the length: zero is right as well.
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
