#include "guard/labels.h"

#include "guard/contracts.h"

namespace mpigrad {
namespace {

constexpr int64_t kWritten = 0x6d70696772616421;

struct Label {
  int64_t written;  // not kWritten if the message was too long and MPI did not copy it
  Part part;
  char operation[kName];
  char site[kText];
};

Label describe(const Call& c, const Mail& mail) {
  Label label{};
  label.written = kWritten;
  Part& p = label.part;
  copy_layout(mail.layout, p.dtype, p.rank, p.dims);
  if (mail.rows >= 0) p.dims[0] = mail.rows;
  p.tree = tree_at(c.site);
  copy_text(label.operation, c.operation);
  copy_text(label.site, line_of(c.site, board.own()).c_str());
  return label;
}

// Whether the last message at this line, or at one with the same place in the table, was alike. A
// loop receives at few lines.
inline bool is_like_the_last(const Call& c, const Mail& mail, int64_t source) {
  struct Kind {
    int64_t site, slot, source, tag, dtype, rank, shape;
  };
  static Kind kinds[256];
  const Layout& x = mail.layout;
  int64_t shape = 0;
  for (int64_t i = 0; i < x.rank; ++i) shape = 31 * shape + x.dims[i];
  Kind& last = kinds[c.site & 255];
  if (last.site == c.site && last.slot == c.slot && last.source == source && last.tag == mail.tag &&
      last.dtype == x.dtype && last.rank == x.rank && last.shape == shape)
    return true;
  last = {c.site, c.slot, source, mail.tag, x.dtype, x.rank, shape};
  return false;
}

// The label of the message that this operation has received, from the sender's words on the board.
bool read_board(const Call& c, int64_t index, int64_t source, int64_t tag, Label& label) {
  std::string operation, line;
  if (!c.post.sent_to_this(index, source, tag, label.part, operation, line)) return false;
  label.written = kWritten;
  copy_text(label.operation, operation.c_str());
  copy_text(label.site, line.c_str());
  return true;
}

// float32[2,3], as guard/board_reader.py writes it.
std::string layout_text(const Part& p) {
  static const char* const names[] = {"?",      "bool",    "int8",    "int16",     "int32",
                                      "int64",  "uint8",   "uint16",  "uint32",    "uint64",
                                      "float16", "float32", "float64", "?",         "?",
                                      "complex64", "bfloat16", "?",    "complex128"};
  std::string text = p.dtype >= 0 && p.dtype < 19 ? names[p.dtype] : "?";
  text += "[";
  for (int64_t i = 0; i < p.rank && i < kDims; ++i)
    text += (i ? "," : "") + std::to_string(p.dims[i]);
  return text + "]";
}

// Out of line, because it is rare and has two labels. `sent` is nullptr if the board has the label.
[[gnu::noinline]] ffi::Error compare(const Call& c, const Mail& mail, const Label* sent,
                                     int64_t index, int64_t source, int64_t tag) {
  Label found;
  if (!sent && !read_board(c, index, source, tag, found)) return ffi::Error::Success();
  if (sent) std::memcpy(&found, sent, sizeof found);
  const Label expected = describe(c, mail);
  const Part &a = found.part, &b = expected.part;
  if (found.written != kWritten || same_message(a, b, c.site < 0)) return ffi::Error::Success();
  return c.fail("expected " + layout_text(b) + " at " + expected.site + ", but " +
                c.name_of(source) + " sends " + layout_text(a) + " by " + found.operation + " at " +
                found.site + ". " + kSameLayout);
}

}  // namespace

size_t label_bytes(int64_t slot) {
  return is_guarded_between_hosts(slot) ? sizeof(Label) : 0;
}

Parcel::Parcel(const Call& c, const Mail& mail, const Words& x) : words(x) {
  const size_t data = x.count * x.width, bytes = label_bytes(c.slot);
  if (!bytes) return;
  memory.resize(bytes + data);
  const Label label = describe(c, mail);
  std::memcpy(memory.data(), &label, bytes);
  copy_bytes(memory.data() + bytes, x.data, data);
  words = Words(memory.data(), memory.size(), 1);
}

Parcel::Parcel(const Call& c, const Words& y) : words(y) {
  const size_t data = y.count * y.width, bytes = label_bytes(c.slot);
  if (!bytes) return;
  memory.resize(bytes + data);
  words = Words(memory.data(), memory.size(), 1);
}

ffi::Error compare_all(const Call& c, const std::vector<Mail>& received) {
  if (received.empty() || is_like_the_last(c, received[0], -static_cast<int64_t>(received.size())))
    return ffi::Error::Success();
  for (size_t i = 0; i < received.size(); ++i)
    if (ffi::Error e = compare(c, received[i], nullptr, i, received[i].peer, received[i].tag);
        e.failure())
      return e;
  return ffi::Error::Success();
}

ffi::Error unpack(const Call& c, const Mail& mail, int code, Status& status, int source,
                  const Words& words, const Words& y) {
  const size_t bytes = label_bytes(c.slot);
  if (bytes || (!code && !is_like_the_last(c, mail, source))) {
    const auto sent = bytes ? static_cast<const Label*>(words.data) : nullptr;
    if (ffi::Error e = compare(c, mail, sent, 0, source, status_tag(status)); e.failure()) return e;
  }
  const ffi::Error error = received(c, code, status, words, source);
  if (error.success() && words.data != y.data)
    copy_bytes(y.data, static_cast<char*>(words.data) + bytes, y.count * y.width);
  return error;
}

}  // namespace mpigrad
