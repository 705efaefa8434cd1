// Elastic waves on two axes, of each type, of order 4.
#include "waves/elastic.h"

#include "waves/run_as.h"

namespace mpigrad::waves {

ffi::Error run_elastic(Kind kind, Call& c, const Setup& setup, Arguments& in, Results& out,
                       bool rest, bool save) {
  const bool doubles = in.get<Buffer>(0)->element_type() == ffi::F64;
  const auto run = setup.tile.reach == 4 ? run_elastic_order8
                   : doubles             ? run_as<Elastic<double, 2, 2>>
                                         : run_as<Elastic<float, 2, 2>>;
  return run(kind, c, setup, in, out, rest, save);
}

}  // namespace mpigrad::waves
