"""The ground floor: the native libraries, the start of MPI, and the source lines of operations."""
