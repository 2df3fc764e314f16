/*
 * One attention problem, checked and normalized. normalize.c makes it from the caller's arguments; the
 * backends read it and trust it.
 */
#ifndef FA_PROBLEM_H
#define FA_PROBLEM_H

#include <stdbool.h>
#include <stdint.h>

#include "append_rows.h"
#include "flashattn.h"

/* The widest head dims: of q and k, and of v and out. */
enum { FA_HEAD_DIM_MAX = 576, FA_VALUE_DIM_MAX = 512 };

/* A strided 4-D view; strides in elements. Extents live in the problem. data NULL: absent. */
typedef struct fa_view {
    char *data;
    fa_dtype dtype;
    int64_t stride[4];
} fa_view;

typedef struct fa_problem {
    fa_pass pass;
    fa_device device; /* FA_DEVICE_CPU or FA_DEVICE_CUDA, never AUTO */

    int64_t batch;   /* sequences; with packed input num_sequences */
    int64_t heads_q; /* a multiple of heads_kv */
    int64_t heads_kv;
    int64_t n_q;   /* the longest a sequence's queries can be: q.shape[1] */
    int64_t n_k;   /* the same for keys: k.shape[1]; paged: block_table_stride * page_size */
    int64_t max_q; /* what the caller says about packed queries: n_q, or a smaller bound */
    int64_t d, d_v;

    fa_view k_scale, v_scale; /* as k and v, a column each; axes of extent 1 have stride 0 */
    fa_view q, k, v, out;     /* packed: axis 0 is unused, axis 1 runs over all tokens */
    int64_t rows_q;   /* rows of axis 1 of q, out and lse: n_q, or all tokens of a packed batch */
    int64_t rows_k;   /* the same for k and v; paged: page_size */
    int64_t blocks_q; /* entries of axis 0 of q, out: batch, or 1 if packed */
    int64_t blocks_k; /* entries of axis 0 of k, v: batch, 1 if packed, the page count if paged */
    float *lse;       /* (blocks_q, heads_q, rows_q), may be NULL in forward */

    fa_precision precision; /* FA_PRECISION_FLOAT32 unless q, k and v are float32 */
    float scale, softcap;   /* softcap 0: none */
    bool causal, diagonal_given, deterministic, batch_invariant, full_workspace;
    bool lacks_data;  /* a dry run: q, k or v has elements, but an address in place of its data */
    int64_t diagonal; /* if diagonal_given; else n_k - n_q of each sequence */
    int64_t window_left, window_right; /* -1: no limit */
    int64_t attention_chunk;           /* 0: none */

    fa_view bias; /* (batch, head, query, key); broadcast axes have stride 0 */
    fa_view mask;
    const float *alibi_slopes;
    int64_t alibi_batch_stride;
    const float *sinks;

    uint32_t dropout_threshold; /* keep if the 16 random bits are >= this; 0: no dropout */
    float dropout_scale;        /* 1 / (1 - p) */
    uint64_t dropout_seed, dropout_offset;
    const uint64_t *dropout_state; /* CUDA: device memory that holds the two; NULL: they count */

    const int32_t *cu_seqlens_q, *cu_seqlens_k, *seqlens_q, *seqlens_k;
    const int32_t *block_table;
    int64_t block_table_stride;

    const float *q_descale, *k_descale, *v_descale; /* (batch, heads_kv) or NULL */

    int threads; /* > 0: asked for; 0: OpenMP's choice */
    void *stream, *workspace;
    size_t workspace_size;

    /* Backward only; data NULL where absent. */
    fa_view dout, dq, dk, dv;
    const float *dlse;
    fa_view dbias;
    int64_t dbias_shape[4]; /* each the bias's full extent or 1 */
    float *dsinks;

    /* Weights only. */
    const int64_t *weight_rows; /* NULL: row r is query r */
    int64_t num_weight_rows;
    fa_view weights;
} fa_problem;

/* Where the rows of one batch item lie in the tensors. */
typedef struct fa_sequence {
    int64_t block_q, start_q, n_q; /* axis-0 index, first row of axis 1, number of queries */
    int64_t block_k, start_k, n_k; /* the same for keys; paged: block_k and start_k are unused */
    int64_t diagonal;
} fa_sequence;

