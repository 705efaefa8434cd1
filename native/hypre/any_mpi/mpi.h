/* The mpi.h with which hypre is compiled for every MPI at once.
 *
 * Handles are 64-bit integers. They hold the handle of the MPI in this process: a pointer (Open MPI,
 * MPI's standard ABI) or a 32-bit integer (MPICH and its derivatives). The constants have values only
 * at run time. The functions are defined in any_mpi.cc. */
#ifndef MPIGRAD_ANY_MPI_H_
#define MPIGRAD_ANY_MPI_H_

#include <stdint.h>

#define MPIGRAD_ANY_MPI 1
#define MPI_VERSION 3
#define MPI_SUBVERSION 1

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(hidden)

/* `long long` is not the type of MPI_Aint, so that C++ can tell them apart. */
typedef long long MPI_Comm, MPI_Datatype, MPI_Group, MPI_Info, MPI_Op, MPI_Request;
typedef intptr_t MPI_Aint;
typedef void MPI_User_function(void* in, void* inout, int* n, MPI_Datatype* type);

typedef struct {
  int MPI_SOURCE, MPI_TAG;
  long long native[8]; /* the status of the MPI in this process */
} MPI_Status;

/* Python gives mpi4py's constants of these names their places here. */
#define MPIGRAD_MPI_CONSTANTS(X)                                                               \
  X(COMM_WORLD) X(COMM_SELF) X(COMM_NULL) X(REQUEST_NULL) X(INFO_NULL) X(GROUP_NULL)           \
  X(CHAR) X(BYTE) X(INT) X(LONG) X(LONG_LONG) X(FLOAT) X(DOUBLE) X(LONG_DOUBLE)                \
  X(C_FLOAT_COMPLEX) X(C_DOUBLE_COMPLEX) X(C_LONG_DOUBLE_COMPLEX)                              \
  X(SUM) X(PROD) X(MIN) X(MAX) X(LOR) X(LAND) X(BOR) X(BAND)                                   \
  X(IN_PLACE) X(BOTTOM) X(ANY_SOURCE) X(ANY_TAG) X(UNDEFINED) X(COMM_TYPE_SHARED)
struct mpigrad_mpi_constants {
#define MPIGRAD_FIELD(name) long long name;
  MPIGRAD_MPI_CONSTANTS(MPIGRAD_FIELD)
#undef MPIGRAD_FIELD
};
extern struct mpigrad_mpi_constants mpigrad_mpi;

#define MPI_COMM_WORLD mpigrad_mpi.COMM_WORLD
#define MPI_COMM_SELF mpigrad_mpi.COMM_SELF
#define MPI_COMM_NULL mpigrad_mpi.COMM_NULL
#define MPI_REQUEST_NULL mpigrad_mpi.REQUEST_NULL
#define MPI_INFO_NULL mpigrad_mpi.INFO_NULL
#define MPI_GROUP_NULL mpigrad_mpi.GROUP_NULL
#define MPI_CHAR mpigrad_mpi.CHAR
#define MPI_BYTE mpigrad_mpi.BYTE
#define MPI_INT mpigrad_mpi.INT
#define MPI_LONG mpigrad_mpi.LONG
#define MPI_LONG_LONG mpigrad_mpi.LONG_LONG
#define MPI_LONG_LONG_INT mpigrad_mpi.LONG_LONG
#define MPI_FLOAT mpigrad_mpi.FLOAT
#define MPI_DOUBLE mpigrad_mpi.DOUBLE
#define MPI_LONG_DOUBLE mpigrad_mpi.LONG_DOUBLE
#define MPI_C_FLOAT_COMPLEX mpigrad_mpi.C_FLOAT_COMPLEX
#define MPI_C_DOUBLE_COMPLEX mpigrad_mpi.C_DOUBLE_COMPLEX
#define MPI_C_LONG_DOUBLE_COMPLEX mpigrad_mpi.C_LONG_DOUBLE_COMPLEX
#define MPI_SUM mpigrad_mpi.SUM
#define MPI_MIN mpigrad_mpi.MIN
#define MPI_MAX mpigrad_mpi.MAX
#define MPI_LOR mpigrad_mpi.LOR
#define MPI_LAND mpigrad_mpi.LAND
#define MPI_BOR mpigrad_mpi.BOR
#define MPI_BAND mpigrad_mpi.BAND
#define MPI_PROD mpigrad_mpi.PROD
#define MPI_IN_PLACE ((void*)(intptr_t)mpigrad_mpi.IN_PLACE)
#define MPI_BOTTOM ((void*)(intptr_t)mpigrad_mpi.BOTTOM)
#define MPI_ANY_SOURCE ((int)mpigrad_mpi.ANY_SOURCE)
#define MPI_ANY_TAG ((int)mpigrad_mpi.ANY_TAG)
#define MPI_UNDEFINED ((int)mpigrad_mpi.UNDEFINED)
#define MPI_COMM_TYPE_SHARED ((int)mpigrad_mpi.COMM_TYPE_SHARED)

#define MPI_SUCCESS 0
#define MPI_STATUS_IGNORE ((MPI_Status*)0)
#define MPI_STATUSES_IGNORE ((MPI_Status*)0)
#define MPI_MAX_LIBRARY_VERSION_STRING 8192

#define MPIGRAD_FORWARDED(name, parameters, ...) int MPI_##name parameters;
#define MPIGRAD_CONVERTED(name, parameters) int MPI_##name parameters;
#include "functions.def"
#undef MPIGRAD_FORWARDED
#undef MPIGRAD_CONVERTED
double MPI_Wtime(void);
double MPI_Wtick(void);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
