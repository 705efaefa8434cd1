"""Arrays of MATLAB files."""

from __future__ import annotations

import pathlib
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["read_mat"]

_PROGRAM = """
import pickle, sys
from scipy.io import loadmat
try:
    found = loadmat(sys.argv[1])
except Exception as error:
    found = f"{type(error).__name__}: {error}"
pickle.dump(found, sys.stdout.buffer)
"""


def read_mat(path: pathlib.Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file by name. Sparse matrices and functions are left out.

    SciPy reads the file in a process of its own, because its reader is in C, and may crash on a
    damaged file.

    Raises
    ------
    ValueError
        If the file is damaged, or has another format.
    """
    words = [sys.executable, "-P", "-c", _PROGRAM, str(path)]
    done = subprocess.run(words, capture_output=True, check=False)
    if done.returncode:
        raise ValueError("SciPy's reader of MATLAB files crashed, so the file is damaged")
    contents = pickle.loads(done.stdout)
    if isinstance(contents, str):
        raise ValueError(contents)
    return {name: value for name, value in contents.items() if isinstance(value, np.ndarray)}
