/*
 * The second launch before forward_sm90 or forward_sm90_wide of float32 numbers: the unit of each head. If the usual power of two does
 * not fit its numbers, they are rounded again, times another one. If one row is too small beside another for any power, the unit is
 * NaN, and the third launch computes what depends on it in float32.
 */
#include "forward_sm90_wide/round.cuh"

/* The power of two that brings the largest element near 2^14. Its inverse is a normal number. */
FA_DEVICE float find_scale(float largest)
{
    const int exponent = min(127 + 14 + 127 - (int)(__float_as_uint(largest) >> 23), 127 + 111);
    return __uint_as_float((uint32_t)exponent << 23);
}

FA_KERNEL __launch_bounds__(THREADS, BLOCKS)
    forward_sm90_rescale(const __grid_constant__ fa_attention_params p,
                         const __grid_constant__ fa_sm90_params s)
{
    __shared__ row_range of_warp[WARPS];
    const int blocks = (int)(gridDim.x / (p.batch * (p.heads_q + 2 * p.heads_kv))); /* of a head */
    int64_t part;
    const rounded_head x = find_head(&p, &s, blockIdx.x, blocks, &part);
    row_range own = {0.0f, INFINITY};
    ptx_wait_for_grids();
    ptx_let_next_grid_start();
    for (int64_t tile = threadIdx.x; tile < x.tiles; tile += THREADS) {
        const float2 range = x.ranges[tile];
        const row_range of_tile = {range.x, range.y};
        own = join_ranges(own, of_tile);
    }
    const row_range range = find_range_of_block(of_warp, own);
    float scale = USUAL_SCALE;
    if (!fits(range, scale)) {
        scale = find_scale(range.largest);
        for (int64_t tile = part; tile < x.tiles; tile += blocks) round_tile(&x, tile, scale);
    }
    if (part == 0 && threadIdx.x == 0) *x.unit = fits(range, scale) ? 1.0f / scale : NAN;
}
