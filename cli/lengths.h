/*
 * Lengths and pages of a batch, for `flashattn run` and `flashattn grad`: reads .npy files of
 * integers into the options. They are checked here, because a GPU does not check them.
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

/* Reads the files for a problem with these q and k, and sets the options. False after a message on
 * stderr. */
bool lengths_load(lengths *l, const lengths_paths *paths, const fa_tensor *q, const fa_tensor *k,
                  fa_options *options);

/* Adds them to the arrays that are copied to the GPU, with everything else that the options point
 * to. */
void lengths_add_copies(const lengths *l, device_copies *copies, fa_options *options);

void lengths_free(lengths *l);

#endif
