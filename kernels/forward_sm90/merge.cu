/*
 * The second launch after forward_sm90_split: merges the parts of each row (split.h). A part's sums have a base of
 * their own, so they are multiplied by 2^(base - top), where top is the largest base. This is exact where bases are
 * large, while weights from rounded log-sum-exps would not be.
 *
 * A thread computes eight columns of a row. It issues the loads of up to AHEAD parts before it uses any of them: the
 * loads mostly hit the second-level cache, and their latency is most of the time.
 *
 * Compile-time parameters: ELEMENT, of the outputs; OWN_LENGTHS, 1 if there are sections: may be left out.
 */
#ifndef OWN_LENGTHS
#define OWN_LENGTHS 0
#endif

#include "common/rows.cuh"
#include "common/x2.cuh"
#include "forward_sm90/finish.cuh"
#include "forward_sm90/forward_sm90.h"
#include "ptx/convert.cuh"
#include "ptx/grid.cuh"
#include "ptx/store.cuh"

enum {
    THREADS = FA_SM90_MERGE_THREADS,
    COLUMNS = FA_SM90_MERGE_COLUMNS,
    AHEAD = 4 /* parts */
};

/* Where a thread's columns of a row are. */
typedef struct row_columns {
    int batch, head, row, column;
    bool no_query; /* the outputs are zeros: it is behind the last query of its sequence */
    int parts;     /* of the row's query tile; 0: there is nothing to merge */
    int first_row; /* the row's number among the rows of the slots; with sections: among those of its slot */
    int64_t lse; /* among the rows of all heads */
#if OWN_LENGTHS
    int section; /* that has the second part */
#endif
} row_columns;

#if OWN_LENGTHS

/* The block's rows are those of a query tile whose second part a section has. A thread without a row gets one behind the query
 * tile. */
FA_DEVICE row_columns find_columns(const fa_attention_params *p, const fa_sm90_split *split)
{
    const uint32_t groups = ((uint32_t)p->d_v + COLUMNS - 1) / COLUMNS,
                   rows = FA_SM90_MERGE_ROWS((uint32_t)p->d_v);
    const uint32_t queries = (uint32_t)split->queries, blocks = (queries + rows - 1) / rows;
    const uint32_t section = blockIdx.x / blocks, own = threadIdx.x / groups;
    const uint32_t row = own < rows ? (blockIdx.x - section * blocks) * rows + own : queries;
    row_columns at;
    at.section = (int)fa_opaque(section);
    at.column = (int)(fa_opaque(threadIdx.x - own * groups) * COLUMNS);
    at.row = (int)fa_opaque(row);
    return at;
}

/* Finds the row by the section's note. False if there is none. */
FA_DEVICE bool locate_row(const fa_attention_params *p, const fa_sm90_split *split, row_columns *at)
{
    const fa_sm90_cut cut = split->cuts[at->section];
    const int i = at->row, query = i >> split->group_bits, head = i - (query << split->group_bits);
    if (cut.parts == 0 || i >= cut.rows) return false;
    at->batch = cut.block;
    at->head = cut.head + head;
    at->row = cut.row + query;
    at->lse = cut.lse + head * p->rows_q + query;
    at->no_query = i >= cut.queries;
    at->parts = at->no_query ? 0 : cut.parts;
    at->first_row = i;
    return true;
}

/* The row's number among the rows of all slots. */
FA_DEVICE int find_slot_row(const fa_sm90_split *split, const row_columns *at, int part)
{
    const int slot = 2 * (at->section - 1 + part) + (part == 0);
    return slot * split->queries + at->first_row;
}

#else

/* Divisions are opaque, so that they come before the wait for the first launch, not where their results are used. */
FA_DEVICE row_columns find_columns(const fa_attention_params *p, const fa_sm90_split *split)
{
    const uint32_t n = blockIdx.x * THREADS + threadIdx.x, rows = (uint32_t)p->rows_q;
    const uint32_t groups = ((uint32_t)p->d_v + COLUMNS - 1) / COLUMNS, row = n / groups;
    const uint32_t heads = (uint32_t)p->heads_q, outer = row / rows;
    row_columns at;
    at.column = (int)(n - row * groups) * COLUMNS;
    at.lse = row;
    at.row = (int)(row - outer * rows);
    at.batch = (int)fa_opaque(outer / heads);
    at.head = (int)(outer - (uint32_t)at.batch * heads);
    const int tile = at.row / split->queries;
    at.no_query = false;
    at.parts = fa_sm90_count_parts(split, tile);
    const int32_t task = fa_sm90_task_of(split, 0, tile, (int32_t)outer);
    at.first_row = (int)fa_opaque((uint32_t)((task - tile) * split->queries + at.row));
    return at;
}

