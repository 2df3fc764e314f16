/*
 * From the caller's arguments to a checked problem. Used by api.c only.
 */
#ifndef FA_NORMALIZE_H
#define FA_NORMALIZE_H

#include <stdbool.h>

#include "cpu/engine.h"
#include "problem.h"

/* Memory of a CUDA device. ordinal -1: there is none, or nobody has asked. */
typedef struct fa_allocation {
    int ordinal;
    uintptr_t first;
    size_t bytes; /* 0: how many is not known */
} fa_allocation;

/* The arguments of fa_forward, fa_backward, fa_decode, fa_weights, or of a question about one of them.
 * options and gradients are complete copies: fields that the caller's version lacks are 0. */
typedef struct fa_arguments {
    fa_pass pass;
    fa_device device;       /* the one chosen, never FA_DEVICE_AUTO */
    fa_allocation q_memory; /* of which q's data was found to be a part */
    bool placed;            /* the caller knows where all of its arrays lie */
    int place;              /* if placed: on this CUDA device; -1: in host memory */
    /* fa_supported and the like: data may be NULL and is not followed, and the arguments below that a
     * question does not have are not checked. */
    bool question;
    const fa_tensor *q, *k, *v, *out;
    const float *lse; /* written by forward and decode, read by backward */
    const fa_gradients *gradients;
    const int64_t *rows;
    int64_t num_rows;
    const fa_tensor *weights;
    const fa_options *options;
} fa_arguments;

/* Checks every argument and fills in the problem; FA_ERROR_ARGUMENT or FA_ERROR_UNSUPPORTED. */
fa_status fa_problem_make(const fa_arguments *arguments, fa_problem *problem);

struct fa_check_report; /* kernels/checks.h */

/* Words what FA_CHECK has found on a device as the same fault gets worded on the CPU. where: ends the sentence. */
fa_status fa_problem_report(const struct fa_check_report *report, const char *where);

/* The arguments of fa_combine. */
typedef struct fa_combine_arguments {
    fa_device device;
    const fa_tensor *parts;
    const float *const *part_lse;
    int64_t num_parts;
    const fa_tensor *out;
    float *lse;
    const fa_options *options;
} fa_combine_arguments;

fa_status fa_combine_problem_make(const fa_combine_arguments *arguments,
                                  fa_combine_problem *problem);

#endif
