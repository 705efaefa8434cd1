"""The lowest layer: native libraries, the start of MPI, and source lines of operations."""

from typing import TYPE_CHECKING

from mpigrad import _lazy

if TYPE_CHECKING:
    from mpigrad.runtime.files import EarlierRun as EarlierRun
    from mpigrad.runtime.files import earlier_run_error as earlier_run_error
    from mpigrad.runtime.files import last_record as last_record
    from mpigrad.runtime.files import last_save as last_save
    from mpigrad.runtime.files import name_in_errors as name_in_errors
    from mpigrad.runtime.files import sync_directory as sync_directory
    from mpigrad.runtime.files import write_atomically as write_atomically
    from mpigrad.runtime.mpi_library import find_mpi_libraries as find_mpi_libraries
    from mpigrad.runtime.native import library as library
    from mpigrad.runtime.native import mpi_library_path as mpi_library_path
    from mpigrad.runtime.native import record as record
    from mpigrad.runtime.native import status_layout as status_layout
    from mpigrad.runtime.processor import ANY_MPI as ANY_MPI
    from mpigrad.runtime.processor import hypre_built_with as hypre_built_with
    from mpigrad.runtime.processor import native_path as native_path
    from mpigrad.runtime.processor import variant_library as variant_library
    from mpigrad.runtime.processor import waves_library as waves_library

_NAMES = {
    "ANY_MPI": "processor",
    "EarlierRun": "files",
    "earlier_run_error": "files",
    "find_mpi_libraries": "mpi_library",
    "hypre_built_with": "processor",
    "last_record": "files",
    "last_save": "files",
    "library": "native",
    "mpi_library_path": "native",
    "name_in_errors": "files",
    "native_path": "processor",
    "record": "native",
    "status_layout": "native",
    "sync_directory": "files",
    "variant_library": "processor",
    "waves_library": "processor",
    "write_atomically": "files",
}

__getattr__, __dir__, __all__ = _lazy.attach(__name__, _NAMES)
