"""The applications of mpigrad. `mpigrad run` finds them by the entry points of pyproject.toml."""

from mpigrad.launch.applications import Application

__all__ = ["ACOUSTIC", "ELASTIC", "FWI", "HEAT", "POISSON", "POPULATION", "SGD"]

_PACKAGES = ("equinox", "jaxtyping", "matplotlib", "zarr")
_EXTRA = "mpigrad[apps]"

POISSON = Application(
    "recover the diffusivity kappa in div(kappa grad u) = f from observations of u",
    settings="mpigrad_apps.poisson.settings:Settings",
    run="mpigrad_apps.poisson.estimation:run",
    packages=_PACKAGES,
    requirement=_EXTRA,
)
HEAT = Application(
    "simulate heat in a plate, or recover the diffusivity from thermometers",
    settings="mpigrad_apps.heat.settings:Settings",
    run="mpigrad_apps.heat.estimation:run",
    packages=_PACKAGES,
    requirement=_EXTRA,
)
ACOUSTIC = Application(
    "shots of acoustic waves at a model of the ground",
    settings="mpigrad_apps.shots.acoustic_settings:Settings",
    run="mpigrad_apps.shots.acoustic_command:run",
    packages=_PACKAGES,
    requirement=_EXTRA,
)
ELASTIC = Application(
    "shots of elastic waves at a model of the ground",
    settings="mpigrad_apps.shots.elastic_settings:Settings",
    run="mpigrad_apps.shots.elastic_command:run",
    packages=_PACKAGES,
    requirement=_EXTRA,
)
FWI = Application(
    "the model of the ground, from the recordings of such shots",
    settings="mpigrad_apps.fwi.settings:Settings",
    run="mpigrad_apps.fwi.estimation:run",
    packages=_PACKAGES,
    requirement=_EXTRA,
)
POPULATION = Application(
    "estimate how patients absorb and eliminate a drug from blood samples",
    settings="mpigrad_apps.population.settings:Settings",
    run="mpigrad_apps.population.estimation:run",
    packages=(*_PACKAGES, "blackjax", "diffrax", "optax"),
    requirement=_EXTRA,
)
SGD = Application(
    "train a network that reads digits, or your own model, by stochastic gradients",
    settings="mpigrad_apps.sgd.settings:Settings",
    run="mpigrad_apps.sgd.comparison:run",
    packages=(*_PACKAGES, "optax", "sklearn"),
    requirement=_EXTRA,
)
