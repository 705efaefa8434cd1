// A digest of values: the same if they are equal to the bit, and different if not, except for one
// chance in 2^64 or less. It costs one reading, while a copy would be written and read as well.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "processor.h"

namespace mpigrad::stencil {

class Digest {
 public:
  // Values are added in the same parts each time.
  void add(const double* values, size_t size) {
    run_on_this_processor([=] {
      Lanes lanes = lanes_;  // in registers
      size_t k = 0;
      for (; k + kLanes <= size; k += kLanes) {
        for (size_t lane = 0; lane < kLanes; ++lane) mix(lanes[lane], values + k + lane);
      }
      for (size_t lane = 0; k < size; ++k, ++lane) mix(lanes[lane], values + k);
      lanes_ = lanes;
    });
  }

  bool operator==(const Digest& other) const { return lanes_ == other.lanes_; }

 private:
  static constexpr size_t kLanes = 32;  // a single lane would wait for the result of each multiplication
  using Lanes = std::array<uint64_t, kLanes>;

  // A bijection of the lane for a fixed value, and of the value for a fixed lane: one value that
  // differs always changes the digest.
  static void mix(uint64_t& lane, const double* value) {
    uint64_t bits;
    std::memcpy(&bits, value, sizeof(bits));
    const uint64_t mixed = (lane ^ bits) * 0x9E3779B97F4A7C15ull;
    lane = mixed ^ (mixed >> 32);
  }

  Lanes lanes_{};
};

}  // namespace mpigrad::stencil
