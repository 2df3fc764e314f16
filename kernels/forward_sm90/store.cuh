/*
 * The end of a work tile: outputs are divided by the sums of weights and stored, with the log-sum-exp. If there is
 * room (OUT_BUFFER), they go through shared memory, so that each lane stores 16 bytes and the warp whole lines.
 * Otherwise lanes exchange neighbours and store 8 bytes each.
 */
#ifndef FA_KERNELS_FORWARD_SM90_STORE_CUH
#define FA_KERNELS_FORWARD_SM90_STORE_CUH

#include "forward_sm90/config.cuh"
#include "common/x2.cuh"
#include "forward_sm90/factors.cuh"
#include "forward_sm90/softmax.cuh"
#include "forward_sm90/warp.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/address.cuh"
#include "ptx/convert.cuh"
#include "ptx/store.cuh"

/* The output's columns from the block's first one on, and where this one is in the work tile's first row. */
FA_DEVICE int columns_left(const fa_attention_params *p) { return p->d_v - FIRST_COLUMN; }
FA_DEVICE char *first_output(const work_tile *w) { return w->out + 2 * FIRST_COLUMN; }

/* Bytes from the work tile's first output row to this one. */
FA_DEVICE int64_t row_offset(const fa_attention_params *p, const work_tile *w, int row)
{
    int64_t elements = query_of(w, row) * p->out.stride[1];
    if (SPLIT) elements += head_of(w, row) * p->out.stride[2];
    return 2 * elements;
}

#if SPLIT

/* The same for four rows of the lane: row lane / 8 and every fourth one behind it, of the 16 from first_row on. Each lane finds one of
 * the 16, because code that is longer makes all work tiles slower. */
FA_DEVICE void find_row_offsets(const fa_attention_params *p, const work_tile *w, int first_row,
                                int64_t *offsets)
{
    const int lane = threadIdx.x % 32;
    const int64_t own = row_offset(p, w, first_row + lane % 16);
#pragma unroll
    for (int part = 0; part < 4; part++) {
        const int from = 4 * part + lane / 8;
        const uint32_t low = __shfl_sync(0xffffffff, (uint32_t)own, from);
        const uint32_t high = __shfl_sync(0xffffffff, (uint32_t)(own >> 32), from);
        offsets[part] = (int64_t)((uint64_t)high << 32 | low);
    }
}

#else

/* The same, counted from the lane's first row on: rows are equally far from each other. */
FA_DEVICE void find_row_offsets(const fa_attention_params *p, const work_tile *w, int first_row,
                                int64_t *offsets)
{
    (void)first_row;
#pragma unroll
    for (int part = 0; part < 4; part++) offsets[part] = row_offset(p, w, 4 * part);
}

#endif

/* Two neighbours of a row's outputs, times its factor. A factor of 0 gives 0, even for NaN. */
FA_DEVICE uint32_t pack_outputs(const float *x, float factor)
{
    return factor == 0.0f ? 0 : fa_pack_x2(x[0] * factor, x[1] * factor);
}

/* ---- Through shared memory ------------------------------------------------------------------- */

/* A warp's buffer has 16 rows of 128 bytes. Chunks of 16 bytes are swizzled within their row, so that accesses to a row
 * or to a column have no bank conflicts. */
FA_DEVICE char *buffer_chunk(char *buffer, int row, int chunk)
{
    return buffer + row * 128 + (chunk ^ row % 8) * 16;
}

/* 64 columns of the warp's 16 rows, from registers to the buffer. */
FA_DEVICE void buffer_columns(char *buffer, const float *out, const float *factor)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            r[i] = pack_outputs(out + 4 * (j + i / 2) + 2 * (i % 2), factor[i % 2]);
        ptx_stmatrix_x4(ptx_shared_address(buffer_chunk(buffer, lane % 16, j + lane / 16)), r);
    }
}

