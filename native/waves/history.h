// Histories of forward runs for their gradients, by ticket, within a budget of bytes. If a history
// was dropped, the run is computed again.
#pragma once

#include <list>

#include "waves/memory.h"

namespace mpigrad::waves {

// The chunks of a run of `steps` steps. The state at the beginning of each chunk but the first may be
// kept. The history of one chunk is stored at a time.
struct Chunks {
  int64_t steps = 0, length = 0;
  bool keeps = true;  // whether the forward run stores anything

  int64_t count() const { return (steps + length - 1) / length; }
  bool whole() const { return length >= steps; }
};

// All shots of a forward run: their histories if there is one chunk, else their checkpoints.
struct Kept {
  int32_t ticket = 0;
  int64_t setup = 0;
  bool used = false;  // by a gradient
  Memory memory;
};

class Store {
 public:
  // Drops runs until there is room, first used ones, then the oldest.
  Kept& keep(int64_t setup, size_t bytes, size_t budget) {
    size_t total = Pool::rounded(bytes);
    for (const Kept& k : kept_) total += k.memory.bytes();
    for (bool used : {true, false})
      for (auto k = kept_.begin(); k != kept_.end() && total > budget;)
        if (k->used == used) {
          total -= k->memory.bytes();
          k = kept_.erase(k);
        } else {
          ++k;
        }
    // Reuse the memory of a used run of the same size, whose pages are touched already.
    for (auto k = kept_.begin(); k != kept_.end(); ++k)
      if (k->used && k->memory.bytes() == Pool::rounded(bytes)) {
        kept_.erase(k);
        break;
      }
    last_ = last_ % 0x7ffffff0 + 1;
    kept_.push_back({last_, setup, false, Memory(bytes)});
    return kept_.back();
  }
  Kept* find(int32_t ticket, int64_t setup) {
    for (Kept& k : kept_)
      if (k.ticket == ticket && k.setup == setup) return &k;
    return nullptr;
  }

 private:
  std::list<Kept> kept_;
  int32_t last_ = 0;
};

inline Store store;

}  // namespace mpigrad::waves
