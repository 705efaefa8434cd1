// Elastic waves, of each type.
#include "waves/elastic.h"

#include "waves/run_as.h"

namespace mpigrad::waves {

ffi::Error run_elastic(Kind kind, Call& c, const Setup& setup, Arguments& in, Results& out,
                       bool rest, bool save) {
  const bool doubles = in.get<Buffer>(0)->element_type() == ffi::F64;
  return (doubles ? run_as<Elastic<double>> : run_as<Elastic<float>>)(kind, c, setup, in, out, rest,
                                                                      save);
}

}  // namespace mpigrad::waves
