/*
 * Backward: clears what another kernel adds to or stores of the gradient of the bias: its sums, if
 * there are any; otherwise dbias itself, for the elements that no query sees. Bound by memory.
 */
#include "backward_simt/dbias_rows.cuh"

FA_KERNEL __launch_bounds__(FA_PASS_THREADS)
    backward_dbias_clear(const __grid_constant__ fa_backward_params p)
{
    const fa_kernel_view *const to = p.dbias_sums.data ? &p.dbias_sums : &p.dbias;
    for (int64_t task = blockIdx.x; task < p.a.tasks; task += gridDim.x) {
        const int64_t number = task * FA_DBIAS_ROWS + threadIdx.x / 32;
        if (number >= p.dbias_shape[0] * p.dbias_shape[1] * p.dbias_shape[2]) continue;
        const dbias_row row = find_dbias_row(&p, number);
        const int64_t first = dbias_row_index(to, &row);
        for (int64_t j = threadIdx.x % 32; j < p.dbias_shape[3]; j += 32)
            fa_store_element(to->data, to->dtype, first + j * to->stride[3], 0.0f);
    }
}
