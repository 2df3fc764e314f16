/*
 * What a block leaves: results, if it has all keys of its work tile or is the last one of its
 * parts, or a part's sums (decode_sm80/merge.cuh).
 */
#ifndef FA_KERNELS_DECODE_LATENT_SM90_STORE_CUH
#define FA_KERNELS_DECODE_LATENT_SM90_STORE_CUH

#include "decode_latent_sm90/config.cuh"

#include "common/exchange.cuh"
#include "common/reduce.cuh"
#include "decode_latent_sm90/pipeline.cuh"
#include "decode_latent_sm90/values.cuh"
#include "decode_latent_sm90/results.cuh"
#include "decode_sm80/merge.cuh"
#include "ptx/semaphore.cuh"
#include "ptx/store.cuh"

/* Of the thread's two rows: the bases of their weights, and the weights' sums. */
typedef struct row_ends {
    float base[2], sum[2];
} row_ends;

FA_DEVICE row_ends find_row_ends(const pipeline *pipe, const row_sums *own)
{
    row_ends ends;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        ends.base[half] = pipe->rows[row_of(0, half)].base;
        ends.sum[half] = fa_sum_over_lanes(own->at[half], 4);
    }
    return ends;
}

/* ---- Results, from registers ----------------------------------------------------------------- */

/* Whether work tiles have all rows: then a launch that merges has at most two parts. */
FA_DEVICE bool has_all_rows(const fa_decode_params *d) { return d->heads * d->queries == ROWS; }

/* Whether rows of results are stored from registers: in vectors of 16 bytes. */
FA_DEVICE bool stores_vectors(const fa_decode_params *d, const fa_work *w)
{
    const bool merges_two = d->step == FA_DECODE_LAST && has_all_rows(d);
    return (w->parts == 1 || merges_two) && d->attention.out.vector == 8;
}

/* The result's row r of the work tile; NULL: there is none. */
FA_DEVICE char *find_result(const fa_decode_params *d, const fa_work *w, int r)
{
    const fa_tile *t = &w->tile;
    const int head = head_of(d, r);
    const int64_t i = t->first + query_of(d, r);
    if (r >= w->rows || head >= w->heads || i >= t->room_q) return NULL;
    return fa_view_row(&d->attention.out, t->block_q, t->start_q + i, t->head + head);
}

/* Two results; zeros for a factor of 0, whatever the sums are. */
FA_DEVICE uint32_t scaled_x2(const float *sums, float factor)
{
    return factor == 0.0f ? 0 : fa_pack_x2(sums[0] * factor, sums[1] * factor);
}

/* By a consumer of values: its half of the columns. A lane stores eight columns of a row at
 * a time. */
FA_DEVICE void store_result_columns(const fa_decode_params *d, const fa_work *w, const float *out,
                                    int half, const row_ends *ends)
{
    const int t = lane_id() % 4, first = half * GROUP_COLUMNS + 8 * t;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int r = row_of(0, i);
        char *row = find_result(d, w, r);
        const float factor = row ? finish_row(d, w, r, ends->base[i], ends->sum[i]) : 0.0f;
#pragma unroll
        for (int j = 0; j < OUTPUTS / 4; j += 4) {
            uint32_t x[4];
#pragma unroll
            for (int n = 0; n < 4; n++) x[n] = scaled_x2(out + 4 * (j + n) + 2 * i, factor);
            fa_exchange_words(x, t);
            if (row && first + 8 * j < d->attention.d_v)
                ptx_store_global_16(row + 2 * (first + 8 * j), make_uint4(x[0], x[1], x[2], x[3]));
        }
    }
}

/* ---- Which block merges ---------------------------------------------------------------------- */

/* Two counters for each work tile, for halves of the columns, in sets for launches that may run at the
 * same time. All are 0 before and after a launch. */
static __device__ int32_t
    part_counters[FA_DECODE_COUNTER_SETS * FA_DECODE_LATENT_SM90_COUNTERS * VALUE_GROUPS];

FA_DEVICE int32_t *find_counter(const fa_decode_params *d, const fa_work *w, int half)
{
    const int64_t tile = (int64_t)d->counters * FA_DECODE_LATENT_SM90_COUNTERS + w->task;
    return &part_counters[tile * VALUE_GROUPS + half];
}

