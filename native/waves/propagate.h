// The time loop of all waves, forward and backward. The equation is a physics (acoustic.h is the
// model). A physics `P` with values of type P::Value offers
//   models, fields(setup), kPhases    numbers of arrays of the model and of the state, and of the
//                                     phases of a step. After each phase neighbours exchange `pieces`
//   extremes, fault                   values, and the error that their maxima over all ranks show in
//                                     the model or in the time step
//   load(models), gradient(models)    set the medium, get its cotangents after the adjoint run
//   Wave, begin, end                  the fields, from and to the arrays of the state, of state_sizes
//                                     per shot
//   begin_adjoint, end_adjoint        from and to the cotangents of the state. The end gets the state, too
//   prepare(phase, mode, wave, ...)   work before a phase on the whole tile. `before` is the history
//                                     of the step before, and first(wave) that of a step that would
//                                     have ended with the initial wave
//   update(phase, mode, box, ...)     the fields in a box. `history` is that of the step: saved, read
//                                     by the adjoint, or read by the tangent (kBorn)
//   finish(phase, mode, wave)         work after all boxes (new fields become the present ones)
//   rim_size, keep_before, keep_after the data that boundary saving keeps of a step (kRim)
//   turn(wave)                        prepares a last state to be run backwards (kReverse, whose
//                                     prepare gets the kept data instead of `before`)
//   kHistoryIsState                   whether the history of a step is part of the state after it
//   depth()                           steps that are computed in one pass over the memory. Above 1:
//                                     one phase, whose prepare only works in kReverse and whose
//                                     finish, called twice, changes nothing
//   inject, sample                    one cell of a source or of a receiver, which the adjoint
//                                     exchanges. It reads the cotangents of the sources before its
//                                     source_phase
//   injects_first(phase, mode)        whether the cells of a box are injected before its update
// A step is for each phase: prepare, then for each box sample, update and inject (or inject and update),
// and the exchange.
#pragma once

#include <chrono>
#include <cmath>
#include <vector>
#include <string>

#include "waves/archive.h"
#include "waves/blocks.h"
#include "waves/exchange.h"
#include "waves/history.h"

namespace mpigrad::waves {

enum class Mode { kPlain, kSave, kAdjoint, kBorn, kRim, kReverse };

// Points and their values (points, steps) of a shot.
template <class T>
struct Values {
  const PointTable* table = nullptr;
  T* data = nullptr;  // of all shots
  int64_t steps = 0;

  T* at(int64_t shot, int64_t step) const { return data + shot * table->points * steps + step; }
};

template <class P>
class Propagation {
 public:
  using T = typename P::Value;
  using Wave = typename P::Wave;

  Propagation(const Call& c, const Setup& setup)
      : c_(c),
        setup_(setup),
        tile_(setup.tile),
        physics_(setup),
        exchange_(tile_, setup.slot),
        packing_(static_cast<Precision>(setup.precision), physics_.history_size()) {}

  int64_t bytes() const { return exchange_.bytes(); }
  // The error of a file on some rank, the same on all ranks, or an empty text.
  const std::string& file_error() const { return file_error_; }

  // Starts on all ranks or on none. `available`: whether this rank has the history of the run. `shots`:
  // those whose histories the run stores, at least one if `available` is false on some rank.
  ffi::Error start(const Arrays<const T>& models, bool& available, int64_t shots) {
    std::vector<double> numbers = physics_.extremes(models);
    const size_t n = numbers.size();
    const int64_t slots = packing_.is_full() ? 0 : steps_in_use() * static_cast<int64_t>(history_bytes());
    const int64_t item = std::max<int64_t>(1, packing_.bytes());  // a tile may have no cells
    const int64_t fit = std::max<int64_t>(0, setup_.memory - slots) / item;
    const double print = 2.0 * static_cast<double>(setup_.fingerprint) + (sizeof(T) == 8);
    numbers.insert(numbers.end(),
                   {print, -print, -static_cast<double>(fit), available ? 0.0 : 1.0,
                    static_cast<double>(checkpoint_bytes()) / item,
                    rims() && setup_.shots * kept_bytes() > setup_.memory ? 1.0 : 0.0});
    std::vector<double> most(numbers.size());
    bool known;
    if (int code = call(runtime.mpi.Allreduce, static_cast<const void*>(numbers.data()),
                        static_cast<void*>(most.data()), static_cast<int>(most.size()),
                        arithmetic_type(kDouble, known), reduction(kMax), c_.comm.handle))
      return c_.done(code);
    if (most[n] != -most[n + 1]) return different_runs(print);
    const std::string fault = physics_.fault(most.data());
    if (!fault.empty()) return c_.fail(fault);
    choose_chunks(-most[n + 2], most[n + 4]);
    if (rims()) chunks_.keeps = most[n + 5] == 0;  // else one shot at a time, computed again
    available = most[n + 3] == 0;
    if (on_disk() && shots > 0 && !available) {
      const bool whole = chunks_.whole();
      file_ = store.make_file(setup_.directory, whole ? packing_.bytes() : checkpoint_bytes(),
                              shots * items());
      if (int code = agree(file_->error())) return code < 0 ? c_.fail(file_error_) : c_.done(code);
    }
    physics_.load(models);
    return ffi::Error::Success();
  }

