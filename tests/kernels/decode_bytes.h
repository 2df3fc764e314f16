/*
 * Caches of 8 bits whose keys and values have their own scales, for the tests of decode kernels.
 * The including file defines FAMILY, machine and run_plan, as for decode_server.h.
 */
#ifndef TEST_DECODE_BYTES_H
#define TEST_DECODE_BYTES_H

enum { Q_HEADS = 6, KV_HEADS = 2, QUERIES = 2, SCALED_KEYS = 300, SCALED_DIM = 64 };

/* A cache whose keys and values have their own scales. All begin at multiples of 16 bytes. */
typedef struct scaled {
    fa_dtype type, cache;
    uint16_t q[QUERIES][Q_HEADS][SCALED_DIM], out[QUERIES][Q_HEADS][SCALED_DIM];
    _Alignas(16) uint8_t k[SCALED_KEYS][KV_HEADS][SCALED_DIM], v[SCALED_KEYS][KV_HEADS][SCALED_DIM];
    float k_scale[SCALED_KEYS][KV_HEADS], v_scale[SCALED_KEYS][KV_HEADS];
    int32_t length;
} scaled;

static double load_half(fa_dtype type, uint16_t x)
{
    return type == FA_FLOAT16 ? fa_half_to_float(x) : fa_bfloat_to_float(x);
}

static uint16_t store_half(fa_dtype type, double x)
{
    return type == FA_FLOAT16 ? fa_float_to_half((float)x) : fa_float_to_bfloat((float)x);
}

static double load_byte(fa_dtype type, uint8_t x)
{
    return type == FA_INT8 ? (int8_t)x : fa_e4m3_to_float(x);
}

/* Scales of values range over 24 powers of two, with both signs, and include zeros. They are NaN
 * after the length, and for the last key, which the first query does not see. All 8-bit numbers
 * occur. */
static void fill_scaled(scaled *s, fa_dtype type, fa_dtype cache)
{
    ref_random random = {(uint64_t)(10 * type + cache)};
    memset(s, POISON, sizeof *s);
    s->type = type;
    s->cache = cache;
    s->length = SCALED_KEYS - 37;
    for (int i = 0; i < QUERIES * Q_HEADS * SCALED_DIM; i++)
        (&s->q[0][0][0])[i] = store_half(type, ref_random_normal(&random));
    for (int j = 0; j < s->length; j++)
        for (int h = 0; h < KV_HEADS; h++) {
            const bool last = j == s->length - 1;
            for (int c = 0; c < SCALED_DIM; c++) {
                uint8_t k = (uint8_t)(j * 7 + h + c * 5), v = (uint8_t)(j + h * 3 + c * 11);
                if (cache == FA_FLOAT8_E4M3 && k % 128 == 127) k--;
                if (cache == FA_FLOAT8_E4M3 && v % 128 == 127) v--;
                if (cache == FA_FLOAT8_E4M3 && last) v = 127;
                s->k[j][h][c] = k;
                s->v[j][h][c] = v;
            }
            s->k_scale[j][h] = (float)(0.2 / (1 + j % 13)) / (cache == FA_INT8 ? 64 : 128);
            s->v_scale[j][h] = last ? NAN
                               : j % 17 == 16
                                   ? 0.0f
                                   : ldexpf(j % 2 ? -0.7f : 0.9f, (j * 5 + 11 * h) % 25 - 12);
        }
}

/* Query i of a head in double. scale: of the change that rounding weights may cause. */
static void expect_scaled(const scaled *s, int i, int h, double out[SCALED_DIM],
                          double scale[SCALED_DIM])
{
    double p[SCALED_KEYS], top = -INFINITY, sum = 0, largest = 0;
    const int g = h / (Q_HEADS / KV_HEADS), keys = s->length - (QUERIES - 1 - i);
    for (int j = 0; j < keys; j++) {
        p[j] = 0;
        for (int c = 0; c < SCALED_DIM; c++)
            p[j] += load_half(s->type, s->q[i][h][c]) * load_byte(s->cache, s->k[j][g][c]);
        p[j] *= s->k_scale[j][g] / sqrt(SCALED_DIM);
        top = fmax(top, p[j]);
    }
    for (int j = 0; j < keys; j++) {
        p[j] = exp(p[j] - top);
        sum += p[j];
        largest = fmax(largest, p[j] * fabsf(s->v_scale[j][g]));
    }
    for (int c = 0; c < SCALED_DIM; c++) {
        out[c] = scale[c] = 0;
        for (int j = 0; j < keys; j++) {
            const double v = load_byte(s->cache, s->v[j][g][c]);
            out[c] += p[j] * s->v_scale[j][g] * v / sum;
            scale[c] += (p[j] * fabsf(s->v_scale[j][g]) + 0x1p-20 * largest) * fabs(v) / sum;
        }
    }
}

