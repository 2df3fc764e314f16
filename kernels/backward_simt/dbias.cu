/*
 * Backward on the plain FMA units, in float32: the gradient of the bias, dS of the logits, summed
 * over the axes that broadcast, for every architecture and head dim.
 *
 * A block owns a tile of dbias: of one batch item and head, 64 queries by 64 keys, or 1 along an
 * axis that broadcasts. It loops over all problem tiles that add to it, so each sum has one order.
 */
#define QUERIES_OWN 1
#define CHAIN_STEPS 1
#include "backward_simt/gradient.cuh"

/* Where a tile of dbias begins. */
typedef struct fa_part {
    int64_t batch, head, query, key; /* 0 if there is a sum over the axis */
} fa_part;

FA_DEVICE int64_t tiles_of(int64_t extent, int tile) { return (extent + tile - 1) / tile; }

FA_DEVICE fa_part find_part(const fa_backward_params *p, int64_t task)
{
    const int64_t *shape = p->dbias_shape;
    const int64_t across_keys = tiles_of(shape[3], OTHERS), down = tiles_of(shape[2], OWN);
    fa_part part;
    part.key = task % across_keys * OTHERS;
    part.query = task / across_keys % down * OWN;
    part.head = task / across_keys / down % shape[1];
    part.batch = task / across_keys / down / shape[1];
    return part;
}

FA_DEVICE void clear(float sums[ROWS][COLUMNS])
{
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = 0.0f;
}

/* Adds a tile's dS, which is in the buffer of the own rows. A thread adds its own elements. */
FA_DEVICE void add_gradients(const fa_shared *shared, float sums[ROWS][COLUMNS])
{
    const float *mine = shared->own + row_of(0) * PITCH + across();
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) sums[r][c] += mine[r * DOWN * PITCH + c * ACROSS];
}

/* Queries [first, ...) of the tile with keys of [key, key_end), a tile at a time. */
FA_DEVICE void use_keys(const fa_backward_params *p, const fa_tile *t, const fa_shared *shared,
                        int64_t first, int64_t key, int64_t key_end, float sums[ROWS][COLUMNS])
{
    const int64_t end = fa_min64(first + OWN, t->n_q);
    const fa_range first_row = fa_tile_visible(&p->a, t, first);
    const fa_range last_row = fa_tile_visible(&p->a, t, end - 1);
    key = fa_max64(key, first_row.lo / OTHERS * OTHERS);
    key_end = fa_min64(key_end, last_row.hi);
#pragma unroll 1
    for (; key < key_end; key += OTHERS) {
        set_operands(p, shared, first, end, key, fa_max64(key, first_row.lo),
                     fa_min64(key + OTHERS, last_row.hi));
        (void)make_gradients(p, t, shared, true);
        add_gradients(shared, sums);
    }
}

/* One sequence and head. */
FA_DEVICE void use_head(const fa_backward_params *p, fa_tile *t, const fa_shared *shared,
                        const fa_part *part, int64_t b, int64_t head, float sums[ROWS][COLUMNS])
{
    __syncthreads();
    if (threadIdx.x == 0) fa_locate_sequence(&p->a, b, head, t);
    __syncthreads();
    const int64_t *shape = p->dbias_shape;
    const int64_t queries = shape[2] == 1 ? t->n_q : fa_min64(part->query + OWN, t->n_q);
    const int64_t keys = shape[3] == 1 ? t->n_k : fa_min64(part->key + OTHERS, t->n_k);
#pragma unroll 1
    for (int64_t first = part->query; first < queries; first += OWN)
        use_keys(p, t, shared, first, part->key, keys, sums);
}

/* Sums the threads' numbers over the axes that broadcast within a tile, and stores the sums. */
FA_DEVICE void store(const fa_backward_params *p, const fa_shared *shared, const fa_part *part,
                     float sums[ROWS][COLUMNS])
{
    const int64_t *shape = p->dbias_shape, *stride = p->dbias.stride;
    const int rows = shape[2] == 1 ? 1 : (int)fa_min64(OWN, shape[2] - part->query);
    const int columns = shape[3] == 1 ? 1 : (int)fa_min64(OTHERS, shape[3] - part->key);
    const int down = shape[2] == 1 ? OWN : 1, right = shape[3] == 1 ? OTHERS : 1;
    __syncthreads();
    put_scores(shared->weights, sums);
    __syncthreads();
#pragma unroll 1
    for (int n = (int)threadIdx.x; n < rows * columns; n += THREADS) {
        const int r = n / columns, c = n % columns;
        float sum = 0.0f;
#pragma unroll 1
        for (int y = r; y < r + down; y++)
#pragma unroll 1
            for (int x = c; x < c + right; x++) sum += shared->weights[y * PITCH + x];
        fa_store_element(p->dbias.data, p->dbias.dtype,
                         part->batch * stride[0] + part->head * stride[1] +
                             (part->query + r) * stride[2] + (part->key + c) * stride[3],
                         sum);
    }
}

FA_KERNEL __launch_bounds__(THREADS, 3)
    backward_dbias_simt(const __grid_constant__ fa_backward_params p)
{
    FA_DYNAMIC_SHARED(memory);
    __shared__ fa_tile tile;
    const fa_shared shared = fa_shared_of(memory);
#pragma unroll 1
    for (int64_t task = blockIdx.x; task < p.a.tasks; task += gridDim.x) {
        const fa_part part = find_part(&p, task);
        const bool each_batch = p.dbias_shape[0] == 1, each_head = p.dbias_shape[1] == 1;
        const int64_t last_batch = each_batch ? p.a.batch - 1 : part.batch;
        const int64_t last_head = each_head ? p.a.heads_q - 1 : part.head;
        float sums[ROWS][COLUMNS];
        clear(sums);
#pragma unroll 1
        for (int64_t b = part.batch; b <= last_batch; b++)
#pragma unroll 1
            for (int64_t h = part.head; h <= last_head; h++)
                use_head(&p, &tile, &shared, &part, b, h, sums);
        store(&p, &shared, &part, sums);
        __syncthreads();
    }
}
