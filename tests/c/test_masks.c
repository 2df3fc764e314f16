/*
 * Which keys each query sees, compared with an integer formula. Queries and keys are 0, so a query
 * that sees m keys gives each the weight 1/m. Value j is the unit vector j, so out[i][j] > 0 means
 * that i sees j.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"

typedef struct position_mask {
    bool causal, diagonal_given, window;
    int64_t diagonal, left, right;
    int64_t chunk; /* 0: none */
} position_mask;

static bool sees(const position_mask *m, int64_t n_q, int64_t n_k, int64_t i, int64_t j)
{
    /* Distances from the diagonal: limits up to INT64_MAX do not overflow. */
    int64_t right_of = j - (i + (m->diagonal_given ? m->diagonal : n_k - n_q));
    if (m->causal && right_of > 0) return false;
    if (m->window && m->left >= 0 && -right_of > m->left) return false;
    if (m->window && m->right >= 0 && right_of > m->right) return false;
    /* The query's position minus its position in its chunk; also for negative ones. */
    if (m->chunk) {
        const int64_t position = j - right_of, place = position % m->chunk;
        const int64_t first = position - place - (place < 0 ? m->chunk : 0);
        return j >= first && j - first < m->chunk;
    }
    return true;
}

static void set_options(fa_options *o, const position_mask *m)
{
    memset(o, 0, sizeof *o);
    o->size = sizeof *o;
    o->threads = 1;
    if (m->causal) o->flags |= FA_CAUSAL;
    if (m->diagonal_given) o->flags |= FA_DIAGONAL;
    if (m->window) o->flags |= FA_WINDOW;
    if (m->diagonal_given) o->diagonal = m->diagonal;
    if (m->window) o->window_left = m->left;
    if (m->window) o->window_right = m->right;
    o->attention_chunk = m->chunk;
}

/* Room for the largest case: values n_k x n_k, out and weights n_q x n_k. */
enum { MAX = 400 };
static float zeros[MAX * 8], values[MAX * MAX], out[MAX * MAX], weights[MAX * MAX], lse[MAX];

static void check(const position_mask *m, int64_t n_q, int64_t n_k)
{
    fa_options o;
    set_options(&o, m);
    for (int64_t j = 0; j < n_k * n_k; j++) values[j] = j / n_k == j % n_k;
    fa_tensor q = fa_bshd(zeros, FA_FLOAT32, 1, n_q, 1, 4),
              k = fa_bshd(zeros, FA_FLOAT32, 1, n_k, 1, 4);
    fa_tensor v = fa_bshd(values, FA_FLOAT32, 1, n_k, 1, n_k);
    fa_tensor result = fa_bshd(out, FA_FLOAT32, 1, n_q, 1, n_k);
    fa_tensor w = {weights, FA_FLOAT32, {1, 1, n_q, n_k}, {n_q * n_k, n_q * n_k, n_k, 1}};
    fa_status status = fa_forward(&q, &k, &v, &result, lse, &o);
    CHECK(status == FA_OK, "fa_forward: %s", fa_last_error());
    status = fa_weights(&q, &k, NULL, n_q, &w, &o);
    CHECK(status == FA_OK, "fa_weights: %s", fa_last_error());
    int64_t wrong = 0, first_i = 0, first_j = 0;
    for (int64_t i = 0; i < n_q; i++)
        for (int64_t j = 0; j < n_k; j++) {
            bool want = sees(m, n_q, n_k, i, j);
            if ((out[i * n_k + j] > 0) == want && (weights[i * n_k + j] > 0) == want) continue;
            if (!wrong++) first_i = i, first_j = j;
        }
    CHECK(wrong == 0,
          "n %lldx%lld causal %d diagonal %lld (%d) window %lld,%lld (%d) chunk %lld: %lld wrong, "
          "first query %lld key %lld",
          (long long)n_q, (long long)n_k, m->causal, (long long)m->diagonal, m->diagonal_given,
          (long long)m->left, (long long)m->right, m->window, (long long)m->chunk, (long long)wrong,
          (long long)first_i, (long long)first_j);
}

/* All small masks. */
static void check_all_small(void)
{
    for (int64_t n_q = 1; n_q <= 6; n_q++)
        for (int64_t n_k = 1; n_k <= 6; n_k++)
            for (int causal = 0; causal < 2; causal++)
                for (int64_t left = -2; left <= n_k + 1; left++)
                    for (int64_t right = -1; right <= n_k + 1; right++) {
                        position_mask m = {causal, false, left > -2, 0, left, right, 0};
                        check(&m, n_q, n_k);
                        for (int64_t d = -n_q - 3; d <= n_k + 3; d += 2) {
                            m.diagonal_given = true;
                            m.diagonal = d;
                            check(&m, n_q, n_k);
                        }
                    }
}

