/* Dropout: Philox's known results, the fraction that is kept, the same mask forward and
 * backward. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "philox.h"

static void check_known_answers(void)
{
    static const struct {
        uint32_t counter[4], key[2], expected[4];
    } answers[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x5f6fb709u, 0x0d893f64u, 0x4f121f81u, 0x4f730a48u}},
        {{0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu},
         {0xffffffffu, 0xffffffffu},
         {0x5207ddc2u, 0x45165e59u, 0x4d8ee751u, 0x8c52f662u}},
        {{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u},
         {0xa4093822u, 0x299f31d0u},
         {0x4dfccabau, 0x190a87f0u, 0xc47362bau, 0xb6b5242au}},
    };
    for (int n = 0; n < 3; n++) {
        uint32_t library[4], reference[4];
        fa_philox(answers[n].counter, answers[n].key, library);
        ref_philox(answers[n].counter, answers[n].key, reference);
        CHECK(memcmp(library, answers[n].expected, sizeof library) == 0,
              "library, answer %d: %08x %08x %08x %08x", n, library[0], library[1], library[2],
              library[3]);
        CHECK(memcmp(reference, answers[n].expected, sizeof reference) == 0, "reference, answer %d",
              n);
    }
}

/* The layout of the counter, written down a second time independently. */
static void check_layout(void)
{
    ref_random random = {1};
    for (int n = 0; n < 20000; n++) {
        uint64_t seed = ref_random_bits(&random), offset = ref_random_bits(&random);
        int64_t head = ref_random_between(&random, 0, 1000);
        int64_t i = ref_random_between(&random, 0, 1 << 20),
                j = ref_random_between(&random, 0, 1 << 20);
        uint32_t library = fa_dropout_bits(seed, offset, head, i, j);
        uint32_t reference =
            ref_dropout_bits(seed, offset, (uint32_t)head, (uint32_t)i, (uint32_t)j);
        CHECK(library == reference, "bits of head %lld (%lld, %lld): %x and %x", (long long)head,
              (long long)i, (long long)j, library, reference);
    }
}

enum { N = 400, HEADS = 2 };

/* Reads the mask from the results: with q = 0 every weight is 1/N, and with unit vectors as values
 * out[i][j] is keep_ij / (N (1 - p)); with unit vectors as dout, dv[j][i] is the same. */
static void check_mask(float p, uint64_t seed, uint64_t offset)
{
    const shape s = {1, HEADS, HEADS, N, N, 4, N};
    attention a;
    attention_make(&a, 1, s, FA_FLOAT32);
    attention_fill(&a, &a.in.q, 0);
    for (int64_t i = 0; i < N; i++)
        for (int64_t h = 0; h < HEADS; h++)
            for (int64_t c = 0; c < N; c++) {
                ref_store(&a.in.v, 0, i, h, c, i == c);
                ref_store(&a.dout, 0, i, h, c, i == c);
            }
    a.in.options.dropout_p = p;
    a.in.options.dropout_seed = seed;
    a.in.options.dropout_offset = offset;
    if (!attention_forward(&a, "dropout") || !attention_backward(&a, "dropout")) return;
    const uint32_t threshold = (uint32_t)floor(65536 * (double)p + 0.5);
    int64_t kept = 0, wrong = 0;
    for (int64_t h = 0; h < HEADS; h++)
        for (int64_t i = 0; i < N; i++)
            for (int64_t j = 0; j < N; j++) {
                bool keep = fa_dropout_bits(seed, offset, h, i, j) >= threshold;
                double expected = keep ? 1 / (N * (1 - (double)p)) : 0;
                double forward = ref_load(&a.out, 0, i, h, j),
                       backward = ref_load(&a.dv, 0, j, h, i);
                kept += keep;
                wrong +=
                    !(fabs(forward - expected) <= 1e-6) || !(fabs(backward - expected) <= 1e-6);
            }
    CHECK(wrong == 0, "p %g: %lld of %d elements are dropped wrongly", (double)p, (long long)wrong,
          HEADS * N * N);
    /* Five standard deviations of a binomial count. */
    double count = HEADS * N * N, mean = count * (1 - (double)p);
    CHECK(fabs((double)kept - mean) <= 5 * sqrt(mean * (double)p),
          "p %g: %lld kept, expected about %.0f", (double)p, (long long)kept, mean);
    attention_free(&a);
}

/* The mean over many masks is attention without dropout; lse is the same for each. */
static void check_mean(void)
{
    enum { MASKS = 400 };
    const shape s = {1, 2, 1, 8, 40, 8, 8};
    attention plain, a;
    attention_make(&plain, 2, s, FA_FLOAT32);
    attention_make(&a, 2, s, FA_FLOAT32);
    attention_forward(&plain, "no dropout");
    double sum[8 * 2 * 8] = {0}, square[8 * 2 * 8] = {0};
    a.in.options.dropout_p = 0.25f;
    for (int n = 0; n < MASKS; n++) {
        a.in.options.dropout_offset = (uint64_t)n;
        attention_forward(&a, "dropout");
        for (int e = 0; e < 8 * 2 * 8; e++) {
            double x = (double)((float *)a.out.data)[e];
            sum[e] += x;
            square[e] += x * x;
        }
        CHECK(memcmp(a.lse, plain.lse, 16 * sizeof(float)) == 0, "dropout changes lse");
    }
    for (int e = 0; e < 8 * 2 * 8; e++) {
        double mean = sum[e] / MASKS,
               deviation = sqrt(square[e] / MASKS - mean * mean) / sqrt(MASKS);
        double expected = (double)((float *)plain.out.data)[e];
        CHECK(fabs(mean - expected) <= 5 * deviation, "mean %g, expected %g +- %g", mean, expected,
              deviation);
    }
    attention_free(&plain);
    attention_free(&a);
}

int main(void)
{
    test_begin();
    check_known_answers();
    check_layout();
    check_mask(0.1f, 1, 0);
    check_mask(0.5f, UINT64_MAX, UINT64_MAX);
    check_mask(0.9f, 0x123456789abcdefu, (uint64_t)5 << 32);
    check_mean();
    return test_end();
}
