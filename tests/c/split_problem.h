/*
 * Problems for the tests of split keys' planners: bfloat16, without data.
 */
#ifndef FA_TESTS_SPLIT_PROBLEM_H
#define FA_TESTS_SPLIT_PROBLEM_H

#include "problem.h"

static inline void set_view(fa_view *v, int64_t rows, int64_t heads, int64_t d)
{
    v->dtype = FA_BFLOAT16;
    v->stride[0] = rows * heads * d;
    v->stride[1] = heads * d;
    v->stride[2] = d;
    v->stride[3] = 1;
}

static inline fa_problem make_split_problem(int64_t batch, int64_t heads, int64_t heads_kv,
                                            int64_t n_q, int64_t n_k, int64_t d)
{
    fa_problem p = {.pass = FA_PASS_FORWARD,
                    .device = FA_DEVICE_CUDA,
                    .batch = batch,
                    .heads_q = heads,
                    .heads_kv = heads_kv,
                    .n_q = n_q,
                    .max_q = n_q,
                    .n_k = n_k,
                    .rows_q = n_q,
                    .rows_k = n_k,
                    .blocks_q = batch,
                    .blocks_k = batch,
                    .d = d,
                    .d_v = d,
                    .scale = 0.1f,
                    .window_left = -1,
                    .window_right = -1};
    set_view(&p.q, n_q, heads, d);
    set_view(&p.k, n_k, heads_kv, d);
    set_view(&p.v, n_k, heads_kv, d);
    set_view(&p.out, n_q, heads, d);
    return p;
}

#endif
