// Random runs of waves/archive.h, as the time loop and its adjoint use it: items are written forward, and
// the one before is changed for a moment, then they are read backwards, two at a time. Sanitizers watch
// the thread that moves items to a file and back.
//
//     archive FIRST_SEED COUNT
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "waves/archive.h"

namespace {

using namespace mpigrad::waves;

int failures = 0;

template <class T>
void run(unsigned seed) {
  std::mt19937 draw(seed);
  const auto between = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(draw); };
  const int64_t size = between(1, 3000), steps = between(1, 40), shots = between(1, 3);
  const Precision precision = static_cast<Precision>(between(0, 2));
  const bool on_disk = between(0, 3) > 0, changes = between(0, 1);
  const Packing<T> packing(precision, size);
  const auto value = [&](int64_t item, int64_t k) { return T(1 + (item * 31 + k * 7) % 97) / 64; };
  const auto check = [&](const T* values, int64_t item) {
    for (int64_t k = 0; k < size; ++k)
      if (std::abs(values[k] - value(item, k)) > (precision == Precision::kFull ? 0 : value(item, k) / 200)) {
        std::fprintf(stderr, "archive: seed %u: item %d, value %d: expected %g, got %g\n", seed,
                     static_cast<int>(item), static_cast<int>(k), double(value(item, k)), double(values[k]));
        return ++failures, void();
      }
  };

  const int64_t items = shots * steps;
  const char* scratch = std::getenv("TMPDIR");
  ScratchFile file(scratch ? scratch : "/tmp", packing.bytes(), on_disk ? items : 0);
  Memory memory(on_disk ? 1 : items * packing.bytes());
  if (!file.error().empty()) std::fprintf(stderr, "archive: %s\n", file.error().c_str()), std::exit(2);
  {
    Archive<T> archive(packing, 1, memory.data(), on_disk ? &file : nullptr, 2);
    for (int64_t item = 0; item < items; ++item) {
      T* const here = archive.at(item);
      const bool follows = item % steps > 0;
      T* const before = follows ? archive.at(item - 1) : nullptr;
      if (changes && before) std::swap(before[0], before[size - 1]);
      for (int64_t k = 0; k < size; ++k) here[k] = value(item, k);
      if (changes && before) std::swap(before[0], before[size - 1]);
      if (follows) archive.put(item - 1);
      if (item % steps == steps - 1) archive.put(item);
    }
    if (archive.in_file()) archive.finish();
    if (!archive.error().empty()) std::fprintf(stderr, "%s\n", archive.error().c_str()), ++failures;
  }
  Archive<T> archive(packing, 1, memory.data(), on_disk ? &file : nullptr, 2);
  for (int64_t shot : {shots - 1, int64_t{0}}) {
    const int64_t first = shot * steps, stop = first + between(0, static_cast<int>(steps) - 1);
    archive.begin_reading(first);
    for (int64_t item = first + steps - 1; item >= stop; --item) {
      check(archive.at(item), item);
      if (item > first) check(archive.at(item - 1), item - 1);
    }
  }
  if (!archive.error().empty()) std::fprintf(stderr, "%s\n", archive.error().c_str()), ++failures;
}

}  // namespace

int main(int, char** words) {
  const unsigned first = std::atoi(words[1]), count = std::atoi(words[2]);
  for (unsigned seed = first; seed < first + count; ++seed) seed % 2 ? run<float>(seed) : run<double>(seed);
  pool.trim(0);
  std::printf("archive: %u runs, %d failures\n", count, failures);
  return failures != 0;
}
