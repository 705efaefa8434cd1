"""The `mpigrad` command: start ranks, end them, and find out what is wrong."""
