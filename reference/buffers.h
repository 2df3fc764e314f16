/*
 * Memory for tests that detects stray writes: every buffer is between guard bands, starts as NaN in
 * every float format (all bits 1), and knows which of its bytes may be written.
 */
#ifndef REF_BUFFERS_H
#define REF_BUFFERS_H

#include "check.h"
#include "random.h"

typedef struct ref_buffer {
    const char *name;
    char *base, *data; /* data is after the first guard band */
    char *copy;        /* for inputs: what data held when the inputs were complete */
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

/* A buffer of all ones, whose data are aligned to align and to nothing more. */
void *ref_buffers_new(ref_buffers *buffers, const char *name, size_t bytes, size_t align);

/* The places of a tensor's axes in memory. */
typedef struct ref_layout {
    int order[4];                       /* axes, outermost first */
    int64_t gap[4];                     /* unused elements after each step of an axis */
    bool negative[4];                   /* the axis runs backwards */
    bool broadcast[4];                  /* stride 0 */
    int64_t misalignment;               /* elements before the first one */
    bool aligned_data, aligned_strides; /* to 16 bytes; all but the smallest to 8 elements */
} ref_layout;

#define REF_LAYOUT_CONTIGUOUS                                                                      \
    {                                                                                              \
        {0, 1, 2, 3}, {0}, {false}, {false}, 0, false, false                                       \
    }

/* A random layout: any order of the first three axes (of all four if any_last), gaps; aligned as
 * fast kernels need it, or only to an element, or in between; with input also negative and 0
 * strides. */
ref_layout ref_layout_random(ref_random *random, bool input, bool any_last);

/* Gives a tensor, whose dtype and shape are set, strides and a buffer. */
void ref_buffers_tensor(ref_buffers *buffers, const char *name, fa_tensor *t,
                        const ref_layout *layout);

/* Declares that the library will write t's elements. */
void ref_buffers_output(ref_buffers *buffers, const fa_tensor *t);

/* Declares that the library will write the whole buffer at data. */
void ref_buffers_whole_output(ref_buffers *buffers, const void *data);

/* Stores the current contents of the inputs. */
void ref_buffers_freeze(ref_buffers *buffers);

/* Fails if a guard band, an input, or memory between an output's elements has changed. */
void ref_buffers_check(const ref_buffers *buffers, ref_report *report);

/* A copy of everything in the buffers, with the guard bands. The caller frees it. */
char *ref_buffers_copy(const ref_buffers *buffers);

/* Restores the buffers from a copy, so that a call can be repeated. */
void ref_buffers_put(const ref_buffers *buffers, const char *copy);

/* Whether the buffers hold the same as a copy. */
bool ref_buffers_are(const ref_buffers *buffers, const char *copy);

void ref_buffers_free(ref_buffers *buffers);

#endif
