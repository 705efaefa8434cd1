// The description of a run, as mpigrad/waves/native_run.py lays it out. Change both together, and the
// version with them: Python and C++ compare it, and the size, before anything else is read. Axes are in
// the order of tile.h: rows (x), columns (the last axis), the middle axis (y on three axes).
#pragma once

#include <cstdint>

namespace mpigrad::waves {

constexpr int64_t kDescriptionVersion = 5;

struct RunDescription {
  int64_t version, size;     // kDescriptionVersion, sizeof(RunDescription)
  int64_t physics;           // 0: acoustic, 1: elastic, 2, 3: the same on three axes
  int64_t slot;              // of the communicator
  int64_t cells[3];          // of this rank's tile of the model along each axis
  int64_t layers[6];         // cells of the absorbing layers before and behind each axis
  int64_t neighbors[6];      // ranks across these sides, -1 at the boundary of the grid
  int64_t reach;             // of the stencil, in cells
  int64_t steps, shots, threads;
  int64_t checkpoints;       // 0: as memory allows, -1: all, -2: boundary, else a state every k steps
  int64_t memory;            // bytes
  int64_t precision;         // of stored histories: 0: that of the run, 1: bfloat16, 2: float16
  const char* directory;     // of the files of histories, empty without files
  int64_t fingerprint;       // 48 bits, equal on all ranks
  double dt, spacing[3];     // negative along an axis that is mirrored

  // Acoustic waves.
  double stable_length;      // the largest stable time step times the largest velocity
  int64_t density;           // 1: there are buoyancies

  // Elastic waves: Kind (elastic.h) of the sources and of each component of the receivers.
  int64_t source_kind;
  int64_t receivers;         // of each component
  int64_t n_components;
  const int64_t* component_kinds;
  int64_t surface;           // axis whose last side is free, or -1. Its table is the last profile
  int64_t mechanisms;        // of attenuation. Their constants are the profile after those of the axes
};

}  // namespace mpigrad::waves
