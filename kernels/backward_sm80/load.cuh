/*
 * Copies to shared memory: keys and values once; for each tile the queries, dout, and their rows.
 * Rows that no query or key sees are not read: zeros are stored instead.
 */
#ifndef FA_KERNELS_BACKWARD_SM80_LOAD_CUH
#define FA_KERNELS_BACKWARD_SM80_LOAD_CUH

#include "backward_sm80/config.cuh"
#include "backward_sm80/layout.cuh"
#include "backward_sm80/work.cuh"
#include "common/rows.cuh"
#include "common/x2.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"

/* Threads that copy: each has the same 16 bytes of every row that it copies. */
enum {
    MAX_ROWS_A_PASS = THREADS / ROW_VECTORS,
    ROWS_A_PASS = MAX_ROWS_A_PASS >= 32   ? 32
                  : MAX_ROWS_A_PASS >= 16 ? 16
                  : MAX_ROWS_A_PASS >= 8  ? 8
                  : MAX_ROWS_A_PASS >= 4  ? 4
                                          : 2,
    COPIERS = ROWS_A_PASS * ROW_VECTORS
};
static_assert(KEYS % ROWS_A_PASS == 0 && QUERIES % ROWS_A_PASS == 0, "whole passes");

/* Rows of a tensor that are copied to a tile, and which of them are needed: those in [from, to),
 * counted from the tile's first row. */
typedef struct row_source {
    const char *data; /* of the tile's first row */
    int64_t pitch;    /* bytes from a row to the next */
    int columns;      /* of the tensor */
    bool whole;       /* rows consist of whole vectors */
    int from, to;
    const float2 *
        /* With options: queries whose rows are {infinity, 0} are not needed either; NULL: all are
         * needed. */
        rows;
} row_source;

FA_DEVICE bool is_wanted(const row_source *from, int row)
{
    if (row < from->from || row >= from->to) return false;
#if OPTIONS
    if (from->rows) {
        const float2 x = from->rows[row];
        return !(x.x == INFINITY && x.y == 0.0f);
    }
#endif
    return true;
}

/* Loads the elements of a vector one by one, for rows that are not aligned to 16 bytes or that end
 * within a vector. */
FA_DEVICE uint4 gather_vector(const char *row, int column, int columns)
{
#if HIGH_LOW
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        x[i] = column + i < columns ? ((const uint32_t *)(const void *)row)[column + i] : 0;
    return make_uint4(x[0], x[1], x[2], x[3]);
#else
    return fa_gather_vector(row, column, columns);
#endif
}

/* Issues the copy of a tile of `rows` rows. */
FA_DEVICE void issue_rows(const row_source *from, int rows, uint32_t to)
{
    const int thread = ptx_thread_id(), unit = thread % ROW_VECTORS, first = thread / ROW_VECTORS;
    const bool inside = VECTOR * unit < from->columns;
    if ((int)COPIERS < (int)THREADS && thread >= COPIERS) return;
    if (!from->whole) {
#pragma unroll 1
        for (int row = first; row < rows; row += ROWS_A_PASS) {
            uint4 x = make_uint4(0, 0, 0, 0);
            if (inside && is_wanted(from, row))
                x = gather_vector(from->data + row * from->pitch, VECTOR * unit, from->columns);
            ptx_st_shared_v4(to + (uint32_t)(row * PITCH + unit / 8 * 128) +
                                 permuted(row, unit & 7, PITCH) * 16,
                             x);
        }
        return;
    }
    const char *source = from->data + first * from->pitch + 16 * unit;
    const int64_t ahead = ROWS_A_PASS * from->pitch;
#pragma unroll
    for (int pass = 0; pass < rows / ROWS_A_PASS; pass++, source += ahead) {
        const int row = first + pass * ROWS_A_PASS;
        ptx_cp_async_16(to + (uint32_t)(row * PITCH + unit / 8 * 128) +
                            permuted(row, unit & 7, PITCH) * 16,
                        source, inside && is_wanted(from, row));
    }
}

