/*
 * The persistent scheduler: the tasks of a block, and the queue of work tiles that one warp, the scheduler, describes
 * in advance for all others.
 *
 * The schedule is usually static: block b of g takes the tasks b, b + g, b + 2g, ... Under a causal mask a task is a
 * causal pair, and the last heads have a balanced or an alternating schedule (balance.cuh, alternate.cuh). For short rows, and where
 * lengths are on the device, the schedule is dynamic: blocks take tasks from a counter in global memory. Launches on
 * different streams must not share a counter.
 */
#ifndef FA_KERNELS_FORWARD_SM90_SCHEDULER_CUH
#define FA_KERNELS_FORWARD_SM90_SCHEDULER_CUH

#include "forward_sm90/config.cuh"
#include "common/divide.h"
#include "common/device.cuh"
#include "forward_sm90/pipeline.cuh"
#include "forward_sm90/warp.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid.cuh"
#if BALANCED
#include "forward_sm90/balance.cuh"
#elif ALTERNATES
#include "forward_sm90/alternate.cuh"
#endif
#if DYNAMIC
#include "forward_sm90/taken_order.cuh"
#endif
#if SPLIT
#include "forward_sm90/sections.cuh"
#endif

/* The longer work tile of a causal pair, or the other one. Pairs are numbered head by head; with an odd number of work
 * tiles, they are those of two heads, and their middle tiles are the pair between. TASK_NONE: the last head has none to
 * share its middle tile's pair with. */
FA_DEVICE int64_t find_paired_task(const fa_attention_params *p, const fa_sm90_params *s,
                                   int64_t pair, bool other)
{
    const int tiles = (int)p->tiles, each = tiles / 2, odd = tiles % 2;
    const int pairs = odd ? tiles : each, group = (int)fa_divide_by(pair, s->by_pairs);
    const int n = (int)pair - group * pairs, half = n > each ? n - each - 1 : n;
    const int second = n == each ? other : n > each;
    const int64_t head = group * (1 + odd) + second;
    const int64_t task = head * tiles + (other ? tiles - 1 - half : half);
    return task < p->tasks ? task : TASK_NONE;
}

/* The block's i-th task. TASK_NONE: number i has no work tile, but later ones may; TASK_END: there are no more. */
FA_DEVICE int64_t find_task(const pipeline *pipe, const fa_attention_params *p,
                            const fa_sm90_params *s, int64_t i)
{
    const int64_t blocks = gridDim.x / CLUSTER, block = blockIdx.x / CLUSTER;
    if (s->task_kind != FA_SM90_CAUSAL_PAIRS) {
        const int64_t task = block + i * blocks;
        return task < s->tasks ? task : TASK_END;
    }
    const int64_t pair = block + i / 2 * blocks;
    if (pair < s->tasks) return find_paired_task(p, s, pair, i % 2 == 1);
#if BALANCED
    return s->balanced_heads ? find_balanced_task(pipe, s, i) : find_alternating_task(p, s, i);
#elif ALTERNATES
    (void)pipe;
    return find_alternating_task(p, s, i);
#else
    (void)pipe;
    return TASK_END;
#endif
}

/* ---- The queue ------------------------------------------------------------------------------- */

/* Entries are used cyclically, by the work tile's number. */
FA_DEVICE uint32_t entry_of(int number) { return (uint32_t)number % QUEUE_ENTRIES; }
FA_DEVICE int entry_parity(int number) { return (int)((uint32_t)number / QUEUE_ENTRIES & 1); }

FA_DEVICE work_tile *queue_entry(const pipeline *pipe, int number)
{
    return &pipe->queue[entry_of(number)];
}

/* Waits until the entries of this many work tiles, from number on, are empty, as each is before its first use: the whole
 * warp. */
FA_DEVICE void wait_for_empty_entries(const pipeline *pipe, int number, int count)
{
    if (number + count <= QUEUE_ENTRIES) return;
    for (int i = number; i < number + count; i++)
        ptx_mbarrier_wait(&pipe->state->entry_empty[entry_of(i)], entry_parity(i) ^ 1);
}

