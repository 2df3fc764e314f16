/*
 * Every error path of the API: the status, and that the message names the argument, its value and
 * what was expected. And the reverse: unusual but legal arguments that must not be refused.
 *
 * Each case starts from a valid setup, changes one thing and calls.
 */
#define _POSIX_C_SOURCE 200809L /* setenv, posix_memalign */

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "flashattn.h"

enum { B = 2, NQ = 3, NK = 5, HQ = 4, HKV = 2, D = 4, DV = 6, ROWS = 2, PARTS = 2 };
enum { ROOM = 1024 }; /* floats of each buffer: more than any tensor of these tests uses */

/* The arguments of all calls. A null_ flag passes NULL for the struct itself. */
typedef struct setup {
    fa_tensor q, k, v, out, bias, mask, weights;
    bool null_q, null_k, null_v, null_out, null_weights, null_gradients, null_parts, null_part_lse;
    float *lse;
    fa_gradients gradients;
    const int64_t *rows;
    int64_t num_rows;
    fa_tensor parts[PARTS];
    const float *part_lse[PARTS];
    int64_t num_parts;
    fa_options o;
    fa_pass pass;
} setup;

enum {
    Q,
    K,
    V,
    OUT,
    LSE,
    BIAS,
    MASK,
    WEIGHTS,
    DOUT,
    DLSE,
    DQ,
    DK,
    DV_,
    DBIAS,
    DSINKS,
    PART0,
    PART1,
    PART_LSE0,
    PART_LSE1,
    SLOPES,
    SINKS,
    DESCALE,
    NUM_BUFFERS
};
static float buffer[NUM_BUFFERS][ROOM];

static int64_t rows[ROOM]; /* long enough to overlap weights */
static int32_t cu_q[B + 1], cu_k[B + 1], lengths_q[B], lengths_k[B], table[B * 2];
static uint64_t dropout_state[2];

static setup valid(void)
{
    rows[0] = 0, rows[1] = 2;
    memcpy(cu_q, (int32_t[]){0, 1, 3}, sizeof cu_q);
    memcpy(cu_k, (int32_t[]){0, 2, 5}, sizeof cu_k);
    memcpy(lengths_q, (int32_t[]){3, 1}, sizeof lengths_q);
    memcpy(lengths_k, (int32_t[]){5, 2}, sizeof lengths_k);
    memcpy(table, (int32_t[]){1, 0, 0, 1}, sizeof table);
    const fa_dtype f = FA_FLOAT32;
    return (setup){
        .q = fa_bshd(buffer[Q], f, B, NQ, HQ, D),
        .k = fa_bshd(buffer[K], f, B, NK, HKV, D),
        .v = fa_bshd(buffer[V], f, B, NK, HKV, DV),
        .out = fa_bshd(buffer[OUT], f, B, NQ, HQ, DV),
        .bias = fa_bshd(buffer[BIAS], f, B, HQ, NQ, NK),
        .mask = fa_bshd(buffer[MASK], FA_BOOL, B, HQ, NQ, NK),
        .weights = fa_bshd(buffer[WEIGHTS], f, B, HQ, ROWS, NK),
        .lse = buffer[LSE],
        .gradients = {.dout = fa_bshd(buffer[DOUT], f, B, NQ, HQ, DV),
                      .dq = fa_bshd(buffer[DQ], f, B, NQ, HQ, D),
                      .dk = fa_bshd(buffer[DK], f, B, NK, HKV, D),
                      .dv = fa_bshd(buffer[DV_], f, B, NK, HKV, DV)},
        .rows = rows,
        .num_rows = ROWS,
        .parts = {fa_bshd(buffer[PART0], f, B, NQ, HQ, DV),
                  fa_bshd(buffer[PART1], f, B, NQ, HQ, DV)},
        .part_lse = {buffer[PART_LSE0], buffer[PART_LSE1]},
        .num_parts = PARTS,
        .o = {.size = sizeof(fa_options)},
    };
}

/* ---- Calls on a setup ------------------------------------------------------------------------ */

#define GIVEN(s, what) ((s)->null_##what ? NULL : &(s)->what)

static fa_status forward(setup *s)
{
    return fa_forward(GIVEN(s, q), GIVEN(s, k), GIVEN(s, v), GIVEN(s, out), s->lse, &s->o);
}

static fa_status decode(setup *s)
{
    return fa_decode(GIVEN(s, q), GIVEN(s, k), GIVEN(s, v), GIVEN(s, out), s->lse, &s->o);
}

static fa_status backward(setup *s)
{
    return fa_backward(GIVEN(s, q), GIVEN(s, k), GIVEN(s, v), GIVEN(s, out), s->lse,
                       GIVEN(s, gradients), &s->o);
}

static fa_status weights(setup *s)
{
    return fa_weights(GIVEN(s, q), GIVEN(s, k), s->rows, s->num_rows, GIVEN(s, weights), &s->o);
}

static fa_status combine(setup *s)
{
    return fa_combine(s->null_parts ? NULL : s->parts, s->null_part_lse ? NULL : s->part_lse,
                      s->num_parts, GIVEN(s, out), s->lse, &s->o);
}

static fa_status supported(setup *s)
{
    return fa_supported(s->pass, GIVEN(s, q), GIVEN(s, k), GIVEN(s, v), GIVEN(s, out), &s->o);
}

static fa_status describe(setup *s)
{
    char text[200];
    return fa_describe(s->pass, GIVEN(s, q), GIVEN(s, k), GIVEN(s, v), GIVEN(s, out), &s->o, text,
                       sizeof text);
}

static fa_status workspace_size(setup *s)
{
    size_t bytes;
    return fa_workspace_size(s->pass, GIVEN(s, q), GIVEN(s, k), GIVEN(s, v), GIVEN(s, out), &s->o,
                             &bytes);
}

/* ---- Expectations ---------------------------------------------------------------------------- */

static int checks, failures;

static void expect_status(int line, fa_status got, fa_status expected)
{
    checks++;
    if (got == expected) return;
    failures++;
    printf("line %d: %s, expected %s: \"%s\"\n", line, fa_status_name(got),
           fa_status_name(expected), got == FA_OK ? "" : fa_last_error());
}

/* The fragments must occur in this order. */
static void expect_message(int line, const char *const *fragments)
{
    const char *at = fa_last_error();
    for (; *fragments; fragments++) {
        checks++;
        const char *found = strstr(at, *fragments);
        if (!found) {
            failures++;
            printf("line %d: \"%s\" lacks \"%s\"\n", line, fa_last_error(), *fragments);
            return;
        }
        at = found + strlen(*fragments);
    }
}

static void expect(int line, fa_status got, fa_status expected, const char *const *fragments)
{
    expect_status(line, got, expected);
    if (got == expected) expect_message(line, fragments);
}

#define FAILS(got, status, ...) expect(__LINE__, got, status, (const char *[]){__VA_ARGS__, NULL})

/* REFUSES(call, change, fragments...): the valid setup s, changed, is an argument error. */
#define REFUSES(call, change, ...)                                                                 \
    do {                                                                                           \
        setup s = valid();                                                                         \
        change;                                                                                    \
        FAILS(call(&s), FA_ERROR_ARGUMENT, __VA_ARGS__);                                           \
    } while (0)

#define ACCEPTS(call, change)                                                                      \
    do {                                                                                           \
        setup s = valid();                                                                         \
        change;                                                                                    \
        expect_status(__LINE__, call(&s), FA_OK);                                                  \
    } while (0)

/* ---- Setups that several cases share --------------------------------------------------------- */

static void pack_queries(setup *s)
{
    s->q = fa_bshd(buffer[Q], FA_FLOAT32, 1, NQ, HQ, D);
    s->out = fa_bshd(buffer[OUT], FA_FLOAT32, 1, NQ, HQ, DV);
    s->o.cu_seqlens_q = cu_q;
    s->o.num_sequences = B;
}

static void pack_keys(setup *s)
{
    s->k = fa_bshd(buffer[K], FA_FLOAT32, 1, NK, HKV, D);
    s->v = fa_bshd(buffer[V], FA_FLOAT32, 1, NK, HKV, DV);
    s->o.cu_seqlens_k = cu_k;
    s->o.num_sequences = B;
}

/* Two pages of NK rows, two table entries for each batch item. */
static void page_keys(setup *s)
{
    s->o.block_table = table;
    s->o.block_table_stride = 2;
    s->o.seqlens_k = lengths_k;
}

static void forget_data(setup *s)
{
    s->q.data = s->k.data = s->v.data = s->out.data = s->bias.data = s->mask.data = NULL;
}

/* ---- Tensors --------------------------------------------------------------------------------- */

