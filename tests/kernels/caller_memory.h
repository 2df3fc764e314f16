/*
 * The caller's memory in the tests of kernels on the host: what kernels may access, and a workspace
 * between guard bands.
 */
#ifndef FA_TEST_CALLER_MEMORY_H
#define FA_TEST_CALLER_MEMORY_H

#include <stdlib.h>
#include <string.h>

#include "buffers.h"
#include "problem.h"

enum { GUARD = 256, POISON = 0xff /* NaN in each type */ };

static inline void add_memory(ref_buffers *memory, const char *name, void *data, size_t bytes)
{
    memory->list[memory->count++] = (ref_buffer){.name = name, .data = data, .bytes = bytes};
}

/* New memory, full of NaN. */
static inline void *new_memory(ref_buffers *memory, const char *name, size_t bytes)
{
    void *data = aligned_alloc(256, (bytes + 511) / 256 * 256);
    if (!data) abort();
    memset(data, POISON, bytes);
    add_memory(memory, name, data, bytes);
    return data;
}

static inline size_t workspace_room(size_t bytes) { return (bytes + 2 * GUARD + 255) / 256 * 256; }

/* Gives the problem a workspace full of NaN, the last one of the caller's buffers. */
static inline void begin_workspace(ref_buffers *memory, fa_problem *p, size_t bytes)
{
    char *bands = aligned_alloc(256, workspace_room(bytes));
    if (!bands) abort();
    memset(bands, POISON, workspace_room(bytes));
    p->workspace = bands + GUARD;
    p->workspace_size = bytes;
    add_memory(memory, "workspace", p->workspace, bytes);
}

static inline bool is_poison(const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)p[i] != POISON) return false;
    return true;
}

/* Frees it. False if memory outside it was written. */
static inline bool end_workspace(ref_buffers *memory, fa_problem *p)
{
    const size_t bytes = memory->list[--memory->count].bytes;
    char *bands = (char *)p->workspace - GUARD, *end = bands + GUARD + bytes;
    const bool clean =
        is_poison(bands, GUARD) && is_poison(end, workspace_room(bytes) - GUARD - bytes);
    free(bands);
    return clean;
}

#endif
