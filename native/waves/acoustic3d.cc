// Acoustic waves on three axes, of each type, with a constant density.
#include "waves/acoustic3d.h"

#include "waves/run_as.h"

namespace mpigrad::waves {

ffi::Error run_acoustic3d(Kind kind, Call& c, const Setup& setup, Arguments& in, Results& out,
                          bool rest, bool save) {
  const bool doubles = in.get<Buffer>(0)->element_type() == ffi::F64;
  const auto run = setup.density ? run_acoustic3d_density
                   : doubles     ? run_as<Acoustic3d<double, false>>
                                 : run_as<Acoustic3d<float, false>>;
  return run(kind, c, setup, in, out, rest, save);
}

}  // namespace mpigrad::waves
