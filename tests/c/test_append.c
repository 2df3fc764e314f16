/* fa_append against its definition, on the CPU: lengths, pages, rotary embedding, types and scales; and every wrong
 * argument that a caller can give it. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "append_case.h"
#include "check.h"
#include "convert.h"
#include "scalar.h"

enum { CASES = 1500, WILD = 1500 };

static fa_status run(const append_case *c)
{
    return fa_append(&c->k_new, append_case_v_new(c), &c->k_cache, append_case_v_cache(c), &c->o);
}

static void test_random(void)
{
    for (uint64_t seed = 0; seed < CASES; seed++) {
        append_case c;
        ref_report report = REF_REPORT_INIT;
        append_case_make(&c, seed);
        CHECK(run(&c) == FA_OK, "case %d: %s (%s)", (int)seed, fa_last_error(), c.text);
        append_case_check(&c, &report);
        CHECK(report.ok, "case %d: %s (%s)", (int)seed, report.message, c.text);
        append_case_free(&c);
    }
}

/* Wild lengths, indices and pages are errors here, unless they happen to be right; then nothing is written. */
static void test_wild(void)
{
    int refused = 0;
    for (uint64_t seed = 0; seed < WILD; seed++) {
        append_case c;
        ref_report report = REF_REPORT_INIT;
        append_case_make(&c, seed);
        append_case_spoil(&c);
        const fa_status status = run(&c);
        CHECK(status == FA_OK ||
                  (status == FA_ERROR_ARGUMENT && strstr(fa_last_error(), "options.")),
              "wild case %d: %s", (int)seed, fa_last_error());
        if (status != FA_OK) {
            refused++;
            memset(c.count_new, 0, sizeof c.count_new);
            memset(c.count_q, 0, sizeof c.count_q);
            for (int64_t b = 0; c.after && b < c.batch; b++) /* buffers begin with such bytes */
                CHECK(c.after[b] == -1, "wild case %d: lengths were written", (int)seed);
            for (int64_t i = 0; c.table && i < c.batch * c.o.block_table_stride; i++)
                CHECK(c.table[i] == -1, "wild case %d: the table was written", (int)seed);
            for (int64_t b = 0; c.cu && b <= c.batch; b++)
                CHECK(c.cu[b] == -1, "wild case %d: cu_seqlens_after was written", (int)seed);
            for (int64_t b = 0; c.rows && c.k_cache.shape[1] > 0 && b < c.batch; b++)
                CHECK(c.rows[b] == -1, "wild case %d: the table of rows was written", (int)seed);
            c.after = c.table = c.rows = c.cu = NULL;
            append_case_check(&c, &report);
        } else {
            append_case_check_inside(&c, &report);
        }
        CHECK(report.ok, "wild case %d: %s (%s)", (int)seed, report.message, c.text);
        append_case_free(&c);
    }
    CHECK(refused > WILD / 2, "only %d of %d wild cases were refused", refused, WILD);
}

/* ---- Conversions ----------------------------------------------------------------------------- */

/* Every number of 8 bits, those half way between two, and their neighbours. */
static void test_conversions(void)
{
    for (int i = 0; i < 256; i++) {
        const float x = fa_e4m3_to_float((uint8_t)i);
        CHECK(isnan(x) ? (fa_float_to_e4m3(x) & 0x7f) == 0x7f : fa_float_to_e4m3(x) == i,
              "float8 %d, %g, becomes %d", i, (double)x, fa_float_to_e4m3(x));
    }
    for (int i = 0; i < 0x7e; i++) {
        const float low = fa_e4m3_to_float((uint8_t)i), high = fa_e4m3_to_float((uint8_t)(i + 1));
        const float middle = (low + high) / 2;
        CHECK(fa_float_to_e4m3(middle) == (i % 2 ? i + 1 : i), "half way above float8 %d", i);
        CHECK(fa_float_to_e4m3(nextafterf(middle, 0)) == i, "below half way above %d", i);
        CHECK(fa_float_to_e4m3(-nextafterf(middle, 1000)) == (0x80 | (i + 1)), "above half way %d",
              i);
    }
    static const float large[] = {448, 464, 480, 1e30f, INFINITY};
    for (int i = 0; i < 5; i++)
        CHECK(fa_float_to_e4m3(large[i]) == 0x7e && fa_float_to_e4m3(-large[i]) == 0xfe, "%g",
              (double)large[i]);
    for (int i = -127; i <= 127; i++) {
        CHECK(fa_float_to_int8((float)i) == i && fa_float_to_int8((float)i + 0.49f) == i &&
                  fa_float_to_int8((float)i - 0.49f) == i,
              "int8 %d", i);
        if (i < 127) CHECK(fa_float_to_int8((float)i + 0.5f) % 2 == 0, "half way above %d", i);
    }
    CHECK(fa_float_to_int8(INFINITY) == 127 && fa_float_to_int8(-1e9f) == -127 &&
              fa_float_to_int8(NAN) == 0,
          "int8 of infinity and NaN");
}

