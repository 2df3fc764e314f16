/*
 * The first launch before forward_sm90 or forward_sm90_wide of float32 numbers: rounds them to float16, times a power of two that
 * fits nearly all, and finds the range of each tile; the next launch looks for others. Bound by memory.
 */
#include "forward_sm90_wide/round.cuh"

FA_KERNEL __launch_bounds__(THREADS, BLOCKS)
    forward_sm90_round(const __grid_constant__ fa_attention_params p,
                       const __grid_constant__ fa_sm90_params s)
{
    __shared__ row_range of_warp[WARPS];
    int64_t tile;
    const rounded_head x = find_head(&p, &s, blockIdx.x, 0, &tile);
    ptx_let_next_grid_start();
    const row_range range = find_range_of_block(of_warp, round_tile(&x, tile, USUAL_SCALE));
    if (threadIdx.x == 0) x.ranges[tile] = make_float2(range.largest, range.smallest);
}