  // `state` is empty for waves at rest. `ticket`: that of the history with `save`, else 0.
  int forward(const Arrays<const T>& state, const Values<T>& sources, const Values<T>& receivers,
              const Arrays<T>& last, bool save, int32_t& ticket) {
    const bool keeps = save && chunks_.keeps, whole = chunks_.whole();
    char* data = nullptr;
    ScratchFile* file = nullptr;
    ticket = 0;
    if (keeps) {
      Kept& k = on_disk() ? store.keep(setup_.id, std::move(file_))
                          : store.keep(setup_.id, setup_.shots * kept_bytes(), setup_.memory);
      ticket = k.ticket;
      data = static_cast<char*>(k.memory.data());
      file = k.file.get();
    }
    Archive<T> steps(packing_, setup_.threads, data, whole ? file : nullptr, steps_in_use());
    Archive<T> states(whole_states(), setup_.threads, data, whole ? nullptr : file, 1);
    Wave wave = physics_.wave();
    for (int64_t shot = 0; shot < setup_.shots; ++shot) {
      physics_.begin(wave, state, shot);
      if (int code = exchange_all(wave)) return code;
      if (keeps && rims()) {
        T* mine = reinterpret_cast<T*>(data + shot * kept_bytes());
        if (int code = forward_with_rims(wave, shot, sources, mine, &receivers)) return code;
        physics_.end(wave, last, shot);
        continue;
      }
      const int64_t length = keeps ? chunks_.length : setup_.steps;
      for (int64_t n = 0; n < setup_.steps; n += length) {
        if (n > 0) put_state(wave, states, shot * items() + n / length - 1);
        const bool saves = keeps && whole;
        if (int code = advance(wave, saves ? Mode::kSave : Mode::kPlain,
                               saves ? history(steps, 0, shot * setup_.steps) : History{}, shot, n,
                               std::min(length, setup_.steps - n), sources, &receivers))
          return code;
        if (int code = agree_about(states)) return code;
      }
      physics_.end(wave, last, shot);
    }
    if (int code = finish(steps)) return code;
    return finish(states);
  }

  // The tangent of a run, computed together with the run.
  int tangent(const Arrays<const T>& state, const Values<T>& sources,
              const Arrays<const T>& model_tangents, const Arrays<const T>& state_tangents,
              const Values<T>& source_tangents, const Values<T>& receivers,
              const Arrays<T>& last) {
    physics_.load_tangents(model_tangents);
    Memory memory(2 * history_bytes());
    Wave wave = physics_.wave(), moved = physics_.wave();
    for (int64_t shot = 0; shot < setup_.shots; ++shot) {
      physics_.begin(wave, state, shot);
      physics_.begin(moved, state_tangents, shot);
      if (int code = exchange_all(wave)) return code;
      if (int code = exchange_all(moved)) return code;
      for (int64_t n = 0; n < setup_.steps; ++n) {
        T* histories = static_cast<T*>(memory.data());
        T* here = histories + n % 2 * physics_.history_size();
        T* before = n ? histories + (n - 1) % 2 * physics_.history_size() : physics_.first(wave);
        if (int code = advance(wave, Mode::kSave, history(here, n), shot, n, 1, sources))
          return code;
        if (int code = advance(moved, Mode::kBorn, history(here, n, before), shot, n, 1,
                               source_tangents, &receivers))
          return code;
      }
      physics_.end(moved, last, shot);
    }
    return 0;
  }