/* What is not finite in a row shows in its own scale or elements, and in no other row. */
static void test_nonfinite(void)
{
    static const fa_dtype types[] = {FA_FLOAT8_E4M3, FA_INT8};
    for (int i = 0; i < 2; i++) {
        float k_new[2][4] = {{1, NAN, 3, INFINITY}, {0, 0, 0, 0}}, scales[2] = {7, 7};
        uint8_t bytes[2][4];
        memset(bytes, 0x11, sizeof bytes);
        const fa_tensor k = fa_bshd(k_new, FA_FLOAT32, 1, 2, 1, 4);
        const fa_tensor cache = fa_bshd(bytes, types[i], 1, 2, 1, 4);
        const fa_tensor scale = fa_bshd(scales, FA_FLOAT32, 1, 2, 1, 1);
        fa_append_options o = FA_APPEND_OPTIONS_INIT;
        o.k_scale = &scale;
        o.flags = FA_WRITE_SCALES;
        CHECK(fa_append(&k, NULL, &cache, NULL, &o) == FA_OK, "%s", fa_last_error());
        CHECK(isnan(scales[0]) && scales[1] == 0, "scales %g and %g", (double)scales[0],
              (double)scales[1]);
        for (int e = 0; e < 4; e++) CHECK(bytes[1][e] == 0, "a row of zeros holds %d", bytes[1][e]);
    }
}

/* ---- Into a quantized cache and out of it ---------------------------------------------------- */

enum {
    KEYS = 40,
    PAGE = 8,
    HEADS = 2,
    GROUP = 3,
    DIM = 24,
    BATCH = 2,
    PAGES = BATCH * KEYS / PAGE
};

static void fill(ref_random *r, float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] = (float)ref_random_normal(r);
}

