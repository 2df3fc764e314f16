/*
 * Backward on Hopper: adds up the dS that the blocks of the last units have left, and stores dbias
 * (dbias_sums.cuh). A block does a tile of 64 queries. Bound by memory.
 */
#include "backward_sm90/config.cuh"
#include "backward_sm90/dbias_sums.cuh"
#include "backward_sm90/work.cuh"

FA_KERNEL __launch_bounds__(ADDERS)
    backward_sm90_dbias(const __grid_constant__ fa_backward_params p,
                        const __grid_constant__ fa_backward_sm90_params s)
{
    __shared__ block_work work;
    const int64_t number = fa_divide(blockIdx.x, s.q_tiles);
    const int tile = (int)(blockIdx.x - number * s.q_tiles);
    /* A block that computes dS has all heads that share its keys, or those of a split. */
    const int heads =
        p.dbias_shape[1] == 1 ? 1 : (int)fa_divide(p.a.heads_q, p.a.heads_kv * s.splits);
    const int32_t unit = s.left.summed + (int32_t)fa_divide(number, heads);
    if (threadIdx.x == 0 && find_keys(&p.a, &s, (int64_t)unit * s.left.blocks, &work))
        find_queries(&p.a, &s, &work);
    __syncthreads();
    const left_unit u = find_left_unit(&p, &s, &work, unit);
    const dbias_place place = find_dbias_place(&p, &u, (int)threadIdx.x);
    add_tile(&s, &u, &place, (int)(number % heads), tile, (int)threadIdx.x);
}
