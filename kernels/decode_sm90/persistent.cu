/*
 * decode_sm90 in persistent blocks, for mixed batches. A few blocks, one on each multiprocessor, do the
 * sequences of few queries, which wait for memory. They leave the other multiprocessors to the next launch,
 * which computes. For 16 bits, and packed or padded queries.
 *
 * One warpgroup does not keep memory busy, because it waits for each of its products. So a block has
 * several groups. Each has a warpgroup that computes and a warp that loads, with their own ring of stages.
 * A group takes one part after another. Its producer describes a part and loads its keys while the
 * consumers are still working on the previous part. Stages, the phases of their barriers and the
 * descriptions are used cyclically across parts.
 */
#include "decode_sm90/config.cuh"

#if !PERSISTENT || EIGHT_BITS
#error "decode_sm90_persistent: GROUPS is missing, or there is a CACHE"
#endif

#include "decode_sm80/merge.cuh"
#include "decode_sm80/work.cuh"
#include "decode_sm90/attend.cuh"
#include "decode_sm90/merge_parts.cuh"
#include "decode_sm90/pipeline.cuh"
#include "decode_sm90/producer.cuh"
#include "ptx/grid.cuh"
#include "ptx/semaphore.cuh"

/* ---- Which parts are the group's ------------------------------------------------------------- */

/*
 * Groups take units: the work tiles of a sequence and a key/value head, with one part of the keys. Because
 * lengths differ, only a group's first unit is fixed, and it takes the others from a counter. In the end
 * each group takes one number too many. So all groups together take as many numbers as there are units, at
 * which atomicInc wraps to 0: the counter is 0 before a launch and after it.
 */
static __device__ uint32_t taken_units[FA_DECODE_SM90_COUNTER_SETS];

/* Where a group is. number: of a part of a work tile, as in describe_work(). */
typedef struct fa_turn {
    int64_t unit, units; /* units: that there are */
    int64_t tile;        /* of the unit */
    bool more;           /* the unit has more tiles */
} fa_turn;

/* The next unit. Without a counter the schedule is static. */
FA_DEVICE int64_t next_unit(const fa_decode_params *d, const fa_turn *turn)
{
    const int64_t groups = (int64_t)gridDim.x * GROUPS;
    if (d->counters < 0 || d->step != FA_DECODE_LAST) return turn->unit + groups;
    return groups + atomicInc(&taken_units[d->counters], (uint32_t)turn->units - 1);
}

/* Whether there is work to do. A launch that merges has a number for each work tile. */
FA_DEVICE bool has_work(const fa_decode_params *d, const fa_work *w)
{
    if (w->rows == 0) return false;
    return d->step == FA_DECODE_MERGE ? w->parts > 1 : w->part < max(w->parts, 1);
}

/* Describes the group's next part, or its first one if w is at a new turn. No rows: there is none. One
 * thread. Tiles after a sequence's last query are skipped. */
FA_DEVICE void describe_next(const fa_decode_params *d, const fa_decode_sm90_params *s,
                             fa_turn *turn, fa_work *w)
{
    const int64_t tiles = d->attention.tiles;
    for (; turn->unit < turn->units; turn->tile++) {
        if (!turn->more) {
            if (turn->tile > 0) turn->unit = next_unit(d, turn), turn->tile = 0;
            if (turn->unit >= turn->units) break;
        }
        *w = describe_work(d, &s->divisors, turn->unit * tiles + turn->tile);
        turn->more = turn->tile + 1 < tiles && w->tile.first + d->queries < w->tile.room_q;
        if (!has_work(d, w)) continue;
        turn->tile++;
        return;
    }
    w->rows = 0;
}

FA_DEVICE fa_turn first_turn(const fa_decode_params *d)
{
    const fa_attention_params *p = &d->attention;
    const int64_t units = fa_divide(p->tasks, p->tiles);
    const fa_turn turn = {blockIdx.x + (int64_t)gridDim.x * group_id(),
                          d->step == FA_DECODE_MERGE ? units : units * d->parts, 0, false};
    return turn;
}

/* ---- Who merges ------------------------------------------------------------------------------ */

/* The same as in decode_sm80/last_part.cuh. */
static __device__ uint32_t part_counters[FA_DECODE_SM90_COUNTER_SETS * FA_DECODE_SM90_COUNTERS];

/* Whether the group's part, which has been stored, is the last part of the work tile. Then all that the
 * other groups have stored can be read. */
FA_DEVICE bool is_last_part(const fa_decode_params *d, const fa_work *w)
{
    bool last = false;
    sync_consumers();
    if (thread_id() == 0) {
        const int64_t counter = (int64_t)d->counters * FA_DECODE_SM90_COUNTERS + w->task;
        const uint32_t end = (uint32_t)w->parts - 1;
        last = ptx_counter_turn(&part_counters[counter], end) == end;
    }
    return ptx_named_barrier_or(consumers_barrier(), CONSUMER_THREADS, last);
}

