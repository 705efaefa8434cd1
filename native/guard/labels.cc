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

// The label of the message that this operation has received, from the sender's words on the board.
bool read_board(const Call& c, int64_t source, int64_t tag, Label& label) {
  std::string operation, line;
  if (!c.post.sent_to_this(source, tag, label.part, operation, line)) return false;
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

ffi::Error unpack(const Call& c, const Mail& mail, int code, Status& status, int source,
                  const Words& words, const Words& y) {
  const size_t bytes = label_bytes(c.slot);
  Label sent;
  if (bytes) std::memcpy(&sent, words.data, bytes);
  if (bytes || (!code && read_board(c, source, status_tag(status), sent))) {
    const Label expected = describe(c, mail);
    const Part &a = sent.part, &b = expected.part;
    const bool same = sent.written != kWritten || !a.dtype || !b.dtype ||
                      (same_layout(a.dtype, a.rank, a.dims, b.dtype, b.rank, b.dims) &&
                       tree_fits(a.tree, b.tree));
    if (!same)
      return c.fail("expected " + layout_text(b) + " at " + expected.site + ", but " +
                    c.name_of(source) + " sends " + layout_text(a) + " by " + sent.operation +
                    " at " + sent.site + ". " + kSameLayout);
  }
  const ffi::Error error = received(c, code, status, words, source);
  if (error.success() && words.data != y.data)
    copy_bytes(y.data, static_cast<char*>(words.data) + bytes, y.count * y.width);
  return error;
}

}  // namespace mpigrad
