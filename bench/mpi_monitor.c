// Counts what a rank sends. Open MPI's monitoring components (OMPI_MCA_pml_monitoring_enable=2) stand
// below everything, and call these functions for each message and collective: loaded before Open MPI
// (LD_PRELOAD), these are found instead of its own, whose numbers cannot be read while it runs.
#include <stdatomic.h>
#include <stddef.h>

static atomic_long messages, bytes, collectives, collective_bytes;

// A message from point to point; those that collectives are made of have negative tags.
void mca_common_monitoring_record_pml(int rank, size_t size, int tag) {
  (void)rank;
  if (tag < 0) return;
  atomic_fetch_add(&messages, 1);
  atomic_fetch_add(&bytes, (long)size);
}

// Collectives: on every rank, or (one to all, all to one) on the root. `size` is that of the operand
// times the number of the other ranks.
static void count(size_t size) {
  atomic_fetch_add(&collectives, 1);
  atomic_fetch_add(&collective_bytes, (long)size);
}
void mca_common_monitoring_coll_a2a(size_t size, void* data) { (void)data, count(size); }
void mca_common_monitoring_coll_o2a(size_t size, void* data) { (void)data, count(size); }
void mca_common_monitoring_coll_a2o(size_t size, void* data) { (void)data, count(size); }

void mpi_monitor_read(long* out) {
  out[0] = atomic_load(&messages), out[1] = atomic_load(&bytes);
  out[2] = atomic_load(&collectives), out[3] = atomic_load(&collective_bytes);
}
