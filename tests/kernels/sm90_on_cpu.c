/* forward_sm90 or forward_sm90_wide in one of its compiled forms, for the host: ENTRY, SOURCE and the rest
 * come from the build. */
#define FA_CUDA_ON_CPU 1
#include "hopper_units.h"
#define COUNT_PATH(path) (hopper_paths[path] += threadIdx.x % 32 == 0)
#define forward_sm90 ENTRY
#define forward_sm90_wide ENTRY

#include SOURCE
