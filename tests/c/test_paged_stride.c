/*
 * Block tables whose batch items are far apart: work and scratch memory depend on the sequences'
 * lengths, never on the distance. The time is not measured here; the tests' time limit and the
 * sanitizers detect errors.
 */
#include <math.h>
#include <string.h>
#include <sys/resource.h>

#include "attention.h"

enum { PAGES = 3, PAGE = 4, HEADS = 2, N_Q = 5, D = 8, LENGTH = 10 };

typedef struct problem {
    float q[N_Q * 2 * HEADS * D], k[PAGES * PAGE * HEADS * D], v[PAGES * PAGE * HEADS * D];
    float out[N_Q * 2 * HEADS * D], lse[2 * HEADS * N_Q], bias[2 * HEADS * N_Q * LENGTH];
    float dq[N_Q * 2 * HEADS * D], dk[PAGES * PAGE * HEADS * D], dv[PAGES * PAGE * HEADS * D];
    float dbias[2 * HEADS * N_Q * LENGTH], weights[2 * HEADS * N_Q * LENGTH];
} problem;

static problem near_by, far_off;
static int32_t table[PAGES] = {2, 0, 1};
static int32_t length[1] = {LENGTH};

static void run(problem *p, int64_t stride)
{
    ref_random random = {1};
    for (size_t i = 0; i < sizeof p->q / sizeof *p->q; i++)
        p->q[i] = (float)ref_random_normal(&random);
    for (size_t i = 0; i < sizeof p->k / sizeof *p->k; i++) {
        p->k[i] = (float)ref_random_normal(&random);
        p->v[i] = (float)ref_random_normal(&random);
    }
    memset(p->out, 0xff, sizeof p->out); /* NaN */
    memset(p->dk, 0xff, sizeof p->dk);
    memset(p->dv, 0xff, sizeof p->dv);
    memset(p->dq, 0xff, sizeof p->dq);
    memset(p->dbias, 0xff, sizeof p->dbias);
    memset(p->weights, 0xff, sizeof p->weights);
    const fa_tensor q = fa_bshd(p->q, FA_FLOAT32, 1, N_Q, 2 * HEADS, D);
    const fa_tensor k = fa_bshd(p->k, FA_FLOAT32, PAGES, PAGE, HEADS, D);
    const fa_tensor v = fa_bshd(p->v, FA_FLOAT32, PAGES, PAGE, HEADS, D);
    const fa_tensor out = fa_bshd(p->out, FA_FLOAT32, 1, N_Q, 2 * HEADS, D);
    const fa_tensor weights = {p->weights,
                               FA_FLOAT32,
                               {1, 2 * HEADS, N_Q, LENGTH},
                               {2 * HEADS * N_Q * LENGTH, N_Q * LENGTH, LENGTH, 1}};
    fa_tensor bias = weights;
    bias.data = p->bias;
    fa_options o = FA_OPTIONS_INIT;
    o.seqlens_k = length;
    o.block_table = table;
    o.block_table_stride = stride;
    o.threads = 2;
    CHECK(fa_decode(&q, &k, &v, &out, p->lse, &o) == FA_OK, "decode, stride %lld: %s",
          (long long)stride, fa_last_error());
    CHECK(fa_weights(&q, &k, NULL, N_Q, &weights, &o) == FA_OK, "weights, stride %lld: %s",
          (long long)stride, fa_last_error());
    o.bias = &bias;
    CHECK(fa_forward(&q, &k, &v, &out, p->lse, &o) == FA_OK, "forward, stride %lld: %s",
          (long long)stride, fa_last_error());
    fa_gradients g = FA_GRADIENTS_INIT;
    g.dout = q;
    g.dq = q, g.dq.data = p->dq;
    g.dk = k, g.dk.data = p->dk;
    g.dv = v, g.dv.data = p->dv;
    g.dbias = bias, g.dbias.data = p->dbias;
    CHECK(fa_backward(&q, &k, &v, &out, p->lse, &g, &o) == FA_OK, "backward, stride %lld: %s",
          (long long)stride, fa_last_error());
}

int main(void)
{
    test_begin();
    run(&near_by, PAGES);
    CHECK(isfinite(near_by.dk[0]) && isfinite(near_by.dbias[0]), "the gradients were not written");
    struct rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    static const int64_t strides[] = {1 << 20, (int64_t)1 << 40, (int64_t)1 << 52,
                                      (int64_t)1 << 56};
    for (int n = 0; n < 4; n++) {
        run(&far_off, strides[n]);
        CHECK(memcmp(&near_by, &far_off, sizeof far_off) == 0, "stride %lld: other results",
              (long long)strides[n]);
    }
    getrusage(RUSAGE_SELF, &after);
    CHECK(after.ru_maxrss - before.ru_maxrss < 32 * 1024, "scratch grows with the stride: %ld KiB",
          after.ru_maxrss - before.ru_maxrss);
    return test_end();
}