static void test_missing(void)
{
    REFUSES(forward, s.null_q = true, "q is NULL", "expected a tensor");
    REFUSES(forward, s.null_k = true, "k is NULL", "expected a tensor");
    REFUSES(forward, s.null_v = true, "v is NULL", "expected a tensor");
    REFUSES(forward, s.null_out = true, "out is NULL", "expected a tensor");
    REFUSES(decode, s.null_q = true, "q is NULL", "expected a tensor");
    REFUSES(weights, s.null_k = true, "k is NULL", "expected a tensor");
    REFUSES(weights, s.null_weights = true, "weights is NULL", "expected a tensor");
    REFUSES(backward, s.null_out = true, "out is NULL", "expected a tensor");
    REFUSES(backward, s.null_gradients = true, "gradients is NULL", "expected a struct with dout");
    REFUSES(backward, s.lse = NULL, "lse is NULL",
            "expected the log-sum-exp that fa_forward wrote");
    REFUSES(forward, s.q.data = NULL, "q.data is NULL", "expected data of shape (2, 3, 4, 4)");
    REFUSES(forward, s.k.data = NULL, "k.data is NULL", "expected data of shape (2, 5, 2, 4)");
    REFUSES(forward, s.v.data = NULL, "v.data is NULL", "expected data of shape (2, 5, 2, 6)");
    REFUSES(forward, s.out.data = NULL, "out.data is NULL", "expected data of shape (2, 3, 4, 6)");
    REFUSES(weights, s.weights.data = NULL, "weights.data is NULL", "shape (2, 4, 2, 5)");
    REFUSES(supported, s.null_q = true, "q is NULL", "expected a tensor");
    REFUSES(supported, s.null_v = true, "v is NULL", "expected a tensor");
}

static void test_dtypes(void)
{
    const char *inputs = "expected float32, float16, bfloat16 or float8_e4m3";
    const char *keys = "expected float32, float16, bfloat16, float8_e4m3 or int8";
    const char *outputs = "expected float32, float16 or bfloat16";
    REFUSES(forward, s.q.dtype = FA_BOOL, "q.dtype is 4 (bool)", inputs);
    REFUSES(forward, s.k.dtype = (fa_dtype)9, "k.dtype is 9 (unknown dtype)", keys);
    REFUSES(forward, s.v.dtype = (fa_dtype)-1, "v.dtype is ", "(unknown dtype)", keys);
    REFUSES(forward, s.out.dtype = FA_FLOAT8_E4M3, "out.dtype is 3 (float8_e4m3)", outputs);
    REFUSES(forward, s.out.dtype = FA_BOOL, "out.dtype is 4 (bool)", outputs);
    REFUSES(weights, s.weights.dtype = FA_FLOAT8_E4M3, "weights.dtype is 3 (float8_e4m3)", outputs);
    REFUSES(forward, s.o.bias = &s.bias;
            s.bias.dtype = FA_BOOL, "options.bias.dtype is 4 (bool)", outputs);
    REFUSES(forward, s.o.bias = &s.bias;
            s.bias.dtype = FA_FLOAT8_E4M3, "options.bias.dtype is 3 (float8_e4m3)", outputs);
    REFUSES(forward, s.o.mask = &s.mask;
            s.mask.dtype = FA_FLOAT32, "options.mask.dtype is 0 (float32)", "expected bool");
    REFUSES(backward, s.gradients.dout.dtype = FA_FLOAT8_E4M3,
            "gradients.dout.dtype is 3 (float8_e4m3)", outputs);
    REFUSES(backward, s.gradients.dq.dtype = FA_BOOL, "gradients.dq.dtype is 4 (bool)", outputs);
    REFUSES(backward, s.out.dtype = FA_FLOAT8_E4M3, "out.dtype is 3 (float8_e4m3)", outputs);
    REFUSES(combine, s.parts[1].dtype = FA_FLOAT8_E4M3, "parts[1].dtype is 3 (float8_e4m3)",
            outputs);
    ACCEPTS(forward, s.q.dtype = FA_FLOAT16; s.k.dtype = FA_FLOAT8_E4M3; s.v.dtype = FA_BFLOAT16);
    ACCEPTS(backward, s.gradients.dq.dtype = FA_FLOAT16; s.gradients.dk.dtype = FA_BFLOAT16);
}

static void test_extents(void)
{
    REFUSES(forward, s.q.shape[1] = -1, "q.shape[1] is -1", "expected 0 to 2^60");
    REFUSES(forward, s.k.shape[0] = INT64_MIN, "k.shape[0] is -9223372036854775808",
            "expected 0 to 2^60");
    REFUSES(forward, s.out.shape[2] = INT64_MAX, "out.shape[2] is 9223372036854775807",
            "0 to 2^60");
    REFUSES(forward, s.q.shape[0] = s.q.shape[1] = (int64_t)1 << 40,
            "q.shape is (1099511627776, 1099511627776, 4, 4)",
            "expected a product of the extents below 2^63");
    REFUSES(forward, s.q.shape[0] = s.q.shape[1] = (int64_t)1 << 40;
            s.q.shape[2] = 0, "q.shape is (1099511627776, 1099511627776, 0, 4)", "below 2^63");
    REFUSES(supported, s.q.stride[1] = INT64_MAX, "q.stride is (48, 9223372036854775807, 4, 1)",
            "with shape (2, 3, 4, 4)", "expected byte offsets within 63 bits");
    REFUSES(supported, s.k.stride[0] = INT64_MIN, "k.stride is (-9223372036854775808, ",
            "with shape (2, 5, 2, 4)", "expected byte offsets within 63 bits");
    REFUSES(supported, s.q.stride[0] = (int64_t)1 << 61, "q.stride is (2305843009213693952, ",
            "byte offsets within 63 bits");
    REFUSES(supported, s.q.stride[0] = INT64_MAX / 8;
            s.q.stride[1] = -(INT64_MAX / 8),
            "q.stride is (1152921504606846975, -1152921504606846975, ",
            "byte offsets within 63 bits");
    REFUSES(supported, s.null_out = true; s.q.shape[1] = (int64_t)1 << 57; s.q.stride[1] = 0;
            s.q.shape[3] = s.k.shape[3] = 1;
            s.q.shape[2] = 16, "batch 2, q.shape[2] 16 and 144115188075855872 queries",
            "expected a product below 2^61");
    REFUSES(supported, s.k.shape[1] = s.v.shape[1] = (int64_t)1 << 59; s.k.stride[1] = 0;
            s.v.stride[1] = 0; s.q.shape[3] = s.k.shape[3] = 1; s.v.shape[3] = 1;
            s.out.shape[3] = 1, "batch 2, k.shape[2] 2 and 576460752303423488 keys",
            "expected a product below 2^61");
    REFUSES(combine, s.out.shape[0] = (int64_t)1 << 59; s.out.shape[1] = s.out.shape[3] = 1;
            s.out.stride[0] = 4; s.out.stride[2] = 1;
            s.out.dtype = FA_FLOAT16, "out.shape is (576460752303423488, 1, 4, 1)",
            "expected a product of the first three extents below 2^61");
}

static void test_strides(void)
{
    REFUSES(forward, s.q.stride[3] = 2, "q.stride[3] is 2", "expected 1");
    REFUSES(forward, s.k.stride[3] = 0, "k.stride[3] is 0", "expected 1");
    REFUSES(forward, s.v.stride[3] = -1, "v.stride[3] is -1", "expected 1");
    REFUSES(forward, s.out.stride[3] = 3, "out.stride[3] is 3", "expected 1");
    REFUSES(weights, s.weights.stride[3] = 2, "weights.stride[3] is 2", "expected 1");
    REFUSES(backward, s.gradients.dout.stride[3] = 0, "gradients.dout.stride[3] is 0",
            "expected 1");
    REFUSES(backward, s.gradients.dv.stride[3] = 7, "gradients.dv.stride[3] is 7", "expected 1");
    REFUSES(combine, s.parts[0].stride[3] = 2, "parts[0].stride[3] is 2", "expected 1");
    const char *shared = "expected an output in which no two elements share an address";
    REFUSES(forward, s.out.stride[0] = 0, "out.stride is (0, 24, 6, 1) with shape (2, 3, 4, 6)",
            shared);
    REFUSES(forward, s.out.stride[1] = 5, "out.stride is (72, 5, 6, 1) with shape (2, 3, 4, 6)",
            shared);
    REFUSES(forward, s.out.stride[2] = -5, "out.stride is (72, 24, -5, 1)", shared);
    REFUSES(weights, s.weights.stride[1] = 0, "weights.stride is (40, 0, 5, 1)", shared);
    REFUSES(backward, s.gradients.dk.stride[1] = 0, "gradients.dk.stride is (40, 0, 4, 1)", shared);
    REFUSES(backward, s.o.bias = &s.bias; s.gradients.dbias = s.bias;
            s.gradients.dbias.data = buffer[DBIAS];
            s.gradients.dbias.stride[3] = 0, "gradients.dbias.stride is (60, 15, 5, 0)", shared);
}

