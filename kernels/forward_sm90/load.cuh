/*
 * Loads by TMA to shared memory: the queries of a work tile, rows of keys and of values. Shared with
 * forward_sm90_wide and forward_tf32_sm90.
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

/* The first column of the queries that a block multiplies. */
#ifndef FIRST_QUERY_COLUMN
#define FIRST_QUERY_COLUMN 0
#endif

/* A consumer's queries of work tile `number`. */
FA_DEVICE char *q_buffer(const pipeline *pipe, int number, int consumer)
{
    return pipe->q + (q_stage(number) * CONSUMERS + consumer) * Q_BYTES;
}

FA_DEVICE void load_queries(const pipeline *pipe, const fa_sm90_params *s, const fa_tile *t,
                            int consumer, int number)
{
    uint64_t *barrier = &pipe->state->q_full[q_stage(number)][consumer];
#if SPLIT
    const fa_sm90_group *group = &s->split.group;
    const int row = (int)(t->start_q + t->first) + consumer * fa_sm90_box_queries(group->box),
              index = (int)fa_divide_by((uint32_t)t->head, group->by_heads);
    ptx_mbarrier_arrive_expect(barrier,
                               Q_BYTES / ROWS * fa_sm90_box_queries(group->box) * group->heads);
#pragma unroll
    for (int block = 0; block < K_BLOCKS; block++)
        ptx_tma_load_5d(q_buffer(pipe, number, consumer) + block * Q_BLOCK, &s->q, barrier,
                        BLOCK_COLUMNS * block, 0, row, index * s->q_step.head,
                        (int)t->block_q * s->q_step.block);
#else
    ptx_mbarrier_arrive_expect(barrier, Q_BYTES);
    const int row = (int)(t->start_q + t->first) + consumer * ROWS;
#pragma unroll
    for (int block = 0; block < K_BLOCKS; block++)
        ptx_tma_load_4d(q_buffer(pipe, number, consumer) + block * Q_BLOCK, &s->q, barrier,
                        FIRST_QUERY_COLUMN + BLOCK_COLUMNS * block, row,
                        (int)t->head * s->q_step.head, (int)t->block_q * s->q_step.block);
#endif
}

/* Loads a consumer's queries. Their full barrier also tells the consumer that the work tile has been described, unless
 * it is the first one of sections, so the end of the work also arrives at this barrier, without queries. (A stage is empty at
 * its first use, so parities start at 1.) */
FA_DEVICE void produce_consumer_queries(const pipeline *pipe, const fa_sm90_params *s,
                                        const work_tile *w, int consumer, int number)
{
    ptx_mbarrier_wait(&pipe->state->q_empty[q_stage(number)][consumer], q_parity(number) ^ 1);
    if (threadIdx.x % 32 != 0) return;
    if (w->key_tiles) load_queries(pipe, s, &w->query_tile, consumer, number);
    else ptx_mbarrier_arrive(&pipe->state->q_full[q_stage(number)][consumer]);
}

/* Rows of keys or values from key `key` on, and blocks of BLOCK_COLUMNS columns from `column`
 * on. */
typedef struct kv_box {
    int key, rows, column, blocks;
} kv_box;

/* A lane's rows of a box, s->box_rows from row `at` on: TMA loads this many at a time, from one page if
 * there are pages. A box has up to 32 times as many. */
typedef struct lane_rows {
    int at;         /* none, if the box has no such row */
    int row, outer; /* of the tensor: where they are */
} lane_rows;

/* Must be computed before waiting for a stage, because reading the block table takes long. The table is
 * not read after the last page: any page will do for the rows after it. */
FA_DEVICE lane_rows find_lane_rows(const kv_box *box, const fa_attention_params *p,
                                   const fa_sm90_params *s, const fa_tile *t)
{
    lane_rows own = {(int)threadIdx.x % 32 * s->box_rows, 0, (int)t->block_k};
    own.row = (int)t->start_k + box->key + own.at;
    if (!p->block_table || own.at >= box->rows) return own;
    const int64_t last = fa_max64(t->n_k - 1, 0);
    const int64_t j = fa_min64(box->key + own.at, last) / s->box_rows * s->box_rows;
    const int64_t page = (uint32_t)j / (uint32_t)p->rows_k;
    own.row = (int)((uint32_t)j % (uint32_t)p->rows_k);
    own.outer = t->n_k ? p->block_table[t->batch * p->block_table_stride + page] : 0;
    return own;
}

/* Issues the copies of a box: each lane those of its rows, one for each block of columns. */
FA_DEVICE void issue_box(char *shared, const fa_sm90_map *map, const fa_sm90_steps *step,
                         uint64_t *barrier, const kv_box *box, const lane_rows *own,
                         const fa_tile *t)
{
    if (own->at >= box->rows) return;
    for (int block = 0; block < box->blocks; block++)
        ptx_tma_load_4d(shared + (block * box->rows + own->at) * 128, map, barrier,
                        box->column + BLOCK_COLUMNS * block, own->row, (int)t->head_kv * step->head,
                        own->outer * step->block);
}

/* The same, if the barrier's phase waits for nothing else. The whole warp. */
FA_DEVICE void load_box(char *shared, const fa_sm90_map *map, const fa_sm90_steps *step,
                        uint64_t *barrier, const kv_box *box, const lane_rows *own,
                        const fa_tile *t)
{
    if (threadIdx.x % 32 == 0) ptx_mbarrier_arrive_expect(barrier, box->blocks * box->rows * 128);
    __syncwarp();
    issue_box(shared, map, step, barrier, box, own, t);
}

/* The keys that some query of the sequence may see. */
FA_DEVICE fa_range find_seen_keys(const fa_attention_params *p, const fa_tile *t)
{
    fa_range seen = fa_tile_visible(p, t, fa_max64(t->n_q - 1, 0));
    seen.lo = fa_tile_visible(p, t, 0).lo;
    return seen;
}

#endif