  // The cotangents of models, sources and first states. `kept` is the history on all ranks, or
  // nullptr.
  int adjoint(const Arrays<const T>& state, const Values<T>& sources, Kept* kept,
              const Values<T>& receiver_cotangents, const Arrays<const T>& last_cotangents,
              const Arrays<T>& models, const Values<T>& source_cotangents,
              const Arrays<T>& first_cotangents) {
    if (kept) kept->used = true;
    if (rims())
      return adjoint_with_rims(state, sources, kept, receiver_cotangents, last_cotangents, models,
                               source_cotangents, first_cotangents);
    const int64_t length = std::min(chunks_.length, setup_.steps);
    const bool whole = chunks_.whole(), ready = kept && whole;
    Memory again, memory;
    ScratchFile* const file = kept ? kept->file.get() : file_.get();
    if (!kept && !whole && !file) again = Memory(kept_bytes());
    if (!ready && !(whole && file)) memory = Memory(length * packing_.bytes());
    void* const stored = kept ? kept->memory.data() : again.data();
    Archive<T> steps(packing_, setup_.threads, ready ? stored : memory.data(), whole ? file : nullptr, steps_in_use());
    Archive<T> states(whole_states(), setup_.threads, stored, whole ? nullptr : file, 1);
    Wave wave = physics_.wave();
    Wave back = physics_.wave();
    for (int64_t shot = 0; shot < setup_.shots; ++shot) {
      const int64_t first_item = kept ? shot * items() : 0;
      if (!kept && !whole) {
        physics_.begin(wave, state, shot);
        if (int code = exchange_all(wave)) return code;
        states.begin_writing();
        for (int64_t chunk = 1; chunk < chunks_.count(); ++chunk) {
          if (int code = advance(wave, Mode::kPlain, {}, shot, (chunk - 1) * length, length, sources))
            return code;
          put_state(wave, states, chunk - 1);
        }
      }
      states.begin_reading(first_item);
      physics_.begin_adjoint(back, last_cotangents, shot);
      if (int code = exchange_all(back)) return code;
      for (int64_t chunk = chunks_.count() - 1; chunk >= 0; --chunk) {
        const int64_t first = chunk * length, end = std::min(first + length, setup_.steps);
        const int64_t item = ready ? first_item : 0;  // of step `first`
        if (chunk == 0) {
          physics_.begin(wave, state, shot);
        } else {
          const Arrays<T> fields = state_arrays(states.at(first_item + chunk - 1));
          physics_.begin(wave, {fields.begin(), fields.end()}, 0);
        }
        if (!ready) {
          if (int code = exchange_all(wave)) return code;
          steps.begin_writing();
          if (int code = advance(wave, Mode::kSave, history(steps, first, item), shot, first,
                                 end - first, sources))
            return code;
        }
        steps.begin_reading(item);
        if (int code = advance(back, Mode::kAdjoint, history(steps, first, item, physics_.first(wave)),
                               shot, end - 1, end - first, receiver_cotangents, &source_cotangents))
          return code;
        if (int code = agree_about(states)) return code;
      }
      physics_.end_adjoint(back, state, first_cotangents, shot);
    }
    if (int code = finish(steps)) return code;
    if (int code = finish(states)) return code;
    physics_.gradient(models);
    return 0;
  }

 private:
  static constexpr int kDouble = 12;  // XLA's id
  static constexpr int kMax = 2;      // mpigrad.runtime.native.REDUCTIONS

  // Programs that were traced earlier: while they are traced, Python names the setting that differs.
  ffi::Error different_runs(double own) const {
    std::vector<double> prints(c_.comm.size);
    if (int code = call(runtime.mpi.Allgather, static_cast<const void*>(&own), 1, word_type(sizeof own),
                        static_cast<void*>(prints.data()), 1, word_type(sizeof own), c_.comm.handle))
      return c_.done(code);
    int other = 0;
    while (other + 1 < c_.comm.size && prints[other] == prints[0]) ++other;
    return c_.fail("the run is not the same on all ranks: that of rank " + std::to_string(other) +
                   " differs from that of rank 0. Give the same dtype, time step, number of steps, "
                   "survey and settings on every rank.");
  }

  // ---- boundary saving ----

  bool rims() const { return setup_.checkpoints == kRims; }

