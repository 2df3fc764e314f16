/*
 * The fourth launch of backward_sm90, if blocks share keys: adds up the sums that they have left,
 * and stores the caller's rows of dK and dV. Bound by memory.
 */
#include "backward_sm90/backward_sm90.h"
#include "backward_sm90/whole_rows.cuh"
#include "common/key_tiles.cuh"
#include "common/rows.cuh"
#include "common/x2.cuh"
#include "ptx/grid.cuh"

enum {
    THREADS = FA_BACKWARD_SM90_PASS_THREADS,
    WARPGROUP = 128,
    ROWS = 64,
    AT_ONCE = 4 /* blocks of eight columns: 32 columns of FA_BACKWARD_SM90_KEY_SLICES */
};

/* The sums of all splits, of four blocks of columns. */
FA_DEVICE void add_splits(const float4 *from, int64_t step, int splits, float4 x[AT_ONCE])
{
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) x[n] = from[WARPGROUP * n];
#pragma unroll 4
    for (int i = 1; i < splits; i++) {
        from += step;
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const float4 y = from[WARPGROUP * n];
            x[n].x += y.x, x[n].y += y.y, x[n].z += y.z, x[n].w += y.w;
        }
    }
}

/* Columns 8j to 8j + 31 of one gradient, 64 rows for each warpgroup. sums: of the first split; step:
 * from one split to the next. */
FA_DEVICE void finish_rows(const fa_key_tile *k, const fa_kernel_view *view, const float *sums,
                           int64_t step, int splits, int dim, int columns, float scale, int first,
                           int j)
{
    const int thread = threadIdx.x % WARPGROUP;
    const float4 *from = (const float4 *)(const void *)(sums + first * dim) + thread;
    if (!view->data) return;
    float4 x[AT_ONCE];
    add_splits(from + WARPGROUP * j, step / 4, splits, x);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int i = first + thread / 32 * 16 + thread % 32 / 4 + 8 * r;
        char *row = i < k->count ? fa_view_row(view, k->block, k->row + i, k->head_kv) : NULL;
        uint32_t words[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++)
            words[n] = r ? fa_pack_x2(x[n].z * scale, x[n].w * scale)
                         : fa_pack_x2(x[n].x * scale, x[n].y * scale);
        store_words(view, row, columns, words, j);
    }
}

FA_KERNEL __launch_bounds__(THREADS)
    backward_sm90_finish_keys(const __grid_constant__ fa_backward_params p,
                              const __grid_constant__ fa_backward_sm90_params s)
{
    const int slices = FA_BACKWARD_SM90_KEY_SLICES(s.head_dim, s.value_dim),
              of_keys = s.head_dim / 32;
    const int64_t task = fa_divide(blockIdx.x, slices);
    const int slice = (int)(blockIdx.x - task * slices);
    ptx_wait_for_grids();
    ptx_let_next_grid_start();
    const fa_key_tile k = fa_find_key_tile(&p.a, task, s.keys);
    const int64_t room = FA_BACKWARD_SM90_KEY_SUMS(s.keys, s.head_dim, s.value_dim);
    const float *sums = s.key_sums + task * room;
    const float kept = p.a.dropout_threshold ? p.a.dropout_scale : 1.0f;
    const float unit = 1.0f / (float)(1 << FA_BACKWARD_SM90_WEIGHT_BITS(ELEMENT));
    for (int first = (int)threadIdx.x / WARPGROUP * ROWS; first < s.keys;
         first += THREADS / WARPGROUP * ROWS)
        if (slice < of_keys)
            finish_rows(&k, &p.dk, sums, p.a.tasks * room, s.splits, s.head_dim, p.a.d, p.a.scale,
                        first, slice * AT_ONCE);
        else
            finish_rows(&k, &p.dv, sums + (int64_t)s.keys * s.head_dim, p.a.tasks * room, s.splits,
                        s.value_dim, p.a.d_v, kept * unit, first, (slice - of_keys) * AT_ONCE);
}
