/*
 * Shared by tests that run single forward problems, not random ones, on the host.
 */
#ifndef FA_TEST_ATTENTION_ON_CPU_H
#define FA_TEST_ATTENTION_ON_CPU_H

#include "attention.h"
#include "check.h"
#include "random_problem.h"

/* Like attention_make, aligned so that every kernel supports it. */
static inline void make_aligned(attention *a, uint64_t seed, shape s, fa_dtype dtype)
{
    ref_layout aligned = REF_LAYOUT_CONTIGUOUS;
    aligned.aligned_data = true;
    attention_make_as(a, seed, s, dtype, &aligned, &aligned, &aligned, &aligned);
}

/* Its forward on a GPU, which a test's `attend` imitates. */
static inline random_call forward_call(attention *a)
{
    random_call call = {.pass = RANDOM_FORWARD,
                        .buffers = &a->buffers,
                        .q = a->in.q,
                        .k = a->in.k,
                        .v = a->in.v,
                        .out = a->out,
                        .lse = a->lse,
                        .options = a->in.options};
    call.options.device = FA_DEVICE_CUDA;
    return call;
}

static inline void check_attends(random_attend *attend, int64_t number, const random_call *call)
{
    char message[320] = "";
    const fa_status status = attend(&number, call, message, sizeof message);
    CHECK(status == FA_OK, "status %d: %s", (int)status, message);
}

#endif