FA_DEVICE void publish_work_tile(const pipeline *pipe, int number, const work_tile *w)
{
    *queue_entry(pipe, number) = *w;
    ptx_mbarrier_arrive(&pipe->state->entry_full[entry_of(number)]);
}

/* The end of the block's work: a work tile without key tiles. The whole warp. */
FA_DEVICE void publish_end(const pipeline *pipe, int number)
{
    work_tile w;
    w.key_tiles = 0;
    for (int c = 0; c < CONSUMERS; c++) w.needed[c] = 0;
    wait_for_empty_entries(pipe, number, 1);
    if (threadIdx.x % 32 == 0) publish_work_tile(pipe, number, &w);
}

/* Waits until work tile `number` has been described. */
FA_DEVICE const work_tile *acquire_work_tile(const pipeline *pipe, int number)
{
    __syncwarp();
    ptx_mbarrier_wait(&pipe->state->entry_full[entry_of(number)], entry_parity(number));
    return queue_entry(pipe, number);
}

/* Releases the description, which the warp no longer needs. */
FA_DEVICE void release_work_tile(const pipeline *pipe, int number)
{
    __syncwarp();
    ptx_mbarrier_arrive_if(&pipe->state->entry_empty[entry_of(number)], threadIdx.x % 32 == 0);
}

/* ---- The scheduler warp ---------------------------------------------------------------------- */

/* Where the next work tiles are described: at most half of the queue, and not together with those that are known later
 * than they are (balance.cuh). */
FA_DEVICE int64_t end_of_batch(const fa_sm90_params *s, int64_t i)
{
    const int64_t end = i + QUEUE_ENTRIES / 2;
#if BALANCED
    if (s->task_kind == FA_SM90_CAUSAL_PAIRS && s->balanced_heads) {
        const int64_t paired = count_paired_tasks(s);
        if (i < paired) return fa_min64(end, paired);
    }
#else
    (void)s;
#endif
    return end;
}

/* Each lane describes a work tile, half of the queue at a time, because one description takes thousands of
 * cycles. early: the block's barriers may not have been initialized when the first ones are described. */
FA_DEVICE void schedule_static(const pipeline *pipe, const fa_attention_params *p,
                               const fa_sm90_params *s, bool early)
{
    const int lane = (int)threadIdx.x % 32;
    work_tile w;
    int number = 0;
    bool more = true;
    for (int64_t first = 0; more;) {
        const int64_t i = first + lane, end = end_of_batch(s, first);
        const int64_t task = i < end ? find_task(pipe, p, s, i) : TASK_NONE;
        const bool found = describe_work_tile(p, s, task, &w);
        const uint32_t all = __ballot_sync(0xffffffff, found);
        more = !__any_sync(0xffffffff, task == TASK_END);
        if (early && first == 0) __syncthreads();
        wait_for_empty_entries(pipe, number, __popc(all));
        if (found) publish_work_tile(pipe, number + __popc(all & ((1u << lane) - 1)), &w);
        number += __popc(all);
        first = end;
    }
    publish_end(pipe, number);
}

/* Launches beside others have their own way to wait (end_behind_grids). */
FA_DEVICE void wait_for_other_grids(void)
{
    if (!BESIDE) ptx_wait_for_grids();
}

#if DYNAMIC

/* Dynamic schedule. If memory limits the rate, multiprocessors get unequal shares of it, and with equal shares of the
 * work some end a third later than others. So the first task of a block is given by its number, and it takes each
 * later task from a counter, shortly before it needs it. The counter is 0 before a launch and after it: atomicInc
 * wraps at the number of tasks, and each block that has a task takes one number too many, so there are as many
 * increments as tasks. Beside another launch, blocks also take their first task: many of them start when the others have ended,
 * and there may be none left. */
static __device__ uint32_t task_counters[FA_SM90_COUNTERS];