static void test_legal_strides(void)
{
    ACCEPTS(forward, s.out = fa_bhsd(buffer[OUT], FA_FLOAT32, B, NQ, HQ, DV));
    /* one third of a packed (batch, sequence, 3, head, dim) buffer */
    ACCEPTS(forward, s.out.stride[1] = (int64_t)3 * HQ * DV;
            s.out.stride[0] = (int64_t)NQ * 3 * HQ * DV);
    ACCEPTS(forward, s.out.stride[1] = -24; s.out.data = buffer[OUT] + 48);
    ACCEPTS(forward, s.q.stride[0] = s.q.stride[1] = s.q.stride[2] = 0);
    ACCEPTS(forward, s.k.stride[1] = -8; s.k.data = buffer[K] + 32);
    ACCEPTS(forward, s.q.shape[3] = s.k.shape[3] = 1; s.q.stride[3] = 77; s.k.stride[3] = 0);
    ACCEPTS(forward, s.k.data = s.q.data; s.v.data = s.q.data);
    ACCEPTS(forward, s.o.bias = &s.bias; s.bias.stride[3] = 0; s.bias.stride[2] = -5;
            s.bias.data = buffer[BIAS] + 10);
    ACCEPTS(backward, s.gradients.dout.stride[0] = s.gradients.dout.stride[1] = 0);
    /* slices of one buffer, interleaved: their rows never overlap */
    ACCEPTS(backward, s.gradients.dk.stride[1] = 32; s.gradients.dk.stride[0] = 160;
            s.gradients.dv.stride[1] = 32; s.gradients.dv.stride[0] = 160;
            s.gradients.dv.data = buffer[DK] + 8);
    ACCEPTS(supported, s.q.stride[0] = (int64_t)1 << 40);
}

static void test_alignment(void)
{
    char *odd = (char *)buffer[Q] + 1;
    REFUSES(forward, s.q.data = odd, "q.data is 0x", "expected an address aligned to 4 bytes");
    REFUSES(forward, s.k.data = odd; s.k.dtype = FA_FLOAT16, "k.data is 0x", "aligned to 2 bytes");
    REFUSES(forward, s.lse = (float *)(void *)odd, "lse is 0x", "aligned to 4 bytes");
    REFUSES(combine, s.lse = (float *)(void *)odd, "lse is 0x", "aligned to 4 bytes");
    REFUSES(combine, s.part_lse[1] = (float *)(void *)odd, "part_lse[1] is 0x",
            "aligned to 4 bytes");
    REFUSES(weights, s.rows = (int64_t *)(void *)odd, "rows is 0x", "aligned to 8 bytes");
    REFUSES(backward, s.gradients.dlse = (float *)(void *)odd, "gradients.dlse is 0x",
            "aligned to 4 bytes");
    REFUSES(backward, s.o.sinks = buffer[SINKS]; s.gradients.dsinks = (float *)(void *)odd,
                                                 "gradients.dsinks is 0x", "aligned to 4 bytes");
    float *odd_floats = (float *)(void *)odd;
    int32_t *odd_ints = (int32_t *)(void *)odd;
    REFUSES(forward, s.o.alibi_slopes = odd_floats, "options.alibi_slopes is 0x",
            "aligned to 4 bytes");
    REFUSES(forward, s.o.sinks = odd_floats, "options.sinks is 0x", "aligned to 4 bytes");
    REFUSES(forward, s.o.q_descale = odd_floats, "options.q_descale is 0x", "aligned to 4 bytes");
    REFUSES(forward, s.o.k_descale = odd_floats, "options.k_descale is 0x", "aligned to 4 bytes");
    REFUSES(forward, s.o.v_descale = odd_floats, "options.v_descale is 0x", "aligned to 4 bytes");
    REFUSES(forward, s.o.cu_seqlens_q = odd_ints, "options.cu_seqlens_q is 0x",
            "aligned to 4 bytes");
    REFUSES(forward, s.o.cu_seqlens_k = odd_ints, "options.cu_seqlens_k is 0x",
            "aligned to 4 bytes");
    REFUSES(forward, s.o.seqlens_q = odd_ints, "options.seqlens_q is 0x", "aligned to 4 bytes");
    REFUSES(forward, s.o.seqlens_k = odd_ints, "options.seqlens_k is 0x", "aligned to 4 bytes");
    REFUSES(forward, s.o.block_table = odd_ints;
            s.o.block_table_stride = 1, "options.block_table is 0x", "aligned to 4 bytes");
    REFUSES(forward, s.o.dropout_state = (uint64_t *)(void *)odd, "options.dropout_state is 0x",
            "aligned to 8 bytes");
    ACCEPTS(forward, s.o.mask = &s.mask; s.mask.data = (char *)buffer[MASK] + 1);
}

static void test_aliasing(void)
{
    const char *apart = "expected an output apart from the inputs and the other outputs";
    REFUSES(forward, s.out.data = s.q.data, "out at 0x", "overlaps q at 0x", apart);
    REFUSES(forward, s.out.data = buffer[K] + 20, "out at 0x", "overlaps k at 0x", apart);
    REFUSES(forward, s.out.data = s.v.data;
            s.out.stride[0] = 100, "out at 0x", "overlaps v at 0x", apart);
    REFUSES(forward, s.lse = s.out.data, "out at 0x", "overlaps lse at 0x", apart);
    REFUSES(forward, s.lse = s.q.data, "lse at 0x", "overlaps q at 0x", apart);
    REFUSES(forward, s.o.bias = &s.bias;
            s.out.data = s.bias.data, "out at", "overlaps options.bias at", apart);
    REFUSES(forward, s.o.mask = &s.mask;
            s.out.data = s.mask.data, "out at", "overlaps options.mask at", apart);
    REFUSES(forward, s.o.sinks = s.lse, "lse at 0x", "overlaps options.sinks at 0x", apart);
    REFUSES(forward, s.o.alibi_slopes = s.lse + 1, "lse at", "overlaps options.alibi_slopes at",
            apart);
    REFUSES(backward, s.gradients.dq.data = s.q.data, "gradients.dq at 0x", "overlaps q at 0x",
            apart);
    REFUSES(backward, s.gradients.dq.data = s.out.data, "gradients.dq at", "overlaps out at",
            apart);
    REFUSES(backward, s.gradients.dk.data = s.lse, "gradients.dk at", "overlaps lse at", apart);
    REFUSES(backward, s.gradients.dv.data = s.gradients.dk.data, "gradients.dk at",
            "overlaps gradients.dv at", apart);
    REFUSES(backward, s.gradients.dq.data = s.gradients.dout.data, "gradients.dq at",
            "overlaps gradients.dout at", apart);
    REFUSES(backward, s.gradients.dlse = buffer[DQ], "gradients.dq at",
            "overlaps gradients.dlse at", apart);
    REFUSES(backward, s.o.sinks = buffer[SINKS]; s.gradients.dsinks = buffer[SINKS],
                                                 "gradients.dsinks at", "overlaps options.sinks at",
                                                 apart);
    REFUSES(backward, s.o.bias = &s.bias;
            s.gradients.dbias = s.bias, "gradients.dbias at", "overlaps options.bias at", apart);
    REFUSES(weights, s.weights.data = s.k.data, "weights at", "overlaps k at", apart);
    REFUSES(weights, s.weights.data = rows, "weights at", "overlaps rows at", apart);
    REFUSES(combine, s.parts[1].data = s.out.data, "out at", "overlaps parts[1] at", apart);
    REFUSES(combine, s.part_lse[0] = s.lse, "lse at", "overlaps part_lse[0] at", apart);
    REFUSES(combine, s.lse = s.out.data, "out at", "overlaps lse at", apart);
    ACCEPTS(backward, s.gradients.dout.data = s.out.data);
}

/* ---- Shapes ---------------------------------------------------------------------------------- */

static void test_shapes(void)
{
    REFUSES(forward, s.q.shape[3] = 0, "q.shape[3] is 0", "expected a head dim from 1 to 576");
    REFUSES(forward, s.q = fa_bshd(buffer[Q], FA_FLOAT32, 1, 1, 1, 577), "q.shape[3] is 577",
            "from 1 to 576");
    REFUSES(forward, s.v.shape[3] = 0, "v.shape[3] is 0", "expected a head dim from 1 to 512");
    REFUSES(supported, s.v.shape[3] = 513, "v.shape[3] is 513",
            "expected a head dim from 1 to 512");
    REFUSES(forward, s.k.shape[0] = 1, "k.shape[0] is 1", "expected 2 (q.shape[0])");
    REFUSES(forward, s.k.shape[3] = 3, "k.shape[3] is 3", "expected 4 (q.shape[3])");
    REFUSES(forward, s.k.shape[2] = 3, "q.shape[2] is 4",
            "expected a multiple of k.shape[2], which is 3");
    REFUSES(forward, s.k.shape[2] = 0, "q.shape[2] is 4",
            "expected a multiple of k.shape[2], which is 0");
    REFUSES(forward, s.v.shape[0] = 1, "v.shape[0] is 1", "expected 2 (k.shape[0])");
    REFUSES(forward, s.v.shape[1] = 4, "v.shape[1] is 4", "expected 5 (k.shape[1])");
    REFUSES(forward, s.v.shape[2] = 1, "v.shape[2] is 1", "expected 2 (k.shape[2])");
    REFUSES(forward, s.out.shape[0] = 1, "out.shape[0] is 1", "expected 2 (q.shape[0])");
    REFUSES(forward, s.out.shape[1] = 2, "out.shape[1] is 2", "expected 3 (q.shape[1])");
    REFUSES(forward, s.out.shape[2] = 2, "out.shape[2] is 2", "expected 4 (q.shape[2])");
    REFUSES(forward, s.out.shape[3] = 4, "out.shape[3] is 4", "expected 6 (v.shape[3])");
    REFUSES(supported, s.pass = FA_PASS_WEIGHTS; s.null_v = true;
            s.out.shape[3] = 0, "out.shape[3] is 0", "expected a head dim from 1 to 512");
}

