/*
 * The alternating schedule of the last heads under a causal mask: the work tiles of the last s->alternating_heads heads go,
 * the longest first, to the blocks from last to first, then from first to last, and so on. Those of the heads before are in
 * causal pairs. Blocks of a cluster take tasks together.
 */
#ifndef FA_KERNELS_FORWARD_SM90_ALTERNATE_CUH
#define FA_KERNELS_FORWARD_SM90_ALTERNATE_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"
#include "common/params.h"

#if CLUSTER > 1
#define TAKERS (gridDim.x / CLUSTER)
#define TAKER (blockIdx.x / CLUSTER)
#else
#define TAKERS gridDim.x
#define TAKER blockIdx.x
#endif

/* Tasks fit in 32 bits. In kernels whose load warp also schedules, long divisions would cost it 2 to 4% of the rate. */
#if BALANCED
#define DIVIDE_TASKS fa_divide
#else
#define DIVIDE_TASKS(a, b) ((int64_t)((uint32_t)(a) / (uint32_t)(b)))
#endif

/* How many pairs a block has at most. */
FA_DEVICE int64_t count_rounds(const fa_sm90_params *s)
{
    return DIVIDE_TASKS(s->tasks + TAKERS - 1, TAKERS);
}

/* How many tasks the block's pairs have. */
FA_DEVICE int64_t count_paired_tasks(const fa_sm90_params *s)
{
    const int64_t rounds = count_rounds(s), last = TAKER + (rounds - 1) * TAKERS;
    return 2 * (last < s->tasks ? rounds : rounds - 1);
}

/* The block's i-th task, where i also counts the tasks of its pairs. Blocks without a pair in the last round take one
 * work tile more, the longest. TASK_END: there are no more. */
FA_DEVICE int64_t find_alternating_task(const fa_attention_params *p, const fa_sm90_params *s,
                                        int64_t i)
{
    const int64_t blocks = TAKERS, block = TAKER, heads = s->alternating_heads;
    const int64_t rounds = count_rounds(s), without = rounds * blocks - s->tasks;
    /* From 0 on: the block's number among those without. */
    const int64_t first = block - (blocks - without);
    const int64_t k = i - 2 * rounds + (first >= 0), turn = k % 2 ? block : blocks - 1 - block;
    const int64_t number = k < 0 ? first : without + k * blocks + turn;
    if (number >= heads * p->tiles) return TASK_END;
    const int64_t tile = DIVIDE_TASKS(number, heads), head = number - tile * heads;
    return p->tasks - (heads - head) * p->tiles + tile;
}

#endif
