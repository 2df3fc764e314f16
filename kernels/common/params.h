/* The parameter of an attention kernel: the parts of fa_problem that kernels need. src/cuda/parameters.c fills it in;
 * it is passed by value. Host and device share it. */
#ifndef FA_KERNELS_COMMON_PARAMS_H
#define FA_KERNELS_COMMON_PARAMS_H

#include <stdint.h>

#include "element.h"

/* The values of fa_dtype. */
enum {
    FA_KERNEL_FLOAT32 = FA_ELEMENT_FLOAT32,
    FA_KERNEL_FLOAT16 = FA_ELEMENT_FLOAT16,
    FA_KERNEL_BFLOAT16 = FA_ELEMENT_BFLOAT16,
    FA_KERNEL_FLOAT8_E4M3 = FA_ELEMENT_FLOAT8_E4M3,
    FA_KERNEL_BOOL = 4,
    FA_KERNEL_INT8 = 5
};

/* A strided view; strides in elements. data NULL: absent. */
typedef struct fa_kernel_view {
    char *data;
    int64_t stride[4];
    int32_t dtype;
    int32_t vector; /* rows are whole groups of so many elements, each moved at once: 8, 4, or 16
                     * (8 bits in decode_sm80); 0: they are not */
} fa_kernel_view;

typedef struct fa_attention_params {
    fa_kernel_view q, k, v, out, bias, mask;
    float *lse; /* (blocks, heads_q, rows_q); NULL: not wanted */

    int64_t batch, heads_q, heads_kv;
    int64_t rows_q; /* rows of axis 1 of q, out and lse: all tokens if packed      */
    int64_t rows_k; /* the same for k and v; paged: rows of a page                 */
    int64_t max_k;  /* the length of a sequence's keys, or its max if lengths are on the device */
    int32_t d, d_v;

    float scale, softcap; /* softcap 0: none */
    int32_t causal, diagonal_given;
    int64_t diagonal, window_left, window_right; /* windows of -1: no limit */

    const float *alibi_slopes;
    int64_t alibi_batch_stride;
    const float *sinks;

    uint32_t dropout_threshold; /* keep if the 16 random bits are >= this; 0: no dropout */
    float dropout_scale;
    uint64_t dropout_seed, dropout_offset;
    const uint64_t *dropout_state; /* instead of the two, if not NULL */

    const int32_t *cu_seqlens_q, *cu_seqlens_k, *seqlens_q, *seqlens_k;
    const int32_t *block_table;
    int64_t block_table_stride;

    const float *q_descale, *k_descale, *v_descale; /* (batch, heads_kv) or NULL */

    int64_t fewest_queries; /* of a packed sequence; those with fewer are another launch's, and
                             * their rows are left alone */
    int64_t tiles;          /* of queries: of a batch item, or of all tokens if packed */
    int64_t tasks;          /* tiles times heads times batch items                     */

    int64_t attention_chunk; /* 0: none; only kernels with HAS_ATTENTION_CHUNKS look at it */
    /* Of elements of 8 bits: like k and v, with one column. data NULL: 1. forward_simt and
     * decode_sm80 read them. */
    fa_kernel_view k_scale, v_scale;

    int64_t pages; /* of a cache with a block table, at most 2^31. Without pages max_k is 0 */
} fa_attention_params;

#endif