static void test_empty_shapes(void)
{
    ACCEPTS(forward, s.q.shape[0] = s.k.shape[0] = s.v.shape[0] = s.out.shape[0] = 0;
            forget_data(&s));
    ACCEPTS(forward, s.q.shape[1] = s.out.shape[1] = 0; s.q.data = s.out.data = NULL);
    ACCEPTS(forward, s.k.shape[1] = s.v.shape[1] = 0; s.k.data = s.v.data = NULL);
    ACCEPTS(forward, s.q.shape[2] = s.out.shape[2] = 0; s.q.data = s.out.data = NULL);
    ACCEPTS(forward, s.q.shape[2] = s.k.shape[2] = s.v.shape[2] = s.out.shape[2] = 0;
            forget_data(&s));
    ACCEPTS(decode, s.q.shape[2] = s.k.shape[2] = s.v.shape[2] = s.out.shape[2] = 0;
            forget_data(&s));
    ACCEPTS(weights, s.k.shape[1] = s.weights.shape[3] = 0; s.k.data = s.weights.data = NULL);
    ACCEPTS(weights, s.num_rows = s.weights.shape[2] = 0; s.weights.data = NULL);
    ACCEPTS(backward, s.q.shape[1] = s.out.shape[1] = s.gradients.dq.shape[1] = 0; s.lse = NULL;
            s.q.data = s.out.data = s.gradients.dout.data = NULL);
    ACCEPTS(combine, s.num_parts = 0; s.null_parts = s.null_part_lse = true);
    ACCEPTS(combine, s.out.shape[1] = s.parts[0].shape[1] = s.parts[1].shape[1] = 0;
            s.out.data = s.parts[0].data = s.parts[1].data = NULL;
            s.part_lse[0] = s.part_lse[1] = NULL);
}

static void test_fp8(void)
{
    const float *one = buffer[DESCALE];
    REFUSES(forward, s.o.q_descale = one, "options.q_descale is set", "q.dtype is float32",
            "expected float8_e4m3");
    REFUSES(forward, s.o.k_descale = one, "options.k_descale is set", "k.dtype is float32",
            "expected float8_e4m3");
    REFUSES(forward, s.o.v_descale = one; s.v.dtype = FA_BFLOAT16, "options.v_descale is set",
                                          "v.dtype is bfloat16", "expected float8_e4m3");
    ACCEPTS(forward, s.k.dtype = FA_FLOAT8_E4M3; s.o.k_descale = one);
    ACCEPTS(forward, s.k.dtype = FA_INT8; s.o.k_descale = one);
}

/* Scales as a tensor, only for keys and values of 8 bits. */
static void test_key_scales(void)
{
    static fa_tensor scale;
    const char *either = "expected float8_e4m3 or int8, or no scale";
#define SCALE(a, b, h)                                                                             \
    scale = fa_bshd(buffer[DESCALE], FA_FLOAT32, a, b, h, 1), s.o.k_scale = &scale
    REFUSES(forward, SCALE(1, 1, 1), "options.k_scale is set", "k.dtype is float32", either);
    REFUSES(decode, SCALE(1, 1, 1); s.o.k_scale = NULL;
            s.o.v_scale = &scale, "options.v_scale is set", "v.dtype is float32", either);
    REFUSES(forward, SCALE(1, 1, 1); s.k.dtype = FA_INT8;
            s.o.k_descale = buffer[DESCALE], "options.k_scale and k_descale are both set",
            "one of them at most");
    REFUSES(forward, SCALE(B + 1, 1, 1);
            s.k.dtype = FA_INT8, "options.k_scale.shape[0] is 3", "expected 2 (k.shape[0]) or 1");
    REFUSES(forward, SCALE(B, NK - 1, 1);
            s.k.dtype = FA_INT8, "options.k_scale.shape[1] is 4", "expected 5 (k.shape[1]) or 1");
    REFUSES(weights, SCALE(1, 1, HKV + 1);
            s.k.dtype = FA_INT8, "options.k_scale.shape[2] is 3", "expected 2 (k.shape[2]) or 1");
    REFUSES(forward, SCALE(B, NK, HKV); s.k.dtype = FA_INT8;
            scale.shape[3] = 2, "options.k_scale.shape[3] is 2", "one scale for a row");
    REFUSES(forward, SCALE(B, NK, HKV); s.k.dtype = FA_INT8;
            scale.shape[1] = -5, "options.k_scale.shape[1] is -5", "0 to 2^60");
    REFUSES(forward, SCALE(B, NK, HKV); s.k.dtype = FA_INT8;
            scale.dtype = FA_FLOAT16, "options.k_scale.dtype is 1", "expected float32");
    REFUSES(forward, SCALE(B, NK, HKV); s.k.dtype = FA_INT8;
            scale.data = NULL, "options.k_scale.data is NULL", "expected data");
    REFUSES(forward, SCALE(B, NK, HKV); s.k.dtype = FA_INT8;
            scale.stride[0] = INT64_MAX, "options.k_scale.stride is", "within 63 bits");
    REFUSES(forward, SCALE(B, NK, HKV); s.k.dtype = FA_INT8; scale.data = (char *)scale.data + 2,
                                                             "options.k_scale.data is 0x",
                                                             "aligned to 4 bytes");
    REFUSES(forward, SCALE(B, NK, HKV); s.k.dtype = FA_INT8;
            scale.data = s.out.data, "out at", "overlaps options.k_scale at", "apart");
    REFUSES(forward, s.q.dtype = FA_INT8, "q.dtype is 5 (int8)", "float8_e4m3");
    ACCEPTS(forward, SCALE(B, NK, HKV); s.k.dtype = FA_INT8);
    ACCEPTS(forward, SCALE(1, NK, 1); s.k.dtype = FA_FLOAT8_E4M3);
    ACCEPTS(decode, SCALE(1, 1, 1); s.k.dtype = s.v.dtype = FA_INT8; s.o.v_scale = &scale);
    ACCEPTS(supported, SCALE(B, 1, HKV); s.k.dtype = FA_INT8; scale.data = NULL);
#undef SCALE
}

static void test_8_bits_in_backward(void)
{
    const char *why = "which the backward pass does not support";
    const char *floats = "expected float32, float16 or bfloat16";
    setup s = valid();
    s.q.dtype = FA_FLOAT8_E4M3;
    FAILS(backward(&s), FA_ERROR_UNSUPPORTED, "q.dtype is float8_e4m3", why, floats);
    s = valid();
    s.k.dtype = FA_FLOAT8_E4M3;
    FAILS(backward(&s), FA_ERROR_UNSUPPORTED, "k.dtype is float8_e4m3", why, floats);
    s.k.dtype = FA_INT8;
    FAILS(backward(&s), FA_ERROR_UNSUPPORTED, "k.dtype is int8", why, floats);
    s = valid();
    s.v.dtype = FA_FLOAT8_E4M3;
    FAILS(backward(&s), FA_ERROR_UNSUPPORTED, "v.dtype is float8_e4m3", why, floats);
    s.pass = FA_PASS_BACKWARD;
    FAILS(supported(&s), FA_ERROR_UNSUPPORTED, "v.dtype is float8_e4m3", why, floats);
}

/* ---- Options --------------------------------------------------------------------------------- */

