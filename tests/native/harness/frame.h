// A call of a handler, as XLA makes it.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string text;
};

class Frame {
 public:
  Frame() {
    operand(XLA_FFI_DataType_TOKEN, nullptr, {});
    result(XLA_FFI_DataType_TOKEN, nullptr, {});
  }
  void operand(XLA_FFI_DataType type, void* data, std::vector<int64_t> dims) {
    args_.push_back(buffer(type, data, std::move(dims)));
  }
  void result(XLA_FFI_DataType type, void* data, std::vector<int64_t> dims) {
    rets_.push_back(buffer(type, data, std::move(dims)));
  }
  void attribute(const char* name, int64_t value) { attributes_[name] = value; }

  // Returns "", or the text of the error.
  std::string call(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
    static const XLA_FFI_Api api = [] {
      XLA_FFI_Api a{};
      a.struct_size = XLA_FFI_Api_STRUCT_SIZE;
      a.api_version.major_version = XLA_FFI_API_MAJOR;
      a.api_version.minor_version = XLA_FFI_API_MINOR;
      a.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
        return new XLA_FFI_Error{args->message};
      };
      return a;
    }();
    std::vector<XLA_FFI_ArgType> arg_types(args_.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> ret_types(rets_.size(), XLA_FFI_RetType_BUFFER);
    std::vector<XLA_FFI_AttrType> attr_types(attributes_.size(), XLA_FFI_AttrType_SCALAR);
    std::deque<XLA_FFI_ByteSpan> names;
    std::deque<XLA_FFI_Scalar> values;
    std::vector<XLA_FFI_ByteSpan*> name_pointers;
    std::vector<void*> value_pointers;
    for (auto& [name, value] : attributes_) {  // sorted, as XLA does
      names.push_back({name.c_str(), name.size()});
      values.push_back({XLA_FFI_DataType_S64, &value});
      name_pointers.push_back(&names.back());
      value_pointers.push_back(&values.back());
    }
    XLA_FFI_CallFrame frame{};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = &api;
    frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args_.size()),
                  arg_types.data(), args_.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets_.size()),
                  ret_types.data(), rets_.data()};
    frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, static_cast<int64_t>(attributes_.size()),
                   attr_types.data(), name_pointers.data(), value_pointers.data()};
    XLA_FFI_Error* error = handler(&frame);
    if (!error) return "";
    const std::string text = error->text;
    delete error;
    return text;
  }

 private:
  void* buffer(XLA_FFI_DataType type, void* data, std::vector<int64_t>&& dims) {
    dims_.push_back(std::move(dims));
    buffers_.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, type, data,
                        static_cast<int64_t>(dims_.back().size()), dims_.back().data()});
    return &buffers_.back();
  }
  std::deque<std::vector<int64_t>> dims_;
  std::deque<XLA_FFI_Buffer> buffers_;
  std::vector<void*> args_, rets_;
  std::map<std::string, int64_t> attributes_;
};
