# hypre's own build, as a static library inside mpigrad_hypre. Its symbols are hidden, so that it never
# meets another hypre in the same process.
if(EXISTS ${HYPRE_SOURCE}/src/CMakeLists.txt)
  set(source ${HYPRE_SOURCE}/src)
else()
  set(source ${HYPRE_SOURCE})
endif()
if(NOT EXISTS ${source}/utilities/mpistubs.c)
  message(FATAL_ERROR "HYPRE_SOURCE=${HYPRE_SOURCE} does not hold hypre's sources. "
    "Give the folder that has src/utilities/mpistubs.c.")
endif()

set(HYPRE_ENABLE_MIXEDINT ON CACHE BOOL "64-bit numbers of global rows")
set(CMAKE_MODULE_PATH ${CMAKE_CURRENT_SOURCE_DIR}/native/hypre/any_mpi ${CMAKE_MODULE_PATH})
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
add_subdirectory(${source} ${CMAKE_BINARY_DIR}/hypre EXCLUDE_FROM_ALL)
# The second is an error of Clang 16 and GCC 14.
target_compile_options(HYPRE PRIVATE -w -Wno-incompatible-pointer-types -ffunction-sections -fdata-sections)

add_library(mpigrad_hypre MODULE native/hypre/hypre.cc native/hypre/prototypes.cc
  native/hypre/any_mpi/any_mpi.cc)
target_link_libraries(mpigrad_hypre PRIVATE HYPRE ${CMAKE_DL_LIBS})
linux_link_options(mpigrad_hypre -Wl,--gc-sections -Wl,--exclude-libs,ALL)