static void test_companions(void)
{
    REFUSES(forward, s.o.flags = 0x140, "options.flags is 0x140", "expected only the bits 0x7f");
    REFUSES(forward, s.o.precision = (fa_precision)3, "options.precision is 3",
            "expected FA_PRECISION_FLOAT32, FA_PRECISION_TF32 or FA_PRECISION_IEEE");
    REFUSES(forward, s.o.precision = (fa_precision)-1, "options.precision is -1", "FA_PRECISION");
    ACCEPTS(forward, s.o.precision = FA_PRECISION_TF32);
    ACCEPTS(forward, s.o.precision = FA_PRECISION_IEEE);
    REFUSES(forward, s.o.reserved_2 = -3, "options.reserved_2 is -3", "expected 0");
    REFUSES(forward, s.o.reserved = -3, "options.reserved is -3", "expected 0");
    REFUSES(forward, s.o.diagonal = 7, "options.diagonal is 7", "expected 0",
            "FA_DIAGONAL is not set");
    REFUSES(forward, s.o.window_left = 8, "options.window_left is 8", "expected 0",
            "FA_WINDOW is not set");
    REFUSES(forward, s.o.window_right = -1, "options.window_right is -1", "expected 0",
            "FA_WINDOW is not set");
    REFUSES(forward, s.o.alibi_batch_stride = 4, "options.alibi_batch_stride is 4",
            "expected 0 without options.alibi_slopes");
    REFUSES(forward, s.o.num_sequences = 2, "options.num_sequences is 2",
            "expected 0 without options.cu_seqlens_q or options.cu_seqlens_k");
    REFUSES(forward, s.o.max_seqlen_q = 3, "options.max_seqlen_q is 3",
            "expected 0 without options.cu_seqlens_q");
    REFUSES(forward, pack_queries(&s); s.o.max_seqlen_k = 5, "options.max_seqlen_k is 5",
                                       "expected 0 without options.cu_seqlens_k");
    REFUSES(forward, s.o.block_table_stride = 2, "options.block_table_stride is 2",
            "expected 0 without options.block_table");
    REFUSES(forward, s.o.workspace_size = 64, "options.workspace is NULL with workspace_size 64",
            "expected memory of that size");
    REFUSES(forward, s.o.dropout_state = dropout_state; s.o.dropout_seed = 5,
                                                        "options.dropout_seed is 5", "expected 0",
                                                        "options.dropout_state stands for them");
    REFUSES(forward, s.o.dropout_state = dropout_state; s.o.dropout_offset = 6, "dropout_offset 6",
                                                        "expected 0",
                                                        "options.dropout_state stands for them");
    ACCEPTS(forward, s.o.dropout_seed = 5; s.o.dropout_offset = 6);
    ACCEPTS(forward, s.o.dropout_state = dropout_state; s.o.dropout_p = 0.5f);
    ACCEPTS(forward, s.o.flags = FA_DETERMINISTIC | FA_BATCH_INVARIANT | FA_SCALE);
}

static void test_ranges(void)
{
    REFUSES(forward, s.o.scale = NAN, "options.scale is ", "nan", "expected a finite number");
    REFUSES(forward, s.o.scale = -INFINITY, "options.scale is -inf", "expected a finite number");
    REFUSES(forward, s.o.softcap = -1.5f, "options.softcap is -1.5",
            "expected 0 (none) or a finite number above 0");
    REFUSES(forward, s.o.attention_chunk = -1, "options.attention_chunk is -1",
            "expected 1 to 2^60 positions, or 0");
    REFUSES(backward, s.o.attention_chunk = INT64_MAX,
            "options.attention_chunk is 9223372036854775807", "expected 1 to 2^60 positions");
    REFUSES(decode, s.o.attention_chunk = INT64_MIN,
            "options.attention_chunk is -9223372036854775808", "or 0 for no chunks");
    REFUSES(forward, s.o.softcap = INFINITY, "options.softcap is inf", "finite number above 0");
    REFUSES(forward, s.o.softcap = NAN, "options.softcap is ", "nan", "finite number above 0");
    REFUSES(forward, s.o.flags = FA_DIAGONAL; s.o.diagonal = ((int64_t)1 << 62) + 1,
                                              "options.diagonal is 4611686018427387905",
                                              "expected -2^62 to 2^62");
    REFUSES(forward, s.o.flags = FA_DIAGONAL; s.o.diagonal = INT64_MIN,
                                              "options.diagonal is -9223372036854775808",
                                              "expected -2^62 to 2^62");
    REFUSES(forward, s.o.flags = FA_WINDOW;
            s.o.window_left = -2, "options.window_left is -2", "expected >= 0, or -1 for no limit");
    REFUSES(forward, s.o.flags = FA_WINDOW; s.o.window_right = INT64_MIN,
                                            "options.window_right is -9223372036854775808",
                                            "expected >= 0, or -1 for no limit");
    REFUSES(forward, s.o.dropout_p = 1.0f, "options.dropout_p is 1", "expected 0 <= p < 1");
    REFUSES(forward, s.o.dropout_p = -0.25f, "options.dropout_p is -0.25", "expected 0 <= p < 1");
    REFUSES(forward, s.o.dropout_p = NAN, "options.dropout_p is ", "nan", "expected 0 <= p < 1");
    REFUSES(forward, s.o.threads = -4, "options.threads is -4",
            "expected > 0, or 0 for OpenMP's choice");
    REFUSES(forward, pack_queries(&s);
            s.o.num_sequences = -1, "options.num_sequences is -1", "expected 0 to 2^60");
    REFUSES(forward, pack_queries(&s);
            s.o.max_seqlen_q = -1, "options.max_seqlen_q is -1", "expected > 0, or 0 for unknown");
    REFUSES(forward, pack_keys(&s);
            s.o.max_seqlen_k = -9, "options.max_seqlen_k is -9", "expected > 0, or 0 for unknown");
    REFUSES(forward, page_keys(&s); s.o.block_table_stride = 0, "options.block_table_stride is 0",
                                    "expected 1 to 2^60 table entries per batch item");
    REFUSES(forward, s.o.stream = &s, "options.stream is 0x",
            "expected NULL, as the call runs on the CPU");
    ACCEPTS(forward, s.o.flags = FA_WINDOW; s.o.window_left = INT64_MAX;
            s.o.window_right = INT64_MAX);
    ACCEPTS(forward, s.o.flags = FA_CAUSAL | FA_DIAGONAL; s.o.diagonal = (int64_t)1 << 62);
    ACCEPTS(forward, s.o.flags = FA_CAUSAL | FA_DIAGONAL; s.o.diagonal = -((int64_t)1 << 62));
    ACCEPTS(forward, s.o.dropout_p = nextafterf(1.0f, 0.0f));
    ACCEPTS(forward, s.o.scale = -0.5f);

    static float slopes[64];
    REFUSES(forward, s.o.alibi_slopes = slopes; s.o.alibi_batch_stride = INT64_MAX,
                                                "options.alibi_batch_stride is 9223372036854775807",
                                                "expected slopes within 2^60 elements");
    REFUSES(forward, s.o.alibi_slopes = slopes;
            s.o.alibi_batch_stride = INT64_MIN,
            "options.alibi_batch_stride is -9223372036854775808",
            "expected slopes within 2^60 elements");
}

/* A struct of a later version, and the contents of its new fields. */
typedef struct later_options {
    fa_options known;
    unsigned char tail[32];
} later_options;

typedef struct later_gradients {
    fa_gradients known;
    unsigned char tail[32];
} later_gradients;

static fa_status forward_with(setup *s, const fa_options *o)
{
    return fa_forward(&s->q, &s->k, &s->v, &s->out, s->lse, o);
}

static fa_status backward_with(setup *s, const fa_gradients *g)
{
    return fa_backward(&s->q, &s->k, &s->v, &s->out, s->lse, g, NULL);
}

static void test_struct_sizes(void)
{
    REFUSES(forward, s.o.size = 3, "options.size is 3", "expected 0 or sizeof(fa_options)");
    REFUSES(forward, s.o.size = SIZE_MAX, "options.size is 18446744073709551615",
            "expected 0 or sizeof");
    REFUSES(combine, s.o.size = 5, "options.size is 5", "expected 0 or sizeof(fa_options)");
    REFUSES(backward, s.gradients.size = 7, "gradients.size is 7",
            "expected 0 or sizeof(fa_gradients)");
    ACCEPTS(forward, s.o.size = sizeof s.o);
    ACCEPTS(backward, s.gradients.size = sizeof s.gradients);

    setup s = valid();
    expect_status(__LINE__, forward_with(&s, NULL), FA_OK);
    later_options o = {.known = {.size = sizeof o}};
    expect_status(__LINE__, forward_with(&s, &o.known), FA_OK);
    o.tail[9] = 1;
    FAILS(forward_with(&s, &o.known), FA_ERROR_UNSUPPORTED, "options.size is ",
          "is not 0: expected 0 behind", fa_version_string());
    o.known.size = offsetof(fa_options, threads); /* fields after the size are ignored */
    o.known.threads = -1;
    expect_status(__LINE__, forward_with(&s, &o.known), FA_OK);

    later_gradients g = {.known = s.gradients};
    g.known.size = sizeof g;
    expect_status(__LINE__, backward_with(&s, &g.known), FA_OK);
    g.tail[31] = 0x80;
    FAILS(backward_with(&s, &g.known), FA_ERROR_UNSUPPORTED, "gradients.size is ",
          "is not 0: expected 0 behind", fa_version_string());
}

/* ---- Devices --------------------------------------------------------------------------------- */

static void test_devices(void)
{
    REFUSES(forward, s.o.device = (fa_device)7, "options.device is 7",
            "expected FA_DEVICE_AUTO, FA_DEVICE_CPU or FA_DEVICE_CUDA");
    REFUSES(combine, s.o.device = (fa_device)7, "options.device is 7", "expected FA_DEVICE_AUTO");
    REFUSES(combine, s.o.stream = &s, "options.stream is 0x", "expected NULL");

    fa_status (*const calls[])(setup *) = {forward, backward,  decode,   weights,
                                           combine, supported, describe, workspace_size};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        ACCEPTS(calls[i], s.o.device = FA_DEVICE_CPU);
#ifndef FA_HAVE_CUDA /* else see test_cuda_errors.c */
        setup s = valid();
        s.o.device = FA_DEVICE_CUDA;
        FAILS(calls[i](&s), FA_ERROR_DEVICE, "options.device is FA_DEVICE_CUDA", "no CUDA backend",
              "expected FA_DEVICE_AUTO or FA_DEVICE_CPU");
#endif
    }
    FAILS(fa_get_cpu_info(NULL), FA_ERROR_ARGUMENT, "info is NULL", "expected where to write");
    FAILS(fa_get_cuda_info(NULL), FA_ERROR_ARGUMENT, "info is NULL", "expected where to write");
}

