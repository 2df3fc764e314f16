/*
 * Attention of few queries over many keys on Hopper: the algorithm of decode_sm80 with wgmma and TMA.
 * Head dims to 256, float16 or bfloat16 with float32 sums; a scale, a softcap, sinks, and masks by
 * position and lengths.
 *
 *   config.cuh    the numbers of the variant, the data of each thread
 *   pipeline.cuh  the state that the warps share
 *   producer.cuh  keys and values by TMA
 *   copy.cuh      keys and values by cp.async, for pages of any size
 *   scores.cuh    S^T, logits and weights
 *   values.cuh    O^T
 *   attend.cuh    the loop over key tiles
 *   merge_parts.cuh  results of merged parts
 *   bytes_attend.cuh  the loop of keys and values of 8 bits
 *
 * Work tiles, parts and merging are those of decode_sm80 (decode_sm80/work.cuh, merge.cuh, last_part.cuh).
 * A block has a part: a warp loads its keys and values by TMA, or four warps copy them, and a warpgroup multiplies. The 64 rows of
 * a product are keys, or columns of the values, and its columns are the rows of the work tile. So a work
 * tile of only 8 rows wastes no work.
 *
 * Keys and values of 8 bits must be converted, and pass through registers for this. So their products are
 * those of decode_sm80, by mma, and a warp has its own rows of a tile and its own sums.
 */
#include "decode_sm90/config.cuh"

#include "decode_sm80/early_work.cuh"
#include "decode_sm80/last_part.cuh"
#include "decode_sm80/merge.cuh"
#include "decode_sm80/work.cuh"
#if EIGHT_BITS
#include "decode_sm90/bytes_attend.cuh"
#else
#include "decode_sm90/attend.cuh"
#endif
#include "decode_sm90/merge_parts.cuh"
#include "decode_sm90/pipeline.cuh"
#if COPIED
#include "decode_sm90/copy.cuh"
#else
#include "decode_sm90/producer.cuh"
#endif
#include "ptx/grid.cuh"

/* ---- The block's work ------------------------------------------------------------------------ */

#if !EIGHT_BITS && !COPIED
/* The same as describe_work, where only the numbers of the sequence, the heads and the part differ between blocks. A block waits
 * for the thread that describes its work, and that takes some 450 instructions in a row. */
FA_DEVICE fa_work describe_common(const fa_decode_params *d, const fa_decode_sm90_params *s,
                                  int number)
{
    const fa_attention_params *p = &d->attention;
    const fa_decode_divisors *by = &s->divisors;
    const fa_decode_common *c = &s->common;
    const int cut = (int)p->tasks - d->whole, n = number - d->whole;
    fa_work w;
    w.part = n < 0 ? 0 : (int)fa_divide_by(n, by->tasks);
    const int task = number - w.part * cut, batch = (int)fa_divide_by(task, by->units);
    const int unit = task - batch * by->units_of_batch,
              head_kv = (int)fa_divide_by(unit, by->chunks);
    const int first = (unit - head_kv * d->chunks) * d->heads;
    const int64_t diagonal = p->diagonal_given ? p->diagonal : p->max_k - p->rows_q;
    w.tile = (fa_tile){.batch = batch,
                       .head = head_kv * by->group + first,
                       .head_kv = head_kv,
                       .block_q = batch,
                       .n_q = p->rows_q,
                       .room_q = p->rows_q,
                       .block_k = batch,
                       .n_k = p->max_k,
                       .diagonal = diagonal};
    w.task = task;
    w.heads = min(d->heads, by->group - first);
    w.queries = (int)p->rows_q;
    w.rows = d->heads * w.queries;
    w.from = c->from, w.to = c->to;
    w.all_from = c->all_from, w.all_to = c->all_to;
    w.start = c->start;
    w.tiles = c->tiles;
    w.parts = n < 0 ? 1 : c->parts;
    w.per_part = n < 0 ? c->tiles : c->per_part;
    return w;
}
#endif

/* By one thread. */
FA_DEVICE void describe_block(const fa_decode_params *d, const fa_decode_sm90_params *s, fa_work *w)
{
#if !EIGHT_BITS && !COPIED
    if (s->common.tiles > 0) {
        *w = describe_common(d, s, (int)blockIdx.x);
        return;
    }
#endif
    *w = describe_work(d, &s->divisors, blockIdx.x);
}

/* Computes the block's part of the keys. The last block of a work tile also merges all parts. */
FA_DEVICE void run_part(const pipeline *pipe, const fa_decode_params *d,
                        const fa_decode_sm90_params *s)
{
    const fa_work *w = &pipe->state->work;
    float *const sums = (float *)(void *)pipe->stages, *const q = (float *)(void *)pipe->q;
#if EIGHT_BITS
    const fa_sources block = {sums, ROWS * ROW_FLOATS, w->parts > 0 ? SUMS : 0};
    const fa_merged merged = {q, q + ROWS * SUMS};
    if (w->parts > 0) {
        fa_place at = {0, 0};
        if (warp_id() >= CONSUMER_WARPS) produce(pipe, d, s, w, &at);
        else attend(pipe, d, w, &at, sums);
        __syncthreads();
    }
    merge(d, w, &block, &merged, w->parts <= 1 ? NULL : find_part(d, w, w->part));
    if (w->parts <= 1) return;
#else
    fa_place at = {0, 0};
    if (warp_id() >= CONSUMER_WARPS) {
        if (w->parts > 0) produce(pipe, d, s, w, &at);
        /* While the last tiles come. A part has no results: with few tiles its block would wait for this. */
        if (w->parts <= 1) find_results(d, w, pipe->state->results);
    } else if (w->parts > 0) attend(pipe, d, w, &at, sums);
    __syncthreads();
    if (w->parts <= 1) {
        write_sums(d, w, sums, pipe->state->results, q);
        return;
    }
    store_part(d, w, sums);
#endif
    if (d->step != FA_DECODE_LAST) return;
    __shared__ int last;
    count_part(d, w, &last);
    const merged_columns own = find_columns(d, w, thread_id());
    __syncthreads();
    if (last) merge_parts(d, w, 0, THREADS, &own);
}

