// The trace: begin and end of each operation, kept in memory if MPIGRAD_TRACE or a profile asks for
// it. It is written as a timeline (Chrome trace events) and summed up by source line.
#pragma once

#include <cstdint>

#include "visibility.h"

namespace mpigrad {

// Read from Python as seven 64-bit words.
struct TraceEvent {
  const char* operation;
  int64_t start_ns, end_ns;
  int64_t slot, site, bytes, peer;
};

MPIGRAD_SHARED extern bool trace_on;  // set once, before the first message

MPIGRAD_SHARED void trace_event(const TraceEvent& event);

}  // namespace mpigrad