/* Restores the previous value: the whole suite runs under each instruction set in turn. */
static void test_unknown_isa(void)
{
    const char *set = getenv("FA_CPU_ISA");
    char *before = set ? strdup(set) : NULL;
    (void)setenv("FA_CPU_ISA", "abacus", 1);
    fa_status (*const calls[])(setup *) = {forward, backward,  decode,   weights,
                                           combine, supported, describe, workspace_size};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        setup s = valid();
        FAILS(calls[i](&s), FA_ERROR_DEVICE, "FA_CPU_ISA is \"abacus\"", "expected", "portable");
    }
    fa_cpu_info info;
    FAILS(fa_get_cpu_info(&info), FA_ERROR_DEVICE, "FA_CPU_ISA is \"abacus\"", "expected",
          "portable");
    if (before) (void)setenv("FA_CPU_ISA", before, 1);
    else (void)unsetenv("FA_CPU_ISA");
    free(before);
}

/* Replaces the C library's function, with which the engines allocate their scratch memory. */
static bool memory_is_out;

void *aligned_alloc(size_t alignment, size_t size)
{
    void *memory = NULL;
    if (memory_is_out || posix_memalign(&memory, alignment, size) != 0) return NULL;
    return memory;
}

static void test_out_of_memory(void)
{
    const struct {
        fa_status (*call)(setup *);
        const char *name;
    } calls[] = {{forward, "fa_forward"},
                 {backward, "fa_backward"},
                 {decode, "fa_decode"},
                 {weights, "fa_weights"},
                 {combine, "fa_combine"}};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        setup s = valid();
        s.o.threads = 1;
        memory_is_out = true;
        fa_status status = calls[i].call(&s);
        memory_is_out = false;
        FAILS(status, FA_ERROR_MEMORY, calls[i].name,
              "could not allocate its scratch memory on the CPU");
    }
}

/* ---- Lengths --------------------------------------------------------------------------------- */

static void test_packed(void)
{
    REFUSES(forward, s.o.cu_seqlens_q = cu_q; s.o.num_sequences = B, "q.shape[0] is 2",
                                              "expected 1 (packed by options.cu_seqlens_q)");
    REFUSES(forward, s.o.cu_seqlens_k = cu_k; s.o.num_sequences = B, "k.shape[0] is 2",
                                              "expected 1 (packed by options.cu_seqlens_k)");
    REFUSES(forward, pack_keys(&s);
            s.o.num_sequences = 1, "q.shape[0] is 2", "expected 1 (options.num_sequences)");
    REFUSES(forward, pack_queries(&s);
            s.o.num_sequences = 1, "k.shape[0] is 2", "expected 1 (options.num_sequences)");
    REFUSES(forward, pack_queries(&s);
            cu_q[0] = -1, "options.cu_seqlens_q[0] is -1", "expected >= 0");
    REFUSES(forward, pack_queries(&s); cu_q[1] = 3;
            cu_q[2] = 2, "options.cu_seqlens_q[2] is 2", "expected >= 3, the entry before it");
    REFUSES(forward, pack_keys(&s); cu_k[1] = -4, "options.cu_seqlens_k[1] is -4", "expected >= 0");
    REFUSES(forward, pack_queries(&s);
            cu_q[2] = 4, "options.cu_seqlens_q[2] is 4", "expected <= 3 (q.shape[1])");
    REFUSES(forward, pack_keys(&s);
            cu_k[2] = 6, "options.cu_seqlens_k[2] is 6", "expected <= 5 (k.shape[1])");
    REFUSES(forward, pack_queries(&s); s.o.max_seqlen_q = 1, "options.max_seqlen_q is 1",
                                       "expected at least 2, the length of sequence 1");
    REFUSES(forward, pack_keys(&s); s.o.max_seqlen_k = 2, "options.max_seqlen_k is 2",
                                    "expected at least 3, the length of sequence 1");
    REFUSES(forward, pack_queries(&s); s.o.seqlens_q = lengths_q;
            lengths_q[0] = 2, "options.seqlens_q[0] is 2", "expected 0 to 1");
    ACCEPTS(forward, pack_queries(&s));
    ACCEPTS(forward, pack_keys(&s));
    ACCEPTS(forward, pack_queries(&s); pack_keys(&s); s.o.max_seqlen_q = 2; s.o.max_seqlen_k = 100);
    ACCEPTS(forward, pack_queries(&s); s.o.seqlens_k = lengths_k);
    ACCEPTS(forward, pack_queries(&s); page_keys(&s));
    ACCEPTS(forward, pack_queries(&s); pack_keys(&s); s.o.num_sequences = 0; cu_q[0] = cu_k[0] = 0);
    ACCEPTS(supported, pack_queries(&s); cu_q[0] = -1);
}

static void test_padded(void)
{
    REFUSES(forward, s.o.seqlens_q = lengths_q;
            lengths_q[1] = 4, "options.seqlens_q[1] is 4", "expected 0 to 3");
    REFUSES(forward, s.o.seqlens_q = lengths_q;
            lengths_q[0] = -1, "options.seqlens_q[0] is -1", "expected 0 to 3");
    REFUSES(forward, s.o.seqlens_k = lengths_k;
            lengths_k[0] = 6, "options.seqlens_k[0] is 6", "expected 0 to 5");
    REFUSES(decode, s.o.seqlens_k = lengths_k;
            lengths_k[1] = -7, "options.seqlens_k[1] is -7", "expected 0 to 5");
    ACCEPTS(forward, s.o.seqlens_q = lengths_q; s.o.seqlens_k = lengths_k; lengths_k[1] = 0);
    ACCEPTS(supported, s.o.seqlens_k = lengths_k; lengths_k[0] = 6);
}

static void test_paged(void)
{
    REFUSES(forward, page_keys(&s); s.o.seqlens_k = NULL, "options.seqlens_k is NULL",
                                    "expected the lengths", "options.block_table is set");
    REFUSES(forward, page_keys(&s); pack_keys(&s),
                                    "options.cu_seqlens_k is set with options.block_table",
                                    "expected packed or paged keys, not both");
    REFUSES(forward, page_keys(&s); s.k.shape[1] = s.v.shape[1] = 0, "k.shape[1] is 0",
                                    "expected a page size of at least 1",
                                    "options.block_table is set");
    REFUSES(forward, page_keys(&s);
            s.o.block_table_stride = (int64_t)1 << 60,
            "options.block_table_stride is 1152921504606846976 with pages of 5 rows",
            "expected a product up to 2^60");
    REFUSES(forward, page_keys(&s);
            lengths_k[0] = 11, "options.seqlens_k[0] is 11", "expected 0 to 10");
    REFUSES(forward, page_keys(&s); table[2] = 2,
                                    "options.block_table[2] (batch item 1, entry 0) is 2",
                                    "expected 0 <= page < 2 (k.shape[0])");
    REFUSES(forward, page_keys(&s); lengths_k[0] = 6;
            table[1] = -1, "options.block_table[1] (batch item 0, entry 1) is -1",
            "expected 0 <= page < 2");
    ACCEPTS(forward, page_keys(&s); table[1] = -1; table[3] = 99); /* entries after the lengths */
    ACCEPTS(forward, page_keys(&s); lengths_k[0] = 10);
    ACCEPTS(supported, page_keys(&s); table[0] = 77);
}

/* ---- Bias and mask --------------------------------------------------------------------------- */

static void test_bias_and_mask(void)
{
    REFUSES(forward, s.o.bias = &s.bias;
            s.bias.shape[0] = 3, "options.bias.shape[0] is 3", "expected 2 (the batch) or 1");
    REFUSES(forward, s.o.bias = &s.bias;
            s.bias.shape[1] = 2, "options.bias.shape[1] is 2", "expected 4 (q.shape[2]) or 1");
    REFUSES(forward, s.o.bias = &s.bias;
            s.bias.shape[2] = 2, "options.bias.shape[2] is 2", "expected 3 (queries) or 1");
    REFUSES(forward, s.o.bias = &s.bias;
            s.bias.shape[3] = 6, "options.bias.shape[3] is 6", "expected 5 (keys) or 1");
    REFUSES(forward, s.o.mask = &s.mask;
            s.mask.shape[0] = 0, "options.mask.shape[0] is 0", "expected 2 (the batch) or 1");
    REFUSES(forward, s.o.mask = &s.mask;
            s.mask.shape[3] = 4, "options.mask.shape[3] is 4", "expected 5 (keys) or 1");
    REFUSES(forward, s.o.bias = &s.bias;
            s.bias.data = NULL, "options.bias.data is NULL", "expected data of shape (2, 4, 3, 5)");
    REFUSES(forward, s.o.mask = &s.mask;
            s.mask.data = NULL, "options.mask.data is NULL", "expected data");
    REFUSES(forward, pack_queries(&s); pack_keys(&s); cu_q[1] = 0; s.o.bias = &s.bias;
            s.bias.shape[2] = 2, "options.bias.shape[2] is 2",
            "expected 1 or at least 3 (queries of the longest sequence)");
    REFUSES(forward, s.o.seqlens_k = lengths_k; s.o.mask = &s.mask;
            s.mask.shape[3] = 4, "options.mask.shape[3] is 4",
            "expected 1 or at least 5 (keys of the longest sequence)");
    ACCEPTS(forward, s.o.bias = &s.bias; s.bias.shape[0] = s.bias.shape[1] = 1; s.o.mask = &s.mask;
            s.mask.shape[2] = s.mask.shape[3] = 1);
    ACCEPTS(forward, pack_queries(&s); pack_keys(&s); s.o.bias = &s.bias; s.bias.shape[2] = 2;
            s.bias.shape[3] = 3);
    ACCEPTS(forward, s.o.seqlens_k = lengths_k; lengths_k[0] = 3; s.o.bias = &s.bias;
            s.bias.shape[3] = 3);
    ACCEPTS(supported, pack_keys(&s); s.o.bias = &s.bias; s.bias.shape[3] = 2);
}

