/*
 * The queries of a work tile, which are read only once.
 */
#ifndef FA_KERNELS_DECODE_SM80_QUERIES_CUH
#define FA_KERNELS_DECODE_SM80_QUERIES_CUH

#include "decode_sm80/config.cuh"

#include "common/rows.cuh"
#include "decode_sm80/work.cuh"

/* Row r of the work tile; NULL: it has no query. */
FA_DEVICE const char *find_query(const fa_decode_params *d, const fa_work *w, int r)
{
    const fa_tile *t = &w->tile;
    const int query = query_of(d, r), head = head_of(d, r);
    if (query >= w->queries || head >= w->heads) return NULL;
    return fa_view_row(&d->attention.q, t->block_q, t->start_q + t->first + query, t->head + head);
}

/* 8 columns of row r, from `column` on; zeros after its end, and if the row has no query. */
FA_DEVICE uint4 fetch_eight(const fa_decode_params *d, const fa_work *w, int r, int column)
{
    const fa_attention_params *p = &d->attention;
    const fa_tile *t = &w->tile;
    const int query = query_of(d, r), head = head_of(d, r);
    uint4 x = make_uint4(0, 0, 0, 0);
    if (query < w->queries && head < w->heads && column < p->d) {
        const char *row =
            fa_view_row(&p->q, t->block_q, t->start_q + t->first + query, t->head + head);
        x = p->q.vector == 8 ? *(const uint4 *)(row + 2 * column)
                             : fa_gather_vector(row, column, p->d);
    }
    return x;
}

/* Columns c and c + 1 of a row of queries; zeros if there is no row. */
FA_DEVICE uint32_t fetch_two(const fa_attention_params *p, const char *row, int c)
{
    if (!row || c >= p->d) return 0;
    if (p->q.vector == 8) return *(const uint32_t *)(row + 2 * c);
    const uint16_t *x = (const uint16_t *)row + c;
    return x[0] | (c + 1 < p->d ? (uint32_t)x[1] << 16 : 0);
}

#endif