FA_DEVICE row_source source_of(const fa_kernel_view *view, int64_t block, int64_t row, int64_t head,
                               int columns, int from, int to)
{
    row_source s;
    s.data = view->data + ELEMENT_BYTES * (block * view->stride[0] + row * view->stride[1] +
                                           head * view->stride[2]);
    s.pitch = ELEMENT_BYTES * view->stride[1];
    s.columns = columns;
    s.whole = has_vectors(view);
    s.from = from;
    s.to = to;
    s.rows = NULL;
    return s;
}

#if HIGH_LOW

/* Rows of the workspace that are split already, as many columns as exist. */
FA_DEVICE void take_parts(row_source *s, const char *rows)
{
    s->data = rows;
    s->pitch = PITCH;
    s->columns = (s->columns + 31) / 32 * 32;
    s->whole = true;
}

/* The address of a tile's rows of queries. Those of dout are FA_BACKWARD_SM80_PART_BYTES later. */
FA_DEVICE const char *find_parts(const fa_backward_sm80_params *s, const block_work *w,
                                 const tile_cursor *at)
{
    return s->parts + tile_number(w, s, at) * 2 * FA_BACKWARD_SM80_PART_BYTES(HEAD_DIM) +
           at->tile % PARTS * Q_BYTES;
}

/* Copies the powers of a tile of queries. */
FA_DEVICE void issue_powers(uint32_t to, const fa_backward_sm80_powers *from)
{
    const int thread = ptx_thread_id();
    if (thread < QUERIES / 2) ptx_cp_async_16(to + (uint32_t)thread * 16, from + 2 * thread, true);
}

#endif

#if HIGH_LOW

/* The number of units of a row of parts that are copied. One product has no low parts. */
enum { PART_VECTORS = THREE_PRODUCTS ? ROW_VECTORS : ROW_VECTORS / 2 };

/* Issues the copy of QUERIES rows of the workspace that are split already; rows without weights are
 * zeros there. columns: the number of columns that exist; zeros are stored after them. half: the
 * half of the rows that gets high parts. thread: its number among the threads that copy `together`
 * rows at once, a power of 2. */
FA_DEVICE void issue_parts(const char *from, int columns, uint32_t to, uint32_t half, int thread,
                           int together)
{
    const int own = thread % PART_VECTORS, first = thread / PART_VECTORS;
    const int unit = THREE_PRODUCTS ? own : high_unit(own);
    const bool inside = VECTOR * unit < (columns + 31) / 32 * 32;
    from += first * PITCH + 16 * unit;
    to += (uint32_t)(first * PITCH + unit / 8 * 128) + permuted(first, unit & 7, PITCH) * 16;
    to ^= half;
#pragma unroll
    for (int row = 0; row < QUERIES; row += together) /* after the thread's first row */
        ptx_cp_async_16((to ^ (uint32_t)((row & 7) * 16)) + (uint32_t)(row * PITCH),
                        from + row * PITCH, inside);
}

/* The same of eight rows by one warp, of high parts alone: lanes copy the 64 bytes of 32 columns of
 * all rows at once. */
FA_DEVICE void issue_eight_rows(const char *from, int columns, uint32_t to, uint32_t half)
{
    const int lane = ptx_thread_id() % 32, unit = lane % 4, row = lane / 4;
    from += row * PITCH + 16 * unit;
    to += (uint32_t)(row * PITCH) + permuted(row, unit, PITCH) * 16;
    to ^= half;
#pragma unroll
    for (int group = 0; group < HEAD_DIM / 32; group++)
        ptx_cp_async_16(to + (uint32_t)(group * 128), from + group * 128, 32 * group < columns);
}

#endif

#if SHARED_SCORES && !BESIDE_KEYS

/* Issues the copy of the columns for which the warp computes gradients: after the scores no other
 * warp reads them. */
FA_DEVICE void issue_own_columns(const row_source *from, uint32_t to)
{
    enum { LANES = COLUMNS / VECTOR, ROWS = 32 / LANES };
    const int lane = ptx_thread_id() % 32, unit = ptx_thread_id() / 32 * LANES + lane % LANES;
    if (VECTOR * unit >= from->columns) return;
#pragma unroll
    for (int i = 0; i < QUERIES / ROWS; i++) {
        const int row = lane / LANES + i * ROWS;
        ptx_cp_async_16(to + (uint32_t)(row * PITCH + unit / 8 * 128) +
                            permuted(row, unit & 7, PITCH) * 16,
                        from->data + row * PITCH + 16 * unit, is_wanted(from, row));
    }
}

