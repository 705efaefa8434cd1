"""Programs written for other libraries: modules with their names, on mpigrad's operations."""
