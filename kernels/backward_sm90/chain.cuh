/*
 * CHAINED variants: the blocks of a head are a cluster, one for each key tile, and dQ never leaves it
 * in float32. All blocks go through the query tiles from the last one down. A block adds its share
 * of a tile's dQ to the sum that it gets from the block before, and sends the sum to the next block.
 * The last block whose keys the tile sees rounds the sum and stores it. So sums have one order, and
 * no launch clears them or rounds them.
 *
 *     block 0   tile 3 --> | tile 2 --> | tile 1 --> | tile 0 -->
 *     block 1              | tile 3 --> | tile 2 --> | tile 1 --> | tile 0 --> dq
 *
 * A block is a little behind the one before. The sum arrives in the buffer
 * of dQ, in the order of the accumulators, by stores that count towards a barrier. The rounded rows
 * go through the same buffer.
 *
 * If all blocks run at once, they also do what `prepare` does: each computes the log-sum-exp and
 * delta of its share of the head's queries, while its keys are loaded.
 */
#ifndef FA_KERNELS_BACKWARD_SM90_CHAIN_CUH
#define FA_KERNELS_BACKWARD_SM90_CHAIN_CUH

#include "backward_sm90/pipeline.cuh"
#include "backward_sm90/work.cuh"

#if CHAINED

#include "backward_simt/row_product.cuh"
#include "backward_sm90/config.cuh"
#include "backward_sm90/consumer_state.cuh"
#include "backward_sm90/prepare_row.cuh"
#include "common/reduce.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid.cuh"
#include "ptx/tma.cuh"

/* ---- Sums of dQ ------------------------------------------------------------------------------ */

/* Whether the sum of a tile goes to the next block. use: the number of the use of the buffers of dQ;
 * a block's first tile has use 1. */
FA_DEVICE bool is_passed(const block_work *w, int use) { return use <= w->passed; }

/* The thread's first 16 bytes of the buffer. */
FA_DEVICE char *find_sums(const pipeline *pipe, const consumer_state *c, int use)
{
    return pipe->buffers + DQ_AT + c->number * DQ_PART + dq_buffer(use) +
           threadIdx.x % WARPGROUP * 16;
}

/* The consumer's barrier expects the sum of this use, if there is one. It may already be there. */
FA_DEVICE void expect_dq(const pipeline *pipe, const consumer_state *c, int use)
{
    const block_work *w = work_of(pipe);
    if (threadIdx.x % WARPGROUP == 0 && w->key_tile > 0 && use <= w->tiles)
        ptx_mbarrier_arrive_expect(dq_received(pipe->state, c->number, use), DQ_PART);
}

/* Adds what the block before has sent. The wait's scope is the block: one of the cluster would also empty the first-level cache,
 * which shared memory does not go through. */
FA_DEVICE void receive_dq(const pipeline *pipe, consumer_state *c, const char *sums, int use)
{
    ptx_mbarrier_wait(dq_received(pipe->state, c->number, use), chain_parity(use));
#pragma unroll
    for (int j = 0; j < DQ_COLUMNS / 8; j++) {
        const float4 x = *(const float4 *)(sums + j * WARPGROUP * 16);
        c->dp[4 * j] += x.x;
        c->dp[4 * j + 1] += x.y;
        c->dp[4 * j + 2] += x.z;
        c->dp[4 * j + 3] += x.w;
    }
    expect_dq(pipe, c, use + DQ_BUFFERS);
}

/* Sends the sum to the next block, when that has room. */
FA_DEVICE void send_dq(const pipeline *pipe, const consumer_state *c, char *sums, int use)
{
    const int next = work_of(pipe)->key_tile + 1;
    ptx_mbarrier_wait(dq_room(pipe->state, c->number, use), chain_parity(use) ^ 1);
#pragma unroll
    for (int j = 0; j < DQ_COLUMNS / 8; j++)
        ptx_store_to_peer_x4((float *)(sums + j * WARPGROUP * 16),
                             dq_received(pipe->state, c->number, use), next, c->dp + 4 * j);
}

