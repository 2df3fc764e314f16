/*
 * The last launch of backward_sm90: multiplies the sums of dQ by the scale and stores them in the
 * caller's rows. Bound by memory.
 */
#include "backward_sm90/backward_sm90.h"
#include "backward_sm90/whole_rows.cuh"
#include "common/rows.cuh"
#include "common/sequence.cuh"
#include "common/x2.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/grid.cuh"

#define QUERIES FA_BACKWARD_SM90_QUERIES

enum {
    THREADS = FA_BACKWARD_SM90_PASS_THREADS,
    GROUPS = THREADS / 128, /* that share the columns */
    NUM_BLOCKS = HEAD_DIM / 8,
    SUM_VECTORS = FA_BACKWARD_SM90_SUM_BYTES(HEAD_DIM) / 16
};

/* If no block has had a share, the sums have not been stored: they count as 0. */
FA_DEVICE bool has_no_share(const fa_backward_sm90_params *s, const fa_tile *t, int64_t number)
{
    if (!s->first_stored) return false;
    const int64_t after = s->first_ahead ? (t->n_q - t->first - 1) / QUERIES : 0; /* query tiles */
    return s->semaphores[(number + after) * FA_BACKWARD_SM90_SEMAPHORES] <= after;
}

#if HEAD_DIM == 64

/* Stores eight queries of a warp, whose sums are transposed: x[w] has four sums of a lane, columns
 * 16w + lane / 4 + {0, 8} of queries 2 (lane % 4) + {0, 1}. */
FA_DEVICE void store_transposed(const fa_backward_params *p, const fa_tile *tile, bool none,
                                const float4 x[HEAD_DIM / 16])
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t i = tile->first + 8 * warp + lane / 4;
    const float scale = p->a.scale;
    uint32_t words[HEAD_DIM / 8];
    char *row =
        i < tile->room_q ? fa_view_row(&p->dq, tile->block_q, tile->start_q + i, tile->head) : NULL;
#pragma unroll
    for (int w = 0; w < HEAD_DIM / 16; w++) {
        words[2 * w] = ptx_transpose_matrix(fa_pack_x2(x[w].x * scale, x[w].y * scale));
        words[2 * w + 1] = ptx_transpose_matrix(fa_pack_x2(x[w].z * scale, x[w].w * scale));
    }
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++)
        if (i >= tile->n_q || none) words[n] = 0;
    store_words(&p->dq, row, p->a.d, words, 0);
    store_words(&p->dq, row, p->a.d, words + 4, 4);
}

#endif

FA_KERNEL __launch_bounds__(THREADS)
    backward_sm90_finish(const __grid_constant__ fa_backward_params p,
                         const __grid_constant__ fa_backward_sm90_params s)
{
    __shared__ fa_tile tile;
    __shared__ bool none;
    const int64_t task = p.a.tasks - 1 - blockIdx.x, outer = fa_divide(task, s.q_tiles);
    const int64_t number = outer * s.q_tiles + s.q_tiles - 1 - (task - outer * s.q_tiles);
    const int thread = threadIdx.x % 128, group = threadIdx.x / 128;
    const float4 *sums = (const float4 *)s.sums + number * SUM_VECTORS + thread;
    float4 x[NUM_BLOCKS / GROUPS];
    const bool reads = fa_reads_lengths(&p.a);
    if (threadIdx.x == 0 && !reads) tile = fa_find_tile(&p.a, task, QUERIES);
    ptx_wait_for_grids();
    ptx_let_next_grid_start();
#pragma unroll
    for (int j = 0; j < NUM_BLOCKS / GROUPS; j++) {
        const int block = group * (NUM_BLOCKS / GROUPS) + j;
#if HEAD_DIM == 64
        /* A warp has eight queries. */
        if (s.sums_transposed) {
            const int at = (int)threadIdx.x / 32 * 128 + (int)threadIdx.x % 32 + 32 * j - thread;
            x[j] = 16 * j < p.a.d ? sums[at] : make_float4(0, 0, 0, 0);
            continue;
        }
#endif
        x[j] = 8 * block < p.a.d ? sums[block * 128] : make_float4(0, 0, 0, 0);
    }
    if (threadIdx.x == 0) { /* while the sums are on their way */
        if (reads) tile = fa_find_tile(&p.a, task, QUERIES);
        none = has_no_share(&s, &tile, number);
    }
    __syncthreads();
#if HEAD_DIM == 64
    if (s.sums_transposed) {
        store_transposed(&p, &tile, none, x);
        return;
    }
#endif
#pragma unroll
    for (int j = 0; j < NUM_BLOCKS / GROUPS; j += 4)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int64_t i = tile.first + thread / 32 * 16 + thread % 32 / 4 + 8 * r;
            const float scale = p.a.scale;
            uint32_t words[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float4 y = x[j + n];
                const float low = r ? y.z : y.x, high = r ? y.w : y.y;
                /* Rows after the last query get zeros, whatever keys they were multiplied with. */
                words[n] = i < tile.n_q && !none ? fa_pack_x2(low * scale, high * scale) : 0;
            }
            char *row = i < tile.room_q
                            ? fa_view_row(&p.dq, tile.block_q, tile.start_q + i, tile.head)
                            : NULL;
            store_words(&p.dq, row, p.a.d, words, group * (NUM_BLOCKS / GROUPS) + j);
        }
}
