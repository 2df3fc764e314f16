/*
 * A key tile that a warp copies (load.cuh, bytes_load.cuh): what each lane copies, and whether some
 * value is not finite.
 */
#ifndef FA_KERNELS_DECODE_SM80_COPIED_TILE_CUH
#define FA_KERNELS_DECODE_SM80_COPIED_TILE_CUH

#include "decode_sm80/config.cuh"

#if !LATENT /* otherwise the block copies a tile */
#include "decode_sm80/nonfinite.cuh"
#include "decode_sm80/work.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"

/* A lane copies the same 16 bytes ("vector") of every row that it copies. */
enum { ROWS_A_PASS = 32 / ROW_VECTORS, PASSES = KEYS / ROWS_A_PASS };

FA_DEVICE int copied_vector(void) { return lane_id() % ROW_VECTORS; }
FA_DEVICE int copied_row(void) { return lane_id() / ROW_VECTORS; }

/* Waits for the oldest pending group of copies. Groups of keys and of values alternate. */
FA_DEVICE void wait_for_tile(void)
{
    ptx_cp_async_wait(2 * STAGES - 1);
    __syncwarp();
}

#if CACHE == FA_ELEMENT_INT8
FA_DEVICE bool has_nonfinite_values(uint32_t tile)
{
    (void)tile;
    return false;
}
#else
/* Whether some value of a tile is not finite. Each lane checks what it has copied. */
FA_DEVICE bool has_nonfinite_values(uint32_t tile)
{
    const uint32_t from = tile + (uint32_t)(copied_row() * PITCH + copied_vector() * 16);
    uint32_t seen = 0;
#pragma unroll 1
    for (int pass = 0; pass < PASSES; pass++) {
        const uint4 x = ptx_ld_shared_v4(from + (uint32_t)(pass * ROWS_A_PASS * PITCH));
        seen |=
            find_nonfinite(x.x) | find_nonfinite(x.y) | find_nonfinite(x.z) | find_nonfinite(x.w);
    }
    return __any_sync(0xffffffffu, seen != 0);
}
#endif
#endif

#endif
