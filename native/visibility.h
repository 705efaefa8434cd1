// Symbols that a library shows. All others are hidden (native/symbols.map).
#pragma once

// To Python.
#define MPIGRAD_EXPORT extern "C" __attribute__((visibility("default")))
// To the libraries of waves, from the communication library.
#define MPIGRAD_SHARED __attribute__((visibility("default")))
