/*
 * Latent attention of few queries over many keys, with many query heads, on Hopper's tensor cores:
 * one key/value head, whose values are the first 512 of the keys' 576 columns. Float16 or bfloat16
 * with float32 sums; a scale, a softcap, sinks, and masks by position and lengths.
 *
 *   config.cuh       the numbers of the variant, who has what
 *   pipeline.cuh     what the warps share
 *   producer.cuh     copies of key tiles
 *   queries.cuh      in registers and in shared memory
 *   scores.cuh       S, logits and weights
 *   values.cuh       O
 *   store.cuh        results, and sums of a part
 *   merge_parts.cuh  results of merged parts
 *   results.cuh      how rows are finished and written
 *
 * A work tile is 64 query heads, or heads and queries, as decode_sm80 has them, and the keys are
 * cut into parts in the same way (decode_sm80/work.cuh). A block has a part. Each key tile is
 * loaded once:
 *
 *     producer            a warp loads by TMA, or several from small pages
 *     consumer of scores  a warpgroup: S of 64 rows and 64 keys, to shared memory
 *     consumers of values two warpgroups: weights, and 256 columns of O each, 128 registers a
 *                         thread
 *
 * With an even number of chunks of 64 query heads, two blocks may form a cluster: they have the same
 * key tiles, and each loads half of them for both.
 *
 * Five of nine blocks of columns of the queries are in registers of the consumer of scores. So
 * there is room for ten pairs of blocks of columns of keys, two key tiles and a half: the next
 * tile's keys are there when its scores are computed, while the last ones are still values.
 *
 * Two parts of 64 rows are merged by the later one of the two blocks (store.cuh), and few rows of more
 * parts by the last block (decode_sm80/merge.cuh). Otherwise a second launch merges, in which several
 * blocks share the rows of a work tile.
 */
#include "decode_latent_sm90/config.cuh"

#include "decode_latent_sm90/merge_parts.cuh"
#include "decode_latent_sm90/pipeline.cuh"
#include "decode_latent_sm90/producer.cuh"
#include "decode_latent_sm90/scores.cuh"
#include "decode_latent_sm90/store.cuh"
#include "decode_latent_sm90/values.cuh"
#include "decode_sm80/early_work.cuh"
#include "decode_sm80/merge.cuh"
#include "decode_sm80/work.cuh"
#include "ptx/grid.cuh"
#include "ptx/registers.cuh"

/* ---- What a block does ----------------------------------------------------------------------- */

FA_DEVICE int rank_of(const fa_decode_latent_sm90_params *s)
{
    return s->cluster > 1 ? (int)(blockIdx.x % 2) : 0;
}

/* The number of the block's part among those of all work tiles. The blocks of a cluster have the
 * same part of two work tiles that differ in their query heads alone: neighbours in a sequence's
 * `chunks` of heads. */
FA_DEVICE int64_t find_number(const fa_decode_params *d, const fa_decode_latent_sm90_params *s)
{
    const fa_attention_params *p = &d->attention;
    if (s->cluster == 1) return blockIdx.x;
    const int64_t pair = blockIdx.x / 2, part = fa_divide_by(blockIdx.x, s->divisors.tasks);
    const int64_t rest = pair - part * (p->tasks / 2),
                  outer = fa_divide_by(rest, s->divisors.tiles);
    return part * p->tasks + (2 * outer + rank_of(s)) * p->tiles + rest - outer * p->tiles;
}

/* In the launch that merges, blocks with the rows of a work tile follow each other. */
FA_DEVICE void describe_block(const fa_decode_params *d, const fa_decode_latent_sm90_params *s,
                              fa_work *w)
{
    if (d->step != FA_DECODE_MERGE) {
        *w = describe_work(d, &s->divisors, find_number(d, s));
        w->first_row = 0;
        return;
    }
    const int shares = (ROWS + s->merged_rows - 1) / s->merged_rows,
              task = (int)blockIdx.x / shares;
    *w = describe_work(d, &s->divisors, task);
    w->first_row = ((int)blockIdx.x - task * shares) * s->merged_rows;
    w->rows = min(w->rows, w->first_row + s->merged_rows);
}

/* Executed by one thread. early: the grid in front has not ended, and may write lengths of keys. Then the first key tile is
 * prefetched. */
FA_DEVICE void find_block(const fa_decode_params *d, const fa_decode_latent_sm90_params *s,
                          bool early, fa_work *w)
{
    bool again = false;
#pragma unroll 1
    do {
        describe_block(d, s, w);
        if (!early || again) return;
        prefetch_first_tile(d, s, w, rank_of(s));
        ptx_wait_for_grids();
        again = has_other_keys(&d->attention, w);
    } while (again);
}

FA_DEVICE bool has_part(const fa_decode_params *d, const fa_work *w)
{
    return d->step != FA_DECODE_MERGE && w->rows > 0 && w->part < w->parts;
}

