# VARIANTS: the kinds of processors for which waves and multigrid are compiled.
#
# MPIGRAD_VARIANTS is `native` (the default: the best variant that the processor of the build runs), `all`
# (wheels: those with AVX2), or a list. In the environment it comes before the value that a build folder has kept.
set(MPIGRAD_VARIANTS native CACHE STRING
  "native, all, or a list of x86-64, x86-64-v3 and x86-64-v4 (on other processors: baseline)")
set(VARIANTS ${MPIGRAD_VARIANTS})
if(DEFINED ENV{MPIGRAD_VARIANTS})
  set(VARIANTS $ENV{MPIGRAD_VARIANTS})
endif()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  set(ALL_VARIANTS x86-64 x86-64-v3 x86-64-v4)
else()
  set(ALL_VARIANTS baseline)
endif()
if(VARIANTS STREQUAL "native" AND NOT CMAKE_CROSSCOMPILING)
  # The rule of the libraries at run time (best_variant in native/processor.h).
  try_run(BEST_VARIANT BEST_VARIANT_COMPILED ${CMAKE_BINARY_DIR}/best_variant
    ${CMAKE_CURRENT_LIST_DIR}/best_variant.cc COMPILE_OUTPUT_VARIABLE output)
  if(NOT BEST_VARIANT_COMPILED)
    message(FATAL_ERROR "cmake/best_variant.cc does not compile:\n${output}")
  endif()
  list(GET ALL_VARIANTS ${BEST_VARIANT} VARIANTS)
elseif(VARIANTS MATCHES "^(native|all)$")
  set(VARIANTS ${ALL_VARIANTS})
  list(REMOVE_ITEM VARIANTS x86-64)
endif()
foreach(variant IN LISTS VARIANTS)
  if(NOT variant IN_LIST ALL_VARIANTS)
    list(JOIN ALL_VARIANTS ", " names)
    message(FATAL_ERROR "MPIGRAD_VARIANTS: expected native, all, or a list of ${names}, got "
      "${variant}. Leave it out to compile for this processor.")
  endif()
endforeach()
message(STATUS "waves and multigrid are compiled for ${VARIANTS}")
