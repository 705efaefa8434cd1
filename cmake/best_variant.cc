// Ends with the index of the best variant that this processor runs (cmake/variants.cmake).
#include "../native/processor.h"

int main() { return mpigrad::best_variant(); }
