/*
 * The command's side of CUDA: it chooses the device and owns the memory there; the library only
 * computes in it. The functions that return bool or a pointer all print an error message on stderr.
 */
#ifndef FA_CLI_DEVICE_H
#define FA_CLI_DEVICE_H

#include <stdbool.h>
#include <stddef.h>

#include "flashattn.h"
#include "random_problem.h"
#include "tensors.h"

/* Replaces FA_DEVICE_AUTO: by CUDA if there is a GPU and this build has kernels of the pass for it,
 * otherwise by the CPU. With CUDA, the first GPU's context is then current. False if CUDA was
 * requested but cannot be used. */
bool device_choose(fa_device *device, fa_pass pass);

/* ---- Host arrays for a call on the GPU ------------------------------------------------------- */

enum { DEVICE_MAX_COPIES = 24 };

typedef struct device_copy {
    void *pointer_at; /* the pointer variable that points to the array */
    void *host, *device;
    size_t bytes;
    bool result; /* it is copied back */
} device_copy;

typedef struct device_copies {
    int count;
    device_copy list[DEVICE_MAX_COPIES];
} device_copies;

/* Adds an array: pointer_at is the address of a pointer to it. NULL and empty arrays are
 * ignored. */
void device_copies_add(device_copies *copies, void *pointer_at, size_t bytes, bool result);
void device_copies_add_tensor(device_copies *copies, cli_tensor *t, bool result);

/* Copies the arrays to the GPU and makes the pointers point there. */
bool device_copies_in(device_copies *copies);

/* Waits for the GPU and copies the results back. */
bool device_copies_out(device_copies *copies);

/* Frees the GPU's copies; the pointers point to the host again. */
void device_copies_free(device_copies *copies);

/* ---- Memory and time ------------------------------------------------------------------------- */

void *device_new(size_t bytes);
void device_delete(void *memory);
bool device_put(void *to, const void *from, size_t bytes);
bool device_get(void *to, const void *from, size_t bytes);
bool device_wait(void);

/* Bytes of the second-level cache. */
double device_cache_bytes(void);

/* Seconds that the GPU spends between two marks. */
typedef struct device_clock {
    void *begin, *end;
} device_clock;
bool device_clock_new(device_clock *clock);
void device_clock_free(device_clock *clock);
bool device_clock_begin(device_clock *clock);
bool device_clock_end(device_clock *clock, double *seconds); /* waits */

/* ---- Random problems ------------------------------------------------------------------------- */

/* One block of device memory. Each problem is moved to it, with all its buffers, their guard bands
 * and their alignment, and back. */
typedef struct device_arena {
    char *device, *host, *first; /* first: the results of the first of two runs, on the host */
    size_t bytes;
    void *stream; /* a stream of its own; NULL: the default one */
} device_arena;

/* An empty arena for thread number `worker`, with a stream. Makes the context of a GPU current;
 * workers are distributed over all GPUs. */
bool device_arena_new(device_arena *arena, int worker);
void device_arena_free(device_arena *arena);

/* For random_settings.attend; the context is a device_arena. Each call is made twice with the same
 * memory contents, and must produce the same bits (dq: with FA_DETERMINISTIC). A workspace is
 * between guard bands, and is filled with NaN. */
fa_status device_attend(void *context, const random_call *call, char *message, size_t size);

#endif