/* From the buffer to the caller's rows: 16 bytes a lane, eight lanes a row. to: the lane's first row; three more
 * follow, at these offsets. left: how many rows there are from the first one on; whole: all lanes have all
 * four, so no lane tests it. */
FA_DEVICE void store_buffer(char *buffer, char *to, const int64_t *offsets, int left, bool whole)
{
    const int lane = threadIdx.x % 32;
    uint4 x[4];
#pragma unroll
    for (int part = 0; part < 4; part++)
        x[part] = *(const uint4 *)buffer_chunk(buffer, part * 4 + lane / 8, lane % 8);
    if (whole) {
#pragma unroll
        for (int part = 0; part < 4; part++) ptx_store_global_16(to + offsets[part], x[part]);
        return;
    }
#pragma unroll
    for (int part = 0; part < 4; part++)
        if (part * 4 < left) ptx_store_global_16(to + offsets[part], x[part]);
}

FA_DEVICE void store_through_buffer(const fa_attention_params *p, const work_tile *w, char *buffer,
                                    const float *out, const float *factor, int consumer,
                                    int first_row)
{
    const int lane = threadIdx.x % 32, first_column = lane % 8 * 8;
    const int rows = end_of_rows(w, consumer), row = first_row + lane / 8,
              columns = columns_left(p);
    const bool whole = rows - first_row >= 16 && columns == VALUE_DIM;
    char *to = first_output(w) + (SPLIT ? 0 : row_offset(p, w, row)) + 2 * first_column;
    int64_t offsets[4];
    find_row_offsets(p, w, first_row, offsets);
#pragma unroll
    for (int column = 0; column < VALUE_DIM; column += 64) {
        __syncwarp(); /* what was in the buffer has been read */
        buffer_columns(buffer, out + column / 2, factor);
        __syncwarp();
        store_buffer(buffer, to + 2 * column, offsets,
                     first_column + column < columns ? rows - row : 0, whole);
    }
}

/* ---- From registers -------------------------------------------------------------------------- */

/* Two neighbouring lanes have columns 4q, 4q+1 and 4q+2, 4q+3 of two blocks of eight columns. They exchange, so that
 * each has four neighbours of one block: 8 bytes. */
FA_DEVICE uint2 gather_four(uint32_t first, uint32_t second)
{
    const bool odd = threadIdx.x & 1;
    const uint32_t got = __shfl_xor_sync(0xffffffff, odd ? first : second, 1);
    return odd ? make_uint2(got, second) : make_uint2(first, got);
}

/* Stores the columns column .. column+3 as far as the row has them: 16-bit elements, one by one. */
FA_DEVICE void store_each(uint16_t *row, int column, int columns, uint2 four)
{
    if (column < columns) row[column] = (uint16_t)four.x;
    if (column + 1 < columns) row[column + 1] = (uint16_t)(four.x >> 16);
    if (column + 2 < columns) row[column + 2] = (uint16_t)four.y;
    if (column + 3 < columns) row[column + 3] = (uint16_t)(four.y >> 16);
}

/* The thread's part of row r, times a factor. */
FA_DEVICE void gather_row(uint2 *fours, const float *out, int r, float factor)
{
#pragma unroll
    for (int j = 0; j < VALUE_DIM / 16; j++) {
        const float *x = out + 8 * j + 2 * r;
        fours[j] = gather_four(pack_outputs(x, factor), pack_outputs(x + 4, factor));
    }
}

FA_DEVICE void store_row(const fa_attention_params *p, const uint2 *fours, char *row)
{
    const int first = (int)threadIdx.x % 2 * 8 + (int)threadIdx.x % 4 / 2 * 4;
    if (p->out.vector && columns_left(p) == VALUE_DIM) {
#pragma unroll
        for (int j = 0; j < VALUE_DIM / 16; j++)
            ptx_store_global_8(row + 2 * (16 * j + first), fours[j]);
        return;
    }
    if (p->out.vector) {
#pragma unroll
        for (int j = 0; j < VALUE_DIM / 16; j++)
            if (16 * j + first < columns_left(p))
                ptx_store_global_8(row + 2 * (16 * j + first), fours[j]);
        return;
    }
#pragma unroll
    for (int j = 0; j < VALUE_DIM / 16; j++)
        store_each((uint16_t *)row, 16 * j + first, columns_left(p), fours[j]);
}

