"""The settings of the application. The command imports this module without JAX and MPI."""

import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True)
class Settings:
    """Recover the temperature that a ring had at the start from its temperature later."""

    cells: int = 60
    """Number of cells of the ring, shared out over the ranks."""
    time_steps: int = 20
    """Number of time steps between the start and the observation."""
    descent_steps: int = 40
    """Number of steps of gradient descent."""
    out: pathlib.Path = pathlib.Path("start.npy")
    """File for the recovered temperature, an array of shape (cells,)."""

    def check(self) -> None:
        """Raise a ValueError that names the first setting which is out of range."""
        if self.cells < 3:
            raise ValueError(f"--cells: expected at least 3, got {self.cells}")
        for option in ("time_steps", "descent_steps"):
            if getattr(self, option) < 1:
                name = option.replace("_", "-")
                raise ValueError(f"--{name}: expected at least 1, got {getattr(self, option)}")
