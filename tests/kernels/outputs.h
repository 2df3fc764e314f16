/*
 * What a random problem's outputs hold, all of them: kept and put back, so that a call can be made again.
 */
#ifndef FA_TEST_OUTPUTS_H
#define FA_TEST_OUTPUTS_H

#include <stdlib.h>
#include <string.h>

#include "buffers.h"

static char *copy_outputs(const ref_buffers *buffers, size_t *bytes)
{
    *bytes = 0;
    for (int i = 0; i < buffers->count; i++) *bytes += buffers->list[i].reserved;
    char *copy = malloc(*bytes + 1), *to = copy;
    if (!copy) abort();
    for (int i = 0; i < buffers->count; to += buffers->list[i++].reserved)
        memcpy(to, buffers->list[i].base, buffers->list[i].reserved);
    return copy;
}

static inline void put_outputs(const ref_buffers *buffers, const char *from)
{
    for (int i = 0; i < buffers->count; from += buffers->list[i++].reserved)
        memcpy(buffers->list[i].base, from, buffers->list[i].reserved);
}

#endif
