/*
 * Backward: rounds the sums of the gradient of the bias, to which another kernel has added, and
 * stores the caller's elements. Bound by memory.
 */
#include "backward_simt/dbias_rows.cuh"

FA_KERNEL __launch_bounds__(FA_PASS_THREADS)
    backward_dbias_round(const __grid_constant__ fa_backward_params p)
{
    for (int64_t task = blockIdx.x; task < p.a.tasks; task += gridDim.x) {
        const int64_t number = task * FA_DBIAS_ROWS + threadIdx.x / 32;
        if (number >= p.dbias_shape[0] * p.dbias_shape[1] * p.dbias_shape[2]) continue;
        const dbias_row row = find_dbias_row(&p, number);
        const int64_t to = dbias_row_index(&p.dbias, &row);
        const float *from =
            (const float *)(const void *)p.dbias_sums.data + dbias_row_index(&p.dbias_sums, &row);
        for (int64_t j = threadIdx.x % 32; j < p.dbias_shape[3]; j += 32)
            fa_store_element(p.dbias.data, p.dbias.dtype, to + j * p.dbias.stride[3], from[j]);
    }
}
