// Histories of forward runs for their gradients, by ticket, within a budget of bytes or in files. If a
// history was dropped, the run is computed again.
#pragma once

#include <algorithm>
#include <list>
#include <memory>
#include <string>

#include "storage/scratch_file.h"
#include "waves/memory.h"

namespace mpigrad::waves {

using storage::ScratchFile;

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
  std::unique_ptr<ScratchFile> file;  // in place of memory
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
      if (k->used && !k->file && k->memory.bytes() == Pool::rounded(bytes)) {
        kept_.erase(k);
        break;
      }
    return add({0, setup, false, Memory(bytes), nullptr});
  }
  Kept& keep(int64_t setup, std::unique_ptr<ScratchFile> file) {
    return add({0, setup, false, Memory(), std::move(file)});
  }
  // A file for a run, or one with an error. Gives back the files of used runs first, and of others if there
  // is not enough space.
  std::unique_ptr<ScratchFile> make_file(const std::string& directory, int64_t item_bytes, int64_t items) {
    std::unique_ptr<ScratchFile> file;
    for (auto k = kept_.begin(); k != kept_.end();) {
      if (!k->used || !k->file) {
        ++k;
        continue;
      }
      if (k->file->fits(directory, item_bytes, items)) file = std::move(k->file);
      k = kept_.erase(k);
    }
    while (!file) {
      file = std::make_unique<ScratchFile>(directory, "history",
                                           "Give another directory, a precision or checkpoints.",
                                           item_bytes, items);
      const auto oldest = std::find_if(kept_.begin(), kept_.end(), [](const Kept& k) { return !!k.file; });
      if (!file->is_full() || oldest == kept_.end()) break;
      kept_.erase(oldest);
      file = nullptr;
    }
    return file;
  }
  Kept* find(int32_t ticket, int64_t setup) {
    for (Kept& k : kept_)
      if (k.ticket == ticket && k.setup == setup) return &k;
    return nullptr;
  }

 private:
  Kept& add(Kept kept) {
    last_ = last_ % 0x7ffffff0 + 1;
    kept.ticket = last_;
    kept_.push_back(std::move(kept));
    return kept_.back();
  }

  std::list<Kept> kept_;
  int32_t last_ = 0;
};

inline Store store;

}  // namespace mpigrad::waves
