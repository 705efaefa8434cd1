"""The lowest layer: native libraries, the start of MPI, and source lines of operations."""