/* What fa_append quantizes fa_decode reads, and it sees what the elements stand for. */
static void test_round_trip(fa_dtype dtype)
{
    static float k[BATCH * KEYS * HEADS * DIM], v[BATCH * KEYS * HEADS * DIM];
    static float q[BATCH * HEADS * GROUP * DIM], got[BATCH * HEADS * GROUP * DIM];
    static float want[BATCH * HEADS * GROUP * DIM], k_plain[PAGES * PAGE * HEADS * DIM];
    static float v_plain[PAGES * PAGE * HEADS * DIM], scales[2][PAGES * PAGE * HEADS];
    static uint8_t caches[2][PAGES * PAGE * HEADS * DIM];
    int32_t pages[PAGES], lengths[BATCH] = {KEYS, KEYS};
    ref_random random = {(uint64_t)dtype};
    for (int i = 0; i < PAGES; i++) pages[i] = i * 3 % PAGES;
    fill(&random, k, BATCH * KEYS * HEADS * DIM);
    fill(&random, v, BATCH * KEYS * HEADS * DIM);
    fill(&random, q, BATCH * HEADS * GROUP * DIM);
    memset(caches, 0x7f, sizeof caches);
    memset(scales, 0xff, sizeof scales);
    const fa_tensor k_new = fa_bshd(k, FA_FLOAT32, BATCH, KEYS, HEADS, DIM);
    const fa_tensor v_new = fa_bshd(v, FA_FLOAT32, BATCH, KEYS, HEADS, DIM);
    const fa_tensor k_cache = fa_bshd(caches[0], dtype, PAGES, PAGE, HEADS, DIM);
    const fa_tensor v_cache = fa_bshd(caches[1], dtype, PAGES, PAGE, HEADS, DIM);
    const fa_tensor k_scale = fa_bshd(scales[0], FA_FLOAT32, PAGES, PAGE, HEADS, 1);
    const fa_tensor v_scale = fa_bshd(scales[1], FA_FLOAT32, PAGES, PAGE, HEADS, 1);
    fa_append_options a = FA_APPEND_OPTIONS_INIT;
    a.flags = FA_WRITE_SCALES;
    a.block_table = pages;
    a.block_table_stride = KEYS / PAGE;
    a.k_scale = &k_scale;
    a.v_scale = &v_scale;
    CHECK(fa_append(&k_new, &v_new, &k_cache, &v_cache, &a) == FA_OK, "%s", fa_last_error());

    const fa_tensor dense_k = fa_bshd(k_plain, FA_FLOAT32, PAGES, PAGE, HEADS, DIM);
    const fa_tensor dense_v = fa_bshd(v_plain, FA_FLOAT32, PAGES, PAGE, HEADS, DIM);
    for (int64_t i = 0; i < PAGES * PAGE * HEADS * DIM; i++) {
        const int64_t page = i / DIM / HEADS / PAGE, row = i / DIM / HEADS % PAGE;
        const int64_t head = i / DIM % HEADS, e = i % DIM;
        k_plain[i] = (float)(ref_load(&k_cache, page, row, head, e) * (double)scales[0][i / DIM]);
        v_plain[i] = (float)(ref_load(&v_cache, page, row, head, e) * (double)scales[1][i / DIM]);
    }
    for (int64_t b = 0; b < BATCH; b++)
        for (int64_t j = 0; j < KEYS; j++) {
            const int64_t at = ((b * KEYS + j) * HEADS) * DIM;
            const int64_t page = pages[b * (KEYS / PAGE) + j / PAGE];
            const int64_t in_cache = ((page * PAGE + j % PAGE) * HEADS) * DIM;
            CHECK(fabsf(k_plain[in_cache] - k[at]) < 0.3f &&
                      fabsf(v_plain[in_cache] - v[at]) < 0.3f,
                  "key %d: %g, not %g", (int)j, (double)k_plain[in_cache], (double)k[at]);
        }
    const fa_tensor queries = fa_bshd(q, FA_FLOAT32, BATCH, 1, HEADS * GROUP, DIM);
    const fa_tensor out = fa_bshd(got, FA_FLOAT32, BATCH, 1, HEADS * GROUP, DIM);
    const fa_tensor plain = fa_bshd(want, FA_FLOAT32, BATCH, 1, HEADS * GROUP, DIM);
    fa_options o = FA_OPTIONS_INIT;
    o.block_table = pages;
    o.block_table_stride = KEYS / PAGE;
    o.seqlens_k = lengths;
    CHECK(fa_decode(&queries, &dense_k, &dense_v, &plain, NULL, &o) == FA_OK, "%s",
          fa_last_error());
    o.k_scale = &k_scale;
    o.v_scale = &v_scale;
    CHECK(fa_decode(&queries, &k_cache, &v_cache, &out, NULL, &o) == FA_OK, "%s", fa_last_error());
    for (int64_t i = 0; i < BATCH * HEADS * GROUP * DIM; i++)
        CHECK(fabsf(got[i] - want[i]) < 1e-5f, "%s: out %g, not %g", fa_dtype_name(dtype),
              (double)got[i], (double)want[i]);
}

/* ---- Wrong arguments ------------------------------------------------------------------------- */

enum { B = 2, N = 3, H = 2, D = 8, DV = 4, ROWS = 6, POSITIONS = 9 };

typedef struct setup {
    fa_tensor k_new, v_new, k_cache, v_cache, q, q_out, cos, sin, k_scale, v_scale;
    const fa_tensor *k_new_p, *v_new_p, *k_cache_p, *v_cache_p;
    fa_append_options o;
} setup;

