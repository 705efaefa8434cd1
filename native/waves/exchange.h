// Halos from the neighbours across faces: one packed message each way, sent before the middle of the
// tile is computed and awaited after (of passes of four steps, those of the last two steps).
#pragma once

#include "waves/memory.h"

namespace mpigrad::waves {

// The layers of a field that neighbours along `axis` need, from `begin` to `end` along the columns (for
// neighbours along the columns: along the rows), and from `low` to `high` along the third axis.
template <class T>
struct Piece {
  T* field;
  int axis;
  int64_t begin, end, low = 0, high = 1;

  int64_t cells() const {
    return std::max<int64_t>(0, end - begin) * std::max<int64_t>(0, high - low);
  }
};

template <class T>
class Exchange {
 public:
  // Messages use the communicator of derivatives, on which programs never receive from any source.
  Exchange(const Tile& tile, int64_t slot) : tile_(tile), comm_(communicator(slot | 1)) {}

  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  int64_t bytes() const { return bytes_; }

  int post(const std::vector<Piece<T>>& pieces) {
    pieces_ = pieces;
    for (int side = 0; side < kSides; ++side) {
      if (tile_.neighbor[side] == kNobody) continue;
      int64_t count = 0;
      for (const auto& p : pieces_)
        if (p.axis == side / 2) count += tile_.reach * p.cells();
      counts_[side] = count;
      if (!count) continue;
      if (static_cast<int64_t>(incoming_[side].size()) < count) {
        incoming_[side].resize(count);
        outgoing_[side].resize(count);
      }
      if (int code = post_receive(receives_[side], incoming_[side].data(), count, sizeof(T),
                                  tile_.neighbor[side], kTag, comm_.handle))
        return code;
    }
    for (int side = 0; side < kSides; ++side) {
      if (tile_.neighbor[side] == kNobody || !counts_[side]) continue;
      copy(side, true);
      bytes_ += counts_[side] * sizeof(T);
      if (int code = post_send(sends_[side], outgoing_[side].data(), counts_[side], sizeof(T),
                               tile_.neighbor[side], kTag, comm_.handle))
        return code;
    }
    return 0;
  }

  int wait() {
    Status status;
    for (int side = 0; side < kSides; ++side) {
      if (tile_.neighbor[side] == kNobody || !counts_[side]) continue;
      for (Request* request : {&receives_[side], &sends_[side]})
        if (int code = await_request(*request, status)) return code;
      copy(side, false);
    }
    return 0;
  }

 private:
  static constexpr int kTag = 511 * 64;  // word 0, which no derivative uses (`communicator.py`)

  // Packs the layers inside a side, or unpacks those beyond it.
  void copy(int side, bool packs) {
    const int64_t cells = std::array{tile_.nx, tile_.ny, tile_.nm}[side / 2];
    const int64_t first = side % 2 ? (packs ? cells - tile_.reach : cells)
                                   : (packs ? 0 : -tile_.reach);
    T* buffer = packs ? outgoing_[side].data() : incoming_[side].data();
    for (const auto& p : pieces_) {
      if (p.axis != side / 2 || !p.cells()) continue;
      const int64_t n = p.end - p.begin;
      const auto at = [&](int64_t i, int64_t m, int64_t j) { return p.field + tile_.at(i, m, j); };
      if (p.axis == kColumns) {
        for (int64_t i = p.begin; i < p.end; ++i)
          for (int64_t m = p.low; m < p.high; ++m, buffer += tile_.reach) {
            T* cell = at(i, m, first);
            for (int64_t k = 0; k < tile_.reach; ++k) (packs ? buffer : cell)[k] = (packs ? cell : buffer)[k];
          }
      } else {
        for (int64_t k = first; k < first + tile_.reach; ++k)
          for (int64_t l = p.low; l < p.high; ++l, buffer += n) {
            const int64_t i = p.axis == kRows ? k : l, m = p.axis == kRows ? l : k;
            T* row = at(i, m, p.begin);
            std::memcpy(packs ? buffer : row, packs ? row : buffer, n * sizeof(T));
          }
      }
    }
  }

  const Tile& tile_;
  const Communicator& comm_;
  std::vector<Piece<T>> pieces_;
  std::vector<T> incoming_[kSides], outgoing_[kSides];
  int64_t counts_[kSides] = {};
  int64_t bytes_ = 0;
  // Last, so that messages that are under way after an error end before their memory.
  Requests receives_ = Requests(kSides), sends_ = Requests(kSides);
};

}  // namespace mpigrad::waves
