// Acoustic waves on three axes, of each type and order.
#include "waves/acoustic3d.h"

#include "waves/run_as.h"

namespace mpigrad::waves {

ffi::Error run_acoustic3d(Kind kind, Call& c, const Setup& setup, Arguments& in, Results& out,
                          bool rest, bool save) {
  const bool doubles = in.get<Buffer>(0)->element_type() == ffi::F64;
  const auto of_order = [&](auto reach) {
    return doubles ? run_as<Acoustic3d<double, reach>> : run_as<Acoustic3d<float, reach>>;
  };
  const int64_t reach = setup.tile.reach;
  const auto run = reach == 1   ? of_order(std::integral_constant<int, 1>{})
                   : reach == 2 ? of_order(std::integral_constant<int, 2>{})
                                : of_order(std::integral_constant<int, 4>{});
  return run(kind, c, setup, in, out, rest, save);
}

}  // namespace mpigrad::waves