/* Whether the block writes results without having a part: of merged parts, or, as the first one of
 * a work tile without keys, zeros. */
FA_DEVICE bool merges(const fa_decode_params *d, const fa_work *w)
{
    if (d->step == FA_DECODE_MERGE) return w->parts > 1 && w->first_row < w->rows;
    return w->rows > 0 && w->parts == 0 && w->part == 0;
}

/* ---- Consumers ------------------------------------------------------------------------------- */

/* The block's part of the keys. */
FA_DEVICE void attend(const pipeline *pipe, const fa_decode_params *d, bool scores)
{
    const fa_work *w = &pipe->state->work;
    float *const factors = (float *)(void *)pipe->scores;
    float *const shared = (float *)(void *)pipe->pairs;
    if (scores) {
        consume_scores(pipe, d);
        if (stores_vectors(d, w)) return;
        sync_threads();
    } else {
        const int half = (int)ptx_uniform((uint32_t)(warp_id() / GROUP_WARPS - 1));
        row_sums own = {{0.0f, 0.0f}};
        float out[OUTPUTS];
        consume_values(pipe, d, half, out, &own);
        row_ends ends = find_row_ends(pipe, &own);
        if (stores_vectors(d, w)) {
            if (w->parts == 1 || takes_other_part(d, w, half, out, &ends))
                store_result_columns(d, w, out, half, &ends);
            return;
        }
        sync_threads(); /* all products have ended: scores and keys are no longer needed */
        share_sums(out, half, shared);
        if (half == 0) store_row_ends(d, w, &ends, factors);
    }
    sync_threads();
    store_sums(d, w, shared, factors);
    if (w->parts > 1 && d->step == FA_DECODE_LAST && is_last_part(d, w)) merge_rows(pipe, d);
}

FA_DEVICE void consume(const pipeline *pipe, const fa_decode_params *d, bool scores)
{
    const fa_work *w = &pipe->state->work;
    if (has_part(d, w)) attend(pipe, d, scores);
    else if (merges(d, w)) merge_rows(pipe, d);
}

FA_KERNEL __launch_bounds__(FA_DECODE_LATENT_SM90_THREADS, 1)
    decode_latent_sm90(const __grid_constant__ fa_decode_params d,
                       const __grid_constant__ fa_decode_latent_sm90_params s)
{
    FA_DYNAMIC_SHARED(raw);
    __shared__ shared_state shared;
    shared_state *state = (shared_state *)ptx_uniform_pointer(&shared);
    char *q = (char *)ptx_uniform_pointer((char *)raw + (-ptx_shared_address(raw) & 1023));
    const pipeline pipe = {.q = q,
                           .tails = q + TAILS_AT,
                           .pairs = q + PAIRS_AT,
                           .scores = (float4 *)(void *)(q + SCORES_AT),
                           .rows = (score_row *)(void *)(q + ROWS_AT),
                           .descriptor = ptx_uniform(ptx_descriptor_low_in_cluster(q, 0)),
                           .cluster = s.cluster,
                           .rank = rank_of(&s),
                           .maps_queries = s.maps_queries != 0,
                           .state = state};
    if (threadIdx.x == 0) {
        if (s.maps_queries) ptx_tma_prefetch(&s.q);
        ptx_tma_prefetch(&s.k);
        init_barriers(state, loading_warps(&s), s.cluster);
    }
    /* The launch overlaps the previous one, and the next launch may overlap the end of this one. The one that merges parts
     * starts only after the other one has waited, so lengths are there. */
    const bool merging = d.step == FA_DECODE_MERGE,
               early = merging || finds_work_early(&d.attention);
    if (!early) ptx_wait_for_grids();
    if (threadIdx.x == 0) find_block(&d, &s, early && !merging, &state->work);
    if (early) ptx_wait_for_grids();
    ptx_let_next_grid_start();
    if (threadIdx.x == 0 && pipe.maps_queries && has_part(&d, &state->work))
        load_queries(&pipe, &d, &s);
    if (s.cluster > 1) ptx_cluster_sync(); /* the peer's barriers are there, too */
    else __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        ptx_decrease_registers(PRODUCER_REGISTERS);
        const bool loads = (int)threadIdx.x / 32 < loading_warps(&s);
        if (loads && has_part(&d, &state->work)) produce(&pipe, &d, &s);
    } else if (threadIdx.x < (1 + CONSUMER_VALUES) * WARPGROUP) {
        ptx_increase_registers(SCORES_REGISTERS);
        consume(&pipe, &d, true);
    } else {
        ptx_increase_registers(VALUES_REGISTERS);
        consume(&pipe, &d, false);
    }
    if (s.cluster > 1) ptx_cluster_sync(); /* the peer may still arrive at barriers of this block */
}
