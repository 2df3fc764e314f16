/*
 * Attention forward on Hopper's tensor cores: float16 and bfloat16, float32 sums.
 *
 * The kernel is persistent: one block stays on each multiprocessor and computes one work tile after another. A work
 * tile is QUERIES queries of a head, and the key tiles that they see. The block's warps have roles:
 *
 *     producer     warp 0 loads queries and keys, warp 1 values, by TMA          producer.cuh, load.cuh
 *     scheduler    warp 2 describes the block's work tiles in advance            scheduler.cuh, work_tile.cuh
 *     balance      warp 3 computes which of the last heads' work tiles belong
 *                  to the block; or it loads a bias                              balance.cuh, producer.cuh
 *     consumers    two or three warpgroups of 64 queries each: issue products,
 *                  compute the softmax while they run, store the outputs         consumer.cuh
 *
 * They synchronize by the barriers of pipeline.cuh. The main loop is do_plain_tiles in consumer.cuh; its parts are
 * multiply.cuh, tile_softmax.cuh (softmax.cuh, options.cuh) and store.cuh. The design is FlashAttention-3's
 * (arXiv:2407.08608): asynchronous loads and products by specialized warps, ping-pong between warpgroups (section
 * 3.1), and a warpgroup's softmax during its own products (section 3.2).
 *
 * config.cuh lists the macros with which this file is compiled.
 */
#include "forward_sm90/config.cuh"
#include "forward_sm90/consumer.cuh"
#include "forward_sm90/pipeline.cuh"
#include "forward_sm90/producer.cuh"
#include "forward_sm90/scheduler.cuh"
#include "ptx/address.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"
#include "ptx/wgmma.cuh"
#if BALANCED
#include "forward_sm90/balance.cuh"
#endif
#if COPIED
#include "forward_sm90/copy.cuh"
#endif
#if HIDES_VALUES || ROUNDED
#include "forward_sm90/recompute.cuh"
#endif

/* The producer warpgroup's warps. */
enum { WARP_QUERIES_AND_KEYS, WARP_VALUES, WARP_SCHEDULER, WARP_BALANCE_OR_BIAS };

/* Warps that read the queue, in addition to the consumers' warps. */
FA_DEVICE int count_queue_readers(const fa_sm90_params *s)
{
#if COPIED
    return (OPTIONS & FA_SM90_BIAS && s->bias_mapped) + 2 + WARPS;
#else
    return OPTIONS & FA_SM90_BIAS && s->bias_mapped ? 3 : 2;
#endif
}

/* A launch that runs at the same time as the previous one (a mixed batch) starts when each block of that
 * launch has waited for all earlier work. The results of that work are in memory then, but this
 * multiprocessor may have older copies in its first-level cache. One thread; a barrier follows. */
FA_DEVICE void forget_older_copies(void)
{
#if BESIDE
    __threadfence();
#endif
}

/* Later work waits only for this launch. So one thread of its last block waits for the previous launch
 * before it ends. The other blocks must not wait, because their multiprocessors are needed. */
FA_DEVICE void end_behind_grids(void)
{
#if BESIDE
    if (blockIdx.x == gridDim.x - 1) ptx_wait_for_grids();
#endif
}

/* Whether the thread's role begins when the grids in front have ended; work tiles are described before. */
FA_DEVICE bool waits_first(void)
{
    const int warp = (int)threadIdx.x / 32;
    return warp != WARP_SCHEDULER &&
           (warp != WARP_BALANCE_OR_BIAS || (OPTIONS & FA_SM90_BIAS) != 0);
}

#if SPLIT

/* Zeros in the rows of queries that are left over, which no load writes: what is there could look like large scores, and they
 * take longer. The consumers. */
FA_DEVICE void clear_rows_left_over(const fa_sm90_params *s, char *q)
{
    const fa_sm90_box box = s->split.group.box;
    const int first = fa_sm90_box_queries(box) * fa_sm90_box_heads(box),
              thread = (int)threadIdx.x - WARPGROUP;
#if COPIED
    if (thread >= CONSUMERS * WARPGROUP) return;
#endif
    if (first == ROWS) return;
    for (int block = 0; block < Q_STAGES * CONSUMERS * K_BLOCKS; block++)
        for (int i = 8 * first + thread; i < 8 * ROWS; i += CONSUMERS * WARPGROUP)
            *(uint4 *)(q + block * Q_BLOCK + 16 * i) = make_uint4(0, 0, 0, 0);
    ptx_fence_proxy_async();
}

