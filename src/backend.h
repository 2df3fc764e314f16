/*
 * A backend: the functions with which api.c runs calls on one kind of device. There is one for each
 * value of fa_device except FA_DEVICE_AUTO, in cpu/backend.c and cuda/backend.c. A build without CUDA
 * has no_cuda.c instead of the latter.
 *
 * Functions that return an fa_status set the error message themselves.
 */
#ifndef FA_BACKEND_H
#define FA_BACKEND_H

#include "arguments.h"
#include "problem.h"

/* The results of a dry run. */
typedef struct fa_answer {
    bool wants_text;
    char text[512]; /* which kernel would run, if it is wanted */
    size_t workspace_bytes;
} fa_answer;

typedef struct fa_backend {
    /* FA_OK if calls can run on a device of this backend. Called where options.device names it. */
    fa_status (*open)(void);

    /* Where memory lies. NULL where the backend's memory is the host's; the other functions below are
     * called only if in_use says yes, except for find_memory. */
    bool (*in_use)(void); /* whether this process may have device memory; cheap */
    /* The device's number, with the allocation. Memory that no device has: FA_HOST_MEMORY. */
    int (*find_memory)(const void *pointer, uintptr_t *first, size_t *bytes);
    int (*device_of)(const void *pointer);    /* the device's number alone */
    int (*out_of_reach)(const void *pointer); /* the same; FA_HOST_MEMORY if the host can read it */

    /* Runs a problem. The arguments are those that it was made from: a backend with memory of its own
     * checks where they lie. */
    fa_status (*run)(const fa_arguments *arguments, const fa_problem *problem);
    fa_status (*combine)(const fa_combine_problem *problem);
    fa_status (*append)(const fa_append_call *call, const fa_append_problem *problem);

    /* Does what run does before it looks at data. */
    fa_status (*dry_run)(const fa_problem *problem, fa_answer *answer);

    /* Fills in an fa_cpu_info or fa_cuda_info, which is all 0. */
    fa_status (*get_info)(void *info);
} fa_backend;

extern const fa_backend fa_cpu_backend, fa_cuda_backend;

#endif
