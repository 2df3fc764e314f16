/*
 * Parts of tensors to shared memory by TMA: the queries of a work tile, rows of keys and of values. Shared with
 * forward_sm90_wide.
 */
#ifndef FA_KERNELS_FORWARD_SM90_LOAD_CUH
#define FA_KERNELS_FORWARD_SM90_LOAD_CUH

#include "forward_sm90/config.cuh"
#include "common/device.cuh"
#include "common/sequence.cuh"
#include "forward_sm90/pipeline.cuh"
#include "forward_sm90/stage.cuh"
#include "forward_sm90/work_tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"

/* A consumer's queries of work tile `number`. */
FA_DEVICE char *q_buffer(const pipeline *pipe, int number, int consumer)
{
    return pipe->q + (q_stage(number) * CONSUMERS + consumer) * Q_BYTES;
}

FA_DEVICE void load_queries(const pipeline *pipe, const fa_sm90_params *s, const fa_tile *t,
                            int consumer, int number)
{
    uint64_t *barrier = &pipe->state->q_full[q_stage(number)][consumer];
    const int row = (int)(t->start_q + t->first) + consumer * ROWS;
    ptx_mbarrier_arrive_expect(barrier, Q_BYTES);
#pragma unroll
    for (int block = 0; block < K_BLOCKS; block++)
        ptx_tma_load_4d(q_buffer(pipe, number, consumer) + block * Q_BLOCK, &s->q, barrier,
                        64 * block, row, (int)t->head * s->q_step.head,
                        (int)t->block_q * s->q_step.block);
}

/* Loads a consumer's queries. Their full barrier also tells the consumer that the work tile has been
 * described; so the end of the work arrives there, too, without queries. (A stage's first use finds it empty,
 * hence the parities that start at 1.) */
FA_DEVICE void produce_consumer_queries(const pipeline *pipe, const fa_sm90_params *s,
                                        const work_tile *w, int consumer, int number)
{
    ptx_mbarrier_wait(&pipe->state->q_empty[q_stage(number)][consumer], q_parity(number) ^ 1);
    if (threadIdx.x % 32 != 0) return;
    if (w->key_tiles) load_queries(pipe, s, &w->query_tile, consumer, number);
    else ptx_mbarrier_arrive(&pipe->state->q_full[q_stage(number)][consumer]);
}

/* Rows of keys or values from key `key` on, and blocks of 64 columns from `column` on. */
typedef struct kv_box {
    int key, rows, column, blocks;
} kv_box;

/* Issues the copies of a box: one for each block of columns, or for each page and block. */
FA_DEVICE void load_box(char *shared, const fa_sm90_map *map, const fa_sm90_steps *step,
                        uint64_t *barrier, const kv_box *box, const fa_attention_params *p,
                        const fa_sm90_params *s, const fa_tile *t)
{
    ptx_mbarrier_arrive_expect(barrier, box->blocks * box->rows * 128);
    for (int at = 0; at < box->rows; at += s->box_rows) {
        int row = (int)t->start_k + box->key + at, outer = (int)t->block_k;
        if (p->block_table) {
            /* The table is not read behind the last page; any page will do for rows behind it. */
            const int64_t j =
                fa_min64(box->key + at, fa_max64(t->n_k - 1, 0)) / s->box_rows * s->box_rows;
            const int64_t page = (uint32_t)j / (uint32_t)p->rows_k;
            row = (int)((uint32_t)j % (uint32_t)p->rows_k);
            outer = t->n_k ? p->block_table[t->batch * p->block_table_stride + page] : 0;
        }
        for (int block = 0; block < box->blocks; block++)
            ptx_tma_load_4d(shared + (block * box->rows + at) * 128, map, barrier,
                            box->column + 64 * block, row, (int)t->head_kv * step->head,
                            outer * step->block);
    }
}

/* ---- Values that no query may see ------------------------------------------------------------ */

/* TMA also loads rows of values outside the keys that a sequence's queries may see. They may hold NaN, and
 * 0 * NaN is NaN, so they are cleared: rows outside [from, to) of a box. The whole warp. */
FA_DEVICE void clear_values(char *shared, int rows, int64_t from, int64_t to)
{
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int block = 0; block < V_BLOCKS; block++)
#pragma unroll 1
        for (int at = lane * 16; at < rows * 128; at += 32 * 16)
            if (at / 128 < from || at / 128 >= to)
                *(float4 *)(shared + block * rows * 128 + at) = make_float4(0, 0, 0, 0);
    ptx_fence_proxy_async();
    __syncwarp();
}

/* The keys that some query of the sequence may see. */
FA_DEVICE fa_range find_seen_keys(const fa_attention_params *p, const fa_tile *t)
{
    fa_range seen = fa_tile_visible(p, t, fa_max64(t->n_q - 1, 0));
    seen.lo = fa_tile_visible(p, t, 0).lo;
    return seen;
}

/* Whether a box holds values to be cleared. Behind the tensor's end TMA writes zeros itself. */
FA_DEVICE bool has_values_to_clear(const fa_attention_params *p, const fa_tile *t,
                                   const fa_range *seen, const kv_box *box)
{
    const bool zeros_behind = !p->block_table && t->start_k + seen->hi == p->rows_k;
    return box->key < seen->lo || (box->key + box->rows > seen->hi && !zeros_behind);
}

/* Loads a box of values, and clears what no query may see before the full barrier says that they are there.
 * cleared: counts the boxes that were cleared so far. */
FA_DEVICE void load_values(const pipeline *pipe, const fa_attention_params *p,
                           const fa_sm90_params *s, const fa_tile *t, const kv_box *box,
                           char *shared, uint64_t *full, int *cleared)
{
    const bool leader = threadIdx.x % 32 == 0;
    const fa_range seen = find_seen_keys(p, t);
    if (!has_values_to_clear(p, t, &seen, box)) {
        if (leader) load_box(shared, &s->v, &s->v_step, full, box, p, s, t);
        return;
    }
    uint64_t *loaded = &pipe->state->v_loaded;
    if (leader) load_box(shared, &s->v, &s->v_step, loaded, box, p, s, t);
    ptx_mbarrier_wait(loaded, *cleared & 1);
    *cleared += 1;
    clear_values(shared, box->rows, seen.lo - box->key, seen.hi - box->key);
    if (leader) ptx_mbarrier_arrive(full);
}

#endif