#define ENTRY forward_sm90_split
#else
#define ENTRY forward_sm90
#endif

FA_KERNEL __launch_bounds__(THREADS, 1)
    ENTRY(const __grid_constant__ fa_attention_params p, const __grid_constant__ fa_sm90_params s)
{
    FA_DYNAMIC_SHARED(raw);
    __shared__ shared_state shared;
    shared_state *state = (shared_state *)ptx_uniform_pointer(&shared);
    char *q = (char *)raw + (-ptx_shared_address(raw) & 1023);
    char *k = q + Q_STAGES * CONSUMERS * Q_BYTES, *v = k + STAGES * K_BYTES;
    char *out_buffer = v + STAGES * V_BYTES, *behind = out_buffer + OUT_BUFFER;
    const pipeline pipe = {
        .q = q,
        .k = k,
        .v = v,
        .k_descriptor = ptx_uniform(ptx_descriptor_low(k, 0)),
        .v_descriptor = ptx_uniform(ptx_descriptor_low(v, KV_BLOCK)),
        .out_buffer = (char *)ptx_uniform_pointer(out_buffer),
#if OPTIONS & FA_SM90_BIAS
        .bias = behind,
        .queue = (work_tile *)ptx_uniform_pointer(behind + CONSUMERS * BIAS_BYTES),
#else
        .queue = (work_tile *)ptx_uniform_pointer(behind),
#endif
#if ROUNDED
        .p = &p,
        .s = &s,
#endif
        .state = state
    };
    if (threadIdx.x == 0) {
        forget_older_copies();
        init_barriers(state, count_queue_readers(&s));
    }
#if SPLIT
    if (threadIdx.x >= WARPGROUP) clear_rows_left_over(&s, q);
#endif
    if (!DESCRIBES_FIRST || threadIdx.x / 32 != WARP_SCHEDULER) __syncthreads();
    if (waits_first()) wait_for_other_grids();
    /* The scheduler may get here before the grids in front have ended: what follows waits for this grid. */
    if (!BESIDE) ptx_let_next_grid_start();
    if (threadIdx.x < WARPGROUP) {
#if SPLIT
        section_schedule sections;
        const bool schedules_sections = threadIdx.x / 32 == WARP_SCHEDULER && s.split.sections > 0;
        if (schedules_sections) begin_sections(&pipe, &p, &s, &sections);
#endif
        ptx_decrease_registers(PRODUCER_REGISTERS);
#if COPIED
        if (threadIdx.x < 32 * (WARP_QUERIES_AND_KEYS + 1)) produce_queries(&pipe, &s);
        else if (threadIdx.x < 32 * (WARP_VALUES + 1)) publish_copies(&pipe, &s);
#else
        if (threadIdx.x < 32 * (WARP_QUERIES_AND_KEYS + 1)) produce_queries_and_keys(&pipe, &p, &s);
        else if (threadIdx.x < 32 * (WARP_VALUES + 1)) produce_values(&pipe, &p, &s);
#endif
#if SPLIT
        else if (schedules_sections) schedule_sections(&pipe, &p, &s, &sections);
#endif
        else if (threadIdx.x < 32 * (WARP_SCHEDULER + 1)) schedule(&pipe, &p, &s);
#if BALANCED
        else if (s.balanced_heads) balance_last_heads(&pipe, &p, &s);
#endif
#if OPTIONS & FA_SM90_BIAS
        else if (s.bias_mapped) produce_bias(&pipe, &s);
#endif
        wait_for_other_grids(); /* so that each thread has */
        if (threadIdx.x == 0) end_behind_grids();
#if COPIED
    } else if (threadIdx.x >= WARPGROUP * (1 + CONSUMERS)) {
        ptx_decrease_registers(PRODUCER_REGISTERS);
        copy_keys_and_values(&pipe, &p, &s);
#endif
    } else {
        ptx_increase_registers(CONSUMER_REGISTERS);
        const int consumer = warp_uniform(threadIdx.x / WARPGROUP - 1);
        const bool recompute = consume(&pipe, &p, consumer);
#if HIDES_VALUES || ROUNDED
        if (recompute) recompute_rows(&pipe, &p, &s, consumer);
#else
        (void)recompute;
#endif
    }
}