static float room[10][1024];
static int32_t lengths[B], index_[B], padding[B], cu[B + 1], counts[B], starts[B], table[B * 4];

static setup valid(void)
{
    static const int32_t zeros[B + 1];
    memcpy(lengths, zeros, sizeof lengths);
    memcpy(padding, zeros, sizeof padding);
    memcpy(starts, zeros, sizeof starts);
    memcpy(counts, zeros, sizeof counts);
    for (int b = 0; b <= B; b++) cu[b] = b;
    for (int b = 0; b < B; b++) index_[b] = B - 1 - b;
    for (int i = 0; i < B * 2; i++) table[i] = i;
    setup s = {.k_new = fa_bshd(room[0], FA_FLOAT32, B, N, H, D),
               .v_new = fa_bshd(room[1], FA_FLOAT32, B, N, H, DV),
               .k_cache = fa_bshd(room[2], FA_FLOAT32, B, ROWS, H, D),
               .v_cache = fa_bshd(room[3], FA_FLOAT32, B, ROWS, H, DV),
               .q = fa_bshd(room[4], FA_FLOAT32, B, N, 2 * H, D),
               .q_out = fa_bshd(room[5], FA_FLOAT32, B, N, 2 * H, D),
               .cos = fa_bshd(room[6], FA_FLOAT32, 1, POSITIONS, 1, D / 2),
               .sin = fa_bshd(room[7], FA_FLOAT32, 1, POSITIONS, 1, D / 2),
               .k_scale = fa_bshd(room[8], FA_FLOAT32, 1, 1, H, 1),
               .v_scale = fa_bshd(room[9], FA_FLOAT32, 1, 1, 1, 1),
               .o = FA_APPEND_OPTIONS_INIT};
    return s;
}

static fa_status call(setup *s)
{
    return fa_append(s->k_new_p, s->v_new_p, s->k_cache_p, s->v_cache_p, &s->o);
}

/* A valid setup with everything, then one change, then the call. */
#define REFUSES(change, value, expected)                                                           \
    do {                                                                                           \
        setup s = valid();                                                                         \
        s.k_new_p = &s.k_new, s.v_new_p = &s.v_new, s.k_cache_p = &s.k_cache,                      \
        s.v_cache_p = &s.v_cache;                                                                  \
        s.o.cos = &s.cos, s.o.sin = &s.sin, s.o.q = &s.q, s.o.q_out = &s.q_out;                    \
        s.o.lengths = lengths;                                                                     \
        CHECK(call(&s) == FA_OK, "valid: %s", fa_last_error());                                    \
        change;                                                                                    \
        const fa_status status = call(&s);                                                         \
        CHECK(status == FA_ERROR_ARGUMENT && strstr(fa_last_error(), value) &&                     \
                  strstr(fa_last_error(), expected),                                               \
              "\"%s\", \"%s\": %s", value, expected,                                               \
              status == FA_OK ? "no error" : fa_last_error());                                     \
    } while (0)

static void use_pages(setup *s)
{
    s->o.block_table = table;
    s->o.block_table_stride = 2;
    s->k_cache.shape[0] = s->v_cache.shape[0] = 4;
    s->k_cache.shape[1] = s->v_cache.shape[1] = 3;
    s->k_cache.stride[0] = 3 * H * D;
    s->v_cache.stride[0] = 3 * H * DV;
}

