/*
 * The product of a row of dout and the same row of out, from which delta is computed.
 */
#ifndef FA_KERNELS_BACKWARD_SIMT_ROW_PRODUCT_CUH
#define FA_KERNELS_BACKWARD_SIMT_ROW_PRODUCT_CUH

#include "backward_simt/backward_simt.h"
#include "common/rows.cuh"
#include "common/sequence.cuh"

/* A lane's part of it: columns 4 lane, 4 lane + 128 ... and the three after each of these. */
FA_DEVICE float fa_row_product(const fa_backward_params *p, const fa_tile *t, int64_t i)
{
    const char *dout = fa_view_row(&p->dout, t->block_q, t->start_q + i, t->head);
    const char *out = fa_view_row(&p->a.out, t->block_q, t->start_q + i, t->head);
    const int kind = fa_fetch_kind(&p->dout), kind_out = fa_fetch_kind(&p->a.out);
    float sum = 0.0f;
#pragma unroll 1
    for (int c = (int)threadIdx.x % 32 * 4; c < p->a.d_v; c += 4 * 32) {
        const float4 x = fa_fetch4(dout, kind, p->dout.dtype, c, p->a.d_v);
        const float4 y = fa_fetch4(out, kind_out, p->a.out.dtype, c, p->a.d_v);
        sum = fmaf(x.x, y.x, sum);
        sum = fmaf(x.y, y.y, sum);
        sum = fmaf(x.z, y.z, sum);
        sum = fmaf(x.w, y.w, sum);
    }
    return sum;
}

#endif
