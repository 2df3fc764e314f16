/*
 * Memory for tests that detects stray writes: every buffer lies between guard bands, starts out as NaN
 * in every float format (all bits 1), and knows which of its bytes may be written.
 */
#ifndef REF_BUFFERS_H
#define REF_BUFFERS_H

#include "check.h"
#include "random.h"

typedef struct ref_buffer {
    const char *name;
    char *base, *data; /* data lies behind the first guard band */
    char *copy;        /* what data held when the inputs were done; for inputs */
    size_t bytes;
    size_t reserved;   /* bytes from base on, guard bands included */
    fa_tensor output;  /* the tensor whose elements may be written; data NULL for inputs */
    bool whole_output; /* all of it may be written */
} ref_buffer;

enum { REF_MAX_BUFFERS = 64 };

typedef struct ref_buffers {
    ref_buffer list[REF_MAX_BUFFERS];
    int count;
} ref_buffers;

/* A buffer of all ones, its data aligned to align but to nothing more. */
void *ref_buffers_new(ref_buffers *buffers, const char *name, size_t bytes, size_t align);

/* Where a tensor's axes lie in memory. */
typedef struct ref_layout {
    int order[4];                       /* axes, outermost first */
    int64_t gap[4];                     /* elements left free behind each step of an axis */
    bool negative[4];                   /* the axis runs backwards */
    bool broadcast[4];                  /* stride 0 */
    int64_t misalignment;               /* elements in front */
    bool aligned_data, aligned_strides; /* to 16 bytes; all but the smallest to 8 elements */
} ref_layout;

#define REF_LAYOUT_CONTIGUOUS                                                                      \
    {                                                                                              \
        {0, 1, 2, 3}, {0}, {false}, {false}, 0, false, false                                       \
    }

/* A random one: any order of the first three axes (of all four if any_last), gaps; aligned as fast
 * kernels need it, or to an element only, or in between; with input also negative and 0
 * strides. */
ref_layout ref_layout_random(ref_random *random, bool input, bool any_last);

/* Gives a tensor (dtype and shape are set) strides and a buffer. */
void ref_buffers_tensor(ref_buffers *buffers, const char *name, fa_tensor *t,
                        const ref_layout *layout);

/* Says that t's elements will be written by the library. */
void ref_buffers_output(ref_buffers *buffers, const fa_tensor *t);

/* Says that all of the buffer at data will be written by the library. */
void ref_buffers_whole_output(ref_buffers *buffers, const void *data);

/* Remembers what the inputs hold. */
void ref_buffers_freeze(ref_buffers *buffers);

/* Fails where a guard band, an input, or memory between an output's elements has changed. */
void ref_buffers_check(const ref_buffers *buffers, ref_report *report);

/* A copy of all that the buffers hold, with the guard bands. The caller frees it. */
char *ref_buffers_copy(const ref_buffers *buffers);

/* Restores the buffers from a copy, so that a call can be repeated. */
void ref_buffers_put(const ref_buffers *buffers, const char *copy);

/* Whether the buffers hold what a copy holds. */
bool ref_buffers_are(const ref_buffers *buffers, const char *copy);

void ref_buffers_free(ref_buffers *buffers);

#endif