/* By all consumers, if the block has stored its part: whether it is the last one of its work tile.
 * Then everything that the others have stored can be read. */
FA_DEVICE bool is_last_part(const fa_decode_params *d, const fa_work *w)
{
    bool last = false;
    sync_threads(); /* all have stored */
    if (thread_id() == 0) {
        int32_t *const counter = find_counter(d, w, 0);
        last = ptx_counter_take(counter) == w->parts - 1;
        if (last) *counter = 0;
    }
    __syncwarp();
    return ptx_named_barrier_or(BARRIER_CONSUMERS, THREADS, last);
}

/* ---- Two parts of all rows ------------------------------------------------------------------- */

/* A part's sums in the order of the threads that have them: the vectors of a thread are so many
 * apart. They take no more room than a part in rows. */
enum {
    SUM_VECTORS = OUTPUTS / 4,
    ENDS_AT = SUM_VECTORS * VALUE_GROUPS * WARPGROUP, /* vectors */
    END_ROWS = VALUE_GROUPS * WARPGROUP / 4           /* vectors: lanes that have the same rows */
};
static_assert(4 * (ENDS_AT + END_ROWS) <= ROWS * ROW_FLOATS, "a part's room in the workspace");

FA_DEVICE float4 *find_own_sums(const fa_decode_params *d, const fa_work *w, int part, int half)
{
    return (float4 *)(void *)find_part(d, w, part) + half * SUM_VECTORS * WARPGROUP +
           thread_id() % WARPGROUP;
}

FA_DEVICE float4 *find_own_ends(const fa_decode_params *d, const fa_work *w, int part, int half)
{
    return (float4 *)(void *)find_part(d, w, part) + ENDS_AT +
           (half * WARPGROUP + thread_id() % WARPGROUP) / 4;
}

FA_DEVICE void leave_part(const fa_decode_params *d, const fa_work *w, int half, const float *out,
                          const row_ends *ends)
{
    float4 *const sums = find_own_sums(d, w, w->part, half);
#pragma unroll
    for (int i = 0; i < SUM_VECTORS; i++)
        sums[i * WARPGROUP] =
            make_float4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
    if (lane_id() % 4 == 0)
        *find_own_ends(d, w, w->part, half) =
            make_float4(ends->base[0], ends->sum[0], ends->base[1], ends->sum[1]);
}

/* x of part 0 plus y of part 1, as merge() adds up sources. */
FA_DEVICE float add_two(float x, float y, const float factor[2])
{
    return fmaf(factor[1], y, fmaf(factor[0], x, 0.0f));
}

/* Adds the other part, in the order of their numbers: results do not depend on which block is
 * later. */
FA_DEVICE void add_other_part(const fa_decode_params *d, const fa_work *w, int half, float *out,
                              row_ends *ends)
{
    enum { AT_A_TIME = 8 };
    const int other = w->part ^ 1;
    const float4 *const sums = find_own_sums(d, w, other, half);
    const float4 end = *find_own_ends(d, w, other, half);
    const float base[2] = {end.x, end.z}, sum[2] = {end.y, end.w};
    float factor[2][2]; /* of a row: of the parts' sums */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float top = fmaxf(ends->base[i], base[i]);
        const float own = ptx_ex2(ends->base[i] - top), others = ptx_ex2(base[i] - top);
        factor[i][0] = other == 0 ? others : own;
        factor[i][1] = other == 0 ? own : others;
        ends->base[i] = top;
        ends->sum[i] = fmaf(own, ends->sum[i], 0.0f) + fmaf(others, sum[i], 0.0f);
    }
#pragma unroll
    for (int first = 0; first < SUM_VECTORS; first += AT_A_TIME) {
        float4 x[AT_A_TIME];
#pragma unroll
        for (int i = 0; i < AT_A_TIME; i++) x[i] = sums[(first + i) * WARPGROUP];
#pragma unroll
        for (int i = 0; i < AT_A_TIME; i++) {
            const float all[] = {x[i].x, x[i].y, x[i].z, x[i].w};
            float *const to = out + 4 * (first + i);
#pragma unroll
            for (int n = 0; n < 4; n++)
                to[n] = other == 0 ? add_two(all[n], to[n], factor[n / 2])
                                   : add_two(to[n], all[n], factor[n / 2]);
        }
    }
}

