/*
 * The key tiles of a block's part, if all warps share them.
 */
#ifndef FA_KERNELS_DECODE_SM80_KEY_TILES_CUH
#define FA_KERNELS_DECODE_SM80_KEY_TILES_CUH

#include "decode_sm80/config.cuh"

#if BLOCK_TILES /* a warp's own key tiles are in work.cuh */
#include "decode_sm80/work.cuh"
#include "ptx/registers.cuh"

/* The first key of the first tile, and the number of tiles. */
typedef struct key_tiles {
    int first, count;
} key_tiles;

FA_DEVICE key_tiles find_key_tiles(const fa_work *w)
{
    const int before = w->part * w->per_part;
    const key_tiles tiles = {w->start + before * BLOCK_KEYS, min(w->per_part, w->tiles - before)};
    return tiles;
}

/* The same in uniform registers. */
FA_DEVICE key_tiles find_uniform_key_tiles(const fa_work *w)
{
    const key_tiles tiles = {(int)ptx_uniform((uint32_t)find_key_tiles(w).first),
                             (int)ptx_uniform((uint32_t)find_key_tiles(w).count)};
    return tiles;
}
#endif

#endif
