/*
 * The second launch after forward_tf32_sm90 or forward_f16x3_sm90 with split keys (split_rounds.h): merges the parts of each
 * row. A warp has a row, and a lane four columns at a time. A row that is not finite is computed again, key by key
 * (recompute.cuh): with all of its keys, because a part does not know the others.
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
    QUADS = VALUE_DIM / 128 /* of a lane */
};

/* Where the sums of a row are. */
typedef struct merged_row {
    int64_t slot_row; /* of its first part */
    int64_t apart;    /* rows from a part to the next one */
    int parts;
} merged_row;

/* 2^(base - top), if bases are exponents of 2. Bases are exact, and so is their difference if they are near each other. */
FA_DEVICE float part_factor(float base, float top, bool natural)
{
    if (base == NO_KEY_SEEN) return 0.0f;
    return ptx_ex2((base - top) * (natural ? FA_LOG2E : 1.0f));
}

FA_DEVICE float find_top(const fa_sm90_split *split, const merged_row *row)
{
    float top = NO_KEY_SEEN;
    for (int part = 0; part < row->parts; part++)
        top = fmaxf(top, split->sums[row->slot_row + part * row->apart].base);
    return top;
}

/* The sums of all parts. out: the lane's columns. Returns the sum of weights. */
FA_DEVICE float add_all_parts(const fa_sm90_split *split, const merged_row *row, float top,
                              float out[QUADS][4])
{
    const bool natural = split->first_tile[1];
    const int lane = (int)threadIdx.x % 32;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < QUADS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[n][i] = 0.0f;
    for (int part = 0; part < row->parts; part++) {
        const int64_t at = row->slot_row + part * row->apart;
        const fa_sm90_row_sum s = split->sums[at];
        if (s.base == NO_KEY_SEEN && s.sum == s.sum) continue; /* its outputs mean nothing */
        const float factor = s.base == NO_KEY_SEEN ? 1.0f : part_factor(s.base, top, natural);
        const float *from = split->out + at * split->value_dim;
        sum = fmaf(factor, s.sum, sum);
#pragma unroll
        for (int n = 0; n < QUADS; n++) {
            const int c = 4 * (lane + 32 * n);
            if (c >= split->value_dim) continue;
            const float4 x = *(const float4 *)(from + c);
            out[n][0] = fmaf(factor, x.x, out[n][0]);
            out[n][1] = fmaf(factor, x.y, out[n][1]);
            out[n][2] = fmaf(factor, x.z, out[n][2]);
            out[n][3] = fmaf(factor, x.w, out[n][3]);
        }
    }
    return sum;
}

/* Stores the lane's columns. Returns whether all of the row's are finite. */
FA_DEVICE bool store_merged(const fa_attention_params *p, char *to, float out[QUADS][4],
                            float factor)
{
    float seen = 0;
#pragma unroll
    for (int n = 0; n < QUADS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int c = 4 * ((int)threadIdx.x % 32 + 32 * n) + i;
            const float x = factor == 0.0f ? 0.0f : out[n][i] * factor;
            if (c >= p->d_v) continue;
            ((float *)to)[c] = x;
            seen += x * 0.0f;
        }
    return !__any_sync(0xffffffff, seen != 0.0f);
}

/* The parameters are those of the first launch; of the second one, only `split`, `reach` and `tasks` are read: the keys of a
 * part. */
FA_KERNEL __launch_bounds__(MERGE_THREADS)
    forward_sm90_merge_float32(const __grid_constant__ fa_attention_params p,
                               const __grid_constant__ fa_sm90_params s)
{
    const fa_sm90_split *split = &s.split;
    const int64_t n = (int64_t)blockIdx.x * MERGE_WARPS + threadIdx.x / 32,
                  cut = fa_divide(n, split->queries);
    const int32_t tiles = fa_count_cut_tiles(split), whole = split->first_task[0];
    float out[QUADS][4], lse;
    const int64_t task = fa_split_tile(split, whole + (cut < tiles ? (int32_t)cut : 0));
    const fa_tile t = fa_find_tile(&p, task, split->queries);
    const int64_t query = t.first + n - cut * split->queries,
                  last = fa_min64(t.first + split->queries, t.n_q) - 1;
    const int64_t keys = fa_min64(t.n_k, (int64_t)s.reach.hi + last);
    const merged_row row = {n, (int64_t)tiles * split->queries,
                            fa_count_split_parts(split, keys, (int32_t)s.tasks)};
    ptx_wait_for_grids();
    ptx_let_next_grid_start();
    if (cut >= tiles || query >= t.n_q) return;
    const float top = find_top(split, &row), sum = add_all_parts(split, &row, top, out);
    float factor = finish_sum(top, sum, p.sinks ? p.sinks[t.head] : -INFINITY,
                              split->first_tile[1], &lse);
    if (p.dropout_threshold) factor *= p.dropout_scale;
    char *to = fa_view_row(&p.out, t.block_q, t.start_q + query, t.head);
    const bool fine = store_merged(&p, to, out, factor);
    if (!fine) {
        __syncwarp();
        lse = recompute_row(&p, &t, query, to);
    }
    if (p.lse && threadIdx.x % 32 == 0) p.lse[fa_row_index(&p, &t, query)] = lse;
}
