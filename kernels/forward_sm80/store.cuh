/*
 * The end of a work tile: outputs are divided by the sums of weights and written, with the
 * log-sum-exp. Those of a part of the keys are left as they are, for the second launch.
 */
#ifndef FA_KERNELS_FORWARD_SM80_STORE_CUH
#define FA_KERNELS_FORWARD_SM80_STORE_CUH

#include "common/exchange.cuh"
#include "common/rows.cuh"
#include "common/sequence.cuh"
#include "common/softmax.cuh"
#include "common/x2.cuh"
#include "forward_sm80/layout.cuh"
#include "forward_sm80/softmax.cuh"

#if SPLIT_KEYS

/* Leaves the sums of the part's rows in its slot: the columns of those that have seen keys. */
FA_DEVICE void write_output(const fa_attention_params *p, const fa_work_tile *w, const fa_output *o)
{
    const fa_sm80_split *s = own_split(p);
    const fa_tile *t = &w->tile;
    const int rows = (int)fa_min64((t->n_q - t->first) << s->group_bits, QUERIES);
    const int column = share_id() * COLUMNS + lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++) {
        const int r = row_of(i / 2, i % 2);
        const float max = o->max[i / 2][i % 2], sum = o->sum[i / 2][i % 2];
        const int64_t row = w->keys.slot * QUERIES + r;
        float *out = s->out + (row * HEAD_DIM + column);
        if (r >= rows) continue;
        if (lane_id() % 4 == 0 && share_id() == 0) {
            const fa_sm90_row_sum both = {max, sum};
            s->sums[row] = both;
        }
        if (max == NOTHING_SEEN && sum == sum) continue;
#pragma unroll
        for (int n = 0; n < D_TILES; n++) {
            const float *x = o->at[i / 2][n] + i % 2 * 2;
            if (share_id() * COLUMNS + 8 * n < p->d_v)
                *(float2 *)(out + 8 * n) = make_float2(x[0], x[1]);
        }
    }
}

#else

#define LN2 0.69314718055994530942f

/* The factor of row 8 * i + g of the warp. Writes its log-sum-exp. */
FA_DEVICE float finish_row(const fa_attention_params *p, const fa_tile *t, float max, float sum,
                           int i)
{
    const int64_t row = t->first + group_row() + 8 * i + lane_id() / 4;
    const float sink = p->sinks ? p->sinks[t->head] : -INFINITY;
    float lse,
        factor = fa_softmax_finish(max == NOTHING_SEEN ? -INFINITY : max * LN2, sum, sink, &lse);
    if (row >= t->n_q) lse = -INFINITY, factor = 0.0f;
    if (row < t->room_q && p->lse && lane_id() % 4 == i && share_id() == 0)
        p->lse[(t->block_q * p->heads_q + t->head) * p->rows_q + t->start_q + row] = lse;
#if OPTIONS
    if (p->dropout_threshold) factor *= p->dropout_scale;
#endif
    return factor;
}

/* The factors of a thread's rows: each of the four lanes that share them computes one. */
FA_DEVICE void finish_rows(const fa_attention_params *p, const fa_tile *t, const fa_output *o,
                           float factor[M_TILES][2])
{
    const int own = lane_id() % (2 * M_TILES);
    float max = o->max[0][0], sum = o->sum[0][0];
#pragma unroll
    for (int i = 1; i < 2 * M_TILES; i++) {
        max = own == i ? o->max[i / 2][i % 2] : max;
        sum = own == i ? o->sum[i / 2][i % 2] : sum;
    }
    const float mine = finish_row(p, t, max, sum, own);
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; i++)
        factor[i / 2][i % 2] = __shfl_sync(0xffffffffu, mine, lane_id() / 4 * 4 + i);
}

#if TF32

/* Rows whose vectors are stored at once. */
FA_DEVICE void write_vectors(const fa_attention_params *p, const fa_output *o,
                             float factors[M_TILES][2], char *rows, int count)
{
    const int column = share_id() * COLUMNS + lane_id() % 4 * 8;
    float *row = (float *)rows + (row_of(0, 0) * p->out.stride[1] + column);
    const int64_t ahead = 8 * p->out.stride[1];
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++, row += ahead) {
        const int columns = row_of(i / 2, i % 2) < count ? p->d_v : 0;
        const float factor = factors[i / 2][i % 2];
#pragma unroll
        for (int n = 0; n < D_TILES / 2; n++) { /* four adjacent columns */
            const int tile = n / 2 * 4, e = i % 2 * 2 + n % 2, ahead_of = n / 2 * 32 + n % 2 * 4;
            const float(*x)[4] = o->at[i / 2] + tile;
            if (column + ahead_of < columns)
                *(float4 *)(row + ahead_of) = make_float4(x[0][e] * factor, x[1][e] * factor,
                                                          x[2][e] * factor, x[3][e] * factor);
        }
    }
}