/* Chunks, with everything else. */
static void check_chunks(void)
{
    for (int64_t n_q = 1; n_q <= 6; n_q++)
        for (int64_t n_k = 1; n_k <= 7; n_k++)
            for (int64_t chunk = 1; chunk <= 8; chunk++)
                for (int causal = 0; causal < 2; causal++)
                    for (int64_t d = -n_q - 9; d <= n_k + 9; d++) {
                        const bool window = (n_q + n_k + d) % 3 == 0;
                        const position_mask m = {causal,         d % 2 != 0,     window, d,
                                                 window ? 1 : 0, window ? 2 : 0, chunk};
                        check(&m, n_q, n_k);
                    }
    static const int64_t n[][2] = {{1, 400}, {13, 257}, {300, 300}, {400, 33}, {200, 399}};
    static const int64_t chunks[] = {1, 16, 31, 32, 100, 128, 256, 399, (int64_t)1 << 60};
    static const int64_t far = (int64_t)1 << 61;
    for (int c = 0; c < 5; c++)
        for (int k = 0; k < 9; k++)
            for (int causal = 0; causal < 2; causal++) {
                const position_mask masks[] = {{causal, false, false, 0, 0, 0, chunks[k]},
                                               {causal, true, false, 31, 0, 0, chunks[k]},
                                               {causal, true, false, -150, 0, 0, chunks[k]},
                                               {causal, true, false, far, 0, 0, chunks[k]},
                                               {causal, true, false, -far, 0, 0, chunks[k]},
                                               {causal, false, true, 0, 40, 20, chunks[k]}};
                for (int m = 0; m < 6; m++) check(&masks[m], n[c][0], n[c][1]);
            }
}

/* Near the edges of tiles, and far from them. */
static void check_large(void)
{
    static const int64_t n[][2] = {{1, 400}, {13, 257}, {300, 300}, {400, 33}, {200, 399}};
    static const int64_t far = (int64_t)1 << 61;
    for (int c = 0; c < 5; c++) {
        const position_mask masks[] = {{true, false, false, 0, 0, 0, 0},
                                       {true, true, false, 31, 0, 0, 0},
                                       {true, true, false, -far, 0, 0, 0},
                                       {true, true, false, far, 0, 0, 0},
                                       {false, true, true, -far, 3, 3, 0},
                                       {false, true, true, far, 3, 3, 0},
                                       {false, false, true, 0, 0, 0, 0},
                                       {false, false, true, 0, 15, 16, 0},
                                       {false, false, true, 0, 63, -1, 0},
                                       {false, false, true, 0, -1, 64, 0},
                                       {true, false, true, 0, 100, 100, 0},
                                       {false, false, true, 0, INT64_MAX, INT64_MAX, 0},
                                       {false, true, true, far, INT64_MAX, 5, 0},
                                       {false, true, true, -500, 20, 450, 0},
                                       {false, true, true, 500, 450, 20, 0},
                                       {true, true, true, 380, 5, -1, 0}};
        for (int m = 0; m < (int)(sizeof masks / sizeof *masks); m++)
            check(&masks[m], n[c][0], n[c][1]);
    }
}

/* Rows that see no key: zeros, -infinity (or the sink), gradients exactly 0. */
static void check_blind_rows(fa_dtype dtype, bool sinks, bool by_mask)
{
    const shape s = {2, 2, 1, 70, 40, 24, 24};
    attention a;
    uint8_t *mask = calloc((size_t)(s.n_q * s.n_k), 1);
    if (!mask) abort();
    fa_tensor view = {mask, FA_BOOL, {1, 1, s.n_q, s.n_k}, {0, 0, s.n_k, 1}};
    attention_make(&a, 7, s, dtype);
    if (sinks) attention_set(&a, OPTION_SINKS);
    for (int64_t n = 30 * s.n_k; n < s.n_q * s.n_k; n++) mask[n] = 1;
    if (by_mask) a.in.options.mask = &view;
    else a.in.options.flags |= FA_CAUSAL; /* bottom right: the first 30 queries see nothing */
    attention_check_backward(&a, "blind rows");
    for (int64_t b = 0; b < s.batch; b++)
        for (int64_t h = 0; h < s.heads_q; h++)
            for (int64_t i = 0; i < 30; i++) {
                float expected = sinks ? a.in.options.sinks[h] : -INFINITY;
                float found = a.lse[(b * s.heads_q + h) * s.n_q + i];
                CHECK(found == expected, "lse %g, expected %g", (double)found, (double)expected);
                for (int64_t c = 0; c < s.d; c++)
                    CHECK(ref_load(&a.out, b, i, h, c) == 0 && ref_load(&a.dq, b, i, h, c) == 0,
                          "query %lld sees nothing: out %g, dq %g", (long long)i,
                          ref_load(&a.out, b, i, h, c), ref_load(&a.dq, b, i, h, c));
            }
    attention_free(&a);
    free(mask);
}

int main(void)
{
    test_begin();
    check_all_small();
    check_large();
    check_chunks();
    for (int n = 0; n < 12; n++) check_blind_rows(float_dtypes[n % 3], n / 3 % 2, n / 6);
    return test_end();
}