/* The row's number among the rows of all slots. */
FA_DEVICE int find_slot_row(const fa_sm90_split *split, const row_columns *at, int part)
{
    return split->first_task[part] * split->queries + at->first_row;
}

#endif

/* The columns and the sums of AHEAD parts from this one on. */
FA_DEVICE void load_parts(const fa_sm90_split *split, const row_columns *at, int first, float4 *x,
                          fa_sm90_row_sum *sums)
{
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        sums[i].base = NO_KEY_SEEN, sums[i].sum = 0.0f;
        if (first + i >= at->parts) continue;
        const int64_t row = find_slot_row(split, at, first + i);
        const float4 *from = (const float4 *)(split->out + (row * split->value_dim + at->column));
        x[2 * i] = from[0];
        x[2 * i + 1] = from[1];
        sums[i] = split->sums[row];
    }
}

FA_DEVICE void add_part(float *out, float factor, const float4 *x)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        out[4 * i] = fmaf(factor, x[i].x, out[4 * i]);
        out[4 * i + 1] = fmaf(factor, x[i].y, out[4 * i + 1]);
        out[4 * i + 2] = fmaf(factor, x[i].z, out[4 * i + 2]);
        out[4 * i + 3] = fmaf(factor, x[i].w, out[4 * i + 3]);
    }
}

/* Whether a row sees no key of the part: its outputs are not used. */
FA_DEVICE bool sees_nothing(const fa_sm90_row_sum *s)
{
    return s->base == NO_KEY_SEEN && s->sum == s->sum;
}

/* Adds AHEAD parts to those before: outputs and sums are relative to the largest base so far. */
FA_DEVICE void add_parts(fa_sm90_row_sum *all, float *out, const fa_sm90_row_sum *parts,
                         const float4 *x)
{
    float base = all->base;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) base = fmaxf(base, parts[i].base);
    const float before = ptx_ex2(all->base - base);
    all->sum *= before;
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) out[i] *= before;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        if (sees_nothing(&parts[i])) continue;
        const float factor = ptx_ex2(parts[i].base - base);
        all->sum = fmaf(factor, parts[i].sum, all->sum);
        add_part(out, factor, x + 2 * i);
    }
    all->base = base;
}

FA_DEVICE void store_columns(const fa_attention_params *p, const row_columns *at, const float *out,
                             float factor)
{
    char *row = fa_view_row(&p->out, at->batch, at->row, at->head);
    uint32_t words[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) /* a factor of 0 gives 0, even for NaN */
        words[i] = factor == 0.0f ? 0 : fa_pack_x2(out[2 * i] * factor, out[2 * i + 1] * factor);
    if (p->out.vector == COLUMNS) {
        ptx_store_global_16(row + 2 * at->column,
                            make_uint4(words[0], words[1], words[2], words[3]));
        return;
    }
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
        if (at->column + i < p->d_v)
            ((uint16_t *)row)[at->column + i] = (uint16_t)(words[i / 2] >> 16 * (i % 2));
}

FA_DEVICE void merge_columns(const fa_attention_params *p, const fa_sm90_split *split,
                             const row_columns *at)
{
    fa_sm90_row_sum all = {NO_KEY_SEEN, 0.0f}, sums[AHEAD];
    float4 x[2 * AHEAD];
    float out[COLUMNS] = {0}, lse;
    const float sink = p->sinks ? p->sinks[at->head] : -INFINITY;
    for (int first = 0; first < at->parts; first += AHEAD) {
        load_parts(split, at, first, x, sums);
        add_parts(&all, out, sums, x);
    }
    float factor = finish_sum(all.base, all.sum, sink, false, &lse);
    if (at->no_query) factor = 0.0f, lse = -INFINITY;
    store_columns(p, at, out, factor);
    if (p->lse && at->column == 0) p->lse[at->lse] = lse;
}

/* The parameters are those of the first launch; of the second one, only `split` is read. */
FA_KERNEL __launch_bounds__(THREADS, OWN_LENGTHS ? FA_SM90_MERGE_BLOCKS : 1)
    forward_sm90_merge(const __grid_constant__ fa_attention_params p,
                       const __grid_constant__ fa_sm90_params s)
{
    row_columns at = find_columns(&p, &s.split);
    ptx_wait_for_grids();
    ptx_let_next_grid_start();
#if OWN_LENGTHS
    if (locate_row(&p, &s.split, &at)) merge_columns(&p, &s.split, &at);
#else
    if (at.batch < p.batch) merge_columns(&p, &s.split, &at);
#endif
}
