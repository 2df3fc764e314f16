/* kernel_on_cpu.c for forward_sm90 and forward_sm90_wide, which count the paths of their tiles
 * through the softmax. */
#include "hopper_units.h"
#define COUNT_PATH(path) (hopper_paths[path] += threadIdx.x % 32 == 0)

#include "kernel_on_cpu.c"
