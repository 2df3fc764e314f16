/*
 * Checks of where the caller's arrays lie: on the device that the call runs on, or in host memory.
 */
#ifndef FA_LOCATION_H
#define FA_LOCATION_H

#include "arguments.h"
#include "backend.h"
#include "problem.h"

/* The location with which the memory of arrays is compared. */
typedef struct fa_location {
    const fa_backend *backend; /* with memory of its own */
    int ordinal;               /* the device that the call runs on; FA_HOST_MEMORY: the CPU */
} fa_location;

/* One array; NULL is fine. */
fa_status fa_check_location(const char *name, const void *pointer, fa_location expected);

/* All arrays of a call. */
fa_status fa_check_locations(const fa_arguments *arguments, fa_location expected);

/* All arrays of a problem that fa_combine_problem_make has made. */
fa_status fa_check_combine_locations(const fa_combine_problem *problem, fa_location expected);

/* All arrays of fa_append. */
fa_status fa_check_append_locations(const fa_append_call *call, fa_location expected);

/* An array that the host reads, on every device. */
fa_status fa_check_host_array(const char *name, const void *array, const fa_backend *backend);

#endif
