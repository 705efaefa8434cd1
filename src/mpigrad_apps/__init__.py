"""Applications of mpigrad: what `mpigrad run` offers, each a program that can be read."""
