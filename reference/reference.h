/*
 * Attention in float64, written to be obviously correct: loops over batch, head, query and key,
 * directly from section 4 of flashattn.h. It shares no code with the library, only the types of its
 * header.
 *
 * Every result has an error: how far an implementation with the roundings of ref_rounding may be
 * from it. It comes from the first-order error analysis of the same formulas, term by term, so
 * tolerances follow from the dtypes and the data and need not be chosen.
 *
 * If memory runs out, the program ends: this is code for tests and for `flashattn verify`.
 */
#ifndef REF_REFERENCE_H
#define REF_REFERENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "flashattn.h"

/* The rounding that an implementation may do. Only ref_rounding_for defines it for this library:
 * job, verify and the tests all take their tolerances from it. */
typedef struct ref_rounding {
    double sum; /* of a float32 sum of products, relative to the sum of their magnitudes */
    /* Of a softmax weight when it is multiplied by values: half an epsilon of the 16-bit type to
     * which it is rounded, relative; 0: it stays float32. */
    double weight;
    double weight_tiny; /* the same, absolute, relative to the row's largest weight; mostly 0 */
    /* Weights are rounded after they are multiplied by their values' scales, so even those of equal
     * logits differ. */
    bool weight_scaled;
    bool sum_rounded; /* rows are divided by the sum of the rounded weights, not the exact ones */
    double out;       /* of an element of out as stored (backward reads it back) */
    double out_tiny;  /* the same, absolute: due to the smallest subnormal number */
    double
        /* Backward: of a weight and of a score's gradient, when they are multiplied by rows of
         * dout, q and k: half an epsilon, relative; 0: they stay float32. */
        pair;
    double pair_tiny; /* the same, absolute: due to the smallest subnormal number */
    /* For a dbias of q's type whose elements are sums over batch items or heads: each score's
     * gradient may be rounded like a pair before it is added, because backward_sm90 adds up what it
     * has rounded for its products. Such errors count one by one: a sum may be much smaller than
     * its terms, and then they are larger than the rounding of the sum. */
    bool pair_shared;
    /* Of queries, keys, values and dout when they are multiplied, and in backward of weights and of
     * scores' gradients, relative: that of tf32; 0: they are not rounded. */
    double operand;
    /* ALiBi's penalty has at least the error of a key so far away, relative to `sum`: kernels on
     * tensor cores subtract the distance to a tile of 128 keys and add that within it, and round each
     * by half an epsilon. */
    double alibi_distance;
    double cap; /* of a capped logit, relative: GPU kernels may use a series for its tanh */
} ref_rounding;

struct ref_inputs;

/* The roundings to expect of the library for these inputs and out. The device matters:
 * in->options.device is the one that computes (FA_DEVICE_AUTO: the CPU, as for arrays in host
 * memory). lse: whether the call requests log-sum-exps. in->rounding is not read. */
ref_rounding ref_rounding_for(const struct ref_inputs *in, fa_dtype out, bool lse);

/* Sums over the keys of a row for one column of out. p: the weights; x: the values, after scales
 * and dropout. */
typedef struct ref_column {
    double out, magnitude;      /* sum of p x, of p |x| */
    double square;              /* of p x^2 */
    double p2, p2_x, p2_square; /* of p^2, p^2 x, p^2 x^2 */
} ref_column;

/* Adds a key of weight p and value x. */
void ref_column_add(ref_column *column, double p, double x);

/* Multiplies all weights so far by a factor. */
void ref_column_scale(ref_column *column, double factor);

/* How much the rounding of the row's weights may change that column's element of out. */
double ref_weights_error(const ref_rounding *rounding, const ref_column *column);

/* A contiguous 4-D array of doubles, and the error of each. */
typedef struct ref_array {
    int64_t shape[4];
    double *value, *error;
} ref_array;

ref_array ref_array_new(int64_t a, int64_t b, int64_t c, int64_t d); /* all zeros */
void ref_array_free(ref_array *array);
int64_t ref_array_index(const ref_array *array, int64_t a, int64_t b, int64_t c, int64_t d);

/* The inputs of attention. The options are complete: their size field is ignored. */
typedef struct ref_inputs {
    fa_tensor q, k, v; /* v.data may be NULL for ref_weights */
    fa_options options;
    ref_rounding rounding;
} ref_inputs;

/* Where one batch item's rows are, and its lengths. */
typedef struct ref_item {
    int64_t b;
    int64_t block_q, start_q, n_q;
    int64_t block_k, start_k, n_k;
    int64_t diagonal;
} ref_item;

int64_t ref_batch(const ref_inputs *in);
ref_item ref_item_of(const ref_inputs *in, int64_t b);

/* Whether query i of head h may see key j, by step 5. */
bool ref_may_see(const ref_inputs *in, const ref_item *item, int64_t h, int64_t i, int64_t j);

/* The place of key j in k and v: axis 0 and axis 1, through the block table if there is one. */
void ref_key_place(const ref_inputs *in, const ref_item *item, int64_t j, int64_t *block,
                   int64_t *row);

/* The 16 random bits of an element. */
uint32_t ref_dropout_bits(uint64_t seed, uint64_t offset, uint32_t batch_head, uint32_t i,
                          uint32_t j);
void ref_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* out has q's blocks and rows, Hq and d_v; lse is (blocks, Hq, rows, 1). Allocated here, freed by
 * the caller. */
void ref_forward(const ref_inputs *in, ref_array *out, ref_array *lse);

/* What the most exact kernels for 16 bits compute, if q, k and v have the same 16-bit dtype:
 * weights of a row relative to its maximum, 2^(x - max), so that the largest one is 1; rounded to
 * that dtype for the product with values; divided by the sum of the weights before rounding.
 * Everything else is in float64, and the result is rounded to out. In the shape of ref_forward's
 * out, without errors: ref_distance_of computes them. Allocated here, freed by the caller. */
void ref_forward_rounded(const ref_inputs *in, fa_dtype out, ref_array *rounded);

typedef struct ref_gradients {
    ref_array dq, dk, dv, dbias, dsinks; /* dsinks: (1, 1, 1, Hq) */
} ref_gradients;

/* Gradients of sum(dout * out) + sum(dlse * lse); dlse may be NULL. dbias_shape NULL: dbias is not
 * wanted. out and lse are recomputed here. */
void ref_backward(const ref_inputs *in, const fa_tensor *dout, const float *dlse,
                  const int64_t *dbias_shape, ref_gradients *gradients);
void ref_gradients_free(ref_gradients *gradients);

/* (B, Hq, num_rows, n_k); rows NULL: all rows. n_k is the extent of the last axis. */
void ref_weights(const ref_inputs *in, const int64_t *rows, int64_t num_rows, int64_t n_k,
                 ref_array *weights);

/* Merges parts; out and lse as in ref_forward. */
void ref_combine(const fa_tensor *parts, const float *const *part_lse, int64_t num_parts,
                 const int64_t out_shape[4], ref_array *out, ref_array *lse);

#endif
