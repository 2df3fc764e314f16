/*
 * The transposers: warps that transpose tiles of values in shared memory, in place.
 *
 * A box of values is 32 keys by 32 columns, 4 KiB in TMA's swizzle. A warp reads half of it into
 * registers and writes it back transposed, to the same addresses. Then row c has the values of
 * column c, with the keys in the order that products need (multiply.cuh). For ldmatrix, 16 bytes
 * are a row of a matrix, and each lane gets 4 bytes of it. So four matrices give a lane four keys
 * of its column: 16 bytes of the transposed row. Neither reads nor writes have bank conflicts.
 */
#ifndef FA_KERNELS_FORWARD_TF32_SM90_TRANSPOSE_CUH
#define FA_KERNELS_FORWARD_TF32_SM90_TRANSPOSE_CUH

#include "forward_tf32_sm90/config.cuh"
#include "forward_tf32_sm90/pipeline.cuh"
#include "common/device.cuh"
#include "forward_sm90/load.cuh"
#include "forward_sm90/scheduler.cuh"
#include "forward_sm90/stage.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/address.cuh"
#include "ptx/barrier.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared.cuh"

/* Transposes two quarters of a box: those on its diagonal, or the other two, which change places.
 * Of each 8 keys and 16 columns, lanes 0 to 15 get keys 0, 2, 4, 6 of a column each, and lanes 16
 * to 31 keys 5, 7, 1, 3, in this order. So a matrix has a key for each half of the warp, and these
 * two keys are in different banks. clears: keys outside [from, to) of the box are set to 0. */
FA_DEVICE void transpose_quarters(uint32_t box, bool diagonal, bool clears, int from, int to)
{
    const int lane = threadIdx.x % 32, odd = lane / 16;
    const int matrix = lane / 8, right = lane % 8 / 4, key = 2 * (matrix ^ 2 * right) + right;
    const uint32_t source = box + (uint32_t)(key * 128 + (lane % 4 ^ key) * 16);
    const uint32_t target = box + (uint32_t)(lane % 16 * 128 + (odd ^ lane % 8) * 16);
    uint32_t x[4][4];
#pragma unroll
    for (int b = 0; b < 4; b++) {
        const int columns = diagonal ? b / 2 : 1 - b / 2;
        ptx_ldmatrix_x4(x[b], (source ^ (uint32_t)(64 * columns)) + 1024 * b);
    }
    __syncwarp(); /* both quarters have been read into registers */
#pragma unroll
    for (int b = 0; b < 4; b++) {
        const int columns = diagonal ? b / 2 : 1 - b / 2;
        uint4 keys = make_uint4(odd ? x[b][2] : x[b][0], odd ? x[b][3] : x[b][1],
                                odd ? x[b][0] : x[b][2], odd ? x[b][1] : x[b][3]);
        if (clears) {
            const int first = 8 * b + odd;
            if (first < from || first >= to) keys.x = 0;
            if (first + 2 < from || first + 2 >= to) keys.y = 0;
            if (first + 4 < from || first + 4 >= to) keys.z = 0;
            if (first + 6 < from || first + 6 >= to) keys.w = 0;
        }
        ptx_st_shared_v4((target ^ (uint32_t)(32 * b)) + 2048 * columns, keys);
    }
}

/* Keys outside [from, to) of the box are set to 0, because no query may see them and they may hold
 * NaN. */
FA_DEVICE void transpose_box(uint32_t box, int from, int to)
{
    if (from <= 0 && to >= 32) {
        transpose_quarters(box, true, false, 0, 32);
        transpose_quarters(box, false, false, 0, 32);
    } else {
        transpose_quarters(box, true, true, from, to);
        transpose_quarters(box, false, true, from, to);
    }
}

/* Makes the warp's stores visible to products. Executed by the whole warp. */
FA_DEVICE void fill_stage(uint64_t *full)
{
    ptx_fence_proxy_async();
    __syncwarp();
    ptx_mbarrier_arrive_if(full, threadIdx.x % 32 == 0);
}

/* A transposer's first box of a tile. It differs from tile to tile, because the number of a tile's
 * boxes is not a multiple of 3. */
FA_DEVICE int first_box(tile_count values, int transposer)
{
    return (int)((values + (uint32_t)transposer) % TRANSPOSERS);
}

/* from, to: the keys of the tile that some query of the sequence may see. values: the number of
 * tiles of values before this one. */
FA_DEVICE void transpose_tile(const pipeline *pipe, int from, int to, tile_count number,
                              tile_count values, int transposer)
{
    const uint32_t tile = ptx_shared_address(pipe->tiles) + stage_of(number) * TILE_BYTES;
    __syncwarp();
    ptx_mbarrier_wait(&pipe->state->loaded[stage_of(values)], parity_of(values));
#pragma unroll 1
    for (int i = first_box(values, transposer); i < TILE_BYTES / BOX_BYTES; i += TRANSPOSERS) {
        const int key = i / V_BLOCKS * 32;
        transpose_box(tile + i * BOX_BYTES, from - key, to - key);
    }
    fill_stage(&pipe->state->full[stage_of(number)]);
}

FA_DEVICE void transpose_all(const pipeline *pipe, const fa_attention_params *p, int transposer)
{
    tile_count first_keys = 0, values = 0;
    int number = 0;
    const work_tile *w = acquire_work_tile(pipe, 0);
    for (int tiles; (tiles = w->key_tiles); w = acquire_work_tile(pipe, ++number)) {
        const fa_range seen = find_seen_keys(p, &w->query_tile);
        const int from = saturate(seen.lo - w->first_key), to = saturate(seen.hi - w->first_key);
        release_work_tile(pipe, number);
        for (int tile = 0; tile < tiles; tile++)
            transpose_tile(pipe, from - tile * KEYS, to - tile * KEYS,
                           number_of_values(first_keys, tile, tiles), values++, transposer);
        first_keys += 2 * (uint32_t)tiles;
    }
}

#endif
