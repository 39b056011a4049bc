// One element at a time: any CPU. On aarch64 fma and sqrt are instructions of the base set, and the compiler
// vectorises this loop by itself.
#include "step.h"

namespace megatrain {

void step_scalar(const Run& run, int64_t begin, int64_t end) { step_lanes<ScalarLanes>(run, begin, end); }

}  // namespace megatrain
