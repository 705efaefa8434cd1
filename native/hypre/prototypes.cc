// This library repeats the prototypes of hypre's internal functions (conjugate.h, structured.h). If
// hypre's own headers declare them otherwise, this file does not compile.
#include "hypre/assembled.h"
#include "hypre/structured.h"

// After ours, because they define macros with short names.
#include "_hypre_parcsr_ls.h"
#include "_hypre_struct_ls.h"
#include "_hypre_struct_mv.h"