static void test_tensors(void)
{
    REFUSES(s.k_new_p = NULL, "k_new is NULL", "expected a tensor");
    REFUSES(s.k_cache_p = NULL, "k_cache is NULL", "expected a tensor");
    REFUSES(s.v_new_p = NULL, "v_new is NULL", "expected both v_new and v_cache, or neither");
    REFUSES(s.v_cache_p = NULL, "v_cache is NULL", "expected both");
    REFUSES(s.k_new.data = NULL, "k_new.data is NULL", "expected data");
    REFUSES(s.k_cache.data = NULL, "k_cache.data is NULL", "expected data");
    REFUSES(s.k_new.dtype = FA_FLOAT8_E4M3, "k_new.dtype is 3", "float32, float16 or bfloat16");
    REFUSES(s.k_cache.dtype = FA_BOOL, "k_cache.dtype is 4", "float8_e4m3 or int8");
    REFUSES(s.k_cache.dtype = (fa_dtype)77, "k_cache.dtype is 77", "float8_e4m3 or int8");
    REFUSES(s.k_new.shape[1] = -1, "k_new.shape[1] is -1", "expected 0 to 2^60");
    REFUSES(s.k_new.shape[0] = s.v_new.shape[0] = 3, "k_cache.shape[0] is 2",
            "expected at least 3 (the batch)");
    REFUSES(s.k_new.shape[3] = 577, "k_new.shape[3] is 577", "from 1 to 576");
    REFUSES(s.k_cache.shape[2] = 1, "k_cache.shape[2] is 1", "expected 2 (k_new.shape[2])");
    REFUSES(s.k_cache.shape[3] = 4, "k_cache.shape[3] is 4", "expected 8 (k_new.shape[3])");
    REFUSES(s.v_cache.shape[1] = 5, "v_cache.shape[1] is 5", "expected 6 (k_cache.shape[1])");
    REFUSES(s.v_cache.shape[3] = 3, "v_cache.shape[3] is 3", "expected 4 (v_new.shape[3])");
    REFUSES(s.v_new.shape[1] = 2, "v_new.shape[1] is 2", "expected 3 (k_new.shape[1])");
    REFUSES(s.k_cache.stride[0] = INT64_MAX / 2, "k_cache.stride is", "within 63 bits");
    REFUSES(s.k_cache.stride[1] = 0, "k_cache.stride is", "no two elements share");
    REFUSES(s.k_cache.stride[3] = 2, "k_cache.stride[3] is 2", "expected 1");
    REFUSES(s.k_new.stride[1] = INT64_MIN, "k_new.stride is", "within 63 bits");
    REFUSES(s.k_cache.data = s.k_new.data, "k_cache at", "overlaps k_new");
    REFUSES(s.v_cache.data = s.k_cache.data, "k_cache at", "overlaps v_cache");
    REFUSES(s.q_out.data = s.k_cache.data, "k_cache at", "overlaps options.q_out");
    REFUSES(s.q_out.data = (char *)s.q.data + 4, "options.q_out at", "overlaps options.q at");
    REFUSES(s.q.shape[3] = 4, "options.q.shape[3] is 4", "expected 8 (k_new.shape[3])");
    REFUSES(s.q.shape[0] = 1, "options.q.shape[0] is 1", "expected 2 (the batch)");
    REFUSES(s.q_out.shape[1] = 2, "options.q_out.shape[1] is 2", "expected 3 (options.q.shape[1])");
    REFUSES(s.q.dtype = FA_INT8, "options.q.dtype is 5 (int8)", "float32, float16 or bfloat16");
}