/* before: the task that the block took before. Without a counter, a block's tasks are given by its number. */
FA_DEVICE int64_t take_task(const fa_sm90_params *s, int64_t before, int64_t tasks)
{
    uint32_t taken = 0;
    const uint32_t by_number = BESIDE ? 0 : gridDim.x, too_many = BESIDE ? gridDim.x : 0;
    if (s->counter < 0) return before + gridDim.x;
    wait_for_other_grids(); /* they may use the same counter */
    if (threadIdx.x % 32 == 0)
        taken = atomicInc(&task_counters[s->counter], (uint32_t)tasks + too_many - 1);
    return (int64_t)by_number + warp_uniform((int)taken);
}

FA_DEVICE int64_t take_first_task(const fa_sm90_params *s, int64_t tasks)
{
    return BESIDE && s->counter >= 0 ? take_task(s, 0, tasks) : blockIdx.x;
}

/* The n-th task that is taken: one head after the other, because its work tiles read the same keys; but those of the last
 * s->alternating_heads heads, which there are under a causal mask, the longest first, so that blocks end together. */
FA_DEVICE int64_t find_taken_task(const fa_attention_params *p, const fa_sm90_params *s, int64_t n)
{
    const int64_t heads = s->alternating_heads, first = s->tasks - heads * p->tiles;
    if (n < first) return n;
    const int64_t tile = fa_divide(n - first, heads);
    return first + (n - first - tile * heads) * p->tiles + tile;
}

/* The number of tasks that are taken before the first of them has ended. */
enum { TASKS_AHEAD = SINGLE_TILES ? 5 : 3 };

#if TAKES_LATE
/* If there are few tasks for each block, a block takes none behind a long work tile before it has requested nearly all of its keys: a task
 * that waits for a long work tile ends late, while other blocks have nothing to do. (H200, us, always 3 tasks
 * ahead, and late: a prompt of 1,536, 16/4 heads of 256, 50.0, 40.6. With many tasks a block, late ones are slower: 10 of them,
 * 391 to 1,345 rows, 64/8 of 192, 149, 156.) */
enum { LATE_TASKS = 8 };

FA_DEVICE bool takes_late(const work_tile *w, int64_t tasks)
{
    return w->key_tiles >= LONG_WORK_TILE && tasks < LATE_TASKS * (int64_t)gridDim.x;
}

FA_DEVICE void wait_for_last_keys(const pipeline *pipe, int number)
{
    ptx_mbarrier_wait(&pipe->state->nearly_loaded[number % WORK_TILES_AHEAD],
                      number / WORK_TILES_AHEAD & 1);
}
#endif

FA_DEVICE void schedule_dynamic(const pipeline *pipe, const fa_attention_params *p,
                                const fa_sm90_params *s)
{
    work_tile w;
    taken_order order;
    int number = 0;
    const bool known = !SPLIT && s->uniform;
    const int64_t tasks = known ? s->tasks : begin_taken_order(p, s, &order);
    for (int64_t task = take_first_task(s, tasks); task < tasks; task = take_task(s, task, tasks)) {
        const bool found = known ? describe_work_tile(p, s, find_taken_task(p, s, task), &w)
                                 : describe_taken_tile(p, s, &order, (int)task, &w);
        if (!found) continue;
        wait_for_empty_entries(pipe, number, 1);
        if (threadIdx.x % 32 == 0) publish_work_tile(pipe, number, &w);
#if TAKES_LATE
        if (!known && takes_late(&w, tasks)) wait_for_last_keys(pipe, number);
#endif
        number++;
        if (number < TASKS_AHEAD) continue;
        const int before = number - TASKS_AHEAD;
        ptx_mbarrier_wait(&pipe->state->entry_empty[entry_of(before)], entry_parity(before));
    }
    publish_end(pipe, number);
}

#endif

#if SPLIT

/* Where the schedule of the block's sections is. */
typedef struct section_schedule {
    line_cut cut;
    section at;
    int number; /* of work tiles that have been described */
} section_schedule;

/* Tells the producers which keys are the block's first, before the first work tile is described as a whole. key_tiles 0:
 * they learn it with the work tile. */
