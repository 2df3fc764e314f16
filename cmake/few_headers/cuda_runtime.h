/*
 * In place of CUDA's header of this name, which nvcc puts before each source: of the headers that it includes
 * those that device code uses. Without the runtime's calls and their types, which no kernel needs, reading
 * takes 0.3 s, not 0.5. The machine code is the same. Only where kernels are compiled to be looked at
 * (FA_CUDA_ONCE), because the names of these headers may change from version to version.
 */
#ifndef FA_CUDA_RUNTIME_H
#define FA_CUDA_RUNTIME_H

/* Special functions of C++17 (Bessel's and others): <cmath> leaves them out if they seem to be there. */
#define _GLIBCXX_BITS_SPECFUN_H 1

#define __CUDA_INCLUDE_COMPILER_INTERNAL_HEADERS__
/* clang-format off: in this order */
#include "crt/host_config.h"
#include "crt/host_defines.h"
#include "vector_types.h"
#include "vector_functions.h"
#include "crt/common_functions.h"
#include "crt/device_functions.h"
#include "device_launch_parameters.h"
/* clang-format on */
#undef __CUDA_INCLUDE_COMPILER_INTERNAL_HEADERS__

#endif