  // Runs a wave that has begun. `mine` gets the rims of all steps and the last state.
  int forward_with_rims(Wave& wave, int64_t shot, const Values<T>& sources, T* mine,
                        const Values<T>* receivers) {
    Memory memory;
    if (!P::kHistoryIsState) memory = Memory(history_bytes());
    T* here = static_cast<T*>(memory.data());
    for (int64_t n = 0; n < setup_.steps; ++n) {
      T* rim = mine + n * physics_.rim_size();
      physics_.keep_before(wave, rim);
      if (int code = advance(wave, Mode::kRim, history(here, n), shot, n, 1, sources, receivers))
        return code;
      physics_.keep_after(here, rim);
    }
    physics_.end(wave, state_arrays(mine + setup_.steps * physics_.rim_size()), 0);
    return 0;
  }

  int adjoint_with_rims(const Arrays<const T>& state, const Values<T>& sources, Kept* kept,
                        const Values<T>& receiver_cotangents,
                        const Arrays<const T>& last_cotangents, const Arrays<T>& models,
                        const Values<T>& source_cotangents, const Arrays<T>& first_cotangents) {
    Memory again, memory(2 * history_bytes());
    if (!kept) again = Memory(kept_bytes());
    Wave wave = physics_.wave(), back = physics_.wave();
    for (int64_t shot = 0; shot < setup_.shots; ++shot) {
      T* mine = static_cast<T*>(again.data());
      if (kept) {
        mine = reinterpret_cast<T*>(static_cast<char*>(kept->memory.data()) + shot * kept_bytes());
      } else {
        physics_.begin(wave, state, shot);
        if (int code = exchange_all(wave)) return code;
        if (int code = forward_with_rims(wave, shot, sources, mine, nullptr)) return code;
      }
      const Arrays<T> last = state_arrays(mine + setup_.steps * physics_.rim_size());
      physics_.begin(wave, {last.begin(), last.end()}, 0);
      physics_.turn(wave);
      if (int code = exchange_all(wave)) return code;
      physics_.begin_adjoint(back, last_cotangents, shot);
      if (int code = exchange_all(back)) return code;
      T* after = physics_.first(wave);
      for (int64_t n = setup_.steps - 1; n >= 0; --n) {
        T* here = static_cast<T*>(memory.data()) + n % 2 * physics_.history_size();
        if (int code = advance(wave, Mode::kReverse,
                               history(here, n, mine + n * physics_.rim_size()), shot, n, 1, sources))
          return code;
        if (int code = advance(back, Mode::kAdjoint,
                               history(P::kHistoryIsState ? after : here, n, here), shot, n, 1,
                               receiver_cotangents, &source_cotangents))
          return code;
        after = here;
      }
      physics_.end_adjoint(back, state, first_cotangents, shot);
    }
    physics_.gradient(models);
    return 0;
  }

  // ---- steps ----

  // The histories of steps from `first` on, the first one as `item` of an archive or at `data`, and what
  // `prepare` gets as that of the step before them.
  struct History {
    T* data = nullptr;
    Archive<T>* archive = nullptr;
    int64_t first = 0, size = 0;
    int64_t item = 0;
    T* earlier = nullptr;

    T* at(int64_t n) const {
      if (archive) return archive->at(item + n - first);
      return data ? data + (n - first) * size : nullptr;
    }
    T* before(int64_t n) const { return n > first ? at(n - 1) : earlier; }
    void put(int64_t n) const {
      if (archive) archive->put(item + n - first);
    }
  };
  History history(T* data, int64_t first, T* earlier = nullptr) const {
    return {data, nullptr, first, physics_.history_size(), 0, earlier};
  }
  History history(Archive<T>& archive, int64_t first, int64_t item, T* earlier = nullptr) const {
    return {nullptr, &archive, first, physics_.history_size(), item, earlier};
  }

  // Runs `count` steps from step n on, the adjoint backwards. The adjoint injects `values` at the
  // receivers, and reads at the sources.
  int advance(Wave& wave, Mode mode, const History& history, int64_t shot, int64_t n, int64_t count,
              const Values<T>& values, const Values<T>* reads = nullptr) {
    for (int64_t done = 0, stored = n; count > 0;) {
      const int64_t depth = std::min(most_steps(), count);
      if (int code = advance_together(wave, mode, history, shot, n, depth, values, reads))
        return code;
      n += mode == Mode::kAdjoint ? -depth : depth;
      count -= depth;
      // If it is the present state, the next step may change it for a moment (forces on velocities).
      const int64_t end = P::kHistoryIsState && count > 0 ? n - 1 : n;
      for (; mode == Mode::kSave && stored < end; ++stored) history.put(stored);
      const int64_t before = done;
      done += depth;
      if (history.archive && before / kStepsBetweenChecks != done / kStepsBetweenChecks)
        if (int code = agree_about(*history.archive)) return code;
    }
    return 0;
  }

