/*
 * The second launch after forward_sm90_split: merges the parts of each row (split.h, merge_parts.cuh).
 *
 * A thread computes eight columns of a row. It issues the loads of several parts before it uses any of them: the
 * loads mostly hit the second-level cache, and their latency is most of the time. With sections it has several rows, two at a
 * time: a block that has one begins too late, if the multiprocessors have no room for all blocks.
 *
 * Compile-time parameters: ELEMENT, of the outputs; OWN_LENGTHS, 1 if there are sections: may be left out.
 */
#ifndef OWN_LENGTHS
#define OWN_LENGTHS 0
#endif

#include "forward_sm90/forward_sm90.h"
#include "forward_sm90/merge_parts.cuh"
#include "ptx/grid.cuh"

enum {
    THREADS = FA_SM90_MERGE_THREADS,
    MOST_TOGETHER = OWN_LENGTHS ? 2 : 1, /* rows */
    MOST_AHEAD = OWN_LENGTHS ? 6 : 4     /* parts of a row */
};

/* A thread's columns of a row, and where their sums are. */
typedef struct row_columns {
    merged_columns to;
    bool exists; /* not one that is left over behind the last query of a group of heads */
    int parts;   /* of the row's query tile; 0: there is nothing to merge */
    int first_row; /* the row's number among the rows of the slots; with sections: among those of its slot */
#if OWN_LENGTHS
    int second; /* the section that has the second part */
#endif
} row_columns;

#if OWN_LENGTHS

/* A section, a share of the rows that are merged for it, and the thread among those of a block. */
typedef struct section_share {
    int section, share, row, column;
} section_share;

FA_DEVICE section_share find_share(const fa_attention_params *p)
{
    const uint32_t groups = ((uint32_t)p->d_v + COLUMNS - 1) / COLUMNS;
    const uint32_t section = blockIdx.x / FA_SM90_MERGE_SHARES, row = threadIdx.x / groups;
    section_share at;
    at.section = (int)section;
    at.share = (int)(blockIdx.x - section * FA_SM90_MERGE_SHARES);
    at.column = (int)(fa_opaque(threadIdx.x - row * groups) * COLUMNS);
    at.row = (int)fa_opaque(row);
    return at;
}

/* Row i of the query tile, by the note about it. */
FA_DEVICE row_columns locate_row(const fa_attention_params *p, const fa_sm90_split *split,
                                 const fa_sm90_cut *cut, int column, int i)
{
    const fa_sm90_box box = split->group.box;
    const int row = i % FA_SM90_BOX_ROWS, own = fa_sm90_query_in_box(box, row),
              head = row - own * fa_sm90_box_heads(box),
              query = i / FA_SM90_BOX_ROWS * fa_sm90_box_queries(box) + own;
    row_columns at;
    at.exists = own < fa_sm90_box_queries(box);
    at.second = cut->second;
    at.to.column = column;
    at.to.batch = cut->block;
    at.to.head = cut->head + head;
    at.to.row = cut->row + query;
    at.to.lse = cut->lse + head * p->rows_q + query;
    at.to.no_query = i >= cut->queries || !at.exists;
    at.parts = at.to.no_query ? 0 : cut->parts;
    at.first_row = i;
    return at;
}

/* The row's number among the rows of all slots. */
FA_DEVICE int find_slot_row(const fa_sm90_split *split, const row_columns *at, int part)
{
    const int slot = 2 * (at->second - 1 + part) + (part == 0);
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
    at.to.column = (int)(n - row * groups) * COLUMNS;
    at.to.lse = row;
    at.to.row = (int)(row - outer * rows);
    at.to.batch = (int)fa_opaque(outer / heads);
    at.to.head = (int)(outer - (uint32_t)at.to.batch * heads);
    const int tile = at.to.row / split->queries;
    at.exists = true;
    at.to.no_query = false;
    at.parts = fa_sm90_count_parts(split, tile);
    const int32_t task = fa_sm90_task_of(split, 0, tile, (int32_t)outer);
    at.first_row = (int)fa_opaque((uint32_t)((task - tile) * split->queries + at.to.row));
    return at;
}

