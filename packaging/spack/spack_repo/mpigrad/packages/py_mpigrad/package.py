from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyMpigrad(PythonPackage):
    """Differentiable MPI programs in Python, on JAX."""

    homepage = "https://github.com/mpigrad/mpigrad"
    git = "https://github.com/mpigrad/mpigrad.git"

    license("Apache-2.0")

    version("main", branch="main")

    variant("hypre", default=True, description="Solve by hypre's BoomerAMG and PFMG")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.24:", type="build")
    depends_on("ninja", type="build")
    depends_on("py-scikit-build-core@0.11:", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.11:")
        depends_on("py-jax@0.8:")
        depends_on("py-numpy@2.0:")

    depends_on("py-mpi4py@4.0:", type="run")
    # No library links MPI: the type `run` keeps the mpiexec of mpi4py's MPI on PATH.
    depends_on("mpi", type="run")
    depends_on("mpi", type=("build", "link"), when="+hypre")
    depends_on("hypre+shared+mpi", when="+hypre")

    def setup_build_environment(self, env: EnvironmentModifications) -> None:
        if self.spec.satisfies("+hypre"):
            env.set("HYPRE_DIR", self.spec["hypre"].prefix)
        else:
            env.set("CMAKE_ARGS", "-DMPIGRAD_NO_SYSTEM_HYPRE=ON")