static void test_rotary_tables(void)
{
    REFUSES(s.o.sin = NULL, "options.sin is NULL", "both tables or none");
    REFUSES(s.o.cos = NULL, "options.cos is NULL", "both tables or none");
    REFUSES(s.cos.shape[0] = 2, "options.cos.shape[0] is 2", "expected 1");
    REFUSES(s.cos.shape[3] = s.sin.shape[3] = 5, "options.cos.shape[3] is 5", "expected 1 to 4");
    REFUSES(s.cos.shape[3] = s.sin.shape[3] = 0, "options.cos.shape[3] is 0", "expected 1 to 4");
    REFUSES(s.sin.shape[3] = 3, "options.sin.shape[3] is 3", "expected 4 (options.cos.shape[3])");
    REFUSES(s.cos.shape[1] = 0, "options.cos.shape[1] is 0", "at least one position");
    REFUSES(s.cos.dtype = FA_FLOAT8_E4M3, "options.cos.dtype is 3", "float32");
    REFUSES(s.o.rotary_offset = 1, "options.rotary_offset is 1", "expected 0 to 0");
    REFUSES(s.o.rotary_offset = -1, "options.rotary_offset is -1", "expected 0 to 0");
    REFUSES(s.cos.shape[1] = s.sin.shape[1] = 2, "options.lengths[0] is 0 with 3",
            "expected positions of 0 to 1 (options.cos.shape[1])");
    REFUSES(s.o.rotary_positions = starts;
            starts[1] = POSITIONS, "options.rotary_positions[1] is 9", "positions of 0 to 8");
    REFUSES(s.o.rotary_positions = starts;
            starts[0] = -1, "options.rotary_positions[0] is -1", "positions of 0 to 8");
    REFUSES(s.o.q = s.o.q_out = NULL; s.o.cos = s.o.sin = NULL; s.o.rotary_positions = starts,
                                                                "options.rotary_positions is set",
                                                                "without options.cos");
    REFUSES(s.o.cos = s.o.sin = NULL, "options.q is set", "without options.cos");
    REFUSES(s.o.q = NULL, "options.q_out is set", "without options.q");
    REFUSES(s.o.q = s.o.q_out = NULL;
            s.o.seqlens_q = counts, "options.seqlens_q is set", "without options.q");
    REFUSES(s.o.q = s.o.q_out = s.o.cos = s.o.sin = NULL;
            s.o.flags = FA_ROTARY_INTERLEAVED, "options.flags is 0x1", "without options.cos");
}

static void test_lengths(void)
{
    REFUSES(lengths[1] = -1, "options.lengths[1] is -1", "expected >= 0");
    REFUSES(lengths[0] = 4, "options.lengths[0] is 4 with 0 rows of padding and 3 new keys",
            "expected at most 6 in all (k_cache.shape[1])");
    REFUSES(lengths[0] = INT32_MAX, "options.lengths[0] is 2147483647", "expected at most 6");
    REFUSES(s.o.left_padding = padding; padding[1] = -2, "options.left_padding[1] is -2", ">= 0");
    REFUSES(s.o.left_padding = padding; padding[1] = 4, "with 4 rows of padding", "at most 6");
    REFUSES(s.o.cache_index = index_;
            index_[1] = 2, "options.cache_index[1] is 2", "expected 0 to 1 (k_cache.shape[0])");
    REFUSES(s.o.cache_index = index_; index_[0] = -1, "options.cache_index[0] is -1", "0 to 1");
    REFUSES(s.o.seqlens_new = counts; counts[0] = 4, "options.seqlens_new[0] is 4", "0 to 3");
    REFUSES(s.o.seqlens_new = counts; counts[1] = -1, "options.seqlens_new[1] is -1", "0 to 3");
    REFUSES(s.o.seqlens_q = counts; counts[1] = 9, "options.seqlens_q[1] is 9", "0 to 3");
    REFUSES(s.o.cu_seqlens_new = cu; s.o.num_sequences = B, "k_new.shape[0] is 2",
                                     "expected 1 (packed by options.cu_seqlens_new)");
    REFUSES(s.o.cu_seqlens_new = cu; s.o.num_sequences = B; s.k_new.shape[0] = s.v_new.shape[0] = 1;
            cu[0] = -1, "options.cu_seqlens_new[0] is -1", "expected >= 0");
    REFUSES(s.o.cu_seqlens_new = cu; s.o.num_sequences = B; s.k_new.shape[0] = s.v_new.shape[0] = 1;
            cu[2] = 4, "options.cu_seqlens_new[2] is 4", "expected <= 3 (k_new.shape[1])");
    REFUSES(s.o.cu_seqlens_new = cu; s.o.num_sequences = B; s.k_new.shape[0] = s.v_new.shape[0] = 1;
            cu[1] = 3, "options.cu_seqlens_new[2] is 2", "expected >= 3, the entry before it");
    REFUSES(s.o.lengths_after = lengths, "options.lengths_after at", "overlaps options.lengths");
    REFUSES(s.o.lengths_after = (int32_t *)((char *)counts + 2), "options.lengths_after",
            "aligned");
    REFUSES(s.o.flags = FA_LENGTHS_WITH_PADDING, "options.flags is 0x8",
            "without options.left_padding");
    REFUSES(s.o.flags = FA_LENGTHS_WITH_PADDING; s.o.left_padding = padding;
            padding[1] = 4, "options.left_padding[1] is 4", "expected at most 3 rows");
    REFUSES(s.o.flags = FA_LENGTHS_WITH_PADDING; s.o.left_padding = padding; padding[0] = 2;
            lengths[0] = 4, "options.lengths[0] is 4 with 2 rows of padding among them and 3 new",
            "expected at most 6 in all");
    REFUSES(s.o.num_sequences = B, "options.num_sequences is 2", "expected 0 without");
    REFUSES(s.o.num_sequences = -1; s.o.cu_seqlens_new = cu, "options.num_sequences is -1", "2^60");
}

