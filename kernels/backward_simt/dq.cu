/*
 * Backward on the plain FMA units, in float32: the gradient of the queries, dQ = scale * dS K
 * (FlashAttention-2, algorithm 2, arXiv:2307.08691), with every option of the API, for every
 * architecture.
 *
 * A block owns a tile of queries of one head and loops over the keys that they see, so each sum has
 * one order and there are no atomics. A tile takes three products: dP = dO V^T, S = Q K^T, dQ += dS
 * K. The third begins with the last chunk of the keys, which is still in shared memory.
 *
 * Compile-time parameters: HEAD_DIM, the larger of d and d_v, rounded up; OWN (kernels/variants.h).
 */
#define QUERIES_OWN 1
#if HEAD_DIM == 256
#define CHAIN_STEPS 1
#endif
#include "backward_simt/gradient.cuh"

enum { CHUNKS = HEAD_DIM / CHUNK };

/* Blocks of a multiprocessor, at least: limits the registers. */
#if HEAD_DIM == 64
#define BLOCKS 3
#else
#define BLOCKS 2
#endif

typedef float fa_sums[CHUNKS][ROWS][GROUPS][4];

/* The work of a block, in shared memory, because products need the registers. */
typedef struct fa_work {
    fa_tile tile;
    int64_t end;      /* of the tile's queries */
    int64_t from, to; /* keys that some of them see */
} fa_work;

FA_DEVICE void clear(fa_sums sums)
{
#pragma unroll
    for (int n = 0; n < CHUNKS; n++)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
#pragma unroll
                for (int e = 0; e < 4; e++) sums[n][r][g][e] = 0.0f;
}

/* dQ += dS K, chunk by chunk from the last one on, which is in shared memory; bad: it is not
 * finite. */
FA_DEVICE void add_keys(const fa_attention_params *p, const fa_tile *t, const fa_shared *shared,
                        const fa_rows *keys, bool bad, fa_sums sums)
{
    const int count = (int)(keys->to - keys->start), last = (p->d - 1) / CHUNK;
#pragma unroll 1
    for (int n = last; n >= 0; n--) {
        if (n < last) {
            __syncthreads();
            const float seen = load_rows(p, t, keys, OTHERS, shared->other, n * CHUNK);
            bad = __syncthreads_or(seen != 0.0f) != 0;
        }
        float part[ROWS][GROUPS][4];
        sum_rows(shared->own, shared->other, count, bad, part);
#pragma unroll
        for (int m = 0; m < CHUNKS; m++) /* registers cannot be indexed */
            if (m == n) add_part(part, sums[m]);
    }
}

FA_DEVICE void find_work(const fa_attention_params *p, int64_t task, fa_work *w)
{
    w->tile = fa_find_tile(p, task, OWN);
    w->end = fa_min64(w->tile.first + OWN, w->tile.n_q);
    w->from = w->to = 0;
    if (w->tile.first >= w->end) return;
    const int64_t from = fa_tile_visible(p, &w->tile, w->tile.first).lo;
    const int64_t to = fa_tile_visible(p, &w->tile, w->end - 1).hi;
    if (from < to) w->from = from, w->to = to;
}

FA_DEVICE void attend(const fa_backward_params *p, const fa_work *w, const fa_shared *shared,
                      fa_sums sums)
{
#pragma unroll 1
    for (int64_t start = w->from / OTHERS * OTHERS; start < w->to; start += OTHERS) {
        set_operands(p, shared, w->tile.first, w->end, start, fa_max64(start, w->from),
                     fa_min64(start + OTHERS, w->to));
        const bool bad = make_gradients(p, &w->tile, shared, false);
        add_keys(&p->a, &w->tile, shared, &shared->of[1].other, bad, sums);
    }
}

/* Stores zeros in rows without a query. */
FA_DEVICE void finish(const fa_backward_params *p, const fa_tile *t, fa_sums sums)
{
    const float scale = p->a.scale;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int64_t i = t->first + row_of(r);
        if (i >= t->room_q) continue;
        char *row = fa_view_row(&p->dq, t->block_q, t->start_q + i, t->head);
#pragma unroll
        for (int n = 0; n < CHUNKS; n++)
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                const float *x = sums[n][r][g];
                float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (i < t->n_q)
                    y = make_float4(scale * x[0], scale * x[1], scale * x[2], scale * x[3]);
                fa_store4(row, &p->dq, n * CHUNK + g * 32 + across() * 4, p->a.d, y);
            }
    }
}

FA_KERNEL __launch_bounds__(THREADS, BLOCKS)
    backward_dq_simt(const __grid_constant__ fa_backward_params p)
{
    FA_DYNAMIC_SHARED(memory);
    __shared__ fa_work work;
    const fa_shared shared = fa_shared_of(memory);
#pragma unroll 1
    for (int64_t task = blockIdx.x; task < p.a.tasks; task += gridDim.x) {
        fa_sums sums;
        if (threadIdx.x == 0) find_work(&p.a, task, &work);
        __syncthreads();
        clear(sums);
        attend(&p, &work, &shared, sums);
        finish(&p, &work.tile, sums);
        __syncthreads();
    }
}
