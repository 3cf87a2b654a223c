"""Ten differential equations with known solutions: see ``__main__.py``."""

from __future__ import annotations

from collections.abc import Callable

from .equation import Equation
from .forward import (
    beam,
    burgers,
    convection,
    heat,
    helmholtz,
    klein_gordon,
    oscillator,
    poisson,
    wave,
)
from .inverse import damping, diffusivity

EQUATIONS: dict[str, Callable[[], Equation]] = {
    "oscillator": oscillator,
    "oscillator, damping unknown": damping,
    "heat": heat,
    "heat, diffusivity unknown": diffusivity,
    "beam": beam,
    "Poisson": poisson,
    "Helmholtz": helmholtz,
    "wave": wave,
    "Klein–Gordon": klein_gordon,
    "Burgers": burgers,
}
"""By name what makes each."""
TRIALS = {"convection": convection}
"""On which the one setting was chosen."""

__all__ = ["EQUATIONS", "TRIALS", "Equation"]
