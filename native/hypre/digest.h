// A digest of values: equal where they are equal to the bit, and else, but for one chance in 2^64 or
// less, another one. Reading is all it costs, where keeping a copy would write and read it as well.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace mpigrad::hypre {

class Digest {
 public:
  // Values are added in parts, always the same ones.
  void add(const double* values, size_t size) {
    size_t k = 0;
    for (; k + kLanes <= size; k += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) mix(lane, values + k + lane);
    }
    for (size_t lane = 0; k < size; ++k, ++lane) mix(lane, values + k);
  }

  bool operator==(const Digest& other) const { return lanes_ == other.lanes_; }

 private:
  static constexpr size_t kLanes = 32;  // one alone would wait for itself in every multiplication

  // Of what a lane held and of what it is given, each determines the result where the other is
  // fixed: one value that differs always shows.
  void mix(size_t lane, const double* value) {
    uint64_t bits;
    std::memcpy(&bits, value, sizeof(bits));
    const uint64_t mixed = (lanes_[lane] ^ bits) * 0x9E3779B97F4A7C15ull;
    lanes_[lane] = mixed ^ (mixed >> 32);
  }

  std::array<uint64_t, kLanes> lanes_{};
};

}  // namespace mpigrad::hypre
