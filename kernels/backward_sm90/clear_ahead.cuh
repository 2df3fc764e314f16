/*
 * A warp that has nothing else to do clears sums of dQ ahead of time. In `prepare`, which is bound
 * by memory, these zeros would be half of all bytes, and they would have left the L2 cache before
 * the additions.
 *
 * A group consists of some key/value heads, or splits of them, whose blocks are consecutive. Only
 * these blocks add to the sums of their query heads. Each block of a group clears some tiles of the
 * group that comes groups_ahead later; `prepare` clears the sums of the first groups. Before its
 * first addition, a block waits until all blocks of the earlier group have cleared their tiles.
 * Those have lower numbers, start first, and clear before they wait for anything. So there is no
 * deadlock, however many blocks run at once.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_CLEAR_AHEAD_CUH
#define FA_KERNELS_BACKWARD_SM90_CLEAR_AHEAD_CUH

#include "backward_sm90/config.cuh"

#if CLEARS_AHEAD

#include "ptx/semaphore.cuh"
#include "ptx/tma.cuh"

FA_DEVICE void clear_tile(float *sums)
{
    float4 *to = (float4 *)(void *)sums + threadIdx.x % 32;
#pragma unroll 8
    for (int n = 0; n < SUM_DIM * QUERIES / 128; n++) to[32 * n] = make_float4(0, 0, 0, 0);
}

/* Executed by a warp of block, or work tile, `number`. Copies of other blocks add to what ordinary
 * stores clear here, so each lane needs a fence. */
FA_DEVICE void clear_ahead(const fa_backward_sm90_params *s, int number)
{
    if (!s->cleared) return;
    const int group = number / s->group_blocks, next = group + s->groups_ahead;
    if (next >= s->groups) return;
    const int first = next * s->group_tiles, end = min(first + s->group_tiles, s->sum_tiles);
#pragma unroll 1
    for (int tile = first + number - group * s->group_blocks; tile < end; tile += s->group_blocks)
        clear_tile(s->sums + (int64_t)tile * (SUM_BYTES / 4));
    ptx_fence_proxy_async_global();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx_counter_add(&s->cleared[next]);
}

/* Executed by a thread that adds to sums, before the first addition of block, or work tile,
 * `number`. */
FA_DEVICE void wait_until_cleared(const fa_backward_sm90_params *s, int number)
{
    if (!s->cleared) return;
    const int group = number / s->group_blocks;
    if (group < s->groups_ahead) return;
    ptx_counter_wait(&s->cleared[group], s->group_blocks);
    ptx_fence_proxy_async_global();
}

#endif

#endif
