// `run` for a physics P of propagate.h. The operands are those of mpigrad/waves/native_run.py.
#pragma once

#include "waves/propagate.h"
#include "waves/run.h"

namespace mpigrad::waves {

// Operands and results, taken in their order.
template <class T>
class Reader {
 public:
  Reader(Arguments& in, Results& out) : in_(in), out_(out) {}
  Arrays<const T> take(int n) {
    Arrays<const T> arrays;
    for (int i = 0; i < n; ++i)
      arrays.push_back(static_cast<const T*>(in_.get<Buffer>(input_++)->untyped_data()));
    return arrays;
  }
  int32_t take_ticket() {
    return static_cast<const int32_t*>(in_.get<Buffer>(input_++)->untyped_data())[0];
  }
  Arrays<T> give(int n, bool zero = false) {
    Arrays<T> arrays;
    for (int i = 0; i < n; ++i) {
      auto y = *out_.get<Buffer>(output_++);
      advise_huge_pages(y->untyped_data(), y->size_bytes());
      if (zero) std::memset(y->untyped_data(), 0, y->size_bytes());
      arrays.push_back(static_cast<T*>(y->untyped_data()));
    }
    return arrays;
  }
  int32_t* give_ticket() {
    return static_cast<int32_t*>((*out_.get<Buffer>(output_++))->untyped_data());
  }

 private:
  Arguments& in_;
  Results& out_;
  size_t input_ = 0, output_ = 0;
};

template <class P>
ffi::Error run_as(Kind kind, Call& c, const Setup& setup, Arguments& in, Results& out, bool rest,
                  bool save) {
  using T = typename P::Value;
  Reader<T> reader(in, out);
  const int fields = rest ? 0 : P::fields(setup);
  const PointTable *sources = &setup.tables[0], *receivers = &setup.tables[1];
  const auto values = [&](const PointTable* table, const T* data) {
    return Values<T>{table, const_cast<T*>(data), setup.steps};
  };
  Propagation<P> propagation(c, setup);
  const Arrays<const T> models = reader.take(P::models(setup));
  const Values<T> amplitudes = values(sources, reader.take(1)[0]);
  const Arrays<const T> state = reader.take(fields);
  bool available = false;
  Kept* kept = nullptr;
  if (kind == kAdjoint) {
    const int32_t ticket = reader.take_ticket();
    kept = store.find(ticket, setup.id);
    available = kept != nullptr;
  }
  const int64_t shots = kind == kAdjoint ? 1 : kind == kForward && save ? setup.shots : 0;
  if (ffi::Error e = propagation.start(models, available, shots); e.failure()) return e;
  int code = 0;
  if (kind == kForward) {
    const Values<T> gathers = values(receivers, reader.give(1, true)[0]);
    int32_t* ticket = reader.give_ticket();
    code = propagation.forward(state, amplitudes, gathers, reader.give(P::fields(setup)), save, *ticket);
  } else if (kind == kTangent) {
    reader.take_ticket();
    const Arrays<const T> model_tangents = reader.take(P::models(setup));
    const Values<T> amplitude_tangents = values(sources, reader.take(1)[0]);
    const Arrays<const T> state_tangents = reader.take(fields);
    const Values<T> gathers = values(receivers, reader.give(1, true)[0]);
    code = propagation.tangent(state, amplitudes, model_tangents, state_tangents,
                               amplitude_tangents, gathers, reader.give(P::fields(setup)));
  } else {
    const Values<T> gathers = values(receivers, reader.take(1)[0]);
    const Arrays<const T> last = reader.take(P::fields(setup));
    const Arrays<T> model_cotangents = reader.give(P::models(setup));
    const Values<T> amplitude_cotangents = values(sources, reader.give(1, true)[0]);
    code = propagation.adjoint(state, amplitudes, available ? kept : nullptr, gathers, last,
                               model_cotangents, amplitude_cotangents, reader.give(fields));
  }
  c.watch.sent(propagation.bytes());
  pool.trim(static_cast<size_t>(setup.memory / 4));
  if (!propagation.file_error().empty()) return c.fail(propagation.file_error());
  return c.done(code);
}

}  // namespace mpigrad::waves