/* The row's number among the rows of all slots. */
FA_DEVICE int find_slot_row(const fa_sm90_split *split, const row_columns *at, int part)
{
    return split->first_task[part] * split->queries + at->first_row;
}

#endif

/* The columns and the sums of `ahead` parts from this one on. */
FA_DEVICE void load_parts(const fa_sm90_split *split, const row_columns *at, int first, int ahead,
                          float4 *x, fa_sm90_row_sum *sums)
{
#pragma unroll
    for (int i = 0; i < ahead; i++) {
        sums[i].base = NO_KEY_SEEN, sums[i].sum = 0.0f;
        if (first + i >= at->parts) continue;
        const int64_t row = find_slot_row(split, at, first + i);
        const float4 *from =
            (const float4 *)(split->out + (row * split->value_dim + at->to.column));
        x[2 * i] = from[0];
        x[2 * i + 1] = from[1];
        sums[i] = split->sums[row];
    }
}

/* So many rows of a query tile, with so many parts of each at a time; both are constants. */
FA_DEVICE void merge_columns(const fa_attention_params *p, const fa_sm90_split *split,
                             const row_columns *at, int together, int ahead)
{
    fa_sm90_row_sum all[MOST_TOGETHER], sums[MOST_TOGETHER][MOST_AHEAD];
    float4 x[MOST_TOGETHER][2 * MOST_AHEAD];
    float out[MOST_TOGETHER][COLUMNS];
#pragma unroll
    for (int r = 0; r < together; r++) {
        all[r].base = NO_KEY_SEEN, all[r].sum = 0.0f;
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) out[r][i] = 0.0f;
    }
    const int parts = max(at[0].parts, at[together - 1].parts);
    for (int first = 0; first < parts; first += ahead) {
#pragma unroll
        for (int r = 0; r < together; r++) load_parts(split, &at[r], first, ahead, x[r], sums[r]);
#pragma unroll
        for (int r = 0; r < together; r++) add_parts(&all[r], out[r], sums[r], ahead, x[r]);
    }
#pragma unroll
    for (int r = 0; r < together; r++)
        if (at[r].exists) finish_columns(p, &at[r].to, &all[r], out[r]);
}

#if OWN_LENGTHS

/* The rows of the block. With two parts a thread merges two rows at a time. Rows without a query come behind those with
 * one. */
FA_DEVICE void merge_rows(const fa_attention_params *p, const fa_sm90_split *split,
                          const section_share *own)
{
    const fa_sm90_cut cut = split->cuts[own->section];
    const int step = FA_SM90_MERGE_ROWS(p->d_v), rows = cut.end - cut.first;
    if (cut.parts == 0 || own->row >= step) return;
    const int end = cut.first + rows * (own->share + 1) / FA_SM90_MERGE_SHARES;
    int i = cut.first + rows * own->share / FA_SM90_MERGE_SHARES + own->row;
    if (cut.parts == 2) {
        for (; i < end; i += 2 * step) {
            row_columns at[2] = {locate_row(p, split, &cut, own->column, i),
                                 locate_row(p, split, &cut, own->column, min(i + step, end - 1))};
            if (i + step >= end) at[1].exists = false;
            merge_columns(p, split, at, 2, 2);
        }
        return;
    }
    for (; i < end; i += step) {
        const row_columns at = locate_row(p, split, &cut, own->column, i);
        merge_columns(p, split, &at, 1, MOST_AHEAD);
    }
}

#endif

/* The parameters are those of the first launch; of the second one, only `split` is read. */
FA_KERNEL __launch_bounds__(THREADS, OWN_LENGTHS ? FA_SM90_MERGE_BLOCKS : 1)
    forward_sm90_merge(const __grid_constant__ fa_attention_params p,
                       const __grid_constant__ fa_sm90_params s)
{
#if OWN_LENGTHS
    const section_share own = find_share(&p);
#else
    const row_columns at = find_columns(&p, &s.split);
#endif
    ptx_wait_for_grids();
    ptx_let_next_grid_start();
#if OWN_LENGTHS
    merge_rows(&p, &s.split, &own);
#else
    if (at.to.batch < p.batch) merge_columns(&p, &s.split, &at, 1, MOST_AHEAD);
#endif
}
