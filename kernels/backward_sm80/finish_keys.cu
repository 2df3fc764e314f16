/*
 * The last launch of backward_sm80, if blocks share keys: adds up the sums that they have left, in
 * the order of the splits, and stores the caller's rows of dK and dV. Bound by memory.
 */
#include "backward_sm80/backward_sm80.h"
#include "common/key_tiles.cuh"
#include "common/rows.cuh"

enum { THREADS = FA_BACKWARD_SM80_PASS_THREADS };

/* The sum of four adjacent elements. step: floats from a split to the next one. */
FA_DEVICE float4 add_splits(const float *from, int64_t step, int splits)
{
    float4 x = *(const float4 *)(const void *)from;
#pragma unroll 4
    for (int i = 1; i < splits; i++) {
        const float4 y = *(const float4 *)(const void *)(from + i * step);
        x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
    }
    return x;
}

/* The rows [first, end) of one gradient. sums: of the first split. */
FA_DEVICE void finish_rows(const fa_key_tile *k, const fa_kernel_view *view, const float *sums,
                           int64_t step, const fa_backward_sm80_params *s, int columns, int first,
                           int end)
{
    const int vectors = s->head_dim / 4, all = min(end, (int)k->count) * vectors;
    if (!view->data) return;
#pragma unroll 1
    for (int i = first * vectors + (int)threadIdx.x; i < all; i += THREADS) {
        const int row = i / vectors, column = 4 * (i - row * vectors);
        if (column >= columns) continue;
        fa_store4(fa_view_row(view, k->block, k->row + row, k->head_kv), view, column, columns,
                  add_splits(sums + 4 * i, step, s->splits));
    }
}

FA_KERNEL __launch_bounds__(THREADS)
    backward_sm80_finish_keys(const __grid_constant__ fa_backward_params p,
                              const __grid_constant__ fa_backward_sm80_params s)
{
    const int slices = FA_BACKWARD_SM80_KEY_SLICES, slice = (int)(blockIdx.x % slices);
    const int64_t task = blockIdx.x / slices;
    const int first = s.keys * slice / slices, end = s.keys * (slice + 1) / slices;
    const fa_key_tile k = fa_find_key_tile(&p.a, task, s.keys);
    const int64_t room = FA_BACKWARD_SM80_KEY_SUMS(s.keys, s.head_dim), step = p.a.tasks * room;
    const float *sums = s.key_sums + task * room;
    finish_rows(&k, &p.dk, sums, step, &s, p.a.d, first, end);
    finish_rows(&k, &p.dv, sums + s.keys * s.head_dim, step, &s, p.a.d_v, first, end);
}
