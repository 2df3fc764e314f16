/*
 * The arguments of fa_forward and the other calls, before they are checked.
 */
#ifndef FA_ARGUMENTS_H
#define FA_ARGUMENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "flashattn.h"

/* A location of arrays: the number of a CUDA device, or this. */
enum { FA_HOST_MEMORY = -1 };

/* An allocation of device memory, if ordinal is a device's number. */
typedef struct fa_allocation {
    int ordinal; /* FA_HOST_MEMORY: there is none, or it is unknown */
    uintptr_t first;
    size_t bytes; /* 0: unknown */
} fa_allocation;

/* The arguments of fa_forward, fa_backward, fa_decode, fa_weights, or of a dry run of one of them.
 * options and gradients are complete copies: fields that the caller's version lacks are 0. */
typedef struct fa_arguments {
    fa_pass pass;
    fa_device device;       /* the one chosen, never FA_DEVICE_AUTO */
    fa_allocation q_memory; /* the allocation that holds q's data, if it is known */
    bool located;           /* the caller knows where all arrays lie: at location */
    int location;           /* a CUDA device or FA_HOST_MEMORY */
    /* fa_supported and the like. Data may be NULL and is not read, and arguments below that a dry run does
     * not have are not checked. */
    bool dry_run;
    const fa_tensor *q, *k, *v, *out;
    const float *lse; /* written by forward and decode, read by backward */
    const fa_gradients *gradients;
    const int64_t *rows;
    int64_t num_rows;
    const fa_tensor *weights;
    const fa_options *options;
} fa_arguments;

/* The arguments of fa_append; options: complete. */
typedef struct fa_append_call {
    fa_device device;
    const fa_tensor *k_new, *v_new, *k_cache, *v_cache;
    const fa_append_options *options;
} fa_append_call;

#endif