#endif

/* ---- Keys and values ------------------------------------------------------------------------- */

FA_DEVICE row_source keys_of_block(const fa_kernel_view *view, const block_work *w, int columns)
{
    const fa_tile *t = &w->sequence;
    return source_of(view, t->block_k, t->start_k + w->keys.first, t->head_kv, columns,
                     w->seen_key_from, w->seen_key_to);
}

FA_DEVICE void issue_keys(const fa_attention_params *p, uint32_t memory, const block_work *w)
{
    const row_source k = keys_of_block(&p->k, w, p->d), v = keys_of_block(&p->v, w, p->d_v);
    issue_rows(&k, KEYS, memory + K_AT);
#if ONE_GRADIENT /* values are waited for later */
    ptx_cp_async_commit();
#endif
    issue_rows(&v, KEYS, memory + V_AT);
}

#if OPTIONS

/* Not 0 if the number, or in 16 bits one of the two numbers, is not finite. */
FA_DEVICE uint32_t is_not_finite(uint32_t x)
{
#if HIGH_LOW
    return (x & 0x7f800000u) == 0x7f800000u;
#else
    return fa_x2_not_finite(x);
#endif
}

/* Keys that are not finite may be hidden by a mask or a bias from some or all queries: their
 * weights are 0, and 0 * NaN is NaN. So they are cleared, and their scores become NaN unless they
 * are hidden. */
FA_DEVICE void clear_bad_keys(uint32_t memory, block_work *w)
{
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int row = (int)threadIdx.x / 32; row < KEYS; row += WARPS) {
        const uint32_t at = memory + K_AT + (uint32_t)(row * PITCH);
        uint32_t seen = 0;
#pragma unroll 1
        for (int unit = lane; unit < ROW_VECTORS; unit += 32) {
            const uint4 x = ptx_ld_shared_v4(at + (uint32_t)(unit / 8 * 128) +
                                             permuted(row, unit & 7, PITCH) * 16);
            seen |=
                is_not_finite(x.x) | is_not_finite(x.y) | is_not_finite(x.z) | is_not_finite(x.w);
        }
        if (!__any_sync(0xffffffffu, seen != 0)) continue;
#pragma unroll 1
        for (int unit = lane; unit < ROW_VECTORS; unit += 32)
            ptx_st_shared_v4(at + (uint32_t)(unit / 8 * 128) + permuted(row, unit & 7, PITCH) * 16,
                             make_uint4(0, 0, 0, 0));
        if (lane == 0) w->bad_keys[row] = 1;
    }
}

#endif

/* ---- A tile ---------------------------------------------------------------------------------- */

/* The parts of a tile that are copied: its queries; dout; the rows, with powers of two. With wide
 * heads, queries and dout perhaps only in the warp's own columns. */
enum { THE_QUERIES = 1, THE_DOUT = 2, THE_ROWS = 4, ALL_OF_TILE = 7, OWN_COLUMNS = 8 };

#if BOTH_BESIDE_KEYS

/* The copy of queries and dout: a warp copies eight rows of one of them. */
FA_DEVICE void issue_tile_by_warps(const fa_backward_params *p, const fa_backward_sm80_params *s,
                                   uint32_t memory, const block_work *w, const tile_cursor *at)
{
    static_assert(WARPS == QUERIES / 4, "eight rows of queries or of dout for each warp");
    const int warp = ptx_thread_id() / 32, row = warp / 2 * 8, place = place_of(at->count);
    const bool of_dout = warp % 2 != 0;
    const char *from =
        find_parts(s, w, at) + (of_dout ? FA_BACKWARD_SM80_PART_BYTES(HEAD_DIM) : 0) + row * PITCH;
    const uint32_t to = of_dout ? dout_at(memory, place) : q_at(memory, place);
    issue_eight_rows(from, of_dout ? p->a.d_v : p->a.d, to + (uint32_t)(row * PITCH),
                     half_of(at->count));
}

#elif ROWS_OF_PARTS