static void test_pages(void)
{
    REFUSES(use_pages(&s); table[1] = 4; lengths[0] = 2,
                                         "options.block_table[1] (row 0, entry 1) is 4",
                                         "expected 0 <= page < 4 (k_cache.shape[0])");
    REFUSES(use_pages(&s); table[2] = -1, "options.block_table[2] (row 1, entry 0) is -1", "< 4");
    REFUSES(use_pages(&s); lengths[1] = 4, "options.lengths[1] is 4",
                           "expected at most 6 in all (the pages of a row of options.block_table)");
    REFUSES(use_pages(&s);
            s.o.block_table_stride = 0, "options.block_table_stride is 0", "1 to 2^60");
    REFUSES(use_pages(&s); s.o.block_table_rows = 1, "options.block_table_rows is 1",
                           "expected at least 2 (the batch)");
    REFUSES(use_pages(&s);
            s.o.block_table_rows = -1, "options.block_table_rows is -1", "0 to 2^60");
    REFUSES(use_pages(&s); s.k_cache.shape[1] = s.v_cache.shape[1] = 0, "k_cache.shape[1] is 0",
                           "page size of at least 1");
    REFUSES(use_pages(&s); s.o.block_table_stride = (int64_t)1 << 59,
                           "options.block_table_stride is", "expected products up to 2^60");
    REFUSES(use_pages(&s); s.o.cache_index = index_;
            index_[1] = 2, "options.cache_index[1] is 2",
            "expected 0 to 1 (rows of options.block_table)");
    REFUSES(s.o.block_table_stride = 2, "options.block_table_stride is 2",
            "without options.block_table");
    REFUSES(s.o.block_table_after = table, "options.block_table_after is set",
            "without options.block_table");
    REFUSES(use_pages(&s); s.o.block_table_after = table + 3, "options.block_table_after at",
                           "overlaps options.block_table");
    REFUSES(s.o.block_table = (const int32_t *)(const void *)((const char *)table + 2);
            s.o.block_table_stride = 2, "options.block_table is 0x", "aligned to 4 bytes");
}

/* Arrays that number all rows of the cache. */
static void test_rows_after(void)
{
    static int32_t rows[B * ROWS], cu_after[B + 1];
    REFUSES(s.o.row_table_after = rows; s.k_cache.stride[0] = ROWS * H * D + 1,
                                        "k_cache.stride is {97, 16, ...}",
                                        "a whole number of rows apart, at least 6");
    REFUSES(s.o.cu_seqlens_after = cu_after; s.v_cache.stride[0] = (ROWS + 1) * H * DV,
                                             "blocks of k_cache are 6 and of v_cache 7 rows apart",
                                             "expected the same");
    REFUSES(s.o.row_table_after = rows; s.v_new_p = s.v_cache_p = NULL;
            s.k_cache.stride[0] = (int64_t)H * D << 31, "k_cache has 2 blocks", "fewer than 2^31");
    REFUSES(s.o.cu_seqlens_after = cu_after; s.o.cache_index = index_,
                                             "options.cu_seqlens_after is set",
                                             "NULL with options.cache_index");
    REFUSES(s.o.cu_seqlens_after = cu_after;
            use_pages(&s), "options.cu_seqlens_after is set", "NULL with options.block_table");
    REFUSES(s.o.row_table_after = lengths, "options.row_table_after at", "overlaps");
    REFUSES(use_pages(&s); s.o.row_table_after = rows; lengths[0] = 3;
            table[0] = 9, "options.block_table[0] (row 0, entry 0) is 9", "0 <= page < 4");
}

