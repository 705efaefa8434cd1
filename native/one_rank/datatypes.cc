// Datatypes and reductions. Reductions of one rank copy, so they only have names.
#include "one_rank/mpi.h"

using namespace one_rank;

namespace {

std::map<int, bool> ops;  // whether they commute

template <class Build>
int make_type(int* made, Build build) {
  Lock hold(lock);
  TypeBuilder builder;
  if (const int code = build(builder)) return code;
  *made = one_rank::add_type(builder.take());
  return kSuccess;
}

// A type of blocks of one old type: the length of block i, and its displacement in bytes.
template <class Length, class Place>
int make_blocks(int n, int old, int* made, Length length, Place place) {
  Shared t;
  {
    Lock hold(lock);
    t = type_of(old);
  }
  if (!t) return kType;
  return make_type(made, [&](TypeBuilder& builder) {
    for (int i = 0; i < n; ++i) builder.add(*t, length(i), place(i, t->extent()));
    return kSuccess;
  });
}

}  // namespace

MPI_FUNCTION int MPI_Type_size_x(int type, long long* size) {
  Lock hold(lock);
  const Shared t = type_of(type);
  return t ? (*size = t->size, kSuccess) : kType;
}
MPI_FUNCTION int MPI_Type_size(int type, int* size) {
  long long bytes = 0;
  const int code = MPI_Type_size_x(type, &bytes);
  return *size = static_cast<int>(bytes), code;
}
MPI_FUNCTION int MPI_Type_get_extent(int type, Aint* lower, Aint* extent) {
  Lock hold(lock);
  const Shared t = type_of(type);
  return t ? (*lower = t->lower, *extent = t->extent(), kSuccess) : kType;
}
MPI_FUNCTION int MPI_Type_get_extent_x(int type, long long* lower, long long* extent) {
  Aint low = 0, size = 0;
  const int code = MPI_Type_get_extent(type, &low, &size);
  return *lower = low, *extent = size, code;
}
MPI_FUNCTION int MPI_Type_get_true_extent(int type, Aint* lower, Aint* extent) {
  Lock hold(lock);
  const Shared t = type_of(type);
  if (!t) return kType;
  Aint low = 0, high = 0;
  for (const auto& block : t->blocks) {
    const bool first = &block == t->blocks.data();
    low = first ? block.offset : std::min(low, block.offset);
    high = first ? block.offset + block.bytes : std::max(high, block.offset + block.bytes);
  }
  return *lower = low, *extent = high - low, kSuccess;
}
MPI_FUNCTION int MPI_Type_get_true_extent_x(int type, long long* lower, long long* extent) {
  Aint low = 0, size = 0;
  const int code = MPI_Type_get_true_extent(type, &low, &size);
  return *lower = low, *extent = size, code;
}
MPI_FUNCTION int MPI_Type_get_envelope(int type, int* n, int* places, int* types, int* kind) {
  // MPI_COMBINER_NAMED, or of made types MPI_COMBINER_DUP, whose contents nobody asks for.
  *n = *places = *types = 0;
  *kind = (type & one_rank::kKind) == one_rank::kMade ? 2 : 1;
  return kSuccess;
}
MPI_FUNCTION int MPI_Type_commit(int* type) {
  Lock hold(lock);
  return type_of(*type) ? kSuccess : kType;
}
MPI_FUNCTION int MPI_Type_free(int* type) {
  Lock hold(lock);
  const bool is_made = (*type & one_rank::kKind) == one_rank::kMade;
  if (!is_made || !one_rank::made_types().erase(*type)) return kType;
  return *type = kNoType, kSuccess;
}
MPI_FUNCTION int MPI_Type_contiguous(int n, int old, int* made) {
  return make_blocks(1, old, made, [=](int) { return n; }, [](int, Aint) { return Aint(0); });
}
MPI_FUNCTION int MPI_Type_dup(int old, int* made) {
  Lock hold(lock);
  const Shared t = type_of(old);
  return t ? (*made = one_rank::add_type(*t), kSuccess) : kType;
}
MPI_FUNCTION int MPI_Type_create_resized(int old, Aint lower, Aint extent, int* made) {
  Lock hold(lock);
  const Shared t = type_of(old);
  if (!t) return kType;
  Type type = *t;
  type.lower = lower, type.upper = lower + extent;
  return *made = one_rank::add_type(std::move(type)), kSuccess;
}
MPI_FUNCTION int MPI_Type_vector(int n, int length, int stride, int old, int* made) {
  return make_blocks(n, old, made, [=](int) { return length; },
                     [=](int i, Aint extent) { return Aint(i) * stride * extent; });
}
MPI_FUNCTION int MPI_Type_create_hvector(int n, int length, Aint stride, int old, int* made) {
  return make_blocks(n, old, made, [=](int) { return length; },
                     [=](int i, Aint) { return i * stride; });
}
MPI_FUNCTION int MPI_Type_indexed(int n, const int* lengths, const int* places, int old,
                                  int* made) {
  return make_blocks(n, old, made, [=](int i) { return lengths[i]; },
                     [=](int i, Aint extent) { return places[i] * extent; });
}
MPI_FUNCTION int MPI_Type_create_hindexed(int n, const int* lengths, const Aint* places, int old,
                                          int* made) {
  return make_blocks(n, old, made, [=](int i) { return lengths[i]; },
                     [=](int i, Aint) { return places[i]; });
}
MPI_FUNCTION int MPI_Type_create_indexed_block(int n, int length, const int* places, int old,
                                               int* made) {
  return make_blocks(n, old, made, [=](int) { return length; },
                     [=](int i, Aint extent) { return places[i] * extent; });
}
MPI_FUNCTION int MPI_Type_create_hindexed_block(int n, int length, const Aint* places, int old,
                                                int* made) {
  return make_blocks(n, old, made, [=](int) { return length; },
                     [=](int i, Aint) { return places[i]; });
}
MPI_FUNCTION int MPI_Type_create_struct(int n, const int* lengths, const Aint* places,
                                        const int* types, int* made) {
  return make_type(made, [&](TypeBuilder& builder) {
    for (int i = 0; i < n; ++i) {
      const Shared t = type_of(types[i]);
      if (!t) return kType;
      builder.add(*t, lengths[i], places[i]);
    }
    return kSuccess;
  });
}

MPI_FUNCTION int MPI_Op_create(void*, int commutes, int* op) {
  Lock hold(lock);
  ops[*op = new_handle(kMadeOp, ops)] = commutes != 0;
  return kSuccess;
}
MPI_FUNCTION int MPI_Op_free(int* op) {
  Lock hold(lock);
  ops.erase(*op);
  return *op = kNoOp, kSuccess;
}
MPI_FUNCTION int MPI_Op_commutative(int op, int* flag) {
  Lock hold(lock);
  const auto made = ops.find(op);
  return *flag = made == ops.end() || made->second, kSuccess;
}
