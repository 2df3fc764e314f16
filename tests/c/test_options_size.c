/*
 * Structs of other versions: fields after options->size count as 0 and are not read. Each size ends
 * right after a field. The struct is at the end of its own allocation, where the sanitizer detects
 * reads after it.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"

static const shape usual = {1, 2, 1, 20, 30, 16, 16};

/* Runs with the first size bytes of full; the result must equal that of full with its other bytes
 * set to 0. */
static void check_size(const fa_options *full, size_t size)
{
    attention a, b;
    attention_make(&a, 1, usual, FA_FLOAT32);
    attention_make(&b, 1, usual, FA_FLOAT32);
    fa_options *cut = malloc(size), whole;
    if (!cut) abort();
    memcpy(cut, full, size);
    cut->size = size;
    memset(&whole, 0, sizeof whole);
    memcpy(&whole, full, size);
    whole.size = sizeof whole;
    fa_status one = fa_forward(&a.in.q, &a.in.k, &a.in.v, &a.out, a.lse, cut);
    fa_status two = fa_forward(&b.in.q, &b.in.k, &b.in.v, &b.out, b.lse, &whole);
    CHECK(one == FA_OK && two == FA_OK, "size %zu: %s", size, fa_last_error());
    CHECK(same_bits(&a.out, &b.out), "size %zu: another result than with the rest zeroed", size);
    free(cut);
    attention_free(&a);
    attention_free(&b);
}

static void check_options(void)
{
    static const float sinks[2] = {1, 2}, slopes[2] = {0.1f, 0.2f};
    fa_options full;
    memset(&full, 0, sizeof full);
    full.flags = FA_CAUSAL | FA_SCALE;
    full.scale = 0.4f;
    full.softcap = 3;
    full.alibi_slopes = slopes;
    full.sinks = sinks;
    full.dropout_p = 0.2f;
    full.dropout_seed = 5;
    full.threads = 2;
    full.attention_chunk = 7;
    full.precision = FA_PRECISION_IEEE;
/* The end of a struct whose last field this is: a multiple of its alignment. */
#define END(field) ((offsetof(fa_options, field) + sizeof(full.field) + 7) / 8 * 8)
    const size_t sizes[] = {END(size),
                            END(flags),
                            END(device),
                            END(scale),
                            END(softcap),
                            END(diagonal),
                            END(window_right),
                            END(bias),
                            END(alibi_slopes),
                            END(sinks),
                            END(dropout_p),
                            END(dropout_seed),
                            END(dropout_state),
                            END(seqlens_k),
                            END(block_table_stride),
                            END(v_descale),
                            END(threads),
                            END(reserved),
                            END(workspace_size),
                            END(part_lse_stride),
                            END(attention_chunk),
                            END(k_scale),
                            END(v_scale),
                            END(precision)};
#undef END
    for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++) check_size(&full, sizes[n]);
}

/* No compiler makes such a struct: half a pointer would be read. */
static void check_odd_size(void)
{
    attention a;
    attention_make(&a, 1, usual, FA_FLOAT32);
    a.in.options.size = offsetof(fa_options, bias) + 4;
    fa_status status = fa_forward(&a.in.q, &a.in.k, &a.in.v, &a.out, a.lse, &a.in.options);
    CHECK(status == FA_ERROR_ARGUMENT && strstr(fa_last_error(), "options.size"), "odd size: %s",
          fa_last_error());
    attention_free(&a);
}

/* 0 is the size in version 0.1. */
static void check_zero_size(void)
{
    attention a, b;
    attention_make(&a, 1, usual, FA_FLOAT32);
    attention_make(&b, 1, usual, FA_FLOAT32);
    a.in.options.flags = b.in.options.flags = FA_CAUSAL;
    a.in.options.size = 0;
    CHECK(attention_forward(&a, "size 0") && attention_forward(&b, "size given"), "forward fails");
    CHECK(same_bits(&a.out, &b.out), "size 0 is not read as the whole struct");
    attention_free(&a);
    attention_free(&b);
}

/* A newer caller's struct: unknown fields that are 0 change nothing. */
static void check_larger(void)
{
    struct {
        fa_options known;
        uint64_t unknown[4];
    } newer;
    attention a, b;
    attention_make(&a, 1, usual, FA_FLOAT32);
    attention_make(&b, 1, usual, FA_FLOAT32);
    memset(&newer, 0, sizeof newer);
    newer.known.size = sizeof newer;
    newer.known.flags = a.in.options.flags = FA_CAUSAL;
    fa_status status = fa_forward(&b.in.q, &b.in.k, &b.in.v, &b.out, b.lse, &newer.known);
    CHECK(status == FA_OK, "larger struct: %s", fa_last_error());
    CHECK(attention_forward(&a, "usual size") && same_bits(&a.out, &b.out),
          "larger struct: other result");
    attention_free(&a);
    attention_free(&b);
}

/* fa_gradients cut after dq: dk and dv are not written. */
static void check_gradients(void)
{
    attention a;
    attention_make(&a, 1, usual, FA_FLOAT32);
    if (!attention_forward(&a, "forward")) return;
    const size_t size = offsetof(fa_gradients, dk);
    fa_gradients whole;
    memset(&whole, 0, sizeof whole);
    whole.size = size;
    whole.dout = a.dout;
    whole.dq = a.dq;
    char *bytes = malloc(size);
    if (!bytes) abort();
    memcpy(bytes, &whole, size);
    fa_status status = fa_backward(&a.in.q, &a.in.k, &a.in.v, &a.out, a.lse,
                                   (const fa_gradients *)(const void *)bytes, &a.in.options);
    CHECK(status == FA_OK, "short fa_gradients: %s", fa_last_error());
    ref_gradients want;
    ref_report report = REF_REPORT_INIT;
    ref_backward(&a.in, &a.dout, NULL, NULL, &want);
    ref_check_tensor(&report, "dq", &a.dq, &want.dq);
    CHECK(report.ok, "%s", report.message);
    ref_gradients_free(&want);
    free(bytes);
    attention_free(&a);
}

int main(void)
{
    test_begin();
    check_options();
    check_odd_size();
    check_zero_size();
    check_larger();
    check_gradients();
    return test_end();
}