/* Sets packed rows of no sequence, [from, to), to zeros, with a warp for each row. */
FA_DEVICE void clear_rows_of_none(const fa_decode_params *d, const fa_work *w, int64_t from,
                                  int64_t to)
{
    const fa_attention_params *p = &d->attention;
#pragma unroll 1
    for (int64_t row = from + warp_id(); row < to; row += WARPS)
#pragma unroll 1
        for (int64_t head = w->tile.head; head < w->tile.head + w->heads; head++) {
            if (p->lse && lane_id() == 0) p->lse[head * p->rows_q + row] = -INFINITY;
#pragma unroll 1
            for (int column = 4 * lane_id(); column < p->d_v; column += 4 * 32)
                fa_store4(fa_view_row(&p->out, 0, row, head), &p->out, column, p->d_v,
                          make_float4(0.0f, 0.0f, 0.0f, 0.0f));
        }
}

/* If work tiles are numbered by sequence, the blocks of the first and of the last sequence also write the
 * rows before the first and after the last sequence. There are hardly ever any. */
FA_DEVICE void clear_outside(const fa_decode_params *d, const fa_work *w)
{
    const fa_tile *t = &w->tile;
    if (d->most_queries != FA_DECODE_ALL_QUERIES || t->first > 0 || w->part > 0) return;
    if (t->batch == 0) clear_rows_of_none(d, w, 0, t->start_q);
    if (t->batch == d->attention.batch - 1)
        clear_rows_of_none(d, w, fa_packed_start(&d->attention, t->batch + 2), d->attention.rows_q);
}

#if !EIGHT_BITS
/* What can be done before the grid in front has ended. */
FA_DEVICE void prepare_part(const fa_decode_params *d, const fa_decode_sm90_params *s,
                            const fa_work *w)
{
    if (d->step == FA_DECODE_MERGE || w->rows == 0) return;
    if (warp_id() >= CONSUMER_WARPS) prefetch_first_tile(d, s, w);
    else prefetch_queries(d, w);
}
#endif

FA_KERNEL __launch_bounds__(THREADS, BLOCKS)
    decode_sm90(const __grid_constant__ fa_decode_params d,
                const __grid_constant__ fa_decode_sm90_params s)
{
    FA_DYNAMIC_SHARED(raw);
    __shared__ shared_state shared;
    shared_state *state = (shared_state *)ptx_uniform_pointer(&shared);
    char *aligned = (char *)ptx_uniform_pointer((char *)raw + (-ptx_shared_address(raw) & 1023));
#if EIGHT_BITS
    const pipeline pipe = {.q = aligned + s.stages * (STAGE_BYTES + SCALE_BYTES),
                           .stages = aligned,
                           .state = state,
                           .count = s.stages};
#else
    char *q = aligned, *weights = q + QUERY_BYTES;
    char *stages = weights + WEIGHT_BUFFERS * WEIGHT_BYTES;
    const pipeline pipe = {.q = q,
                           .weights = weights,
                           .stages = stages,
                           .exchange = (float *)(void *)(stages + s.stages * STAGE_BYTES),
                           .state = state,
                           .count = s.stages};
#endif
    if (threadIdx.x == CONSUMER_THREADS) {
        if (!COPIED) {
            ptx_tma_prefetch(&s.k);
            ptx_tma_prefetch(&s.v);
        }
        init_barriers(state, s.stages);
    }
    /* The launch overlaps the previous one, and the next launch may overlap the end of this one. */
#if EIGHT_BITS
    ptx_wait_for_grids(); /* for scales, too */
    find_work(&d, &s.divisors, &state->work);
#else
    const bool early = finds_work_early(&d.attention);
    if (!early) ptx_wait_for_grids();
    if (ptx_thread_id() == 0) describe_block(&d, &s, &state->work);
    __syncthreads();
    if (early) {
        prepare_part(&d, &s, &state->work);
        __syncthreads(); /* all have read the work */
        ptx_wait_for_grids();
        if (ptx_thread_id() == 0 && has_other_keys(&d.attention, &state->work))
            describe_block(&d, &s, &state->work);
        if (d.attention.seqlens_k) __syncthreads();
    }
#endif
    if (!s.alone) ptx_let_next_grid_start();
    const fa_work *w = &state->work;
    const bool merges = d.step == FA_DECODE_MERGE;
    if (!merges) clear_outside(&d, w);
    if (w->rows == 0) return;
    if (!merges && w->part < max(w->parts, 1)) run_part(&pipe, &d, &s);
    if (!merges || w->parts <= 1) return;
    /* Blocks that merge the same work tile are numbered like its parts. */
    const int begin = w->part * THREADS;
    const merged_columns own = find_columns(&d, w, begin + thread_id());
    const int turns = ((int)gridDim.x - d.whole) / ((int)d.attention.tasks - d.whole);
    merge_parts(&d, w, begin, turns * THREADS, &own);
}
