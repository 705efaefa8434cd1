// The while loops with messages that this rank is in. Ranks that take steps of their own in the same
// loop compute a wrong result silently: with the guard, their messages carry what the condition of
// the loop reads, for comparison.
#pragma once

#include "guard/board.h"

namespace mpigrad {

// Of the operation that begins now.
LoopState loop_state();
// Show the innermost loop on the board.
void show_loop(Slot& slot);
// A program begins, or an operation has failed: this rank is in no loop.
void forget_loops();

}  // namespace mpigrad