/* dQ of the previous tile: what the consumer does with its share. Use 0 holds no dQ. */
FA_DEVICE void pass_dq(const pipeline *pipe, consumer_state *c, int use)
{
    const block_work *w = work_of(pipe);
    char *sums = find_sums(pipe, c, use);
    if (use == 0) return;
    if (w->key_tile > 0) receive_dq(pipe, c, sums, use);
    if (is_passed(w, use)) {
        send_dq(pipe, c, sums, use);
        return;
    }
    if (w->key_tile > 0) ptx_named_barrier_sync(NAMED_BARRIER_CHAIN + c->number, WARPGROUP);
    store_dq_columns(c, use);
}

/* Executed by a store warp when a consumer's buffer is free: tells the block before, if that sends
 * another sum to it. */
FA_DEVICE void give_room(shared_state *state, const block_work *w, int consumer, int use)
{
    if (w->key_tile > 0 && use + DQ_BUFFERS <= w->tiles)
        ptx_mbarrier_arrive_peer_if(dq_room(state, consumer, use), w->key_tile - 1, 1);
}

/* ---- What `prepare` does --------------------------------------------------------------------- */

/* Whether there are rows that have no slot at first. They go through the workspace. */
FA_DEVICE bool leaves_rows(const fa_backward_sm90_params *s)
{
    return s->prepares && s->q_tiles > ROW_SLOTS;
}

/* Executed by one thread, in the block's first step. */
FA_DEVICE void begin_chain(shared_state *state, const fa_backward_sm90_params *s)
{
    init_barriers(state);
    ptx_mbarrier_arrive_expect(&state->rows_full,
                               s->prepares ? min((int)s->q_tiles, ROW_SLOTS) * ROW_BYTES : 0);
}

/* At once: each thread of the consumers has some rows, of which it loads 16 bytes. */
enum {
    ROW_LANES = HEAD_DIM / 8,
    ROW_STEP = CONSUMERS * WARPGROUP / ROW_LANES,
    ROWS_AT_ONCE = HEAD_DIM / 16,
    CHAIN_ROWS = ROWS_AT_ONCE * ROW_STEP /* two query tiles */
};
static_assert(ROW_LANES >= FA_BACKWARD_SM90_CHAIN, "each sends to one block");
static_assert((int)ROW_SLOTS >= (int)STAGES, "a slot is free when its tile's stage is");

/* Where the numbers of a head's queries go: to the slots of all blocks, those of the first tiles
 * that they go through; the others to the workspace. */
typedef struct row_places {
    char *slots;
    uint64_t *full;
    float *left; /* of the head's first tile */
    int tiles, blocks;
} row_places;

/* Executed by all lanes that have the row: each sends to one block. lane: of those. */
FA_DEVICE void send_numbers(const fa_backward_params *p, const fa_tile *t, const row_places *to,
                            int row, float lse, float product, int lane)
{
    const bool counts = lse != -INFINITY;
    const float dlse = counts && p->dlse ? p->dlse[lse_index(p, t, row)] : 0.0f;
    float x[QUERIES + 1]; /* delta is QUERIES places behind the log-sum-exp everywhere */
    put_numbers(x, lse, counts ? product - dlse : 0.0f);
    const int count = to->tiles - 1 - row / QUERIES, at = FA_BACKWARD_SM90_ROW_AT(row % QUERIES);
    if (count < 0) return;
    if (count < ROW_SLOTS) {
        float *slot = (float *)(to->slots + count * ROW_BYTES) + at;
        if (lane >= to->blocks) return;
        ptx_store_to_peer(slot, to->full, lane, x[0]);
        ptx_store_to_peer(slot + QUERIES, to->full, lane, x[QUERIES]);
        return;
    }
    float *left = to->left + row / QUERIES * (2 * QUERIES) + at;
    if (lane > 0) return;
    left[0] = x[0];
    left[QUERIES] = x[QUERIES];
}

