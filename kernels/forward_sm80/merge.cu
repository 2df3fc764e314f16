/*
 * The second launch after forward_sm80_split: merges the parts of each row (split.h, forward_sm90/merge_parts.cuh).
 *
 * A thread computes eight columns of a row, of all parts, or if there are few rows of every second or fourth one: then
 * lanes next to each other add up what they have. It issues the loads of several parts before it uses any of them: the loads
 * mostly hit the second-level cache, and their latency is most of the time. Each query tile has as many blocks as its rows
 * could need.
 *
 * Compile-time parameter: ELEMENT, of the outputs.
 */
#include "common/sequence.cuh"
#include "forward_sm80/split.h"
#include "forward_sm90/merge_parts.cuh"

enum { THREADS = FA_SM80_MERGE_THREADS, AHEAD = 8 /* parts that are loaded at once */ };

/* A thread's columns of a row, and where their sums are. */
typedef struct row_columns {
    merged_columns to;
    int64_t slot_row; /* of the first part, among the rows of all slots */
} row_columns;

/* False if the thread has no row. */
FA_DEVICE bool find_columns(const fa_attention_params *p, const fa_sm80_split *s, row_columns *at)
{
    const uint32_t groups = ((uint32_t)p->d_v + COLUMNS - 1) / COLUMNS;
    const uint32_t task = blockIdx.x / (uint32_t)s->tile_blocks;
    const uint32_t block = blockIdx.x - task * (uint32_t)s->tile_blocks;
    const uint32_t n = (block * THREADS + threadIdx.x) >> s->lane_bits;
    const uint32_t row = n / groups, head = row & ((1u << s->group_bits) - 1);
    const fa_tile t = fa_find_tile(p, task, s->queries >> s->group_bits);
    const int64_t query = t.first + (row >> s->group_bits);
    at->to.batch = (int)t.block_q;
    at->to.head = (int)((t.head << s->group_bits) + head);
    at->to.row = (int)(t.start_q + query);
    at->to.column = (int)((n - row * groups) * COLUMNS);
    at->to.no_query = query >= t.n_q;
    at->to.lse = ((t.block_q * p->heads_q << s->group_bits) + at->to.head) * p->rows_q + at->to.row;
    at->slot_row = (int64_t)task * s->parts * s->queries + row;
    return row < (uint32_t)s->queries && query < t.room_q;
}

/* The columns and the sums of AHEAD parts, this one and those `step` behind the one before. */
FA_DEVICE void load_parts(const fa_sm80_split *s, const row_columns *at, int first, int step,
                          float4 *x, fa_sm90_row_sum *sums)
{
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        const int part = first + i * step;
        sums[i].base = NO_KEY_SEEN, sums[i].sum = 0.0f;
        if (part >= s->parts) continue;
        const int64_t row = at->slot_row + (int64_t)part * s->queries;
        const float4 *from = (const float4 *)(s->out + (row * s->value_dim + at->to.column));
        x[2 * i] = from[0];
        x[2 * i + 1] = from[1];
        sums[i] = s->sums[row];
    }
}

/* Adds up what 2^bits lanes next to each other have of the same columns. */
FA_DEVICE void add_lanes(fa_sm90_row_sum *all, float *out, int bits)
{
    float base = all->base;
    for (int i = 0; i < bits; i++) base = fmaxf(base, __shfl_xor_sync(0xffffffffu, base, 1 << i));
    const float factor = ptx_ex2(all->base - base);
    all->base = base;
    all->sum *= factor;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) out[c] *= factor;
    for (int i = 0; i < bits; i++) {
        all->sum += __shfl_xor_sync(0xffffffffu, all->sum, 1 << i);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) out[c] += __shfl_xor_sync(0xffffffffu, out[c], 1 << i);
    }
}

FA_KERNEL __launch_bounds__(THREADS)
    forward_sm80_merge(const __grid_constant__ fa_sm80_split_params s)
{
    const fa_attention_params *p = &s.attention;
    fa_sm90_row_sum all = {NO_KEY_SEEN, 0.0f}, sums[AHEAD];
    float4 x[2 * AHEAD];
    float out[COLUMNS] = {0.0f};
    row_columns at;
    const int lanes = 1 << s.split.lane_bits, lane = (int)threadIdx.x & (lanes - 1);
    const bool has_row = find_columns(p, &s.split, &at);
    const int parts = has_row && !at.to.no_query ? s.split.parts : 0;
    for (int first = lane; first < parts; first += AHEAD * lanes) {
        load_parts(&s.split, &at, first, lanes, x, sums);
        add_parts(&all, out, sums, AHEAD, x);
    }
    if (lanes > 1) add_lanes(&all, out, s.split.lane_bits);
    if (has_row && lane == 0) finish_columns(p, &at.to, &all, out);
}
