/*
 * How the last heads are shared out under a causal mask, so that blocks end together.
 *
 * The balanced schedule. Under a causal mask a task is a causal pair of work tiles, and all pairs cost the same.
 * With a static schedule some blocks then take one pair more than others. So the work tiles of the last
 * s->balanced_heads heads are not in pairs: each goes, the longest first, to the block that has the fewest key tiles
 * to compute so far. While a block works on its pairs, one of its warps computes this schedule for all blocks, and
 * notes the block's own tasks. Each lane keeps the loads of some blocks.
 *
 * The alternating schedule (alternate.cuh) takes no time to compute, but is less even.
 */
#ifndef FA_KERNELS_FORWARD_SM90_BALANCE_CUH
#define FA_KERNELS_FORWARD_SM90_BALANCE_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"
#include "forward_sm90/pipeline.cuh"
#include "forward_sm90/warp.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/barrier.cuh"

#if BALANCED

typedef struct balance {
    /* For blocks lane, lane + 32, ...: key tiles << 8 | block; and how many more tasks the block can note. */
    uint32_t load[FA_SM90_MAX_BALANCED_BLOCKS / 32];
    int32_t free[FA_SM90_MAX_BALANCED_BLOCKS / 32];
    int center, left; /* query i sees the keys from i + center - left to i + center */
} balance;

/* The cost of the work tile with the head's query tile number `tile`: its key tiles, and two for the fixed work. */
FA_DEVICE uint32_t find_cost(const fa_attention_params *p, const balance *b, int tile)
{
    const int first = tile * QUERIES + b->center;
    const int hi = min((int)p->max_k, first + QUERIES), lo = max(0, first - b->left);
    return (uint32_t)(max(0, hi - lo) / KEYS + 2);
}

/* The cost of a block's causal pairs. */
FA_DEVICE uint32_t find_cost_of_pairs(const fa_attention_params *p, const fa_sm90_params *s,
                                      const balance *b, int block)
{
    const int blocks = (int)gridDim.x, tasks = (int)s->tasks, tiles = (int)p->tiles;
    const int each = tiles / 2, pairs = tiles % 2 ? tiles : each, step = blocks % pairs;
    uint32_t cost = 0;
    int i = block % pairs; /* as in find_paired_task */
    for (int task = block; task < tasks; task += blocks) {
        const int half = i > each ? i - each - 1 : i;
        cost += find_cost(p, b, tiles - 1 - half) + find_cost(p, b, half);
        i += i + step < pairs ? step : step - pairs;
    }
    return cost;
}

FA_DEVICE void init_balance(const fa_attention_params *p, const fa_sm90_params *s, balance *b)
{
    const int blocks = (int)gridDim.x;
    b->center = saturate(p->diagonal_given ? p->diagonal : p->max_k - p->rows_q);
    b->left = p->window_left < 0 ? UNBOUNDED : saturate(p->window_left);
#pragma unroll
    for (int i = 0; i < FA_SM90_MAX_BALANCED_BLOCKS / 32; i++) {
        const int block = (int)threadIdx.x % 32 + 32 * i;
        b->free[i] = FA_SM90_MAX_BALANCED_TASKS;
        b->load[i] = ~0u;
        if (block < blocks) b->load[i] = find_cost_of_pairs(p, s, b, block) << 8 | (uint32_t)block;
    }
}

FA_DEVICE uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* Adds a task of this cost to the block with the smallest load, and returns the block. */
FA_DEVICE uint32_t assign_task(balance *b, uint32_t cost)
{
    uint32_t smallest = ~0u;
#pragma unroll
    for (int i = 0; i < FA_SM90_MAX_BALANCED_BLOCKS / 32; i++)
        smallest = min_u32(smallest, b->load[i]);
    smallest = __reduce_min_sync(0xffffffff, smallest);
#pragma unroll
    for (int i = 0; i < FA_SM90_MAX_BALANCED_BLOCKS / 32; i++)
        if (b->load[i] == smallest) b->load[i] = --b->free[i] > 0 ? smallest + (cost << 8) : ~0u;
    return smallest & 255;
}

/* The balance warp: notes the block's tasks for the scheduler warp. */
FA_DEVICE void balance_last_heads(const pipeline *pipe, const fa_attention_params *p,
                                  const fa_sm90_params *s)
{
    const uint32_t this_block = (uint32_t)warp_uniform((int)blockIdx.x);
    const bool leader = threadIdx.x % 32 == 0;
    const int tiles = (int)p->tiles, first = (int)(p->tasks - s->balanced_heads * p->tiles);
    balance b;
    int count = 0;
    init_balance(p, s, &b);
    for (int tile = tiles - 1; tile >= 0; tile--) {
        const uint32_t cost = find_cost(p, &b, tile);
        for (int head = 0; head < s->balanced_heads; head++) {
            if (assign_task(&b, cost) != this_block) continue;
            if (leader) pipe->state->balanced[count] = first + head * tiles + tiles - 1 - tile;
            count++;
        }
    }
    if (leader) {
        pipe->state->balanced_count = count;
        ptx_mbarrier_arrive(&pipe->state->balanced_full);
    }
}

#include "forward_sm90/alternate.cuh"

/* The block's i-th task in the balanced schedule. */
FA_DEVICE int64_t find_balanced_task(const pipeline *pipe, const fa_sm90_params *s, int64_t i)
{
    ptx_mbarrier_wait(&pipe->state->balanced_full, 0);
    const int64_t balanced = i - count_paired_tasks(s);
    return balanced < pipe->state->balanced_count ? pipe->state->balanced[balanced] : TASK_END;
}

#endif

#endif
