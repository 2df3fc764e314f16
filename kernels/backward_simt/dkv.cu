/*
 * Backward on the plain FMA units, in float32: the gradients of keys and values, dV = P^T dO and
 * dK = scale * dS^T Q (FlashAttention-2, algorithm 2, arXiv:2307.08691), with every option of the
 * API, for every architecture.
 *
 * A block owns a tile of keys of one key/value head and loops over the queries of all heads that
 * share it, so each sum has one order and there are no atomics. A tile takes four products; scores
 * are transposed, so that a row belongs to a key. With paged keys a block owns rows of one page and
 * loops over the sequences that use it, in their order. A page that no sequence uses gets zeros.
 *
 * Compile-time parameters: HEAD_DIM, the larger of d and d_v, rounded up; OWN (kernels/variants.h).
 */
#define QUERIES_OWN 0
#if HEAD_DIM == 128
#define CHAIN_STEPS 1
#endif
#include "backward_simt/gradient.cuh"
#include "common/key_tiles.cuh"

enum { CHUNKS = HEAD_DIM / CHUNK };

#define BLOCKS 2 /* of a multiprocessor, at least: limits the registers */

typedef float fa_sums[CHUNKS][ROWS][GROUPS][4];

/* The work of a block, in shared memory, because products need the registers. */
typedef struct fa_work {
    fa_key_tile keys;
    fa_tile tile;       /* a sequence and one of the query heads */
    int64_t first, end; /* keys of the sequence */
    int64_t from, to;   /* queries that see some of them */
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

/* ---- The products ---------------------------------------------------------------------------- */

/* dK += dS^T Q and dV += P^T dO, chunk by chunk. The first chunk is the last chunk of Q, which is
 * in shared memory; bad: it is not finite. There is one loop for both, so that the code of the
 * loads exists only once. */
FA_DEVICE void add_queries(const fa_backward_params *p, const fa_tile *t, const fa_shared *shared,
                           bool bad, fa_sums dk, fa_sums dv)
{
    const fa_rows *dout = &shared->of[0].other, *q = &shared->of[1].other;
    const int count = (int)(q->to - q->start);
    const int last = (p->a.d - 1) / CHUNK, last_v = (p->a.d_v - 1) / CHUNK;
#pragma unroll 1
    for (int step = 0; step <= last + 1 + last_v; step++) {
        const bool value = step > last;
        const int n = value ? last_v - (step - last - 1) : last - step;
        if (value ? !p->dv.data : !p->dk.data) continue;
        if (step > 0) {
            __syncthreads();
            const float seen =
                load_rows(&p->a, t, value ? dout : q, OTHERS, shared->other, n * CHUNK);
            bad = __syncthreads_or(seen != 0.0f) != 0;
        }
        float part[ROWS][GROUPS][4];
        sum_rows(value ? shared->weights : shared->own, shared->other, count, bad, part);
#pragma unroll
        for (int m = 0; m < CHUNKS; m++) { /* registers cannot be indexed */
            if (m != n) continue;
            if (value) add_part(part, dv[m]);
            else add_part(part, dk[m]);
        }
    }
}

/* Sequence b's part of the tile: the keys from `first` on, and the queries that see some of
 * them. */
FA_DEVICE void find_work(const fa_attention_params *p, fa_work *w, int64_t b, int64_t first)
{
    fa_locate_sequence(p, b, w->keys.head_kv * (p->heads_q / p->heads_kv), &w->tile);
    w->first = first;
    w->end = fa_min64(first + w->keys.count, w->tile.n_k);
    w->from = w->to = 0;
    if (w->first >= w->end) return;
    w->from = fa_first_query(p, &w->tile, w->first, true);
    w->to = fa_first_query(p, &w->tile, w->end, false);
}

/* All queries of sequence b that see some of its keys from `first` on. */
FA_DEVICE void use_sequence(const fa_backward_params *p, fa_work *w, const fa_shared *shared,
                            int64_t b, int64_t first, fa_sums dk, fa_sums dv)
{
    __syncthreads();
    if (threadIdx.x == 0) find_work(&p->a, w, b, first);
    __syncthreads();
#pragma unroll 1
    for (int64_t g = p->a.heads_q / p->a.heads_kv; g > 0; g--) {
#pragma unroll 1
        for (int64_t start = w->from; start < w->to; start += OTHERS) {
            set_operands(p, shared, start, fa_min64(start + OTHERS, w->to), w->first, w->first,
                         w->end);
            const bool bad = make_gradients(p, &w->tile, shared, false);
            add_queries(p, &w->tile, shared, bad, dk, dv);
        }
        __syncthreads();
        if (threadIdx.x == 0) w->tile.head++;
        __syncthreads();
    }
}

/* Whether table entry e is this page and within its sequence's length. */
FA_DEVICE bool is_use(const fa_attention_params *p, int64_t e, int64_t page)
{
    if (e >= p->batch * p->block_table_stride) return false;
    int64_t b, n;
    if (((uint64_t)e | (uint64_t)p->block_table_stride) >> 32) {
        b = e / p->block_table_stride;
        n = e % p->block_table_stride;
        /* A 32-bit division is much cheaper. */
    } else {
        b = (uint32_t)e / (uint32_t)p->block_table_stride;
        n = (uint32_t)e % (uint32_t)p->block_table_stride;
    }
    return n * p->rows_k < p->seqlens_k[b] && p->block_table[e] == page;
}

/* Finds the next sequence that has the tile's keys: with pages, in the order of the table. *next: where to look, from 0
 * on; *first: the tile's first key there. */
FA_DEVICE bool find_use(const fa_attention_params *p, const fa_work *w, const fa_shared *shared,
                        int64_t *next, int64_t *b, int64_t *first)
{
    if (!p->block_table) {
        *b = w->keys.batch;
        *first = w->keys.first;
        return (*next)++ == 0 && w->keys.batch >= 0 && w->keys.count > 0;
    }
#pragma unroll 1
    while (*next < p->batch * p->block_table_stride) {
        const int64_t e = (*next)++;
        const int n = (int)(e % THREADS);
        if (n == 0) { /* the threads look at the next entries together */
            const int used = is_use(p, e + threadIdx.x, w->keys.block);
            if (!__syncthreads_or(used)) {
                *next = e + THREADS;
                continue;
            }
            shared->flags[threadIdx.x] = used;
            __syncthreads();
        }
        if (!shared->flags[n]) continue;
        *b = e / p->block_table_stride;
        *first = e % p->block_table_stride * p->rows_k + w->keys.first;
        return true;
    }
    return false;
}

/* ---- Results --------------------------------------------------------------------------------- */

FA_DEVICE void store(const fa_kernel_view *view, const fa_key_tile *k, int columns, float scale,
                     float sums[CHUNKS][ROWS][GROUPS][4])
{
    if (!view->data) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (row_of(r) >= k->count) continue;
        char *row = fa_view_row(view, k->block, k->row + row_of(r), k->head_kv);
#pragma unroll
        for (int n = 0; n < CHUNKS; n++)
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                const float *x = sums[n][r][g];
                fa_store4(row, view, n * CHUNK + g * 32 + across() * 4, columns,
                          make_float4(scale * x[0], scale * x[1], scale * x[2], scale * x[3]));
            }
    }
}

FA_KERNEL __launch_bounds__(THREADS, BLOCKS)
    backward_dkv_simt(const __grid_constant__ fa_backward_params p)
{
    FA_DYNAMIC_SHARED(memory);
    __shared__ fa_work work;
    const fa_shared shared = fa_shared_of(memory);
#pragma unroll 1
    for (int64_t task = blockIdx.x; task < p.a.tasks; task += gridDim.x) {
        fa_sums dk, dv;
        if (threadIdx.x == 0) work.keys = fa_find_key_tile(&p.a, task, OWN);
        __syncthreads();
        clear(dk);
        clear(dv);
        int64_t next = 0, b, first;
#pragma unroll 1
        while (find_use(&p.a, &work, &shared, &next, &b, &first)) /* one loop: half as much code */
            use_sequence(&p, &work, &shared, b, first, dk, dv);
        store(&p.dk, &work.keys, p.a.d, p.a.scale, dk);
        store(&p.dv, &work.keys, p.a.d_v, 1.0f, dv);
        __syncthreads();
    }
}
