/*
 * The log-sum-exp and delta of a tile's queries, in shared memory as prepare.cu has written them.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_ROWS_CUH
#define FA_KERNELS_BACKWARD_SM90_ROWS_CUH

#include "backward_sm90/config.cuh"
#include "backward_sm90/pipeline.cuh"
#include "common/device.cuh"
#include "ptx/address.cuh"
#include "ptx/convert.cuh"
#include "ptx/shared.cuh"

enum { DELTA_AT = ROW_BYTES / 2 /* of a tile's rows */ };

/* The factor by which a weight becomes its true value. */
#define WEIGHT_UNIT (1.0f / (float)(1 << FA_BACKWARD_SM90_WEIGHT_BITS(ELEMENT)))

/* The factor of the weight in dS. */
FA_DEVICE float subtract_delta(float dp, float delta)
{
    return FA_BACKWARD_SM90_WEIGHT_BITS(ELEMENT) ? fmaf(dp, WEIGHT_UNIT, -delta) : dp - delta;
}

/* Where the lane's part of a tile's rows begins: the log-sum-exp of 4 of each 16 queries. Delta is
 * DELTA_AT bytes later. */
FA_DEVICE uint32_t row_address(const pipeline *pipe, int slot)
{
    return ptx_shared_address(pipe->buffers + ROWS_AT + slot * ROW_BYTES) +
           (uint32_t)threadIdx.x % 4 * 16;
}

/* Numbers of the lane's 4 queries of 16. Number 2j + i belongs to element 4j + 2r + i of its
 * scores. */
FA_DEVICE void load_four_rows(float *numbers, uint32_t address)
{
    const uint4 x = ptx_ld_shared_v4(address);
    numbers[0] = fa_bits_float(x.x), numbers[1] = fa_bits_float(x.y);
    numbers[2] = fa_bits_float(x.z), numbers[3] = fa_bits_float(x.w);
}

/* Sums of dP begin with -delta of their queries. rows: row_address. */
FA_DEVICE void begin_dp(float *dp, uint32_t rows)
{
#pragma unroll
    for (int n = 0; n < QUERIES / 16; n++) {
        float delta[4];
        load_four_rows(delta, rows + DELTA_AT + 64 * (uint32_t)n);
#pragma unroll
        for (int i = 0; i < 8; i++) dp[8 * n + i] = -delta[i / 4 * 2 + i % 2] / WEIGHT_UNIT;
    }
}

FA_DEVICE void load_rows(float *numbers, uint32_t address)
{
#pragma unroll
    for (int n = 0; n < QUERIES / 16; n++) load_four_rows(numbers + 4 * n, address + 64 * n);
}

#endif
