/*
 * Runs the rungs of the ladder: finds a rung's compiled kernel for a problem, checks what it can take,
 * and launches it. Errors are sentences.
 *
 * rungs.h lists the rungs, rung.h is what host and kernels agree on. All functions work in the calling
 * thread's current context (fa_cuda_use_device).
 */
#ifndef FA_LADDER_H
#define FA_LADDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda/driver.h"
#include "flashattn.h"
#include "rung.h"

typedef enum ladder_types { LADDER_FLOAT32, LADDER_TF32, LADDER_HALVES } ladder_types;

/* A line of rungs.h. */
typedef struct ladder_rung {
    int number;
    const char *name;
    int architecture; /* 80: Ampere and later; 90: Hopper only */
    ladder_types types;
    int largest_d;
    const char *idea;
} ladder_rung;

/* From the bottom up. */
int ladder_num_rungs(void);
const ladder_rung *ladder_rung_at(int index);
const ladder_rung *ladder_find_rung(const char *name); /* NULL: no such rung */

/* True if the rung reads and writes this type. */
bool ladder_takes(const ladder_rung *rung, fa_dtype dtype);

/* The name of the image that serves head dim d: that of the smallest compiled head dim >= d, for
 * example "pingpong_d128_bf16". d must be 1 to rung->largest_d. */
enum { LADDER_NAME = 64 };
void ladder_image_name(const ladder_rung *rung, fa_dtype dtype, int64_t d, char name[LADDER_NAME]);

/* ---- Running --------------------------------------------------------------------------------- */

enum { LADDER_ERROR = 384 };

/* A rung's compiled form for a type and head dim. */
typedef struct ladder_kernel {
    const ladder_rung *rung;
    fa_dtype dtype;
    int head_dim; /* as compiled: 64, 128 or 256 */
    rung_about about;
    void *steps[RUNG_STEPS]; /* kernels, for fa_cuda_launch_kernel */
} ladder_kernel;

/* Fills in a kernel of the current device. False, with a sentence in error: this build or this device
 * has none. */
bool ladder_load(const ladder_rung *rung, fa_dtype dtype, int64_t d, ladder_kernel *kernel,
                 char error[LADDER_ERROR]);

/* The arrays lie on the device, are aligned to 256 bytes, and are (heads, n, pitch): rows of d elements
 * that begin `pitch` elements apart, a multiple of 16 bytes. */
typedef struct ladder_problem {
    const void *q, *k, *v;
    void *out;
    int64_t heads, n, d, pitch;
    float scale;
    bool causal;
    float *scratch; /* for rungs whose about.needs_scores is set */
    size_t
        scratch_bytes; /* at least those of one head: n * n floats; more runs more heads at once */
    void *stream;
} ladder_problem;

/* The pitch for a head dim: d rounded up to a multiple of 16 bytes. */
int64_t ladder_pitch(fa_dtype dtype, int64_t d);

/* Plans one launch of a kernel; no device is touched. heads is how many heads a launch takes
 * at most; a problem with more is run in several. False: error says why it cannot be run. */
typedef struct ladder_plan {
    int device; /* the ordinal */
    int64_t heads;
    int64_t grid_x[RUNG_STEPS],
        grid_y[RUNG_STEPS]; /* z: the heads of the launch, or 1 if persistent */
} ladder_plan;
bool ladder_make_plan(const ladder_kernel *kernel, const ladder_problem *problem,
                      const fa_cuda_device *device, ladder_plan *plan, char error[LADDER_ERROR]);

/* Queues the whole problem on its stream. */
bool ladder_run(const ladder_kernel *kernel, const ladder_problem *problem,
                char error[LADDER_ERROR]);

/* ---- The probe (ceiling.cu) ------------------------------------------------------------------ */

/* A kernel of the probe; hopper: of the part that only Hopper runs. */
bool ladder_load_probe(bool hopper, const char *entry, void **kernel, char error[LADDER_ERROR]);

/* Writes a fault of the driver as a sentence: what was being done, the driver's function, name and text. */
bool ladder_fault(char error[LADDER_ERROR], const char *doing, const fa_cuda_fault *fault);

#endif