/* CHAIN_ROWS rows. All loads are issued before the first is used. from: the first of the rows. */
FA_DEVICE void prepare_vectors(const fa_backward_params *p, const fa_tile *t, const row_places *to,
                               int from)
{
    const int thread = (int)threadIdx.x - WARPGROUP, lane = thread % ROW_LANES;
    const int first = from + thread / ROW_LANES;
    const char *dout = fa_view_row(&p->dout, t->block_q, first, t->head) + 16 * lane,
               *out = fa_view_row(&p->a.out, t->block_q, first, t->head) + 16 * lane;
    const int64_t dout_step = ROW_STEP * p->dout.stride[1] * 2,
                  out_step = ROW_STEP * p->a.out.stride[1] * 2;
    uint4 x[ROWS_AT_ONCE], y[ROWS_AT_ONCE];
    float lse[ROWS_AT_ONCE];
#pragma unroll
    for (int n = 0; n < ROWS_AT_ONCE; n++) {
        const int row = first + n * ROW_STEP;
        x[n] = y[n] = make_uint4(0, 0, 0, 0);
        lse[n] = load_row_lse(p, t, row);
        if (row >= t->n_q || 8 * lane >= p->a.d_v) continue;
        x[n] = *(const uint4 *)(dout + n * dout_step);
        y[n] = *(const uint4 *)(out + n * out_step);
    }
#pragma unroll
    for (int n = 0; n < ROWS_AT_ONCE; n++) {
        const uint32_t a[4] = {x[n].x, x[n].y, x[n].z, x[n].w},
                       b[4] = {y[n].x, y[n].y, y[n].z, y[n].w};
        const float product = multiply_row(a, b, ROW_LANES);
        send_numbers(p, t, to, first + n * ROW_STEP, lse[n], product, lane);
    }
}

/* All other rows: a warp for each. */
FA_DEVICE void prepare_rows(const fa_backward_params *p, const fa_tile *t, const row_places *to,
                            int from)
{
#pragma unroll 1
    for (int row = from + (int)threadIdx.x / 32 - WARPS; row < from + CHAIN_ROWS;
         row += CONSUMERS * WARPS) {
        const float product = fa_warp_sum(row < t->n_q ? fa_row_product(p, t, row) : 0.0f);
        send_numbers(p, t, to, row, load_row_lse(p, t, row), product, (int)threadIdx.x % 32);
    }
}

/* Executed by the consumers: prepares the block's share of the head's queries. Copies of all blocks
 * read what goes to the workspace, so each thread needs a fence. */
FA_DEVICE void prepare_own_rows(const pipeline *pipe, const fa_backward_params *p,
                                const fa_backward_sm90_params *s, int64_t block)
{
    block_work own;
    ptx_wait_for_grids();
    find_keys(&p->a, s, block, &own);
    ptx_cluster_wait(); /* all blocks have initialized their barriers */
    const fa_tile *t = &own.sequence;
    const row_places to = {pipe->buffers + ROWS_AT, &pipe->state->rows_full,
                           s->rows + find_tile_number(&p->a, t, s->q_tiles) * (2 * QUERIES),
                           (int)s->q_tiles, (int)p->a.tiles};
    const bool vectors = p->dout.vector == 8 && p->a.out.vector == 8;
    const int rank = (int)own.keys.first / KEYS;
#pragma unroll 1
    for (int from = rank * CHAIN_ROWS; from < to.tiles * QUERIES; from += to.blocks * CHAIN_ROWS)
        if (vectors) prepare_vectors(p, t, &to, from);
        else prepare_rows(p, t, &to, from);
    if (leaves_rows(s)) ptx_fence_proxy_async_global();
}

/* Executed by all threads: waits until all blocks have initialized their barriers, and says that this
 * block's rows have been prepared. */
FA_DEVICE void join_chain(const fa_backward_sm90_params *s)
{
    if (!s->prepares || threadIdx.x < WARPGROUP) ptx_cluster_wait();
    if (leaves_rows(s)) ptx_cluster_arrive();
}

/* Executed by the load warp, and not by one lane: waits for the rows in the workspace. */
FA_DEVICE void wait_for_rows(void)
{
    ptx_cluster_wait();
    ptx_fence_proxy_async_global();
}

#else

/* A sum of dQ that is whole goes to no other block. */
FA_DEVICE bool is_passed(const block_work *w, int use)
{
    (void)w, (void)use;
    return false;
}

#endif

#endif
