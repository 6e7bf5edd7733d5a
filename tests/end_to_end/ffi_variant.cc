// FACTOR makes libraries with the same targets and other results, and CRASH_WHEN_LOADED one that crashes.
#include <cstdlib>

#ifndef FACTOR
#define FACTOR 1
#endif
extern const float kFactor = FACTOR;

#ifdef CRASH_WHEN_LOADED
// Not in the process of the script, which sets this variable.
__attribute__((constructor)) static void crash_when_loaded() {
  if (!std::getenv("FFI_KERNELS_OF_SCRIPT")) *reinterpret_cast<volatile int*>(8) = 1;
}
#endif
