// A library that passes for another MPI: it has the function by which mpigrad tells MPIs apart.
#include <string.h>

int MPI_Get_library_version(char* version, int* length) {
  strcpy(version, "MPICH Version:\t3.2\nMPICH Device:\tch3:nemesis\n");
  *length = (int)strlen(version);
  return 0;
}
