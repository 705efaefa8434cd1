// Acoustic waves, of each type and order.
#include "waves/acoustic.h"

#include "waves/run_as.h"

namespace mpigrad::waves {

ffi::Error run_acoustic(Kind kind, Call& c, const Setup& setup, Arguments& in, Results& out,
                        bool rest, bool save) {
  const bool doubles = in.get<Buffer>(0)->element_type() == ffi::F64;
  const auto run = setup.tile.reach == 2
                       ? (doubles ? run_as<Acoustic<double, 2>> : run_as<Acoustic<float, 2>>)
                       : (doubles ? run_as<Acoustic<double, 4>> : run_as<Acoustic<float, 4>>);
  return run(kind, c, setup, in, out, rest, save);
}

}  // namespace mpigrad::waves
