// The datatypes of the MPI of one rank: lists of blocks of bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

namespace one_rank {

using Aint = intptr_t;

struct Block {
  Aint offset;
  Aint bytes;
};

struct Type {
  std::vector<Block> blocks;  // in the order of the data
  Aint lower = 0, upper = 0;  // the extent
  Aint size = 0;
  Aint item = 0;  // bytes of each basic item, 0 if they differ

  Aint extent() const { return upper - lower; }
  bool is_dense() const {
    return blocks.size() == 1 && blocks[0].offset == 0 && blocks[0].bytes == extent();
  }
};

inline Type basic_type(Aint bytes) {
  return {bytes ? std::vector<Block>{{0, bytes}} : std::vector<Block>{}, 0, bytes, bytes, bytes};
}

// A value and an int behind it, for MINLOC and MAXLOC.
inline Type pair_type(Aint bytes, Aint place, Aint extent) {
  return {{{0, bytes}, {place, 4}}, 0, extent, bytes + 4, 0};
}

// Builds a type from copies of others.
class TypeBuilder {
 public:
  // Adds `count` copies of a type at a displacement in bytes.
  void add(const Type& type, Aint count, Aint displacement) {
    if (count <= 0) return;
    if (type.size) built_.item = built_.size && built_.item != type.item ? 0 : type.item;
    for (Aint i = 0; i < count; ++i)
      for (const Block& block : type.blocks) append(displacement + i * type.extent(), block);
    built_.size += count * type.size;
    const Aint low = displacement + type.lower;
    const Aint high = displacement + (count - 1) * type.extent() + type.upper;
    built_.lower = empty_ ? low : std::min(built_.lower, low);
    built_.upper = empty_ ? high : std::max(built_.upper, high);
    empty_ = false;
  }
  Type take() { return std::move(built_); }

 private:
  void append(Aint displacement, const Block& block) {
    const Aint offset = displacement + block.offset;
    auto& blocks = built_.blocks;
    if (!blocks.empty() && blocks.back().offset + blocks.back().bytes == offset)
      blocks.back().bytes += block.bytes;
    else
      blocks.push_back({offset, block.bytes});
  }
  Type built_;
  bool empty_ = true;
};

inline std::vector<char> pack(const void* buffer, Aint count, const Type& type) {
  std::vector<char> data(count * type.size);
  const char* from = static_cast<const char*>(buffer);
  char* to = data.data();
  if (type.is_dense() && !data.empty()) {
    std::memcpy(to, from, data.size());
    return data;
  }
  for (Aint i = 0; i < count; ++i, from += type.extent())
    for (const Block& block : type.blocks) {
      std::memcpy(to, from + block.offset, block.bytes);
      to += block.bytes;
    }
  return data;
}

// Returns false if there is no room for all of the data.
inline bool unpack(const std::vector<char>& data, void* buffer, Aint count, const Type& type) {
  Aint left = std::min<Aint>(data.size(), count * type.size);
  const char* from = data.data();
  char* to = static_cast<char*>(buffer);
  if (type.is_dense()) {
    if (left) std::memcpy(to, from, left);
  } else if (type.size) {
    for (; left > 0; to += type.extent())
      for (const Block& block : type.blocks) {
        const Aint bytes = std::min(left, block.bytes);
        if (bytes > 0) std::memcpy(to + block.offset, from, bytes);
        from += bytes, left -= bytes;
      }
  }
  return static_cast<Aint>(data.size()) <= count * type.size;
}

// MPICH's handles. Those of basic types have the size in bits 8 to 15.
constexpr int kKind = static_cast<int>(0xff000000), kBasic = 0x4c000000;
constexpr int kPair = static_cast<int>(0x8c000000), kMade = static_cast<int>(0xcc000000);

using Shared = std::shared_ptr<const Type>;  // a message may outlast the handle of its type

inline std::map<int, Shared>& made_types() {
  const auto pair = [](Aint bytes, Aint place, Aint extent) {
    return std::make_shared<const Type>(pair_type(bytes, place, extent));
  };
  static std::map<int, Shared> types = {{kPair + 0, pair(4, 4, 8)},   {kPair + 1, pair(8, 8, 16)},
                                        {kPair + 2, pair(8, 8, 16)},  {kPair + 3, pair(2, 4, 8)},
                                        {kPair + 4, pair(16, 16, 32)}};
  return types;
}

// The type of a handle, or nullptr.
inline Shared type_of(int handle) {
  if ((handle & kKind) == kBasic) {
    static std::map<Aint, Shared> basic;
    const Aint bytes = handle == kBasic + 0x10 || handle == kBasic + 0x11 ? 0 : handle >> 8 & 0xff;
    Shared& type = basic[bytes];
    if (!type) type = std::make_shared<const Type>(basic_type(bytes));
    return type;
  }
  const auto at = made_types().find(handle);
  return at == made_types().end() ? nullptr : at->second;
}

// A handle of a kind that a table does not have yet. Its lower 24 bits are a number.
template <class Table>
int new_handle(int kind, const Table& table) {
  static int last = 16;
  do last = last % 0xffffff + 1;
  while (last < 16 || table.count(kind + last));
  return kind + last;
}

inline int add_type(Type type) {
  const int handle = new_handle(kMade, made_types());
  made_types()[handle] = std::make_shared<const Type>(std::move(type));
  return handle;
}

}  // namespace one_rank
