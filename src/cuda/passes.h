/*
 * The passes that take several kernels, or kernels without a choice: backward, weights, combine. As
 * with plan.h, plans are numbers in and numbers out.
 */
#ifndef FA_CUDA_PASSES_H
#define FA_CUDA_PASSES_H

#include "../../kernels/passes.h"
#include "cuda/driver.h"
#include "cuda/plan.h"

/* In the order in which they are queued. */
enum {
    FA_STEP_DELTA,
    FA_STEP_DQ,
    FA_STEP_DKV,
    FA_STEP_DBIAS,
    FA_STEP_DSINKS,
    FA_STEP_WEIGHTS,
    FA_CUDA_STEPS
};

/* One launch. */
typedef struct fa_cuda_step {
    int variant;   /* its id; FA_NO_VARIANT: not of this pass */
    int64_t tiles; /* of a batch item or packed batch         */
    int64_t tasks; /* 0: nothing to do                        */
    int device;    /* the ordinal */
    uint32_t grid, threads, smem_bytes;
} fa_cuda_step;

typedef struct fa_cuda_passes {
    fa_cuda_step steps[FA_CUDA_STEPS];
    size_t workspace_bytes; /* backward: delta, a float for each query and head */
} fa_cuda_passes;

/* Whether a problem is one of these: backward or weights. */
bool fa_cuda_has_passes(const fa_problem *problem);

/* False if the device cannot; why then says so in a sentence. */
bool fa_cuda_passes_make(const fa_problem *problem, const fa_cuda_device *device,
                         fa_cuda_passes *passes, char *why, size_t size);

/* One line for fa_describe. */
void fa_cuda_passes_describe(const fa_problem *problem, const fa_cuda_device *device,
                             const fa_cuda_passes *passes, char *text, size_t size);

/* Whether a step has something to write and somewhere to write it. */
bool fa_cuda_step_runs(const fa_problem *problem, const fa_cuda_passes *passes, int step);

/* What the kernels are told. */
fa_backward_params fa_cuda_backward_params(const fa_problem *problem, const fa_cuda_step *step);
fa_weights_params fa_cuda_weights_params(const fa_problem *problem, const fa_cuda_step *step);

/* Queues all steps that run. kernels: of each of them. */
bool fa_cuda_run_passes(void *const kernels[FA_CUDA_STEPS], const fa_problem *problem,
                        const fa_cuda_passes *passes, fa_cuda_fault *fault);

/* ---- Combine --------------------------------------------------------------------------------- */

typedef struct fa_cuda_combining {
    fa_cuda_step step;
    int64_t most; /* parts of a launch */
    size_t
        workspace_bytes; /* that keep sums between launches; 0: out and lse do, or there is one */
} fa_cuda_combining;

/* False if the device cannot; why then says so in a sentence. */
bool fa_cuda_combine_make(const fa_combine_problem *parts, const fa_cuda_device *device,
                          fa_cuda_combining *how, char *why, size_t size);

/* What one launch is told: of the parts from number `done` on, as many as it takes. Returns how
 * many are done then. */
int64_t fa_cuda_combine_params(const fa_combine_problem *parts, const fa_cuda_combining *how,
                               int64_t done, fa_combine_launch *params);

bool fa_cuda_combine(void *kernel, const fa_combine_problem *parts, const fa_cuda_combining *how,
                     fa_cuda_fault *fault);

#endif
