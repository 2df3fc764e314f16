/*
 * Rows of dbias: of one batch item, head and query. Each warp processes one at a time.
 */
#ifndef FA_KERNELS_BACKWARD_SIMT_DBIAS_ROWS_CUH
#define FA_KERNELS_BACKWARD_SIMT_DBIAS_ROWS_CUH

#include "backward_simt/backward_simt.h"
#include "common/divide.h"
#include "common/rows.cuh"

typedef struct dbias_row {
    int64_t batch, head, query;
} dbias_row;

FA_DEVICE dbias_row find_dbias_row(const fa_backward_params *p, int64_t row)
{
    const int64_t heads = p->dbias_shape[1], queries = p->dbias_shape[2];
    const int64_t item = fa_divide(row, queries), batch = fa_divide(item, heads);
    const dbias_row found = {batch, item - batch * heads, row - item * queries};
    return found;
}

/* The element of its first key. */
FA_DEVICE int64_t dbias_row_index(const fa_kernel_view *view, const dbias_row *row)
{
    return row->batch * view->stride[0] + row->head * view->stride[1] +
           row->query * view->stride[2];
}

#endif
