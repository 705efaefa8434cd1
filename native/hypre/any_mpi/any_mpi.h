// The MPI on which hypre runs, found at run time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mpigrad::hypre {

// Bytes of an MPI_Status of this MPI, and of the places of the source and the tag in it.
struct StatusLayout {
  size_t size = 0, source = 0, tag = 0;
};

// The names of the constants, each followed by a space.
const char* constant_names();

// Returns nullptr, or an error text. `library` is the path of the MPI library in this process.
// `constants` has the values of the constants in the order of their names, and 32-bit handles as
// unsigned numbers.
const char* find_mpi(const char* library, bool pointers, const StatusLayout& status,
                     const int64_t* constants);

}  // namespace mpigrad::hypre
