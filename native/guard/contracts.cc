#include "guard/contracts.h"

#include <algorithm>
#include <array>

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

bool same_message(Part sent, Part expected, bool adjoint) {
  if (!sent.dtype || !expected.dtype) return true;
  const auto drop_leading_ones = [](Part& p) {
    for (; p.rank > 0 && p.rank <= kDims && p.dims[0] == 1; --p.rank)
      std::copy(p.dims + 1, p.dims + p.rank, p.dims);
  };
  if (adjoint) drop_leading_ones(sent), drop_leading_ones(expected);
  return same_layout(sent.dtype, sent.rank, sent.dims, expected.dtype, expected.rank,
                     expected.dims) &&
         tree_fits(sent.tree, expected.tree);
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

namespace {

std::array<uint64_t, 1 << 12> keys;  // of operations that were compared. Later ones replace others
std::array<Ledger, kEntries> ledgers;

}  // namespace

uint64_t digest(const Contract& c) {
  Mixed mix;
  for (const int64_t word : {c.dtype, c.rank, c.free_dims, c.terms, c.counts_kind, c.counts, c.tree})
    mix(word);
  for (int64_t i = std::min(c.free_dims, c.rank); i < std::min<int64_t>(c.rank, kDims); ++i)
    mix(c.dims[i]);
  for (int64_t i = 0; i < c.terms; ++i) mix(c.values[i]);
  if (c.counts_kind == kSameCounts)
    for (int64_t i = 0; i < c.counts; ++i) mix(c.sends[i]);
  int64_t words[kName / 8];
  std::memcpy(words, c.operation, kName);
  // copy_text writes nothing behind the end of a text.
  const size_t used = strnlen(c.operation, kName);
  std::memset(reinterpret_cast<char*>(words) + used, 0, kName - used);
  for (const int64_t word : words) mix(word);
  return mix.sum;
}

bool is_new(uint64_t key) {
  uint64_t& known = keys[key >> 52];
  if (known == key) return false;
  known = key;
  return true;
}

void forget_agreements(int64_t slot) {
  keys.fill(0);
  ledgers[slot] = {};
}

void Ledger::add(const Contract& c) {
  known &= c.tree >= 0;
  sum = (sum ^ digest(c)) * factors[0];
  sum ^= sum >> 32;
}

Ledger& ledger(int64_t slot) { return ledgers[slot]; }

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
