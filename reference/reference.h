/*
 * Attention in float64, written to be obviously right: loops over batch, head, query and key, straight
 * from section 4 of flashattn.h. It shares no code with the library, only the types of its header.
 *
 * Every result comes with an error: how far an implementation may be away from it whose roundings are
 * those of ref_rounding. It is the first-order error analysis of the same formulas, term by term, so
 * that tolerances follow from the dtypes and the data and need no choosing.
 *
 * Out of memory ends the program: this is code for tests and for `flashattn verify`.
 */
#ifndef REF_REFERENCE_H
#define REF_REFERENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "flashattn.h"

/* What rounding an implementation may do. ref_rounding_for says it for this library, and nothing else
 * does: job, verify and the tests all take their tolerances from it. */
typedef struct ref_rounding {
    double sum;    /* of a float32 sum of products, relative to the sum of their magnitudes       */
    double weight; /* of a softmax weight as it is multiplied with values: half an epsilon of the
                    * 16-bit type that it is rounded to, relatively; 0: it stays float32          */
    double weight_tiny; /* the same absolutely, in parts of the row's largest weight; mostly 0    */
    bool weight_scaled; /* weights are rounded after they are multiplied by their values' scales:
                         * those of equal logits, too, differ                                     */
    bool sum_rounded;   /* rows are divided by the sum of the rounded weights, not the exact ones */
    double out;         /* of an element of out as stored (backward reads it back)                */
    double out_tiny; /* the same absolutely: what the smallest subnormal number leaves            */
    double
        pair; /* backward: of a weight and of a score's gradient, as they are multiplied with rows of
                       * dout, q and k: half an epsilon, relatively; 0: they stay float32 */
    double pair_tiny; /* the same absolutely: what the smallest subnormal number leaves           */
    /* dbias of q's type, an element of which is a sum over batch items or heads: each score's gradient may be rounded like
     * a pair before it is added, because backward_sm90 adds up what it has rounded for its products. Such errors count one
     * by one: a sum may be much smaller than what it is made of, and then they are larger than the rounding of the sum. */
    bool pair_shared;
    /* Of queries, keys, values and dout as they are multiplied, and in backward of weights and of
     * scores' gradients, relatively: tf32's; 0: they are multiplied as they are. */
    double operand;
    double cap; /* of a capped logit, relatively: GPU kernels may take a series for its tanh      */
} ref_rounding;

struct ref_inputs;

/* The roundings to expect of the library for these inputs and out. The device counts: in->options.device is
 * the one that computes (FA_DEVICE_AUTO: the CPU, as for arrays in host memory). lse: whether the call asks
 * for log-sum-exps. in->rounding is not read. */
ref_rounding ref_rounding_for(const struct ref_inputs *in, fa_dtype out, bool lse);

/* Sums over the keys of a row for one column of out. p: the weights; x: the values, scaled and kept or
 * dropped. */
typedef struct ref_column {
    double out, magnitude;      /* sum of p x, of p |x|  */
    double square;              /* of p x^2              */
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

/* What attention is computed from. The options are whole: size is not looked at. */
typedef struct ref_inputs {
    fa_tensor q, k, v; /* v.data may be NULL for ref_weights */
    fa_options options;
    ref_rounding rounding;
} ref_inputs;

/* Where one batch item's rows lie, and its lengths. */
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

/* Where key j lies in k and v: axis 0 and axis 1, through the block table if there is one. */
void ref_key_place(const ref_inputs *in, const ref_item *item, int64_t j, int64_t *block,
                   int64_t *row);

/* The 16 random bits of an element. */
uint32_t ref_dropout_bits(uint64_t seed, uint64_t offset, uint32_t batch_head, uint32_t i,
                          uint32_t j);
void ref_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* out has q's blocks and rows, Hq and d_v; lse is (blocks, Hq, rows, 1). Made here, freed by the
 * caller. */
void ref_forward(const ref_inputs *in, ref_array *out, ref_array *lse);

/* What the most exact kernels for 16 bits compute, where q, k and v have one such dtype: a row's weights
 * 2^(x - max) by its maximum, so that the largest one is 1, rounded to that dtype for the product with values,
 * divided by the sum of the weights before they were rounded; all else in float64, and the result rounded to
 * out. In the shape of ref_forward's out, without errors: ref_distance_of says what these are. Made here, freed by the caller. */
void ref_forward_rounded(const ref_inputs *in, fa_dtype out, ref_array *rounded);

typedef struct ref_gradients {
    ref_array dq, dk, dv, dbias, dsinks; /* dsinks: (1, 1, 1, Hq) */
} ref_gradients;

/* Gradients of sum(dout * out) + sum(dlse * lse); dlse may be NULL. dbias_shape NULL: none wanted. out
 * and lse are computed anew here. */
void ref_backward(const ref_inputs *in, const fa_tensor *dout, const float *dlse,
                  const int64_t *dbias_shape, ref_gradients *gradients);
void ref_gradients_free(ref_gradients *gradients);

/* (B, Hq, num_rows, n_k); rows NULL: all. n_k is the extent of the last axis. */
void ref_weights(const ref_inputs *in, const int64_t *rows, int64_t num_rows, int64_t n_k,
                 ref_array *weights);

/* Merges parts; out and lse as in ref_forward. */
void ref_combine(const fa_tensor *parts, const float *const *part_lse, int64_t num_parts,
                 const int64_t out_shape[4], ref_array *out, ref_array *lse);

#endif
