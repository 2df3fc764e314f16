/*
 * Descriptions of work tiles by the load warp, in kernels without a scheduler warp: forward_tf32_sm90 and
 * forward_f16x3_sm90.
 */
#ifndef FA_KERNELS_FORWARD_SM90_DESCRIBE_CUH
#define FA_KERNELS_FORWARD_SM90_DESCRIBE_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"
#include "forward_sm90/pipeline.cuh"
#include "forward_sm90/scheduler.cuh"
#include "forward_sm90/work_tile.cuh"

/* The work tiles that the load warp has described so far. There is no scheduler warp. The time of a
 * description is hidden by loads in flight. */
typedef struct schedule_state {
    int64_t task; /* of the lane: the next of the block's */
    int number;   /* of work tiles */
    bool more;
} schedule_state;

/* Describes the block's next two tasks, if there are any: waits until their entries are empty and fills
 * them. */
FA_DEVICE void describe_next(const pipeline *pipe, const fa_attention_params *p,
                             const fa_sm90_params *s, schedule_state *at)
{
    enum { TOGETHER = QUEUE_ENTRIES / 2 };
    const int lane = (int)threadIdx.x % 32;
    work_tile w;
    const int64_t task = lane < TOGETHER ? find_task(pipe, p, s, at->task) : TASK_NONE;
    const bool found = describe_work_tile(p, s, task, &w);
    const uint32_t all = __ballot_sync(0xffffffff, found);
    at->more = !__any_sync(0xffffffff, task == TASK_END);
    wait_for_empty_entries(pipe, at->number, __popc(all));
    if (found) publish_work_tile(pipe, at->number + __popc(all & ((1u << lane) - 1)), &w);
    at->number += __popc(all);
    at->task += TOGETHER;
    if (!at->more) publish_end(pipe, at->number);
}

#endif