/* ---- Gradients ------------------------------------------------------------------------------- */

static void ask_for_dbias(setup *s)
{
    s->o.bias = &s->bias;
    s->gradients.dbias = s->bias;
    s->gradients.dbias.data = buffer[DBIAS];
}

static void test_gradients(void)
{
    REFUSES(backward, s.gradients.dout.data = NULL, "gradients.dout.data is NULL",
            "expected the gradient of out");
    REFUSES(backward, s.gradients.dout.shape[3] = 5, "gradients.dout.shape[3] is 5",
            "expected 6 (out.shape[3])");
    REFUSES(backward, s.gradients.dq.shape[1] = 2, "gradients.dq.shape[1] is 2",
            "expected 3 (q.shape[1])");
    REFUSES(backward, s.gradients.dk = fa_bshd(buffer[DK], FA_FLOAT32, B, NK, HQ, D),
            "gradients.dk.shape[2] is 4", "expected 2 (k.shape[2])");
    REFUSES(backward, s.gradients.dv.shape[0] = 1, "gradients.dv.shape[0] is 1",
            "expected 2 (v.shape[0])");
    REFUSES(backward, s.gradients.dbias = s.bias, "gradients.dbias is set", "options.bias is NULL");
    REFUSES(backward, ask_for_dbias(&s); s.gradients.dbias.shape[1] = 3,
                                         "gradients.dbias.shape[1] is 3",
                                         "expected 4 (q.shape[2]) or 1");
    REFUSES(backward, ask_for_dbias(&s); s.gradients.dbias.dtype = FA_BOOL,
                                         "gradients.dbias.dtype is 4 (bool)",
                                         "expected float32, float16 or bfloat16");
    REFUSES(backward, s.gradients.dsinks = buffer[DSINKS], "gradients.dsinks is set",
            "options.sinks is NULL");
    REFUSES(backward, s.out.shape[3] = 2, "out.shape[3] is 2", "expected 6 (v.shape[3])");
    ACCEPTS(backward, ask_for_dbias(&s);
            s.gradients.dbias.shape[0] = s.gradients.dbias.shape[2] = 1);
    ACCEPTS(backward, ask_for_dbias(&s); s.bias.shape[0] = 1);
    ACCEPTS(backward, s.gradients.dq.data = s.gradients.dk.data = s.gradients.dv.data = NULL);
    ACCEPTS(backward, s.o.sinks = buffer[SINKS]; s.gradients.dsinks = buffer[DSINKS];
            s.gradients.dlse = buffer[DLSE]);
}

/* ---- Weights and combine --------------------------------------------------------------------- */

static void test_weights(void)
{
    REFUSES(weights, s.num_rows = -1, "num_rows is -1", "expected 0 to 2^60");
    REFUSES(weights, s.rows = NULL, "num_rows is 2", "expected 3 (q.shape[1])", "rows is NULL");
    REFUSES(weights, s.rows = NULL; s.o.seqlens_q = lengths_q, "num_rows is 2",
                                    "expected at least 3 (queries of the longest sequence)",
                                    "rows is NULL");
    REFUSES(weights, rows[1] = 3, "rows[1] is 3", "expected 0 <= row < 3 (q.shape[1])");
    REFUSES(weights, rows[0] = -1, "rows[0] is -1", "expected 0 <= row < 3 (q.shape[1])");
    REFUSES(weights, s.weights.shape[0] = 1, "weights.shape[0] is 1", "expected 2 (the batch)");
    REFUSES(weights, s.weights.shape[1] = 2, "weights.shape[1] is 2", "expected 4 (q.shape[2])");
    REFUSES(weights, s.weights = fa_bshd(buffer[WEIGHTS], FA_FLOAT32, B, HQ, 3, NK),
            "weights.shape[2] is 3", "expected 2 (num_rows)");
    REFUSES(weights, s.weights.shape[3] = 4, "weights.shape[3] is 4", "expected 5 (keys)");
    REFUSES(weights, s.o.seqlens_k = lengths_k;
            s.weights.shape[3] = 4, "weights.shape[3] is 4",
            "expected at least 5 (keys of the longest sequence)");
    ACCEPTS(weights, s.o.seqlens_k = lengths_k; lengths_k[0] = 3; s.weights.shape[3] = 3);
    ACCEPTS(weights, s.rows = NULL; s.num_rows = NQ;
            s.weights = fa_bshd(buffer[WEIGHTS], FA_FLOAT16, B, HQ, NQ, NK));
    ACCEPTS(weights, pack_queries(&s); pack_keys(&s); s.weights.shape[3] = 3);
}

/* Lengths and tables are inputs like any others. */
static void test_index_overlap(void)
{
    int32_t *lse = (int32_t *)(void *)buffer[LSE], *out = (int32_t *)(void *)buffer[OUT];
    memset(buffer[LSE], 0, 64);
    REFUSES(forward, s.o.seqlens_k = lse + 2, "lse at 0x", "overlaps options.seqlens_k at 0x");
    REFUSES(decode, s.o.seqlens_q = lse, "lse at 0x", "overlaps options.seqlens_q at 0x");
    REFUSES(forward, pack_queries(&s); pack_keys(&s);
            s.o.cu_seqlens_k = lse, "lse at 0x", "overlaps options.cu_seqlens_k at 0x");
    memset(buffer[OUT], 0, 256);
    REFUSES(forward, page_keys(&s);
            s.o.block_table = out + 4, "out at 0x", "overlaps options.block_table at 0x");
    REFUSES(forward, s.o.dropout_p = 0.5f; s.o.dropout_state = (uint64_t *)(void *)out, "out at 0x",
                                           "overlaps options.dropout_state at 0x");
}

static void test_combine(void)
{
    REFUSES(combine, s.null_out = true, "out is NULL", "expected a tensor");
    REFUSES(combine, s.num_parts = -2, "num_parts is -2", "expected >= 0");
    REFUSES(combine, s.null_parts = true, "parts is NULL", "expected 2 tensors (num_parts)");
    REFUSES(combine, s.null_part_lse = true, "part_lse is NULL", "expected 2 pointers (num_parts)");
    REFUSES(combine, s.part_lse[1] = NULL, "part_lse[1] is NULL",
            "expected the log-sum-exp of parts[1]");
    REFUSES(combine, s.parts[1].data = NULL, "parts[1].data is NULL",
            "expected data of shape (2, 3, 4, 6)");
    REFUSES(combine, s.parts[0].shape[1] = 2, "parts[0].shape[1] is 2",
            "expected 3 (out.shape[1])");
    REFUSES(combine, s.out.shape[3] = 0, "out.shape[3] is 0", "expected a head dim from 1 to 512");
    REFUSES(combine, s.out.stride[2] = 0, "out.stride is (72, 24, 0, 1)",
            "no two elements share an address");
    REFUSES(combine, s.o.threads = -1, "options.threads is -1", "expected > 0, or 0");
    REFUSES(combine, s.o.reserved_2 = 1, "options.reserved_2 is 1", "expected 0");
    REFUSES(combine, s.o.reserved = 1, "options.reserved is 1", "expected 0");
    REFUSES(combine, s.o.flags = 1u << 20, "options.flags is 0x100000",
            "expected only the bits 0x7f");
    REFUSES(combine, s.o.flags = FA_CAUSAL, "options.flags is 0x1",
            "expected only FA_DETERMINISTIC and FA_BATCH_INVARIANT in fa_combine");
    ACCEPTS(combine, s.o.flags = FA_DETERMINISTIC | FA_BATCH_INVARIANT; s.o.threads = 1);
    ACCEPTS(combine, s.lse = NULL);
    ACCEPTS(combine, s.parts[0].dtype = FA_BFLOAT16; s.out.dtype = FA_FLOAT16);
}