/* ---- Descriptions ---------------------------------------------------------------------------- */

FA_DEVICE int slot_of(uint32_t n) { return (int)(n % WORKS); }
FA_DEVICE int parity_of(uint32_t n) { return (int)(n / WORKS & 1); }

/* ---- Roles ----------------------------------------------------------------------------------- */

FA_DEVICE void produce_parts(const pipeline *pipe, const fa_decode_params *d,
                             const fa_decode_sm90_params *s)
{
    fa_place at = {0, 0};
    fa_turn turn = first_turn(d);
#pragma unroll 1
    for (uint32_t n = 0;; n++) {
        fa_work *w = &pipe->state->work[slot_of(n)];
        ptx_mbarrier_wait(&pipe->state->work_empty[slot_of(n)], parity_of(n) ^ 1);
        __syncwarp();
        if (lane_id() == 0) {
            describe_next(d, s, &turn, w);
            ptx_mbarrier_arrive(&pipe->state->work_full[slot_of(n)]);
        }
        __syncwarp();
        if (w->rows == 0) return;
        if (d->step != FA_DECODE_MERGE && w->parts > 0) produce(pipe, d, s, w, &at);
    }
}

/* The end of a part: its sums become results, or go to the workspace. Returns whether this group merges all
 * parts. The rows' factors replace the queries, which are no longer needed. */
FA_DEVICE bool finish_part(const pipeline *pipe, const fa_decode_params *d, const fa_work *w,
                           const float *sums)
{
    if (w->parts <= 1) {
        if (warp_id() == 0) find_results(d, w, pipe->state->results);
        sync_consumers();
        write_sums(d, w, sums, pipe->state->results, (float *)(void *)pipe->q);
        return false;
    }
    store_part(d, w, sums);
    return d->step == FA_DECODE_LAST && is_last_part(d, w);
}

FA_DEVICE void consume_parts(const pipeline *pipe, const fa_decode_params *d, float *sums)
{
    fa_place at = {0, 0};
#pragma unroll 1
    for (uint32_t n = 0;; n++) {
        const fa_work *w = &pipe->state->work[slot_of(n)];
        bool merges = d->step == FA_DECODE_MERGE;
        ptx_mbarrier_wait(&pipe->state->work_full[slot_of(n)], parity_of(n));
        if (w->rows == 0) return;
        if (!merges) {
            if (w->parts > 0) attend(pipe, d, w, &at, sums);
            sync_consumers();
            merges = finish_part(pipe, d, w, sums);
        }
        if (merges) {
            const merged_columns own = find_columns(d, w, thread_id());
            merge_parts(d, w, 0, THREADS, &own);
        }
        sync_consumers(); /* all have read the description, and the factors where queries come */
        ptx_mbarrier_arrive_if(&pipe->state->work_empty[slot_of(n)], thread_id() == 0);
    }
}

FA_KERNEL __launch_bounds__(FA_DECODE_SM90_PERSISTENT_THREADS(GROUPS), 1)
    decode_sm90_persistent(const __grid_constant__ fa_decode_params d,
                           const __grid_constant__ fa_decode_sm90_params s)
{
    FA_DYNAMIC_SHARED(raw);
    char *aligned = (char *)raw + (-ptx_shared_address(raw) & 1023);
    char *q = (char *)ptx_uniform_pointer(
        aligned + group_id() * FA_DECODE_SM90_GROUP(HEAD_DIM, ROWS, KEYS, s.stages));
    char *weights = q + QUERY_BYTES, *stages = weights + WEIGHT_BUFFERS * WEIGHT_BYTES;
    char *exchange = stages + s.stages * STAGE_BYTES;
    char *sums = exchange + FA_DECODE_SM90_EXCHANGE(ROWS);
    const pipeline pipe = {.q = q,
                           .weights = weights,
                           .stages = stages,
                           .exchange = (float *)(void *)exchange,
                           .state = (shared_state *)(void *)(sums + 4 * ROWS * ROW_FLOATS),
                           .count = s.stages};
    if (is_producer() && lane_id() == 0) {
        ptx_tma_prefetch(&s.k);
        ptx_tma_prefetch(&s.v);
        init_barriers(pipe.state, s.stages);
    }
    /* The launch overlaps the previous one, and the next launch overlaps this one. The next launch starts
     * when each block has reached this point: then all work before this launch has ended. */
    ptx_wait_for_grids();
    ptx_let_next_grid_start();
    __syncthreads(); /* the barriers are initialized */
    if (is_producer()) produce_parts(&pipe, &d, &s);
    else consume_parts(&pipe, &d, (float *)(void *)sums);
}
