// The ranks of a grid: sums over all, and messages between neighbouring tiles.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "mpi/handler.h"
#include "multigrid/level.h"

namespace mpigrad::multigrid {

constexpr int kSum = 0, kMax = 2;  // slots of MPI's reductions (mpigrad/runtime/native.py)

class Ranks {
 public:
  // The communicator of derivatives, on which programs never receive from any source.
  Ranks(int64_t slot, const int64_t* tiles) : comm_(&communicator(slot | 1)) {
    std::copy_n(tiles, kAxes, tiles_);
    int rank = comm_->rank;
    for (int a = 0; a < kAxes; ++a) {
      place_[a] = rank % tiles_[a];
      rank /= static_cast<int>(tiles_[a]);
    }
  }

  int rank() const { return comm_->rank; }
  int size() const { return comm_->size; }
  int64_t bytes = 0;  // sent since the start of the operation

  void reduce(double* values, int count, int operation) const {
    if (size() == 1) return;
    bool known;
    check(call(runtime.mpi.Allreduce, runtime.in_place, static_cast<void*>(values), count,
               arithmetic_type(static_cast<int>(ffi::F64), known), reduction(operation),
               comm_->handle));
  }

  // One object of each rank.
  template <class T>
  void gather(const T& own, T* all) const {
    const int bytes = sizeof own;
    check(call(runtime.mpi.Allgather, static_cast<const void*>(&own), bytes, word_type(1),
               static_cast<void*>(all), bytes, word_type(1), comm_->handle));
  }

  // Every rank's numbers, in the order of the ranks.
  void gather(const float* own, int count, float* all, const std::vector<int>& counts,
              const std::vector<int>& starts) const {
    const Handle type = word_type(sizeof(float));
    check(call(runtime.mpi.Allgatherv, static_cast<const void*>(own), count, type,
               static_cast<void*>(all), counts.data(), starts.data(), type, comm_->handle));
  }

  // Exchanges cells with the neighbours along each axis in turn, so that corners arrive as well.
  // `copy(packs, cells, buffer)` copies cells to or from a buffer, and returns the number of floats.
  // `halo` is the number of cells around the tile.
  template <class Copy>
  void exchange(const Layout& layout, int halo, Copy&& copy) {
    Cells reach = layout.own;
    for (int a = 0; a < kAxes; ++a) {
      exchange_axis(layout, reach, a, halo, copy);
      if (layout.shape[a] > 1) {
        reach.lower[a] = std::max<int64_t>(reach.lower[a] - halo, 0);
        reach.upper[a] = std::min(reach.upper[a] + halo, layout.shape[a]);
      }
    }
  }

 private:
  static constexpr int kTag = 511 * 64;  // as waves/exchange.h

  static void check(int code) {
    if (code) throw std::runtime_error(error_text(code));
  }

  int neighbor(int axis, int side) const {
    const int64_t at = place_[axis] + side;
    if (at < 0 || at >= tiles_[axis]) return -1;
    int64_t stride = 1;
    for (int a = 0; a < axis; ++a) stride *= tiles_[a];
    return static_cast<int>(comm_->rank + side * stride);
  }

  template <class Copy>
  void exchange_axis(const Layout& layout, const Cells& reach, int axis, int halo, Copy&& copy) {
    Requests receives(2), sends(2);
    Cells there[2];
    for (int i = 0; i < 2; ++i) {
      const int side = i ? 1 : -1, other = neighbor(axis, side);
      if (other < 0) continue;
      Cells here = reach;
      there[i] = reach;
      const int64_t edge = i ? layout.own.upper[axis] : layout.own.lower[axis];
      here.lower[axis] = i ? edge - halo : edge;
      here.upper[axis] = here.lower[axis] + halo;
      there[i].lower[axis] = here.lower[axis] + side * halo;
      there[i].upper[axis] = here.upper[axis] + side * halo;
      // A tile at the end may be smaller than the halo of its neighbour: cells beyond it are zero.
      outgoing_[i].resize(copy(true, here, nullptr));
      incoming_[i].resize(copy(false, there[i], nullptr));
      check(post_receive(receives[i], incoming_[i].data(), incoming_[i].size(), 4, other, kTag,
                         comm_->handle));
      copy(true, here, outgoing_[i].data());
      bytes += 4 * static_cast<int64_t>(outgoing_[i].size());
      check(post_send(sends[i], outgoing_[i].data(), outgoing_[i].size(), 4, other, kTag,
                      comm_->handle));
    }
    Status status;
    for (int i = 0; i < 2; ++i) {
      if (neighbor(axis, i ? 1 : -1) < 0) continue;
      check(await_request(receives[i], status));
      copy(false, there[i], incoming_[i].data());
      check(await_request(sends[i], status));
    }
  }

  const Communicator* comm_;
  int64_t tiles_[kAxes], place_[kAxes];
  std::vector<float> outgoing_[2], incoming_[2];
};

// Exchanges the halos of an array with so many slots.
inline void exchange(Ranks& ranks, const Layout& layout, const Array<float>& array, int slots,
                     int halo = kHalo) {
  ranks.exchange(layout, halo, [&](bool packs, const Cells& cells, float* buffer) {
    int64_t count = 0;
    for (int64_t z = cells.lower[2]; z < cells.upper[2]; ++z)
      for (int64_t y = cells.lower[1]; y < cells.upper[1]; ++y)
        for (int slot = 0; slot < slots; ++slot)
          for (int half = 0; half < 2; ++half) {
            const int64_t begin = floor_half(cells.lower[0] + 1 - half),
                          size = floor_half(cells.upper[0] + 1 - half) - begin;
            if (buffer) {
              float* row = array.data() + layout.at(y, z, half, slots, slot) + begin;
              if (packs)
                std::memcpy(buffer + count, row, size * sizeof(float));
              else
                std::memcpy(row, buffer + count, size * sizeof(float));
            }
            count += size;
          }
    return count;
  });
}

}  // namespace mpigrad::multigrid
