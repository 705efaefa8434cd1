// The same of order 8.
#include "waves/elastic.h"

#include "waves/run_as.h"

namespace mpigrad::waves {

ffi::Error run_elastic_order8(Kind kind, Call& c, const Setup& setup, Arguments& in, Results& out,
                              bool rest, bool save) {
  const bool doubles = in.get<Buffer>(0)->element_type() == ffi::F64;
  const auto run = doubles ? run_as<Elastic<double, 2, 4>> : run_as<Elastic<float, 2, 4>>;
  return run(kind, c, setup, in, out, rest, save);
}

}  // namespace mpigrad::waves
