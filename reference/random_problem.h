/*
 * A random problem from the whole option space: drawn from one number, computed by the library,
 * compared with the reference. Everything that may not be read is NaN, everything that may not be
 * written is watched, outputs start out as NaN.
 */
#ifndef REF_RANDOM_PROBLEM_H
#define REF_RANDOM_PROBLEM_H

#include "buffers.h"
#include "check.h"

typedef enum random_pass {
    RANDOM_FORWARD = 0,
    RANDOM_BACKWARD,
    RANDOM_DECODE,
    RANDOM_WEIGHTS,
    RANDOM_COMBINE,
    RANDOM_NUM_PASSES
} random_pass;

const char *random_pass_name(random_pass pass);

/* A call of fa_forward or fa_decode. Every pointer leads into one of the buffers. */
typedef struct random_call {
    bool decode;
    const ref_buffers *buffers;
    fa_tensor q, k, v, out;
    float *lse;
    fa_options options;
} random_call;

typedef struct random_settings {
    fa_device device;
    int32_t threads; /* 0: each problem draws 1 to 3 */
    /* Computes forward and decode in place of the library's own calls, for example in other memory;
     * then there are no problems of the other passes. On failure message (of that size) says why. */
    fa_status (*attend)(void *context, const random_call *call, char *message, size_t size);
    void *context;
} random_settings;

typedef struct random_result {
    random_pass pass;
    fa_dtype dtype;   /* of q (combine: of the parts) */
    fa_status status; /* of the call that failed, else FA_OK */
    ref_report report;
    char description[800]; /* one line */
    char reproduce[120];   /* a command line */
} random_result;

/* Draws problem number `number` and checks it. */
void random_problem_run(uint64_t number, const random_settings *settings, random_result *result);

#endif