  // Runs `depth` steps in one pass over the memory: when some rows have been computed in a step, the rows
  // `reach` before them are computed in the next one, while they are in the cache (blocks.h). The halos of
  // each step need only cells near neighbours, which are computed first. So the messages of the last two
  // steps travel while the core is computed, with all its steps.
  int advance_together(Wave& wave, Mode mode, const History& history, int64_t shot, int64_t n,
                       int64_t depth, const Values<T>& values, const Values<T>* reads) {
    const int64_t direction = mode == Mode::kAdjoint ? -1 : 1;
    const PointTable::Shot& points = values.table->of(shot);
    const PointTable::Shot* read = reads ? &reads->table->of(shot) : nullptr;
    const size_t n_read = read ? read->entries.size() : 0;
    samples_.resize(std::max(samples_.size(), static_cast<size_t>(depth) * n_read));
    for (int phase = 0; phase < P::kPhases; ++phase) {
      const bool samples = read && phase == (mode == Mode::kAdjoint ? physics_.source_phase() : 0);
      physics_.prepare(phase, mode, wave, history.at(n), history.before(n));
      int64_t present = 0;  // the step for which the fields of `wave` are in place
      const auto turn_to = [&](int64_t step) {
        if ((step - present) % 2) physics_.finish(phase, mode, wave);
        present = step;
      };
      const auto compute = [&](int64_t step, const Box& box) {
        if (box.empty()) return;
        turn_to(step);
        T* here = history.at(n + direction * step);
        const T* amounts = values.at(shot, n + direction * step);
        if (samples)
          read->each(box, [&](const PointTable::Entry& e, int64_t k) {
            samples_[step * n_read + k] = physics_.sample(mode, e, wave);
          });
        const auto inject = [&] {
          points.each(box, [&](const PointTable::Entry& e, int64_t) {
            const T value = static_cast<T>(e.weight) * amounts[e.point * values.steps];
            physics_.inject(phase, mode, e, wave, value, here);
          });
        };
        const bool first = physics_.injects_first(phase, mode);
        if (first) inject();
        in_parallel(setup_.threads, box,
                    [&](const Box& part) { physics_.update(phase, mode, part, wave, here); });
        if (!first) inject();
      };
      BlockTrial& trial = block_trial(tile_, depth, sizeof(T), static_cast<int64_t>(mode));
      const Blocks blocks(tile_, depth, trial.size(), sizeof(T));
      const int64_t alone = std::max<int64_t>(0, depth - 2);  // steps whose messages travel alone
      double seconds = 0;
      for (int64_t step = 0; step < depth; ++step) {
        for (const Box& box : tile_.frame(tile_.core(depth - step))) compute(step, box);
        turn_to(step);
        pieces_.clear();
        physics_.pieces(phase, mode, wave, pieces_);
        if (int code = exchange_.post(pieces_)) return code;
        if (step >= alone) {
          const auto begin = std::chrono::steady_clock::now();
          const int64_t parts = depth - alone, part = step - alone;
          for (int64_t k = blocks.count() * part / parts; k < blocks.count() * (part + 1) / parts; ++k)
            for (int64_t s = 0; s < depth; ++s) compute(s, blocks.at(k, tile_.core(depth - s), s));
          seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        }
        if (int code = exchange_.wait()) return code;
        c_.watch.moves();
      }
      turn_to(depth);
      if (!trial.decided()) trial.add(seconds);
    }
    // In the order of the cells whatever the depth, which depends on the checkpoints.
    for (int64_t step = 0; step < depth; ++step) {
      T* sums = reads ? reads->at(shot, n + direction * step) : nullptr;
      for (size_t k = 0; k < n_read; ++k)
        sums[read->entries[k].point * reads->steps] += samples_[step * n_read + k];
    }
    return 0;
  }

  // The halos of an initial wave.
  int exchange_all(Wave& wave) {
    pieces_.clear();
    physics_.all_pieces(wave, pieces_);
    if (int code = exchange_.post(pieces_)) return code;
    return exchange_.wait();
  }

