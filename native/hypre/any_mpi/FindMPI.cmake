# hypre's build asks for MPI, and gets the mpi.h of this folder.
set(MPI_FOUND TRUE)
set(MPI_C_FOUND TRUE)
if(NOT TARGET MPI::MPI_C)
  add_library(MPI::MPI_C INTERFACE IMPORTED)
  target_include_directories(MPI::MPI_C INTERFACE ${CMAKE_CURRENT_LIST_DIR})
endif()
