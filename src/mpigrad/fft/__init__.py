"""Fourier transforms of fields on grids over ranks, with exact derivatives."""

from mpigrad.fft.layout import Layout
from mpigrad.fft.spectral import Direct, Helmholtz, dealias, gradient, laplacian, solve_helmholtz
from mpigrad.fft.transforms import (
    dctn,
    dstn,
    fft,
    fftn,
    forward,
    idctn,
    idstn,
    ifft,
    ifftn,
    inverse,
    irfft,
    irfftn,
    rfft,
    rfftn,
)

__all__ = [
    "Direct",
    "Helmholtz",
    "Layout",
    "dctn",
    "dealias",
    "dstn",
    "fft",
    "fftn",
    "forward",
    "gradient",
    "idctn",
    "idstn",
    "ifft",
    "ifftn",
    "inverse",
    "irfft",
    "irfftn",
    "laplacian",
    "rfft",
    "rfftn",
    "solve_helmholtz",
]
