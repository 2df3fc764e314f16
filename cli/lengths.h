/*
 * Lengths and pages of a batch, for `flashattn run` and `flashattn grad`: from .npy files of
 * integers into the options. They are checked here, since a GPU does not check them.
 */
#ifndef FA_CLI_LENGTHS_H
#define FA_CLI_LENGTHS_H

#include "device.h"
#include "flashattn.h"

/* The files; NULL: not given. */
typedef struct lengths_paths {
    const char *seqlens_q, *seqlens_k, *cu_seqlens_q, *cu_seqlens_k, *block_table;
} lengths_paths;

/* What was read, malloc'd; NULL: not given. */
typedef struct lengths {
    int32_t *seqlens_q, *seqlens_k, *cu_seqlens_q, *cu_seqlens_k, *block_table;
    int64_t batch; /* sequences */
    int64_t table_entries;
} lengths;

/* Reads the files for a problem whose q and k these are, and sets the options. False after a message on
 * stderr. */
bool lengths_load(lengths *l, const lengths_paths *paths, const fa_tensor *q, const fa_tensor *k,
                  fa_options *options);

/* To the GPU, with all else that the options lead to. */
void lengths_add_copies(const lengths *l, device_copies *copies, fa_options *options);

void lengths_free(lengths *l);

#endif