  // Steps in a pass. Threads wait for each other after each box. A pass of several steps has many boxes, and
  // each wait is long if other work uses one of the cores.
  int64_t most_steps() const { return setup_.threads > 1 ? 1 : physics_.depth(); }
  // Histories that a pass and `prepare` work on.
  int64_t steps_in_use() const { return std::max<int64_t>(2, most_steps()); }
  size_t history_bytes() const { return physics_.history_size() * sizeof(T); }

  // Steps or states that are kept of a shot.
  int64_t items() const { return chunks_.whole() ? setup_.steps : chunks_.count() - 1; }
  Packing<T> whole_states() const { return {Precision::kFull, checkpoint_size()}; }
  int64_t checkpoint_bytes() const { return checkpoint_size() * static_cast<int64_t>(sizeof(T)); }
  // Of one shot.
  int64_t kept_bytes() const {
    if (rims())
      return setup_.steps * physics_.rim_size() * static_cast<int64_t>(sizeof(T)) + checkpoint_bytes();
    return items() * (chunks_.whole() ? packing_.bytes() : checkpoint_bytes());
  }
  int64_t checkpoint_size() const {
    int64_t total = 0;
    for (int64_t size : physics_.state_sizes()) total += size;
    return total;
  }
  // The arrays of the state at the beginning of a chunk.
  Arrays<T> state_arrays(T* data) const {
    Arrays<T> fields;
    for (int64_t size : physics_.state_sizes()) {
      fields.push_back(data);
      data += size;
    }
    return fields;
  }
  void put_state(Wave& wave, Archive<T>& states, int64_t item) const {
    physics_.end(wave, state_arrays(states.at(item)), 0);
    states.put(item);
  }

  // ---- files ----

  static constexpr int64_t kStepsBetweenChecks = 64;
  static constexpr int kFileError = -1;  // file_error_ has the text

  bool on_disk() const { return !setup_.directory.empty(); }

  // Returns kFileError on all ranks if one of them has an error.
  int agree(const std::string& error) {
    const double own = error.empty() ? 0 : c_.comm.rank + 1;
    double most = 0;
    bool known;
    if (int code = call(runtime.mpi.Allreduce, static_cast<const void*>(&own),
                        static_cast<void*>(&most), 1, arithmetic_type(kDouble, known),
                        reduction(kMax), c_.comm.handle))
      return code;
    if (most == 0) return 0;
    const int rank = static_cast<int>(most) - 1;
    std::vector<char> text(2000);
    if (rank == c_.comm.rank)
      std::snprintf(text.data(), text.size(), "rank %d %s", rank, error.c_str());
    if (int code = call(runtime.mpi.Bcast, static_cast<void*>(text.data()),
                        static_cast<int>(text.size()), word_type(1), rank, c_.comm.handle))
      return code;
    text.back() = 0;
    file_error_ = text.data();
    return kFileError;
  }
  int agree_about(Archive<T>& archive) { return archive.in_file() ? agree(archive.error()) : 0; }
  int finish(Archive<T>& archive) {
    if (!archive.in_file()) return 0;
    archive.finish();
    return agree_about(archive);
  }

  // `fit`: number of steps whose histories fit into every rank's memory. `fields`: size of a state,
  // in histories.
  void choose_chunks(double fit, double fields) {
    const double steps = static_cast<double>(setup_.steps), shots = static_cast<double>(setup_.shots);
    chunks_ = {setup_.steps, setup_.steps, true};
    if (setup_.checkpoints < 0 || (on_disk() && !setup_.checkpoints)) return;
    if (setup_.checkpoints > 0) {
      chunks_.length = std::min(setup_.checkpoints, setup_.steps);
      return;
    }
    if (steps * shots <= fit) return;
    // Smallest memory: the same for the checkpoints as for the history of a chunk.
    const auto length = [&](double n) {
      return std::clamp<int64_t>(std::llround(std::sqrt(fields * n)), 1, setup_.steps);
    };
    chunks_.length = length(steps * shots);
    if (chunks_.length + fields * shots * (chunks_.count() - 1) <= fit) return;
    chunks_.length = length(steps);  // keep nothing: compute one shot at a time again
    chunks_.keeps = false;
  }

  const Call& c_;
  const Setup& setup_;
  const Tile& tile_;
  P physics_;
  Exchange<T> exchange_;
  Packing<T> packing_;
  Chunks chunks_;
  std::unique_ptr<ScratchFile> file_;  // of this run
  std::string file_error_;
  std::vector<Piece<T>> pieces_;
  std::vector<T> samples_;  // of the points that a group of steps reads
};

}  // namespace mpigrad::waves