static void test_options(void)
{
    REFUSES(s.o.flags = 16, "options.flags is 0x10", "expected only the bits 0xf");
    REFUSES(s.o.reserved = 1, "options.reserved is 1", "expected 0");
    REFUSES(s.o.threads = -1, "options.threads is -1", "expected > 0");
    REFUSES(s.o.stream = room, "options.stream is 0x", "as the call runs on the CPU");
    REFUSES(s.o.size = 12, "options.size is 12", "sizeof(fa_append_options)");
    REFUSES(s.o.device = (fa_device)9, "options.device is 9", "FA_DEVICE_AUTO");
    REFUSES(s.o.k_scale = &s.k_scale, "options.k_scale is set and k_cache is float32",
            "expected float8_e4m3 or int8");
    REFUSES(s.k_cache.dtype = FA_INT8; s.o.k_scale = &s.k_scale;
            s.k_scale.shape[2] = 3, "options.k_scale.shape[2] is 3",
            "expected 2 (k_cache.shape[2]) or 1");
    REFUSES(s.k_cache.dtype = FA_INT8; s.o.k_scale = &s.k_scale;
            s.k_scale.dtype = FA_FLOAT16, "options.k_scale.dtype is 1", "expected float32");
    REFUSES(s.k_cache.dtype = FA_INT8; s.o.k_scale = &s.k_scale;
            s.o.flags = FA_WRITE_SCALES, "options.k_scale.shape[0] is 1",
            "as FA_WRITE_SCALES writes one for each row");
    REFUSES(s.k_cache.dtype = FA_INT8;
            s.o.flags = FA_WRITE_SCALES, "options.k_scale is NULL", "FA_WRITE_SCALES");
    REFUSES(s.v_new_p = s.v_cache_p = NULL;
            s.o.v_scale = &s.v_scale, "options.v_scale is set", "expected float8_e4m3 or int8");
}

/* Without new keys the cache may be memory that cannot be written: values within the keys, one block for all. */
static void test_no_keys(void)
{
    static int32_t rows[B * ROWS];
    setup s = valid();
    s.k_new.shape[1] = 0;
    s.v_new = s.k_new, s.v_cache = s.k_cache;
    s.o.row_table_after = rows;
    s.o.lengths = lengths;
    lengths[0] = 2, lengths[1] = ROWS;
    CHECK(fa_append(&s.k_new, &s.v_new, &s.k_cache, &s.v_cache, &s.o) == FA_OK && rows[1] == 1 &&
              rows[ROWS + 4] == ROWS + 4,
          "%s: %d, %d", fa_last_error(), (int)rows[1], (int)rows[ROWS + 4]);
    s.o.row_table_after = NULL;
    s.k_cache.stride[0] = s.v_cache.stride[0] = 0;
    CHECK(fa_append(&s.k_new, &s.v_new, &s.k_cache, &s.v_cache, &s.o) == FA_OK, "%s",
          fa_last_error());
}

/* Struct sizes of other versions; no options at all: everything at the cache's beginning. */
static void test_sizes(void)
{
    setup s = valid();
    CHECK(fa_append(&s.k_new, &s.v_new, &s.k_cache, &s.v_cache, NULL) == FA_OK, "%s",
          fa_last_error());
    s.o.size = offsetof(fa_append_options, cos);
    s.o.q = &s.q; /* behind the size: not read */
    CHECK(fa_append(&s.k_new, NULL, &s.k_cache, NULL, &s.o) == FA_OK, "%s", fa_last_error());
}

int main(void)
{
    test_begin();
    test_conversions();
    test_random();
    test_wild();
    test_nonfinite();
    test_round_trip(FA_FLOAT8_E4M3);
    test_round_trip(FA_INT8);
    test_tensors();
    test_rotary_tables();
    test_lengths();
    test_pages();
    test_rows_after();
    test_options();
    test_no_keys();
    test_sizes();
    return test_end();
}