/* The copy of queries and dout by threads that copy `together` rows at once. */
FA_DEVICE void issue_tile_parts(const fa_backward_params *p, const fa_backward_sm80_params *s,
                                uint32_t memory, const block_work *w, const tile_cursor *at,
                                int what, int thread, int together)
{
    const char *parts = find_parts(s, w, at);
    if (what & THE_QUERIES)
        issue_parts(parts, p->a.d, q_at(memory, place_of(at->count)), half_of(at->count), thread,
                    together);
    if (what & THE_DOUT)
        issue_parts(parts + FA_BACKWARD_SM80_PART_BYTES(HEAD_DIM), p->a.d_v,
                    dout_at(memory, place_of(at->count)), dout_half_of(at->count), thread,
                    together);
}

#endif

FA_DEVICE void issue_tile(const fa_backward_params *p, const fa_backward_sm80_params *s,
                          uint32_t memory, const block_work *w, const tile_cursor *at, int what)
{
    const int thread = ptx_thread_id(), stage = stage_of(at);
    const float2 *rows = (const float2 *)(const void *)s->rows + tile_number(w, s, at) * TILE +
                         at->tile % PARTS * QUERIES;
#if BOTH_BESIDE_KEYS
    if (what & (THE_QUERIES | THE_DOUT)) issue_tile_by_warps(p, s, memory, w, at);
#elif ROWS_OF_PARTS
    enum { TOGETHER = THREADS / PART_VECTORS };
    static_assert(THREADS % PART_VECTORS == 0 && QUERIES % TOGETHER == 0, "whole passes");
    issue_tile_parts(p, s, memory, w, at, what, ptx_thread_id(), TOGETHER);
#else
    const fa_tile *t = &w->sequence;
    const int first = at->tile * QUERIES, from = w->seen_query_from - first,
              to = w->seen_query_to - first;
    const int64_t head = t->head + at->head, row = t->start_q + first;
    row_source q = source_of(&p->a.q, t->block_q, row, head, p->a.d, from, to);
    row_source dout = source_of(&p->dout, t->block_q, row, head, p->a.d_v, from, to);
#if OPTIONS && !HIGH_LOW /* parts of such rows are 0 */
    if (p->a.mask.data || p->a.bias.data) q.rows = dout.rows = rows;
#endif
#if HIGH_LOW
    const char *parts = find_parts(s, w, at);
    take_parts(&q, parts);
    take_parts(&dout, parts + FA_BACKWARD_SM80_PART_BYTES(HEAD_DIM));
#endif
#if SHARED_SCORES
    if (what & OWN_COLUMNS) {
        if (what & THE_QUERIES) issue_own_columns(&q, q_at(memory, place_of(at->count)));
        if (what & THE_DOUT) issue_own_columns(&dout, dout_at(memory, place_of(at->count)));
        return;
    }
#endif
    if (what & THE_QUERIES) issue_rows(&q, QUERIES, q_at(memory, stage));
    if (what & THE_DOUT) issue_rows(&dout, QUERIES, dout_at(memory, stage));
#endif
    if (!(what & THE_ROWS)) return;
    if (thread < QUERIES / 2)
        ptx_cp_async_16(rows_at(memory, stage) + (uint32_t)thread * 16, rows + 2 * thread, true);
#if HIGH_LOW
    issue_powers(query_powers_at(memory, stage),
                 s->powers + tile_number(w, s, at) * TILE + at->tile % PARTS * QUERIES);
#endif
#if THREE_PRODUCTS
    if (s->factors && thread < QUERIES / 4)
        ptx_cp_async_16(factors_at(memory, stage) + (uint32_t)thread * 16,
                        s->factors + tile_number(w, s, at) * TILE + at->tile % PARTS * QUERIES +
                            4 * thread,
                        true);
#endif
}

#if THREE_PRODUCTS

/* Stores factors of 1, if there are no others. */
FA_DEVICE void fill_factors(uint32_t memory)
{
    for (int i = ptx_thread_id(); i < STAGES * QUERIES; i += THREADS)
        ptx_st_shared_f32(factors_at(memory, 0) + 4 * (uint32_t)i, 1.0f);
}

#endif

#endif
