/*
 * What products need of a query: its log-sum-exp and delta.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_PREPARE_ROW_CUH
#define FA_KERNELS_BACKWARD_SM90_PREPARE_ROW_CUH

#include "backward_sm90/backward_sm90.h"
#include "common/device.cuh"
#include "common/rows.cuh"
#include "common/sequence.cuh"
#include "common/softmax.cuh"

/* A query's numbers. The log-sum-exp is infinity for rows whose weights must be 0: those without
 * keys, and those after the last query. For such rows lse is -infinity and delta is 0. */
FA_DEVICE void put_numbers(float *numbers, float lse, float delta)
{
    const int bits = FA_BACKWARD_SM90_WEIGHT_BITS(ELEMENT);
    numbers[0] = lse != -INFINITY ? fmaf(lse, FA_LOG2E, (float)-bits) : INFINITY;
    numbers[FA_BACKWARD_SM90_QUERIES] = delta / (float)(1 << bits);
}

/* Where a number of row `row`, counted from the tile's first one, is in lse and dlse. Through
 * fa_row_index, prepare would take 5 to 10 registers more at head dim 64, and fewer of its blocks
 * would run at once. */
FA_DEVICE int64_t lse_index(const fa_backward_params *p, const fa_tile *t, int row)
{
    return (t->block_q * p->a.heads_q + t->head) * p->a.rows_q + t->start_q + t->first + row;
}

/* The row's log-sum-exp; -infinity after the last query. It is loaded together with the row, because
 * a block runs for little longer than the latency of memory. */
FA_DEVICE float load_row_lse(const fa_backward_params *p, const fa_tile *t, int row)
{
    return t->first + row < t->n_q ? p->a.lse[lse_index(p, t, row)] : -INFINITY;
}

/* product: of dout and out. rows: the tile's numbers; every 64 rows, the next tile's numbers follow
 * 64 rows later. */
FA_DEVICE void prepare_row(const fa_backward_params *p, const fa_tile *t, int row, float lse,
                           float product, float *rows)
{
    const bool counts = lse != -INFINITY;
    const float dlse = counts && p->dlse ? p->dlse[lse_index(p, t, row)] : 0.0f;
    put_numbers(rows + FA_BACKWARD_SM90_ROW_AT(row), lse, counts ? product - dlse : 0.0f);
}

/* The product of two rows. Each of `lanes` lanes has eight elements of both. */
FA_DEVICE float multiply_row(const uint32_t x[4], const uint32_t y[4], int lanes)
{
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const float2 a = fa_unpack_x2(x[k], ELEMENT), b = fa_unpack_x2(y[k], ELEMENT);
        sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
    }
#pragma unroll
    for (int other = lanes / 2; other > 0; other /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, other);
    return sum;
}

#endif
