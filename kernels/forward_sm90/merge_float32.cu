/*
 * The second launch after forward_tf32_sm90 or forward_f16x3_sm90 with split keys (split_rounds.h): merges the parts of each
 * row. A warp has a row, and a lane four columns at a time. A row that is not finite is computed again, key by key
 * (recompute_row.cuh): with all of its keys, because a part does not know the others.
 */
#define VALUE_DIM 512 /* at most */
#define CLUSTER 1
#define FIRST_COLUMN 0

#include "common/dialect.h"
#include "common/element.h"
#include "forward_sm90/finish.cuh"
#include "forward_sm90/forward_sm90.h"
#include "forward_sm90/split_rounds.h"
#include "common/sequence.cuh"
#include "forward_sm90/recompute_row.cuh"
#include "ptx/grid.cuh"

enum {
    MERGE_THREADS = FA_SM90_MERGE_THREADS,
    MERGE_WARPS = MERGE_THREADS / 32,
    MERGE_BLOCKS = 5,        /* of a multiprocessor: most of the time is latency */
    QUADS = VALUE_DIM / 128, /* of a lane */
    AHEAD = 2                /* parts whose columns are loaded before the first is used */
};
static_assert(FA_SM90_PARTS <= 32, "a lane has the sum of one part");

/* Where the sums of a row are. */
typedef struct merged_row {
    int64_t slot_row; /* of its first part */
    int64_t apart;    /* rows from a part to the next one */
    int parts;
} merged_row;

/* What all lanes know of a row: the largest base, and the sum of weights relative to it. factor: of the outputs of part `lane`; +0:
 * they mean nothing. */
typedef struct merged_sums {
    float top, sum, factor;
} merged_sums;

/* Each lane loads the sum of one part. Bases are exact, and so is their difference where it matters. natural: they are logits. */
FA_DEVICE merged_sums merge_sums(const fa_sm90_split *split, const merged_row *row, bool natural)
{
    const int lane = (int)threadIdx.x % 32;
    fa_sm90_row_sum own = {NO_KEY_SEEN, 0.0f};
    merged_sums all;
    if (lane < row->parts) own = split->sums[row->slot_row + lane * row->apart];
    all.top = fa_warp_max(own.base);
    const bool nothing = own.base == NO_KEY_SEEN && own.sum == own.sum;
    all.factor = nothing ? 0.0f : ptx_ex2((own.base - all.top) * (natural ? FA_LOG2E : 1.0f));
    all.sum = fa_warp_sum(nothing ? 0.0f : all.factor * own.sum);
    if (!nothing && all.factor == 0.0f)
        all.factor = -0.0f; /* it adds nothing, but its outputs may be NaN, which must be seen */
    return all;
}

/* The columns of `ahead` parts from this one on. */
FA_DEVICE void add_parts(const fa_sm90_split *split, const merged_row *row, float own_factor,
                         int first, float out[QUADS][4])
{
    float4 x[AHEAD][QUADS];
    float factor[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        factor[i] = first + i < row->parts ? __shfl_sync(0xffffffff, own_factor, first + i) : 0.0f;
        const float *from =
            split->out + (row->slot_row + (first + i) * row->apart) * split->value_dim;
#pragma unroll
        for (int n = 0; n < QUADS; n++) {
            const int c = 4 * ((int)threadIdx.x % 32 + 32 * n);
            x[i][n] = make_float4(0, 0, 0, 0);
            if (__float_as_int(factor[i]) != 0 && c < split->value_dim)
                x[i][n] = *(const float4 *)(from + c);
        }
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
#pragma unroll
        for (int n = 0; n < QUADS; n++) {
            out[n][0] = fmaf(factor[i], x[i][n].x, out[n][0]);
            out[n][1] = fmaf(factor[i], x[i][n].y, out[n][1]);
            out[n][2] = fmaf(factor[i], x[i][n].z, out[n][2]);
            out[n][3] = fmaf(factor[i], x[i][n].w, out[n][3]);
        }
}

/* Stores the lane's columns. Returns whether all of the row's are finite. */
FA_DEVICE bool store_merged(const fa_attention_params *p, char *to, float out[QUADS][4],
                            float factor)
{
    float seen = 0;
#pragma unroll
    for (int n = 0; n < QUADS; n++) {
        const int c = 4 * ((int)threadIdx.x % 32 + 32 * n);
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = factor == 0.0f ? 0.0f : out[n][i] * factor;
            if (c + i < p->d_v) seen += x[i] * 0.0f;
        }
        if (c + 3 < p->d_v && p->out.vector >= 4) {
            *(float4 *)((float *)to + c) = make_float4(x[0], x[1], x[2], x[3]);
            continue;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (c + i < p->d_v) ((float *)to)[c + i] = x[i];
    }
    return !__any_sync(0xffffffff, seen != 0.0f);
}

/* The parameters are those of the first launch; of the second one, only `split`, `reach` and `tasks` are read: the keys of a
 * part. */
FA_KERNEL __launch_bounds__(MERGE_THREADS, MERGE_BLOCKS)
    forward_sm90_merge_float32(const __grid_constant__ fa_attention_params p,
                               const __grid_constant__ fa_sm90_params s)
{
    const fa_sm90_split *split = &s.split;
    const uint32_t n = blockIdx.x * MERGE_WARPS + threadIdx.x / 32,
                   cut = n / (uint32_t)split->queries;
    const int32_t tiles = fa_count_cut_tiles(split), whole = split->first_task[0];
    const bool natural = split->first_tile[1];
    float out[QUADS][4], lse;
    const bool exists = cut < (uint32_t)tiles;
    const fa_tile t =
        fa_find_tile(&p, fa_split_tile(split, whole + (exists ? (int32_t)cut : 0)), split->queries);
    const int64_t query = t.first + (n - cut * (uint32_t)split->queries),
                  last = fa_min64(t.first + split->queries, t.n_q) - 1;
    const int64_t keys = fa_min64(t.n_k, (int64_t)s.reach.hi + last);
    const merged_row row = {n, (int64_t)tiles * split->queries,
                            fa_count_split_parts(split, keys, (int32_t)s.tasks)};
    ptx_wait_for_grids();
    ptx_let_next_grid_start();
    if (!exists || query >= t.n_q) return;
    const merged_sums sums = merge_sums(split, &row, natural);
#pragma unroll
    for (int i = 0; i < 4 * QUADS; i++) out[i / 4][i % 4] = 0.0f;
    for (int part = 0; part < row.parts; part += AHEAD)
        add_parts(split, &row, sums.factor, part, out);
    float factor =
        finish_sum(sums.top, sums.sum, p.sinks ? p.sinks[t.head] : -INFINITY, natural, &lse);
    if (p.dropout_threshold) factor *= p.dropout_scale;
    char *to = fa_view_row(&p.out, t.block_q, t.start_q + query, t.head);
    if (!store_merged(&p, to, out, factor) || !(sums.sum < INFINITY)) {
        __syncwarp();
        lse = recompute_row(&p, &t, query, to);
    }
    if (p.lse && threadIdx.x % 32 == 0) p.lse[fa_row_index(&p, &t, query)] = lse;
}
