/*
 * Zeros in the sums of dQ, stored ahead by a warp that has nothing else to do. In `prepare`, which is bound by memory, they would
 * be half of all bytes, and leave the L2 cache before anybody adds to them.
 *
 * A group is a number of key/value heads, or of splits of them, whose blocks follow each other: no other blocks add to the sums of its query heads. Each block
 * of a group clears a share of the sums of a later group, groups_ahead of them further; `prepare` clears those of the first ones.
 * A block adds to sums when all blocks of the group that clears them have done their shares. These have lower numbers, start first
 * and wait for nobody before they clear, so there is no deadlock, however many blocks run at once.
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

/* A warp of block, or work tile, `number`. What is stored here, copies of other blocks add to: so each lane has a fence. */
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

/* A thread that issues copies, before the first one of block, or work tile, `number`. */
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