/* Both rows are gathered before either is stored: otherwise the second would wait for the registers of the first. */
FA_DEVICE void store_rows(const fa_attention_params *p, const work_tile *w, const float *out,
                          const float *factor, int consumer)
{
    const int first = row_of(consumer, 0), rows = end_of_rows(w, consumer);
    char *row = first_output(w) + row_offset(p, w, first);
    uint2 fours[2][VALUE_DIM / 16];
#pragma unroll
    for (int r = 0; r < 2; r++) gather_row(fours[r], out, r, factor[r]);
    if (first < rows) store_row(p, fours[0], row);
    char *second =
        SPLIT ? first_output(w) + row_offset(p, w, first + 8) : row + row_offset(p, w, 8);
    if (first + 8 < rows) store_row(p, fours[1], second);
}

#if HIDES_VALUES

/* Whether the warp's outputs are finite, except in rows of factor 0. If not, see recompute.cuh. */
FA_DEVICE bool is_finite_for_warp(const float *out, const float *factor)
{
    float seen[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 2; i++) seen[i / 2 % 2] += out[i] * 0.0f;
    return !__any_sync(0xffffffff, (factor[0] != 0.0f && seen[0] != 0.0f) ||
                                       (factor[1] != 0.0f && seen[1] != 0.0f));
}

#endif

/* ---- To the workspace ------------------------------------------------------------------------ */

#if SPLIT

/* The sums of a part's rows, as they are: the rows of all parts are divided together. A lane stores two neighbours, and
 * four lanes 32 bytes. */
FA_DEVICE void store_part(const work_tile *w, const row_state *rows, const float *out, int consumer)
{
    const int first = row_of(consumer, 0), own = (int)threadIdx.x % 4;
    float sum[2];
    find_sums(rows, sum);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int i = first + 8 * r;
        if (i >= end_of_rows(w, consumer)) continue;
        float *to = (float *)w->out + i * VALUE_DIM + 2 * own;
#pragma unroll
        for (int j = 0; j < VALUE_DIM / 8; j++)
            *(float2 *)(to + 8 * j) = make_float2(out[4 * j + 2 * r], out[4 * j + 2 * r + 1]);
        const fa_sm90_row_sum both = {rows->base[r], sum[r]};
        if (own == 0) w->sums[i] = both;
    }
}

#endif

/* ---- All of it ------------------------------------------------------------------------------- */

/* Stores a consumer's outputs and log-sum-exp; zeros and -infinity in rows without a query. Returns whether rows of the
 * warp must be recomputed. */
FA_DEVICE bool store_outputs(const fa_attention_params *p, const work_tile *w, char *out_buffer,
                             const row_state *rows, float *out, int consumer)
{
#if SPLIT
    if (w->sums) {
        store_part(w, rows, out, consumer);
        return false;
    }
#endif
    const int first = row_of(consumer, 0);
    float factor[2];
    find_factors(p, w, rows, first, factor);
    const int warp_row = consumer * ROWS + (int)threadIdx.x % WARPGROUP / 32 * 16;
#if HIDES_VALUES
    const bool recompute = (p->bias.data || p->mask.data) && !is_finite_for_warp(out, factor);
#else
    const bool recompute = false;
#endif
    if (STORES_THROUGH_BUFFER && p->out.vector == 8)
        store_through_buffer(p, w, out_buffer + warp_row * 128, out, factor, consumer, warp_row);
    else store_rows(p, w, out, factor, consumer);
    return recompute;
}

#endif
