/*
 * The sums of dQ. In the workspace they are in the order of the accumulators, so that a warp adds
 * to whole lines of memory. A tile of TILE queries consists of fragments of 16 queries and 8
 * columns: those of the first columns, then those of the next ones. Each lane has four numbers of a
 * fragment, as mma returns them. If four can be added at once, from Hopper on, they are contiguous;
 * otherwise all lanes' first numbers come first, then all second ones.
 *
 * In float32 the caller's rows of dq may be the sums themselves. Then dS has the scale already.
 */
#ifndef FA_KERNELS_BACKWARD_SM80_SUMS_CUH
#define FA_KERNELS_BACKWARD_SM80_SUMS_CUH

#include "backward_sm80/backward_sm80.h"
#include "common/device.cuh"
#include "common/params.h"
#include "ptx/reduce.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define SUMS_TOGETHER 0
#else
#define SUMS_TOGETHER 1
#endif

/* Whether the caller's rows are the sums. */
FA_DEVICE bool is_in_place(const fa_backward_sm80_params *s)
{
    return FA_ELEMENT_BYTES(ELEMENT) == 4 && !s->sums;
}

/* The factor of dS when it is computed, and the factor of dK at the end. */
FA_DEVICE float ds_scale(const fa_attention_params *p, const fa_backward_sm80_params *s)
{
    return is_in_place(s) ? p->scale : 1.0f;
}

FA_DEVICE float dk_scale(const fa_attention_params *p, const fa_backward_sm80_params *s)
{
    return is_in_place(s) ? 1.0f : p->scale;
}

/* A block's tile of the workspace, in the launches before and after backward_sm80. A head's last
 * tile comes first. */
FA_DEVICE int64_t find_own_tile(const fa_backward_sm80_params *s, int64_t block)
{
    const int64_t outer = block / s->q_tiles;
    return outer * s->q_tiles + s->q_tiles - 1 - (block - outer * s->q_tiles);
}

/* In float32, lane t of four has these two units of 16 bytes of 32 columns of a gradient. So if all
 * four lanes store or add one of their units, they access whole sectors of 32 bytes. */
FA_DEVICE int gradient_unit(int t, int i) { return i ? 4 + (t ^ 1) : t; }

enum { SUMS_OF_FRAGMENT = 128, ROW_FRAGMENTS = FA_BACKWARD_SM80_TILE / 16 };

/* Where the lane's part of a fragment begins. block: of 16 queries; column: of 8 columns. */
FA_DEVICE float *fragment_sums(float *tile, int block, int column)
{
    return tile + (column * ROW_FRAGMENTS + block) * SUMS_OF_FRAGMENT +
           threadIdx.x % 32 * (SUMS_TOGETHER ? 4 : 1);
}

FA_DEVICE void add_to_sums(float *sums, const float x[4])
{
#if SUMS_TOGETHER
    ptx_reduce_add_4(sums, x);
#else
#pragma unroll
    for (int i = 0; i < 4; i++) ptx_reduce_add(sums + 32 * i, x[i]);
#endif
}

/* Adds four adjacent elements to a row of this many columns. whole: the row consists of aligned
 * vectors. */
FA_DEVICE void add_to_row(float *row, bool whole, int column, int columns, const float x[4])
{
    if (whole) {
        if (column < columns) ptx_reduce_add_4(row + column, x);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (column + i < columns) ptx_reduce_add(row + column + i, x[i]);
}

FA_DEVICE float4 load_sums(const float *sums)
{
#if SUMS_TOGETHER
    return *(const float4 *)(const void *)sums;
#else
    return make_float4(sums[0], sums[32], sums[64], sums[96]);
#endif
}

#endif