/* By a consumer of values, if the work tile has two parts: the earlier one of two blocks leaves its
 * sums and returns false; the later one waits for them and adds them. A block that has come first
 * has only its stores before it, so the wait ends. */
FA_DEVICE bool takes_other_part(const fa_decode_params *d, const fa_work *w, int half, float *out,
                                row_ends *ends)
{
    enum { BOTH_CAME_AND_ONE_STORED = 3 };
    int32_t *const counter = find_counter(d, w, half);
    const bool counts = thread_id() % WARPGROUP == 0;
    bool later = false;
    if (counts) {
        later = ptx_counter_take(counter) > 0;
        if (later) {
            ptx_counter_wait(counter, BOTH_CAME_AND_ONE_STORED);
            *counter = 0;
        }
    }
    __syncwarp();
    if (ptx_named_barrier_or(BARRIER_OF_CONSUMER + CONSUMER_VALUES + half, WARPGROUP, later)) {
        add_other_part(d, w, half, out, ends);
        return true;
    }
    leave_part(d, w, half, out, ends);
    ptx_named_barrier_sync(BARRIER_OF_CONSUMER + CONSUMER_VALUES + half, WARPGROUP);
    if (counts) ptx_counter_add(counter);
    return false;
}

/* ---- Parts, and results in other rows, through shared memory --------------------------------- */

/* By a consumer of values: the ends of rows. factors: of the rows of results. */
FA_DEVICE void store_row_ends(const fa_decode_params *d, const fa_work *w, const row_ends *ends,
                              float *factors)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = row_of(0, half);
        const float base = ends->base[half], sum = ends->sum[half];
        if (lane_id() % 4 > 0 || r >= w->rows) continue;
        if (w->parts == 1) factors[r] = finish_row(d, w, r, base, sum);
        else
            *(float2 *)(find_part(d, w, w->part) + r * ROW_FLOATS + VALUE_DIM) =
                make_float2(base, sum);
    }
}

/* By the consumers of values: their half of the columns, to shared memory. */
FA_DEVICE void share_sums(const float *out, int half, float *sums)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float *row = sums + row_of(0, i) * ROW_FLOATS + half * GROUP_COLUMNS + lane_id() % 4 * 2;
#pragma unroll
        for (int j = 0; j < OUTPUTS / 4; j++)
            *(float2 *)(row + 8 * j) = make_float2(out[4 * j + 2 * i], out[4 * j + 2 * i + 1]);
    }
}

/* Zeros for a factor of 0, whatever x is. */
FA_DEVICE float4 scaled(float4 x, float factor)
{
    if (factor == 0.0f) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
}

/* A row of results, by a warp. */
FA_DEVICE void store_result(const fa_decode_params *d, const fa_work *w, int r, const float *sums,
                            float factor)
{
    const fa_attention_params *p = &d->attention;
    char *row = find_result(d, w, r);
    if (!row) return;
#pragma unroll 1
    for (int column = lane_id() * 4; column < VALUE_DIM; column += 32 * 4)
        fa_store4(row, &p->out, column, p->d_v, scaled(*(const float4 *)(sums + column), factor));
}

/* The same of a part. */
FA_DEVICE void store_part(const fa_decode_params *d, const fa_work *w, int r, const float *sums)
{
    float *row = find_part(d, w, w->part) + r * ROW_FLOATS;
#pragma unroll
    for (int column = lane_id() * 4; column < VALUE_DIM; column += 32 * 4)
        if (column < d->attention.d_v) *(float4 *)(row + column) = *(const float4 *)(sums + column);
}

/* By all consumers: from there to global memory, whole rows a warp. */
FA_DEVICE void store_sums(const fa_decode_params *d, const fa_work *w, const float *sums,
                          const float *factors)
{
#pragma unroll 1
    for (int r = warp_id(); r < w->rows; r += WARPS) {
        if (w->parts > 1) store_part(d, w, r, sums + r * ROW_FLOATS);
        else store_result(d, w, r, sums + r * ROW_FLOATS, factors[r]);
    }
}

#endif