FA_DEVICE void publish_first_keys(const pipeline *pipe, const work_tile *w, int key_tiles)
{
    work_tile *first = &pipe->state->first;
    if (threadIdx.x % 32 != 0) return;
    first->query_tile = w->query_tile;
    first->first_key = w->first_key;
    first->key_tiles = key_tiles;
    ptx_mbarrier_arrive(&pipe->state->first_full);
}

/* Describes work tiles of the section until it has described so many in all. */
FA_DEVICE void schedule_section(const pipeline *pipe, const fa_attention_params *p,
                                const fa_sm90_params *s, section_schedule *now, int most)
{
    work_tile w;
    while (now->at.left > 0 && now->number < most) {
        const section_part part = find_part_of_section(s, &now->at);
        if (part.from <
            part.to) { /* otherwise the section has none of it, because its part would be short */
            find_keys_of_part(p, s, &now->at, &part, &w);
            if (most == 1) publish_first_keys(pipe, &w, w.key_tiles);
            describe_part(p, s, &now->cut, &now->at, &part, &w);
            wait_for_empty_entries(pipe, now->number, 1);
            if (threadIdx.x % 32 == 0) publish_work_tile(pipe, now->number, &w);
            now->number++;
        }
        end_part(p, s, &part, &now->at);
    }
    if (most == 1 && now->number == 0) publish_first_keys(pipe, &w, 0);
}

/* Describes the first work tile, for which everything else waits: while the warp still has as many registers as all warps
 * have when a block starts. */
FA_DEVICE void begin_sections(const pipeline *pipe, const fa_attention_params *p,
                              const fa_sm90_params *s, section_schedule *now)
{
    sequence_lines lines;
    prefetch_lengths(p);
    if (DESCRIBES_FIRST) __syncthreads();
    wait_for_other_grids(); /* they may write lengths */
    lines.first = -1;
    now->number = 0;
    now->cut = find_sections(p, s, &lines);
    now->at = begin_section(p, s, &now->cut, (int)blockIdx.x, &lines);
    schedule_section(pipe, p, s, now, 1);
}

/* The other work tiles of the block's sections. The next section begins where another block's ends. */
FA_DEVICE void schedule_sections(const pipeline *pipe, const fa_attention_params *p,
                                 const fa_sm90_params *s, section_schedule *now)
{
    for (int n = (int)blockIdx.x;;) {
        schedule_section(pipe, p, s, now, INT32_MAX);
        n += (int)gridDim.x;
        if (n >= s->split.sections) break;
        sequence_lines lines;
        lines.first = -1;
        now->at = begin_section(p, s, &now->cut, n, &lines);
    }
    publish_end(pipe, now->number);
}

#endif

/* Whether descriptions of work tiles read memory, which the grid in front may write. */
FA_DEVICE bool reads_memory(const fa_attention_params *p)
{
    return fa_reads_lengths(p) || p->alibi_slopes || p->q_descale || p->k_descale;
}

/* Whether blocks take tasks as they need them. Without sections, work tiles of lengths on the device have no other schedule. */
FA_DEVICE bool is_dynamic(const fa_sm90_params *s)
{
#if SPLIT
    return s->split.parts == 0 && !s->uniform;
#else
    return DYNAMIC && s->counter >= 0;
#endif
}

/* The first work tiles are described while the grid in front ends. */
FA_DEVICE void schedule(const pipeline *pipe, const fa_attention_params *p, const fa_sm90_params *s)
{
    /* A balanced schedule is waited for at a barrier. */
    const bool early = DESCRIBES_FIRST && !is_dynamic(s) && s->balanced_heads == 0;
#if DYNAMIC
    if (is_dynamic(s) && !s->uniform) prefetch_lengths(p);
#endif
    if (reads_memory(p)) wait_for_other_grids();
    if (DESCRIBES_FIRST && !early) __syncthreads();
#if DYNAMIC
    if (is_dynamic(s)) {
        schedule_dynamic(pipe, p, s);
        return;
    }
#endif
    schedule_static(pipe, p, s, early);
}

#endif