#define COMBINE_REFUSES(field, value)                                                              \
    REFUSES(combine, s.o.field = (value), "options." #field " is set", "expected 0",               \
            "fa_combine has no use for it")

static void test_unused_by_combine(void)
{
    COMBINE_REFUSES(scale, 1.0f);
    COMBINE_REFUSES(softcap, 2.0f);
    COMBINE_REFUSES(attention_chunk, 4);
    COMBINE_REFUSES(k_scale, &s.bias);
    COMBINE_REFUSES(v_scale, &s.bias);
    COMBINE_REFUSES(diagonal, 1);
    COMBINE_REFUSES(window_left, 1);
    COMBINE_REFUSES(window_right, 1);
    COMBINE_REFUSES(bias, &s.bias);
    COMBINE_REFUSES(mask, &s.mask);
    COMBINE_REFUSES(alibi_slopes, buffer[SLOPES]);
    COMBINE_REFUSES(alibi_batch_stride, 4);
    COMBINE_REFUSES(sinks, buffer[SINKS]);
    COMBINE_REFUSES(dropout_p, 0.5f);
    COMBINE_REFUSES(dropout_seed, 1);
    COMBINE_REFUSES(dropout_offset, 1);
    COMBINE_REFUSES(dropout_state, dropout_state);
    COMBINE_REFUSES(num_sequences, 1);
    COMBINE_REFUSES(cu_seqlens_q, cu_q);
    COMBINE_REFUSES(cu_seqlens_k, cu_k);
    COMBINE_REFUSES(seqlens_q, lengths_q);
    COMBINE_REFUSES(seqlens_k, lengths_k);
    COMBINE_REFUSES(max_seqlen_q, 1);
    COMBINE_REFUSES(max_seqlen_k, 1);
    COMBINE_REFUSES(block_table, table);
    COMBINE_REFUSES(block_table_stride, 1);
    COMBINE_REFUSES(q_descale, buffer[DESCALE]);
    COMBINE_REFUSES(k_descale, buffer[DESCALE]);
    COMBINE_REFUSES(v_descale, buffer[DESCALE]);
    COMBINE_REFUSES(precision, FA_PRECISION_TF32);
    ACCEPTS(combine, s.o.workspace = buffer[0]; s.o.workspace_size = 64);
    REFUSES(combine, s.o.workspace_size = 64, "options.workspace is NULL with workspace_size 64");
}

static void test_part_lse_stride(void)
{
    static int64_t strides[PARTS][3];
    const int64_t dense[3] = {HQ * NQ, NQ, 1}, far[3] = {INT64_MAX, 1, 1},
                  sum[3] = {1LL << 61, 0, 1};
    const int64_t backwards[3] = {0, 0, -1};
#define SET(part, to)                                                                              \
    memcpy(strides[part], to, sizeof strides[part]), s.o.part_lse_stride = strides[0]
    memcpy(strides[0], dense, sizeof dense);
    ACCEPTS(combine, SET(1, dense));
    ACCEPTS(combine, SET(1, backwards); s.part_lse[1] += NQ);
    REFUSES(combine, SET(1, far),
            "options.part_lse_stride of part_lse[1] is (9223372036854775807, ",
            "batch 2, 4 heads and 3 queries", "expected byte offsets within 63 bits");
    REFUSES(combine, SET(1, sum), "options.part_lse_stride of part_lse[1]", "within 63 bits");
    REFUSES(combine, s.o.part_lse_stride = (int64_t *)(void *)((char *)strides + 4),
            "options.part_lse_stride is 0x", "aligned to 8 bytes");
    REFUSES(forward, s.o.part_lse_stride = strides[0], "options.part_lse_stride is set",
            "only fa_combine uses it");
#undef SET
}

/* ---- Questions, names and the error text itself ---------------------------------------------- */

static void test_dry_runs(void)
{
    REFUSES(supported, s.pass = (fa_pass)4, "pass is 4", "expected FA_PASS_FORWARD");
    REFUSES(describe, s.pass = (fa_pass)-1, "pass is -1", "expected FA_PASS_FORWARD");
    REFUSES(workspace_size, s.pass = (fa_pass)9, "pass is 9", "expected FA_PASS_FORWARD");
    REFUSES(describe, s.k.shape[3] = 3, "k.shape[3] is 3", "expected 4 (q.shape[3])");
    REFUSES(workspace_size, s.o.threads = -1, "options.threads is -1", "expected > 0");
    for (int pass = FA_PASS_FORWARD; pass <= FA_PASS_WEIGHTS; pass++) {
        ACCEPTS(supported, s.pass = (fa_pass)pass; forget_data(&s); s.o.bias = &s.bias;
                s.o.mask = &s.mask);
        ACCEPTS(describe, s.pass = (fa_pass)pass; forget_data(&s); s.null_out = true);
        ACCEPTS(workspace_size, s.pass = (fa_pass)pass; forget_data(&s); page_keys(&s));
    }
    ACCEPTS(supported, s.pass = FA_PASS_WEIGHTS; s.null_v = s.null_out = true);

    setup s = valid();
    char text[8];
    FAILS(fa_describe(FA_PASS_FORWARD, &s.q, &s.k, &s.v, &s.out, NULL, NULL, 8), FA_ERROR_ARGUMENT,
          "text is NULL and size 8", "expected room");
    FAILS(fa_describe(FA_PASS_FORWARD, &s.q, &s.k, &s.v, &s.out, NULL, text, 0), FA_ERROR_ARGUMENT,
          "text is given and size 0", "expected room for at least one byte");
    FAILS(fa_workspace_size(FA_PASS_FORWARD, &s.q, &s.k, &s.v, &s.out, NULL, NULL),
          FA_ERROR_ARGUMENT, "bytes is NULL", "expected where to write the size");
}

static void expect_text(int line, const char *got, const char *expected)
{
    checks++;
    if (strcmp(got, expected) == 0) return;
    failures++;
    printf("line %d: \"%s\", expected \"%s\"\n", line, got, expected);
}

static void test_names(void)
{
    const char *const statuses[] = {"FA_OK",           "FA_ERROR_ARGUMENT", "FA_ERROR_UNSUPPORTED",
                                    "FA_ERROR_MEMORY", "FA_ERROR_DEVICE",   "FA_ERROR_WORKSPACE",
                                    "unknown status"};
    for (int i = 0; i < 7; i++) expect_text(__LINE__, fa_status_name((fa_status)i), statuses[i]);
    const char *const dtypes[] = {"float32", "float16", "bfloat16",     "float8_e4m3",
                                  "bool",    "int8",    "unknown dtype"};
    const size_t sizes[] = {4, 2, 2, 1, 1, 1, 0};
    for (int i = 0; i < 7; i++) {
        expect_text(__LINE__, fa_dtype_name((fa_dtype)i), dtypes[i]);
        expect_status(__LINE__, fa_dtype_size((fa_dtype)i) == sizes[i] ? FA_OK : FA_ERROR_ARGUMENT,
                      FA_OK);
    }
}

/* A successful call does not change the message of the failed one. */
static void test_text_stays(void)
{
    setup s = valid();
    s.o.threads = -1;
    (void)forward(&s);
    s.o.threads = 0;
    (void)forward(&s);
    expect_text(__LINE__, fa_last_error(),
                "options.threads is -1: expected > 0, or 0 for OpenMP's choice");
}

/* fa_describe names at most as many threads as a team can have. */
static void test_described_threads(void)
{
    char text[200] = "";
    setup s = valid();
    s.o.device = FA_DEVICE_CPU;
    s.o.threads = 99999;
    expect_status(__LINE__,
                  fa_describe(FA_PASS_FORWARD, &s.q, &s.k, &s.v, &s.out, &s.o, text, sizeof text),
                  FA_OK);
    const char *threads = strrchr(text, ',');
    expect_text(__LINE__, threads ? threads : text, ", 1024 threads");
}

static void test_valid(void)
{
    expect_text(__LINE__, fa_last_error(), "");
    ACCEPTS(forward, (void)0);
    ACCEPTS(backward, (void)0);
    ACCEPTS(decode, (void)0);
    ACCEPTS(weights, (void)0);
    ACCEPTS(combine, (void)0);
    ACCEPTS(supported, (void)0);
    ACCEPTS(describe, (void)0);
    ACCEPTS(workspace_size, (void)0);
}

int main(void)
{
    test_valid();
    test_missing();
    test_dtypes();
    test_extents();
    test_strides();
    test_legal_strides();
    test_alignment();
    test_aliasing();
    test_shapes();
    test_empty_shapes();
    test_fp8();
    test_key_scales();
    test_8_bits_in_backward();
    test_companions();
    test_ranges();
    test_struct_sizes();
    test_devices();
    test_unknown_isa();
    test_out_of_memory();
    test_packed();
    test_padded();
    test_paged();
    test_bias_and_mask();
    test_gradients();
    test_weights();
    test_combine();
    test_index_overlap();
    test_unused_by_combine();
    test_part_lse_stride();
    test_dry_runs();
    test_names();
    test_text_stays();
    test_described_threads();
    printf("test_errors: %d checks, %d failed\n", checks, failures);
    return failures != 0;
}
