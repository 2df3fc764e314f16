/*
 * Shared parts of `flashattn ladder`: the chosen rungs, the device, messages.
 */
#ifndef FA_CLI_LADDER_RUNGS_H
#define FA_CLI_LADDER_RUNGS_H

#include <stdbool.h>
#include <stdint.h>

#include "ladder.h"

enum { RUNGS_MAX = 32 };

/* The chosen rungs, in the order of the ladder. */
typedef struct rungs_chosen {
    int count;
    const ladder_rung *rungs[RUNGS_MAX];
} rungs_chosen;

/* Removes the names after argv[0], up to the first option; without names, chooses all rungs. False
 * after a message on stderr. */
bool rungs_choose(int *argc, char **argv, rungs_chosen *chosen);

/* Opens device 0 and makes it current. False after a message on stderr, also if this build has no
 * kernels. */
bool rungs_open_device(fa_cuda_device *device);

/* False if the rung is for another architecture. */
bool rungs_run_here(const ladder_rung *rung, const fa_cuda_device *device);

/* "f32", "tf32" or "bf16, f16" */
const char *rungs_types(const ladder_rung *rung);

/* Messages on stderr; both return false. */
bool rungs_say_fault(const char *doing, const fa_cuda_fault *fault);
bool rungs_say(const char *error);

#endif
