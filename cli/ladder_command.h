/*
 * What the parts of `flashattn ladder` share: the rungs that were asked for, the device, the ceiling.
 */
#ifndef FA_CLI_LADDER_COMMAND_H
#define FA_CLI_LADDER_COMMAND_H

#include <stdbool.h>
#include <stdint.h>

#include "ladder.h"

enum { RUNGS_MOST = 32 };

/* The rungs to work on, in the order of the ladder. */
typedef struct rungs_chosen {
    int count;
    const ladder_rung *rungs[RUNGS_MOST];
} rungs_chosen;

/* Takes the names behind argv[0] away, up to the first option; none: all rungs. False after a message
 * on stderr. */
bool rungs_choose(int *argc, char **argv, rungs_chosen *chosen);

/* Opens device 0 and makes it current. False after a message on stderr, also if this build has no
 * kernels. */
bool rungs_open_device(fa_cuda_device *device);

/* False where the rung is for another architecture. */
bool rungs_run_here(const ladder_rung *rung, const fa_cuda_device *device);

/* "f32", "tf32" or "bf16, f16" */
const char *rungs_types(const ladder_rung *rung);

/* Messages on stderr; both return false. */
bool rungs_say_fault(const char *doing, const fa_cuda_fault *fault);
bool rungs_say(const char *error);

int rungs_verify(int argc, char **argv); /* ladder run */
int rungs_bench(int argc, char **argv);  /* ladder bench */

/* ---- The probe (ladder_ceiling.c) ------------------------------------------------------------- */

/* What the device can do at best; 0: it has no such instruction. */
typedef struct rungs_ceiling {
    double copy;     /* bytes per second, read and written */
    double ffma;     /* operations per second; a multiply-add counts as 2 */
    double mma_tf32; /* mma.sync */
    double mma_bf16;
    double wgmma_bf16; /* Hopper */
} rungs_ceiling;

bool rungs_measure_ceiling(const fa_cuda_device *device, rungs_ceiling *ceiling);

/* The same but for copy, which takes 2 GiB of the device's memory. */
bool rungs_measure_rates(const fa_cuda_device *device, rungs_ceiling *ceiling);

/* The rate that a rung of these types is compared with. */
double rungs_ceiling_of(const rungs_ceiling *ceiling, ladder_types types);

/* Fills device memory with standard normal numbers; count is a multiple of 4. */
bool rungs_fill_normal(void *data, fa_dtype dtype, int64_t count, uint32_t seed);

#endif