static void run_scaled(scaled *s, int64_t parts)
{
    char why[320] = "";
    machine m = {.number = parts};
    fa_cuda_plan plan = {0};
    fa_problem p;
    const fa_tensor q = fa_bshd(s->q, s->type, 1, QUERIES, Q_HEADS, SCALED_DIM);
    const fa_tensor out = fa_bshd(s->out, s->type, 1, QUERIES, Q_HEADS, SCALED_DIM);
    const fa_tensor k = fa_bshd(s->k, s->cache, 1, SCALED_KEYS, KV_HEADS, SCALED_DIM);
    const fa_tensor v = fa_bshd(s->v, s->cache, 1, SCALED_KEYS, KV_HEADS, SCALED_DIM);
    const fa_tensor k_scale = fa_bshd(s->k_scale, FA_FLOAT32, 1, SCALED_KEYS, KV_HEADS, 1);
    const fa_tensor v_scale = fa_bshd(s->v_scale, FA_FLOAT32, 1, SCALED_KEYS, KV_HEADS, 1);
    fa_options o = FA_OPTIONS_INIT;
    o.flags = FA_CAUSAL;
    o.seqlens_k = &s->length;
    o.k_scale = &k_scale;
    o.v_scale = &v_scale;
    const fa_arguments a = {.pass = FA_PASS_DECODE,
                            .device = FA_DEVICE_CUDA,
                            .q = &q,
                            .k = &k,
                            .v = &v,
                            .out = &out,
                            .options = &o};
    add_memory(&m.memory, "all", s, sizeof *s);
    CHECK(fa_problem_make(&a, &p) == FA_OK, "%s", fa_last_error());
    CHECK(fa_cuda_plan_make(&p, &devices[H200], &FAMILY, &plan, why, sizeof why) &&
              plan.family == &FAMILY,
          "%s", why);
    fa_cuda_cut_decode(&plan.launches[0], 0, parts, 1);
    CHECK(run_plan(&m, &p, &plan.launches[0]), "memory beside the workspace was written");
}

static void check_scaled(const scaled *s)
{
    const double unit = s->type == FA_FLOAT16 ? 0x1p-11 : 0x1p-8;
    for (int i = 0; i < QUERIES * Q_HEADS; i++) {
        double want[SCALED_DIM], scale[SCALED_DIM];
        expect_scaled(s, i / Q_HEADS, i % Q_HEADS, want, scale);
        for (int c = 0; c < SCALED_DIM; c++) {
            const double x = load_half(s->type, s->out[i / Q_HEADS][i % Q_HEADS][c]);
            const double error = unit * fabs(want[c]) + 0x1p-10 * scale[c];
            CHECK(isnan(want[c]) ? isnan(x) : fabs(x - want[c]) <= error,
                  "%s, %s, query %d, head %d, column %d: %g, expected %g +- %g",
                  fa_dtype_name(s->type), fa_dtype_name(s->cache), i / Q_HEADS, i % Q_HEADS, c, x,
                  want[c], error);
        }
    }
}

static void test_scales(void)
{
    scaled *s = malloc(sizeof *s);
    if (!s) abort();
    for (int i = 0; i < 8; i++) {
        fill_scaled(s, i % 2 ? FA_FLOAT16 : FA_BFLOAT16, i / 2 % 2 ? FA_INT8 : FA_FLOAT8_E4M3);
        run_scaled(s, i / 4 ? 3 : 1);
        check_scaled(s);
    }
    free(s);
}

#endif
