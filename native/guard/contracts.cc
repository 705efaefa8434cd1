#include "guard/contracts.h"

#include <algorithm>

namespace mpigrad {

void copy_layout(const Layout& from, int64_t& dtype, int64_t& rank, int64_t* dims) {
  dtype = from.dtype;
  rank = from.rank;
  for (int64_t i = 0; i < std::min<int64_t>(rank, kDims); ++i) dims[i] = from.dims[i];
}

bool same_layout(int64_t dtype, int64_t rank, const int64_t* dims, int64_t dtype2, int64_t rank2,
                 const int64_t* dims2, int64_t free_dims) {
  return dtype == dtype2 && rank == rank2 &&
         std::equal(dims + std::min(free_dims, rank), dims + std::min<int64_t>(rank, kDims),
                    dims2 + std::min(free_dims, rank));
}

bool repeats(const Contract& c, int64_t site, const char* operation, const Agreement& a) {
  if (c.site != site || c.dtype != a.layout.dtype || c.rank != a.layout.rank ||
      c.terms != static_cast<int64_t>(a.terms.size()) || c.counts_kind != kNoCounts ||
      a.counts_kind != kNoCounts || c.free_dims != a.free_dims || !operation ||
      c.name != operation)
    return false;
  for (int64_t i = 0; i < std::min<int64_t>(c.rank, kDims); ++i)
    if (c.dims[i] != a.layout.dims[i]) return false;
  const int64_t* value = c.values;
  for (const Term& term : a.terms)
    if (*value++ != term.value) return false;
  return true;
}

void write(Contract& c, int64_t site, const char* operation, const char* text,
           const Agreement& a) {
  c.site = site;
  c.tree = tree_at(site);
  copy_layout(a.layout, c.dtype, c.rank, c.dims);
  c.free_dims = a.free_dims;
  c.terms = 0;
  for (const Term& term : a.terms) {
    copy_text(c.names[c.terms], term.name);
    c.values[c.terms++] = term.value;
  }
  c.counts_kind = a.sends.size <= kCounts ? a.counts_kind : kNoCounts;
  c.counts = c.counts_kind == kNoCounts ? 0 : a.sends.size;
  for (int64_t i = 0; i < c.counts; ++i) {
    c.sends[i] = a.sends.values[i];
    c.receives[i] = a.receives.size ? a.receives.values[i] : 0;
  }
  std::memcpy(c.operation, text, kName);
  c.name = operation;
}

bool agree(const Contract& a, const Contract& b) {
  if (std::strncmp(a.operation, b.operation, kName) || a.terms != b.terms ||
      a.counts_kind != b.counts_kind || a.counts != b.counts || a.free_dims != b.free_dims ||
      !same_layout(a.dtype, a.rank, a.dims, b.dtype, b.rank, b.dims, a.free_dims) ||
      !same_tree(a.tree, b.tree) || steps_differ(a.loop, b.loop))
    return false;
  for (int64_t i = 0; i < a.terms; ++i)
    if (a.values[i] != b.values[i]) return false;
  return a.counts_kind != kSameCounts || std::equal(a.sends, a.sends + a.counts, b.sends);
}

bool pairs_agree(int64_t slot, int64_t sequence) {
  const int64_t size = std::min<int64_t>(board.own().entries[slot].size, kCounts);
  const Slot* owner;
  for (int64_t a = 0; a < size; ++a)
    for (int64_t b = 0; b < size; ++b) {
      const Contract& from = member(slot, a, &owner)->contracts[sequence % kContracts];
      const Contract& to = member(slot, b, &owner)->contracts[sequence % kContracts];
      if (from.sequence == sequence && to.sequence == sequence && from.sends[b] != to.receives[a])
        return false;
    }
  return true;
}

}  // namespace mpigrad