/* Writes element by element; zeros if the factor is 0, whatever the row holds. The loop is not
 * unrolled and uses local memory: this is rare and must not be much code. */
FA_DEVICE void write_elements(const fa_attention_params *p, const fa_output *o,
                              float factors[M_TILES][2], char *rows, int count)
{
    enum { COUNT = 2 * D_TILES }; /* of a row */
    const int first = share_id() * COLUMNS + lane_id() % 4 * 8;
    float waiting[M_TILES * 2 * COUNT];
#pragma unroll
    for (int i = 0; i < M_TILES * 2 * COUNT; i++) { /* in the order of the columns */
        const int row = i / COUNT, n = i % COUNT;
        const float factor = factors[row / 2][row % 2];
        const float x = o->at[row / 2][n / 8 * 4 + n % 4][row % 2 * 2 + n / 4 % 2] * factor;
        waiting[i] = factor == 0.0f ? 0.0f : x;
    }
#pragma unroll 1
    for (int i = 0; i < M_TILES * 2 * COUNT; i++) {
        const int row = i / COUNT, r = row_of(row / 2, row % 2);
        const int column = first + i % COUNT / 8 * 32 + i % 8;
        if (r >= count) return;
        if (column < p->d_v) ((float *)rows)[r * p->out.stride[1] + column] = waiting[i];
    }
}

#else

/* Four x2 of a thread's part of a row, from the warp's column 32 * n on. */
FA_DEVICE void get_output_x2(const fa_output *o, int m, int half, int n, float factor,
                             uint32_t x[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *from = o->at[m][4 * n + i] + 2 * half;
        x[i] = fa_pack_x2(from[0] * factor, from[1] * factor);
    }
}

/* Rows whose vectors are stored at once. */
FA_DEVICE void write_vectors(const fa_attention_params *p, const fa_output *o,
                             float factors[M_TILES][2], char *rows, int count)
{
    const int column = share_id() * COLUMNS + lane_id() % 4 * 8;
    char *row = rows + 2 * (row_of(0, 0) * p->out.stride[1] + column);
    const int64_t ahead = 16 * p->out.stride[1];
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++, row += ahead) {
        const int columns = row_of(i / 2, i % 2) < count ? p->d_v : 0;
#pragma unroll
        for (int n = 0; n < D_TILES / 4; n++) {
            uint32_t x[4];
            get_output_x2(o, i / 2, i % 2, n, factors[i / 2][i % 2], x);
            fa_exchange_words(x, lane_id() % 4);
            if (column + 32 * n < columns)
                *(uint4 *)(row + 64 * n) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}

/* Writes element by element; zeros if the factor is 0, whatever the row holds. The loop is not
 * unrolled and uses local memory: this is rare and must not be much code. */
FA_DEVICE void write_elements(const fa_attention_params *p, const fa_output *o,
                              float factors[M_TILES][2], char *rows, int count)
{
    const int first = share_id() * COLUMNS + lane_id() % 4 * 2;
    uint32_t waiting[M_TILES * 2 * D_TILES];
#pragma unroll
    for (int i = 0; i < M_TILES * 2 * D_TILES / 4; i++) {
        const int row = i / (D_TILES / 4);
        const float factor = factors[row / 2][row % 2];
        get_output_x2(o, row / 2, row % 2, i % (D_TILES / 4), factor, waiting + 4 * i);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (factor == 0.0f) waiting[4 * i + k] = 0;
    }
#pragma unroll 1
    for (int i = 0; i < M_TILES * 2 * D_TILES; i++) {
        const int row = i / D_TILES, r = row_of(row / 2, row % 2);
        if (r >= count) return;
        fa_scatter_x2(rows + 2 * r * p->out.stride[1], first + i % D_TILES * 8, p->d_v, waiting[i]);
    }
}

#endif

FA_DEVICE void write_output(const fa_attention_params *p, const fa_work_tile *w, const fa_output *o)
{
    const fa_tile *t = &w->tile;
    char *rows = fa_view_row(&p->out, t->block_q, t->start_q + t->first, t->head);
    const int count = (int)fa_min64(t->room_q - t->first, QUERIES);
    float factors[M_TILES][2];
    int zeros = 0;
    finish_rows(p, t, o, factors);
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++)
        zeros |= factors[i / 2][i % 2] == 0.0f && row_of(i / 2, i % 2) < count;
    if (is_vectored(&p->out) && !__any_sync(0xffffffffu, zeros))
        write_vectors(p, o, factors, rows, count);
    else write_elements(p, o, factors, rows, count);
}

#endif

#endif
