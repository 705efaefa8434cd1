"""The `mpigrad` command: start and end ranks, and diagnose an installation."""
