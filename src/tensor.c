/*
 * Dtypes and the usual tensors.
 */
#include "flashattn.h"

size_t fa_dtype_size(fa_dtype dtype)
{
    switch (dtype) {
    case FA_FLOAT32: return 4;
    case FA_FLOAT16:
    case FA_BFLOAT16: return 2;
    case FA_FLOAT8_E4M3:
    case FA_INT8:
    case FA_BOOL: return 1;
    }
    return 0;
}

const char *fa_dtype_name(fa_dtype dtype)
{
    switch (dtype) {
    case FA_FLOAT32: return "float32";
    case FA_FLOAT16: return "float16";
    case FA_BFLOAT16: return "bfloat16";
    case FA_FLOAT8_E4M3: return "float8_e4m3";
    case FA_BOOL: return "bool";
    case FA_INT8: return "int8";
    }
    return "unknown dtype";
}

/* A stride that would overflow wraps around; the calls refuse such a shape by its product. */
static int64_t stride_product(int64_t a, int64_t b) { return (int64_t)((uint64_t)a * (uint64_t)b); }

fa_tensor fa_bshd(void *data, fa_dtype dtype, int64_t batch, int64_t sequence, int64_t heads,
                  int64_t dim)
{
    int64_t row = stride_product(heads, dim);
    fa_tensor t = {
        data, dtype, {batch, sequence, heads, dim}, {stride_product(sequence, row), row, dim, 1}};
    return t;
}

fa_tensor fa_bhsd(void *data, fa_dtype dtype, int64_t batch, int64_t sequence, int64_t heads,
                  int64_t dim)
{
    int64_t head = stride_product(sequence, dim);
    fa_tensor t = {
        data, dtype, {batch, sequence, heads, dim}, {stride_product(heads, head), dim, head, 1}};
    return t;
}