static inline fa_sequence fa_problem_sequence(const fa_problem *p, int64_t b)
{
    fa_sequence s = {b, 0, p->n_q, b, 0, p->n_k, 0};
    if (p->cu_seqlens_q) {
        s.block_q = 0;
        s.start_q = p->cu_seqlens_q[b];
        s.n_q = p->cu_seqlens_q[b + 1] - s.start_q;
    }
    if (p->seqlens_q) s.n_q = p->seqlens_q[b];
    if (p->cu_seqlens_k) {
        s.block_k = 0;
        s.start_k = p->cu_seqlens_k[b];
        s.n_k = p->cu_seqlens_k[b + 1] - s.start_k;
    }
    if (p->seqlens_k) s.n_k = p->seqlens_k[b];
    s.diagonal = p->diagonal_given ? p->diagonal : s.n_k - s.n_q;
    return s;
}

/* The address of row (a, row, head) of a (batch, sequence, head, dim) view. */
static inline char *fa_view_row(const fa_view *v, int64_t a, int64_t row, int64_t head)
{
    static const int8_t size[] = {4, 2, 2, 1, 1, 1};
    return v->data + (a * v->stride[0] + row * v->stride[1] + head * v->stride[2]) * size[v->dtype];
}

/* The address of row j of a sequence's keys or values: through the page table if there is one. */
static inline char *fa_key_row(const fa_problem *p, const fa_view *v, const fa_sequence *s,
                               int64_t b, int64_t j, int64_t head)
{
    if (p->block_table) {
        int64_t page = p->block_table[b * p->block_table_stride + j / p->rows_k];
        return fa_view_row(v, page, j % p->rows_k, head);
    }
    return fa_view_row(v, s->block_k, s->start_k + j, head);
}

/* The scale of the elements of row j of a sequence's keys or values. */
static inline float fa_key_scale(const fa_problem *p, const fa_view *scale, const fa_sequence *s,
                                 int64_t b, int64_t j, int64_t head)
{
    if (!scale->data) return 1.0f;
    return *(const float *)(const void *)fa_key_row(p, scale, s, b, j, head);
}

/* Where the log-sum-exp of query 0 of a sequence lies in a (blocks_q, heads_q, rows_q) array. */
static inline int64_t fa_lse_offset(const fa_problem *p, const fa_sequence *s, int64_t head)
{
    return (s->block_q * p->heads_q + head) * p->rows_q + s->start_q;
}

/* What fa_append writes. Views without data are absent. */
typedef struct fa_append_problem {
    fa_device device; /* FA_DEVICE_CPU or FA_DEVICE_CUDA, never AUTO */
    fa_append_arrays arrays;
    int64_t heads_kv, heads_q, d, d_v;
    int64_t blocks_new, blocks_q; /* entries of axis 0 of k_new and of q */
    fa_view k_new, v_new, k_cache, v_cache, q, q_out;
    fa_view cos, sin;                  /* (1, positions, 1, rotary_dim / 2) */
    fa_view k_scale, v_scale;          /* (blocks, rows, head, 1); broadcast axes have stride 0 */
    int64_t rotary_dim, rotary_offset; /* 0: no rotation */
    bool interleaved, one_position, write_scales;
    int threads; /* as in fa_problem */
    void *stream;
} fa_append_problem;

/* What fa_combine merges: float32 log-sum-exps and values of any float type. */
typedef struct fa_combine_problem {
    fa_device device; /* FA_DEVICE_CPU or FA_DEVICE_CUDA, never AUTO */
    int64_t batch, heads, n_q, d_v, num_parts;
    const fa_tensor *parts; /* this array and the next two lie in host memory */
    const float *const *part_lse;
    const int64_t *part_lse_stride; /* (num_parts, 3); NULL: contiguous */
    fa_view out;
    float *lse;
    int threads; /* as in fa_problem */
    void *stream, *workspace;
    size_t workspace_size;
} fa_combine_problem;

/* Where the log-sum-exp of a part's (batch, head, query) lies. */
static inline int64_t fa_part_lse_offset(const fa_combine_problem *p, int64_t part, int64_t b,
                                         int64_t h, int64_t i)
{
    if (!p->part_lse_stride) return (b * p->heads + h) * p->n_q + i;
    const int64_t *stride = p->part_lse_stride + 3 * part;
    return b * stride[0] + h * stride[1] + i * stride[2];
}

#endif
