#include "reference.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "scalar.h"
#include "wide_vectors.h"

/* ------------------------------------------------------------------------------------------------
 * Arrays
 * ---------------------------------------------------------------------------------------------- */

static void out_of_memory(int64_t count)
{
    fprintf(stderr, "reference: cannot allocate %lld elements\n", (long long)count);
    abort();
}

static double *zeros(int64_t count)
{
    double *p = calloc(count > 0 ? (size_t)count : 1, sizeof *p);
    if (!p) out_of_memory(count);
    return p;
}

ref_array ref_array_new(int64_t a, int64_t b, int64_t c, int64_t d)
{
    ref_array array = {{a, b, c, d}, zeros(a * b * c * d), zeros(a * b * c * d)};
    return array;
}

void ref_array_free(ref_array *array)
{
    free(array->value);
    free(array->error);
    array->value = array->error = NULL;
}

int64_t ref_array_index(const ref_array *array, int64_t a, int64_t b, int64_t c, int64_t d)
{
    return ((a * array->shape[1] + b) * array->shape[2] + c) * array->shape[3] + d;
}

/* A tensor's elements as a contiguous array of doubles. */
static ref_array unpack(const fa_tensor *t)
{
    ref_array array = ref_array_new(t->shape[0], t->shape[1], t->shape[2], t->shape[3]);
    int64_t n = 0;
    for (int64_t a = 0; a < t->shape[0]; a++)
        for (int64_t b = 0; b < t->shape[1]; b++)
            for (int64_t c = 0; c < t->shape[2]; c++)
                for (int64_t d = 0; d < t->shape[3]; d++)
                    array.value[n++] = ref_load(t, a, b, c, d);
    return array;
}

static double *row_of(const ref_array *array, int64_t a, int64_t b, int64_t c)
{
    return array->value + ref_array_index(array, a, b, c, 0);
}

static double *error_row_of(const ref_array *array, int64_t a, int64_t b, int64_t c)
{
    return array->error + ref_array_index(array, a, b, c, 0);
}

/* Tensor cores, and bfloat16 dot products of CPUs, need weights in the 16 bits of the values. All
 * of them need one dtype for q, k and v. (A CPU without such instructions is more exact, but has
 * the same tolerance.) */
static bool rounds_weights(const ref_inputs *in, bool cuda)
{
    fa_dtype dtype = in->v.dtype;
    if (in->q.dtype != dtype || in->k.dtype != dtype) return false;
    return dtype == FA_BFLOAT16 || (dtype == FA_FLOAT16 && cuda);
}

/* CUDA's decode converts 8-bit keys and values to float16, and rounds weights to float16. */
static bool rounds_to_half(const ref_inputs *in, bool cuda)
{
    const bool short_queries = in->q.dtype == FA_FLOAT16 || in->q.dtype == FA_BFLOAT16;
    const bool bytes = in->v.dtype == FA_INT8 || in->v.dtype == FA_FLOAT8_E4M3;
    return cuda && short_queries && bytes && in->k.dtype == in->v.dtype;
}

/* Half an epsilon of tf32, which has the exponent of float32 and 11 bits including the leading one,
 * plus a quarter of that: kernels that multiply tf32 numbers round like this. */
#define TF32_ROUNDING 0x1.4p-11

/* Whether kernels on tensor cores may use what a precision of float32 inputs allows. */
static bool has_precision(const ref_inputs *in, bool cuda, fa_precision precision)
{
    return cuda && in->options.precision == precision && in->q.dtype == FA_FLOAT32 &&
           in->k.dtype == FA_FLOAT32 && in->v.dtype == FA_FLOAT32;
}

ref_rounding ref_rounding_for(const ref_inputs *in, fa_dtype out, bool lse)
{
    bool cuda = in->options.device == FA_DEVICE_CUDA;
    ref_rounding r = {.sum = 16 * ref_epsilon(FA_FLOAT32),
                      .out = ref_epsilon(out) / 2,
                      .out_tiny = ref_smallest(out)};
    r.cap = r.sum;
    if (has_precision(in, cuda, FA_PRECISION_TF32)) r.operand = TF32_ROUNDING, r.weight = 0x1p-11;
    /* A weight that consists of two float16 numbers has steps of 2^-24, and the largest weight is
     * 2^15. This matters if dropout drops the large ones. */
    if (has_precision(in, cuda, FA_PRECISION_FLOAT32)) r.weight_tiny = 0x1p-40;
    if (rounds_to_half(in, cuda)) {
        r.weight = ref_epsilon(FA_FLOAT16) / 2;
        /* The largest product of a weight and its value's scale is at least 2^6; other scales are
         * smaller. */
        r.weight_tiny = in->options.v_scale ? 0x1p-28 : 0x1p-31;
        r.weight_scaled = in->options.v_scale;
    }
    if (!rounds_weights(in, cuda)) return r;
    r.weight = ref_epsilon(in->v.dtype) / 2;
    if (cuda) {
        r.alibi_distance = 8; /* of 16 epsilons each: 128 keys, twice half an epsilon */
        r.pair = r.weight;
        r.pair_tiny = ref_smallest(in->v.dtype) / 2;
    }
    /* The smallest weights in float16 lose bits: it has steps of 2^-24, and a row's largest weight
     * is at least 2^7 in all kernels. */
    if (in->v.dtype == FA_FLOAT16) r.weight_tiny = 0x1p-31;
    /* These kernels may use a series for the tanh of a softcap. If the log-sum-exp is requested, its error is at
     * most 3.2e-5 of a small logit, and 2.8e-6 of the softcap. */
    if (cuda) r.cap = lse ? 3.2e-5 : in->v.dtype == FA_FLOAT16 ? 0x1p-15 : 0x1p-12;
    return r;
}

void ref_column_add(ref_column *c, double p, double x)
{
    c->out += p * x;
    c->magnitude += p * fabs(x);
    c->square += p * x * x;
    c->p2 += p * p;
    c->p2_x += p * p * x;
    c->p2_square += p * p * x * x;
}

void ref_column_scale(ref_column *c, double factor)
{
    c->out *= factor;
    c->magnitude *= factor;
    c->square *= factor;
    c->p2 *= factor * factor;
    c->p2_x *= factor * factor;
    c->p2_square *= factor * factor;
}

/*
 * Weight j becomes p_j (1 + e_j), |e_j| <= u. If the division is by the sum of the rounded weights,
 * out changes by sum e_j p_j (x_j - out) to first order: what all weights have in common cancels,
 * and nothing remains in a row that one key dominates. If it is by the exact sum, out also changes
 * by out * sum e_j p_j, at most u |out|.
 *
 * In the worst case every e_j has the sign of x_j - out: out changes by at most u sum p_j
 * |x_j - out|, which is at most u sqrt(sum p_j (x_j - out)^2) by Cauchy and Schwarz, because the
 * sum of p is at most 1. But rounding errors are independent with mean 0. Each is uniform in at
 * most (-u, u), so their sum has a standard deviation of at most u sqrt(sum p_j^2
 * (x_j - out)^2 / 3). The chance of 4 sqrt(3) = 6.9 times that is below 1e-11. This second bound is
 * needed to detect a lost key among hundreds.
 */
double ref_weights_error(const ref_rounding *rounding, const ref_column *c)
{
    double spread = c->square - c->out * c->out;
    double independent = c->p2_square - 2 * c->out * c->p2_x + c->out * c->out * c->p2;
    /* With a sink or dropped values, the sum of p is not 1: sum p (x - out)^2 is square - 2
     * out^2 + out^2 sum p <= square - out^2. */
    double moved = fmin(sqrt(fmax(spread, 0)), 4 * sqrt(fmax(independent, 0)));
    if (!rounding->sum_rounded) moved = fmin(moved + fabs(c->out), c->magnitude);
    return rounding->weight * moved;
}

/* ------------------------------------------------------------------------------------------------
 * Which rows, which keys
 * ---------------------------------------------------------------------------------------------- */

int64_t ref_batch(const ref_inputs *in)
{
    bool packed = in->options.cu_seqlens_q || in->options.cu_seqlens_k;
    return packed ? in->options.num_sequences : in->q.shape[0];
}

ref_item ref_item_of(const ref_inputs *in, int64_t b)
{
    const fa_options *o = &in->options;
    ref_item item = {b, b, 0, in->q.shape[1], b, 0, in->k.shape[1], 0};
    if (o->cu_seqlens_q) {
        item.block_q = 0;
        item.start_q = o->cu_seqlens_q[b];
        item.n_q = o->cu_seqlens_q[b + 1] - o->cu_seqlens_q[b];
    }
    if (o->cu_seqlens_k) {
        item.block_k = 0;
        item.start_k = o->cu_seqlens_k[b];
        item.n_k = o->cu_seqlens_k[b + 1] - o->cu_seqlens_k[b];
    }
    if (o->seqlens_q) item.n_q = o->seqlens_q[b];
    if (o->seqlens_k) item.n_k = o->seqlens_k[b];
    item.diagonal = (o->flags & FA_DIAGONAL) ? o->diagonal : item.n_k - item.n_q;
    return item;
}

void ref_key_place(const ref_inputs *in, const ref_item *item, int64_t j, int64_t *block,
                   int64_t *row)
{
    const fa_options *o = &in->options;
    if (o->block_table) {
        int64_t page_size = in->k.shape[1];
        *block = o->block_table[item->b * o->block_table_stride + j / page_size];
        *row = j % page_size;
    } else {
        *block = item->block_k;
        *row = item->start_k + j;
    }
}

/* Element (b, h, i, j) of a bias or mask, axes of extent 1 broadcast. */
static double load_broadcast(const fa_tensor *t, int64_t b, int64_t h, int64_t i, int64_t j)
{
    return ref_load(t, t->shape[0] == 1 ? 0 : b, t->shape[1] == 1 ? 0 : h, t->shape[2] == 1 ? 0 : i,
                    t->shape[3] == 1 ? 0 : j);
}

bool ref_may_see(const ref_inputs *in, const ref_item *item, int64_t h, int64_t i, int64_t j)
{
    const fa_options *o = &in->options;
    double center = (double)i + (double)item->diagonal;
    if ((o->flags & FA_CAUSAL) && !((double)j <= center)) return false;
    if (o->flags & FA_WINDOW) {
        if (o->window_left >= 0 && !(center - (double)o->window_left <= (double)j)) return false;
        if (o->window_right >= 0 && !((double)j <= center + (double)o->window_right)) return false;
    }
    if (o->attention_chunk > 0) {
        const double chunk = (double)o->attention_chunk;
        if (floor(center / chunk) != floor((double)j / chunk)) return false;
    }
    if (o->mask && load_broadcast(o->mask, item->b, h, i, j) == 0) return false;
    return true;
}

/* ------------------------------------------------------------------------------------------------
 * Dropout
 * ---------------------------------------------------------------------------------------------- */

void ref_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t x[4] = {counter[0], counter[1], counter[2], counter[3]};
    for (uint32_t round = 0; round < 7; round++) {
        uint32_t k0 = key[0] + round * 0x9E3779B9u, k1 = key[1] + round * 0xBB67AE85u;
        uint64_t product0 = (uint64_t)x[0] * 0xD2511F53u;
        uint64_t product1 = (uint64_t)x[2] * 0xCD9E8D57u;
        uint32_t y[4] = {(uint32_t)(product1 >> 32) ^ x[1] ^ k0, (uint32_t)product1,
                         (uint32_t)(product0 >> 32) ^ x[3] ^ k1, (uint32_t)product0};
        memcpy(x, y, sizeof x);
    }
    memcpy(out, x, sizeof x);
}

uint32_t ref_dropout_bits(uint64_t seed, uint64_t offset, uint32_t batch_head, uint32_t i,
                          uint32_t j)
{
    uint32_t counter[4] = {4 * (j >> 5) + ((j >> 1) & 3), i, batch_head + (uint32_t)(offset >> 32),
                           (uint32_t)offset};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t block[4];
    ref_philox(counter, key, block);
    uint32_t half = 2 * ((j >> 3) & 3) + (j & 1);
    return (block[half / 2] >> (half % 2 ? 16 : 0)) & 0xffffu;
}

/* The factor of step 8: 0 or 1 / (1 - p); 1 without dropout. */
static double keep_factor(const ref_inputs *in, const ref_item *item, int64_t h, int64_t i,
                          int64_t j)
{
    const fa_options *o = &in->options;
    if (!(o->dropout_p > 0)) return 1;
    uint64_t seed = o->dropout_state ? o->dropout_state[0] : o->dropout_seed;
    uint64_t offset = o->dropout_state ? o->dropout_state[1] : o->dropout_offset;
    uint32_t batch_head = (uint32_t)(item->b * in->q.shape[2] + h);
    uint32_t r = ref_dropout_bits(seed, offset, batch_head, (uint32_t)i, (uint32_t)j);
    double p = (double)o->dropout_p;
    return (double)r >= floor(65536 * p + 0.5) ? 1 / (1 - p) : 0;
}

/* ------------------------------------------------------------------------------------------------
 * One row of the attention matrix: query i of head h of a batch item
 * ---------------------------------------------------------------------------------------------- */

enum { SUMS = 7 };

/* Half an epsilon of float32: the relative error of an addition to a sum. */
#define ADDITION 0x1p-24

/* Adds factor * x to float32 sums, and error * |x| to their errors. Errors of additions are mostly
 * independent, and ref_rounding's `sum` covers those. But equal consecutive terms, as from rows
 * that are the same memory, are rounded the same way: their errors add up. last: the previous
 * terms, 0 at first. */
WITH_WIDE_VECTORS UNCHECKED static void
add_touched_terms(int64_t n, double factor, double error, const double *restrict x,
                  double *restrict sums, double *restrict errors, double *restrict last)
{
    for (int64_t i = 0; i < n; i++) {
        const double term = factor * x[i];
        const bool equal = (term == last[i]) & (term != 0);
        sums[i] += term;
        errors[i] += error * fabs(x[i]) + (equal ? ADDITION * fabs(sums[i]) : 0);
        last[i] = term;
    }
}

static void add_terms(int64_t n, double factor, double error, const double *x, double *sums,
                      double *errors, double *last)
{
    TOUCH(x, n), TOUCH(sums, n), TOUCH(errors, n), TOUCH(last, n);
    add_touched_terms(n, factor, error, x, sums, errors, last);
}

/* Everything that is read repeatedly, as doubles. */
typedef struct loaded {
    const ref_inputs *in;
    ref_array q, k, v;
    int64_t d, d_v, heads_q, heads_kv;
    double scale;
    double *sums; /* (SUMS, d_v): of compute_output and what it calls */
} loaded;

/* Multiplies 8-bit elements by their scales, which broadcast. */
static void scale_rows(ref_array *x, const fa_tensor *scale)
{
    for (int64_t a = 0; scale && a < x->shape[0]; a++)
        for (int64_t b = 0; b < x->shape[1]; b++)
            for (int64_t h = 0; h < x->shape[2]; h++) {
                const double factor = load_broadcast(scale, a, b, h, 0);
                for (int64_t e = 0; e < x->shape[3]; e++) row_of(x, a, b, h)[e] *= factor;
            }
}

static loaded load_inputs(const ref_inputs *in)
{
    loaded l = {in,
                unpack(&in->q),
                unpack(&in->k),
                {{0}, NULL, NULL},
                in->q.shape[3],
                in->v.shape[3],
                in->q.shape[2],
                in->k.shape[2],
                0,
                NULL};
    scale_rows(&l.k, in->options.k_scale);
    if (in->v.data) l.v = unpack(&in->v);
    if (in->v.data) scale_rows(&l.v, in->options.v_scale);
    l.sums = zeros(SUMS * l.d_v);
    bool given = (in->options.flags & FA_SCALE) || in->options.scale != 0;
    l.scale = given ? (double)in->options.scale : 1 / sqrt((double)l.d);
    return l;
}

static void unload_inputs(loaded *l)
{
    ref_array_free(&l->q);
    ref_array_free(&l->k);
    ref_array_free(&l->v);
    free(l->sums);
}

/* The factor of an fp8 tensor's data. */
static double descale(const loaded *l, const float *factors, int64_t b, int64_t head_kv)
{
    return factors ? (double)factors[b * l->heads_kv + head_kv] : 1;
}

/* A key, and where its row of k or v begins. */
typedef struct placed_key {
    int64_t j, offset;
} placed_key;

static int compare_places(const void *left, const void *right)
{
    const placed_key *a = left, *b = right;
    if (a->offset != b->offset) return a->offset < b->offset ? -1 : 1;
    return (a->j > b->j) - (a->j < b->j);
}

static int64_t row_offset(const fa_tensor *t, int64_t block, int64_t row)
{
    return block * t->stride[0] + row * t->stride[1];
}

/* The keys of an item, sorted so that those whose rows of t are the same memory are consecutive:
 * strides may be 0, and a page may be used twice. Rounding has the same effect on all of these
 * rows, so their errors add up. */
static placed_key *sort_keys(const ref_inputs *in, const ref_item *item, const fa_tensor *t)
{
    placed_key *sorted = calloc(item->n_k > 0 ? (size_t)item->n_k : 1, sizeof *sorted);
    if (!sorted) out_of_memory(item->n_k);
    for (int64_t j = 0; j < item->n_k; j++) {
        int64_t block, row;
        ref_key_place(in, item, j, &block, &row);
        sorted[j] = (placed_key){j, row_offset(t, block, row)};
    }
    qsort(sorted, (size_t)item->n_k, sizeof *sorted, compare_places);
    return sorted;
}

typedef struct row {
    int64_t n_k;
    placed_key *by_k, *by_v;     /* in the order of sort_keys; NULL: everything stays float32 */
    double *x, *x_error;         /* logits after step 5; errors are absolute */
    double *x_moved;             /* additional change if operands are rounded to tf32 */
    double *slope, *slope_error; /* derivative of step 2 */
    double *p, *p_error;         /* step 7 */
    double *keep;                /* step 8's factor */
    double lse, lse_error, lse_moved;
    double p_sink, p_sink_error; /* the sink's share */
} row;

static row row_new(const ref_inputs *in, const ref_item *item)
{
    const int64_t n_k = item->n_k;
    const bool rounds = in->v.data && (in->rounding.weight > 0 || in->rounding.operand > 0);
    row r = {.n_k = n_k,
             .by_k = rounds ? sort_keys(in, item, &in->k) : NULL,
             .by_v = rounds ? sort_keys(in, item, &in->v) : NULL,
             .x = zeros(n_k),
             .x_error = zeros(n_k),
             .x_moved = zeros(n_k),
             .slope = zeros(n_k),
             .slope_error = zeros(n_k),
             .p = zeros(n_k),
             .p_error = zeros(n_k),
             .keep = zeros(n_k)};
    return r;
}

static void row_free(row *r)
{
    free(r->by_k);
    free(r->by_v);
    free(r->x);
    free(r->x_error);
    free(r->x_moved);
    free(r->slope);
    free(r->slope_error);
    free(r->p);
    free(r->p_error);
    free(r->keep);
}

/*
 * How far a sum of products of rounded operands may be from the exact sum: each factor's error is
 * at most u times the factor. In the worst case that is 2 u times the sum of the magnitudes. But
 * errors are independent with mean 0, like those of weights (ref_weights_error): the standard
 * deviation of the sum is at most u sqrt(2 / 3 sum (x y)^2), and 6.9 times that is the second
 * bound. The common error of equal numbers in a row is at most 2 u times the sum itself.
 */
static double moved_by_operands(double u, double dot, double magnitude, double square)
{
    return u * fmin(2 * magnitude, 4 * sqrt(2 * square) + 2 * fabs(dot));
}

/* Sums of x y, |x y| and (x y)^2. Each is computed as several sums: a single one would wait for
 * every addition. */
typedef struct products {
    double dot, magnitude, square;
} products;

enum { LANES = 8 };
typedef double lanes __attribute__((vector_size(LANES * sizeof(double))));
typedef int64_t lanes_bits __attribute__((vector_size(LANES * sizeof(double))));

WITH_WIDE_VECTORS UNCHECKED static products
sum_touched_products(int64_t n, const double *restrict x, const double *restrict y)
{
    lanes dot = {0}, magnitude = {0}, square = {0};
    products sum = {0, 0, 0};
    int64_t c = 0;
    for (; c + LANES <= n; c += LANES) {
        lanes xs, ys;
        memcpy(&xs, x + c, sizeof xs);
        memcpy(&ys, y + c, sizeof ys);
        const lanes xy = xs * ys;
        dot += xy;
        magnitude += (lanes)((lanes_bits)xy & INT64_MAX); /* without the sign */
        square += xy * xy;
    }
    for (int lane = 0; lane < LANES; lane++) {
        sum.dot += dot[lane];
        sum.magnitude += magnitude[lane];
        sum.square += square[lane];
    }
    for (; c < n; c++) {
        const double xy = x[c] * y[c];
        sum.dot += xy;
        sum.magnitude += fabs(xy);
        sum.square += xy * xy;
    }
    return sum;
}

static products sum_products(int64_t n, const double *x, const double *y)
{
    TOUCH(x, n), TOUCH(y, n);
    return sum_touched_products(n, x, y);
}

/* Steps 1 to 5 for one key. */
static void compute_logit(const loaded *l, const ref_item *item, int64_t h, int64_t i, int64_t j,
                          row *r)
{
    const fa_options *o = &l->in->options;
    const double eps = l->in->rounding.sum;
    int64_t head_kv = h / (l->heads_q / l->heads_kv), block, key_row;
    r->x[j] = -INFINITY;
    r->x_error[j] = r->x_moved[j] = 0;
    r->slope[j] = 1;
    r->slope_error[j] = 0;
    if (!ref_may_see(l->in, item, h, i, j)) return;

    ref_key_place(l->in, item, j, &block, &key_row);
    const double *q = row_of(&l->q, item->block_q, item->start_q + i, h);
    const double *k = row_of(&l->k, block, key_row, head_kv);
    double factor = l->scale * descale(l, o->q_descale, item->b, head_kv) *
                    descale(l, o->k_descale, item->b, head_kv);
    const products qk = sum_products(l->d, q, k);
    double x = factor * qk.dot, error = eps * fabs(factor) * qk.magnitude;
    if (o->softcap > 0) {
        double cap = (double)o->softcap, t = tanh(x / cap);
        r->slope[j] = 1 - t * t;
        r->slope_error[j] = eps + 2 * fabs(t) * (error / cap);
        x = cap * t;
        error = error + l->in->rounding.cap * fabs(x);
    }
    if (o->alibi_slopes) {
        double slope = (double)o->alibi_slopes[item->b * o->alibi_batch_stride + h];
        double distance = fabs((double)i + (double)item->diagonal - (double)j);
        x -= slope * distance;
        error += eps * fabs(slope) * fmax(distance, l->in->rounding.alibi_distance);
    }
    if (o->bias) {
        double bias = load_broadcast(o->bias, item->b, h, i, j);
        x += bias;
        if (isfinite(bias)) error += eps * fabs(bias);
    }
    r->x[j] = x;
    r->x_error[j] = error;
    if (l->in->rounding.operand > 0)
        r->x_moved[j] = r->slope[j] * fabs(factor) *
                        moved_by_operands(l->in->rounding.operand, qk.dot, qk.magnitude, qk.square);
}

/* Step 6: log(exp(sink) + sum exp(x)). The largest term is factored out first, so that nothing
 * overflows. */
static double log_sum_exp(const double *x, int64_t n, double sink)
{
    double largest = sink;
    for (int64_t j = 0; j < n; j++) {
        if (isnan(x[j])) return NAN;
        if (x[j] > largest) largest = x[j];
    }
    if (isinf(largest)) return largest;
    double sum = exp(sink - largest);
    for (int64_t j = 0; j < n; j++) sum += exp(x[j] - largest);
    return largest + log(sum);
}

/* Step 7 for one logit. A logit of -infinity has no weight, even if no other key has one. */
static double weight_of(double x, double lse)
{
    return x == -INFINITY && !isnan(lse) ? 0 : exp(x - lse);
}

/* Steps 1 to 8 for one query. */
static void compute_row(const loaded *l, const ref_item *item, int64_t h, int64_t i, row *r)
{
    const fa_options *o = &l->in->options;
    const ref_rounding *rounding = &l->in->rounding;
    double sink = o->sinks ? (double)o->sinks[h] : -INFINITY;
    for (int64_t j = 0; j < r->n_k; j++) compute_logit(l, item, h, i, j, r);
    r->lse = log_sum_exp(r->x, r->n_k, sink);

    r->p_sink = weight_of(sink, r->lse);
    r->lse_error = r->lse_moved = 0;
    for (int64_t j = 0; j < r->n_k; j++) {
        r->p[j] = weight_of(r->x[j], r->lse);
        r->keep[j] = keep_factor(l->in, item, h, i, j);
        r->lse_error += r->p[j] * r->x_error[j];
        r->lse_moved += r->p[j] * r->x_moved[j];
    }
    if (isfinite(r->lse)) r->lse_error += rounding->sum * (1 + fabs(r->lse));
    for (int64_t j = 0; j < r->n_k; j++)
        r->p_error[j] = r->p[j] * (rounding->sum + r->x_error[j] + r->lse_error) +
                        (r->p[j] < FLT_MIN ? r->p[j] : 0); /* subnormal: it may become 0 */
    r->p_sink_error = r->p_sink * (rounding->sum + r->lse_error);
}

/* ------------------------------------------------------------------------------------------------
 * Forward
 * ---------------------------------------------------------------------------------------------- */

static double largest_of(const double *p, int64_t n)
{
    double largest = 0;
    for (int64_t j = 0; j < n; j++) largest = fmax(largest, p[j]);
    return largest;
}

/* Sums over the keys of a row, for all columns together, so that the compiler can use vectors. */
typedef struct column_sums {
    int64_t d_v;
    double *px, p;                /* of p x and of p, over the present keys of one weight */
    double *p2_x, *p2_square, p2; /* as in ref_column */
} column_sums;

/* Keys of one weight count as a single one in the sums of squares. */
static void end_weight(column_sums *s)
{
    double *restrict px = s->px, *restrict p2_x = s->p2_x, *restrict p2_square = s->p2_square;
    s->p2 += s->p * s->p;
    for (int64_t c = 0; c < s->d_v; c++) {
        p2_x[c] += s->p * px[c];
        p2_square[c] += px[c] * px[c];
        px[c] = 0;
    }
    s->p = 0;
}

/* The error that rounding the weights of the row adds. Keys of equal logits have the same weight,
 * which is rounded the same way; those that are the same memory are consecutive here. But in another
 * key tile the weight may be relative to another maximum, and is rounded in another way: then the
 * errors of one weight do not cancel. So the error is the larger one of both cases. */
WITH_WIDE_VECTORS
static void add_weights_error(const loaded *l, const ref_item *item, int64_t head_kv, const row *r,
                              double factor, const double *out_row, double *restrict error_row)
{
    const ref_rounding *rounding = &l->in->rounding;
    const int64_t d_v = l->d_v;
    const double tiny = rounding->weight_tiny * largest_of(r->p, r->n_k);
    double *restrict magnitude = l->sums, *restrict square = magnitude + d_v;
    double *restrict px = square + d_v, last = NAN;
    column_sums sums = {d_v, px, 0, px + d_v, px + 2 * d_v, 0};
    double *restrict each_x = px + 3 * d_v, *restrict each_square = each_x + d_v, each = 0;
    int64_t block, key_row;
    memset(l->sums, 0, (size_t)(SUMS * d_v) * sizeof *l->sums);
    for (int64_t n = 0; n < r->n_k; n++) {
        const int64_t j = r->by_k[n].j;
        if (r->x[j] == -INFINITY) continue;
        ref_key_place(l->in, item, j, &block, &key_row);
        const double *v = row_of(&l->v, block, key_row, head_kv);
        const double p = r->p[j], scale = r->keep[j] * factor;
        if (r->x[j] != last || rounding->weight_scaled) end_weight(&sums);
        last = r->x[j];
        sums.p += p;
        for (int64_t c = 0; c < d_v; c++) {
            const double x = scale * v[c];
            magnitude[c] += p * fabs(x);
            square[c] += p * x * x;
            px[c] += p * x;
            each_x[c] += p * p * x;
            each_square[c] += p * x * (p * x);
            error_row[c] += tiny * fabs(x);
        }
        each += p * p;
    }
    end_weight(&sums);
    for (int64_t c = 0; c < d_v; c++) {
        const ref_column column = {out_row[c], magnitude[c], square[c],
                                   sums.p2,    sums.p2_x[c], sums.p2_square[c]},
                         alone = {out_row[c], magnitude[c], square[c],
                                  each,       each_x[c],    each_square[c]};
        error_row[c] +=
            fmax(ref_weights_error(rounding, &column), ref_weights_error(rounding, &alone));
    }
}

/* Whether key n and the next one in sorted order are the same memory. */
static bool same_as_next(const row *r, const placed_key *sorted, int64_t n)
{
    return n + 1 < r->n_k && sorted[n + 1].offset == sorted[n].offset;
}

/* The error that rounding queries and keys to tf32 adds to the row. Logit j changes by at most
 * x_moved, its weight by a factor of at most 1 + e_j = exp(x_moved), and out by sum e_j p_j
 * (v_j - out) to first order. Keys that are the same memory have one e_j. Errors of different keys
 * are independent, so out changes by at most the root of the sum of the squares, or twice that for
 * rows whose keys are not all different. */
static void add_keys_error(const loaded *l, const ref_item *item, int64_t head_kv, const row *r,
                           double factor, const double *out_row, double *error_row)
{
    double *restrict worst = l->sums, *restrict square = worst + l->d_v;
    double *restrict moved = square + l->d_v;
    int64_t block, key_row;
    memset(l->sums, 0, (size_t)(3 * l->d_v) * sizeof *l->sums);
    for (int64_t n = 0; n < r->n_k; n++) {
        const int64_t j = r->by_k[n].j;
        if (r->x[j] != -INFINITY) {
            ref_key_place(l->in, item, j, &block, &key_row);
            const double *v = row_of(&l->v, block, key_row, head_kv);
            const double p_moved = r->p[j] * expm1(r->x_moved[j]), scale = r->keep[j] * factor;
            for (int64_t c = 0; c < l->d_v; c++) moved[c] += p_moved * (scale * v[c] - out_row[c]);
        }
        if (same_as_next(r, r->by_k, n)) continue;
        for (int64_t c = 0; c < l->d_v; c++) {
            worst[c] += fabs(moved[c]);
            square[c] += moved[c] * moved[c];
            moved[c] = 0;
        }
    }
    for (int64_t c = 0; c < l->d_v; c++) error_row[c] += fmin(worst[c], 2 * sqrt(square[c]));
}

/* The error from rounding values: it changes out as the rounding of weights does, and if all values
 * are equal, by as much as the error of one of them. */
static void add_values_error(const loaded *l, const ref_item *item, int64_t head_kv, const row *r,
                             double factor, const double *out_row, double *error_row)
{
    const double u = l->in->rounding.operand;
    double *restrict magnitude = l->sums, *restrict square = magnitude + l->d_v;
    double *restrict part = square + l->d_v;
    int64_t block, key_row;
    memset(l->sums, 0, (size_t)(3 * l->d_v) * sizeof *l->sums);
    for (int64_t n = 0; n < r->n_k; n++) {
        const int64_t j = r->by_v[n].j;
        if (r->x[j] != -INFINITY) {
            ref_key_place(l->in, item, j, &block, &key_row);
            const double *v = row_of(&l->v, block, key_row, head_kv);
            const double p = r->p[j] * r->keep[j] * factor;
            for (int64_t c = 0; c < l->d_v; c++) part[c] += p * v[c];
        }
        if (same_as_next(r, r->by_v, n)) continue;
        for (int64_t c = 0; c < l->d_v; c++) {
            magnitude[c] += fabs(part[c]);
            square[c] += part[c] * part[c];
            part[c] = 0;
        }
    }
    for (int64_t c = 0; c < l->d_v; c++)
        error_row[c] += u * fmin(magnitude[c], 4 * sqrt(square[c]) + fabs(out_row[c]));
}

/* Step 9 for one query, into out_row and its error (d_v). */
static void compute_output(const loaded *l, const ref_item *item, int64_t h, const row *r,
                           double *out_row, double *error_row)
{
    int64_t head_kv = h / (l->heads_q / l->heads_kv), block, key_row;
    double factor = descale(l, l->in->options.v_descale, item->b, head_kv);
    const ref_rounding *rounding = &l->in->rounding;
    const double tiny = /* for weights that are not rounded otherwise */
        rounding->weight > 0 ? 0 : rounding->weight_tiny * largest_of(r->p, r->n_k);
    for (int64_t c = 0; c < l->d_v; c++) out_row[c] = error_row[c] = l->sums[c] = 0;
    for (int64_t j = 0; j < r->n_k; j++) {
        if (r->x[j] == -INFINITY) continue;
        ref_key_place(l->in, item, j, &block, &key_row);
        const double *v = row_of(&l->v, block, key_row, head_kv);
        const double p = r->p[j] * r->keep[j] * factor;
        const double p_error =
            (r->p_error[j] + r->p[j] * rounding->sum + tiny) * r->keep[j] * fabs(factor);
        add_terms(l->d_v, p, p_error, v, out_row, error_row, l->sums);
    }
    if (l->in->rounding.weight > 0)
        add_weights_error(l, item, head_kv, r, factor, out_row, error_row);
    if (l->in->rounding.operand > 0) {
        add_keys_error(l, item, head_kv, r, factor, out_row, error_row);
        add_values_error(l, item, head_kv, r, factor, out_row, error_row);
    }
}

void ref_forward(const ref_inputs *in, ref_array *out, ref_array *lse)
{
    loaded l = load_inputs(in);
    *out = ref_array_new(in->q.shape[0], in->q.shape[1], l.heads_q, l.d_v);
    *lse = ref_array_new(in->q.shape[0], l.heads_q, in->q.shape[1], 1);
    for (int64_t n = 0; n < in->q.shape[0] * l.heads_q * in->q.shape[1]; n++)
        lse->value[n] = -INFINITY;

    for (int64_t b = 0; b < ref_batch(in); b++) {
        ref_item item = ref_item_of(in, b);
        row r = row_new(in, &item);
        for (int64_t h = 0; h < l.heads_q; h++)
            for (int64_t i = 0; i < item.n_q; i++) {
                int64_t token = item.start_q + i;
                int64_t at = ref_array_index(lse, item.block_q, h, token, 0);
                compute_row(&l, &item, h, i, &r);
                compute_output(&l, &item, h, &r, row_of(out, item.block_q, token, h),
                               error_row_of(out, item.block_q, token, h));
                lse->value[at] = r.lse;
                lse->error[at] = r.lse_error + r.lse_moved;
            }
        row_free(&r);
    }
    unload_inputs(&l);
}

/* One query of ref_forward_rounded, from the logits in r. */
static void compute_rounded(const loaded *l, const ref_item *item, int64_t h, const row *r,
                            fa_dtype dtype, double *out_row)
{
    const int64_t head_kv = h / (l->heads_q / l->heads_kv);
    const double factor = descale(l, l->in->options.v_descale, item->b, head_kv);
    const double sink = l->in->options.sinks ? (double)l->in->options.sinks[h] : -INFINITY;
    double top = -INFINITY, sum = 0;
    for (int64_t j = 0; j < r->n_k; j++) top = fmax(top, r->x[j]);
    if (top == -INFINITY) return;
    for (int64_t j = 0; j < r->n_k; j++) {
        if (r->x[j] == -INFINITY) continue;
        int64_t block, key_row;
        ref_key_place(l->in, item, j, &block, &key_row);
        const double *v = row_of(&l->v, block, key_row, head_kv);
        const double weight = exp(r->x[j] - top), scale = r->keep[j] * factor;
        const double rounded = ref_round(l->in->v.dtype, weight) * scale;
        sum += weight;
        for (int64_t c = 0; c < l->d_v; c++) out_row[c] += rounded * v[c];
    }
    sum += exp(sink - top);
    for (int64_t c = 0; c < l->d_v; c++) out_row[c] = ref_round(dtype, out_row[c] / sum);
}

void ref_forward_rounded(const ref_inputs *in, fa_dtype dtype, ref_array *rounded)
{
    loaded l = load_inputs(in);
    *rounded = ref_array_new(in->q.shape[0], in->q.shape[1], l.heads_q, l.d_v);
    for (int64_t b = 0; b < ref_batch(in); b++) {
        ref_item item = ref_item_of(in, b);
        row r = row_new(in, &item);
        for (int64_t h = 0; h < l.heads_q; h++)
            for (int64_t i = 0; i < item.n_q; i++) {
                compute_row(&l, &item, h, i, &r);
                compute_rounded(&l, &item, h, &r, dtype,
                                row_of(rounded, item.block_q, item.start_q + i, h));
            }
        row_free(&r);
    }
    unload_inputs(&l);
}

/* ------------------------------------------------------------------------------------------------
 * Backward
 * ---------------------------------------------------------------------------------------------- */

/* The sums over c that one query's gradients need. */
typedef struct row_sums {
    double delta, delta_error; /* sum_c dout_c out_c - dlse */
} row_sums;

static row_sums compute_delta(const loaded *l, const double *dout, const double *out,
                              const double *out_error, double dlse)
{
    const ref_rounding *rounding = &l->in->rounding;
    row_sums s = {-dlse, rounding->sum * fabs(dlse)};
    for (int64_t c = 0; c < l->d_v; c++) {
        s.delta += dout[c] * out[c];
        double stored = rounding->out * fabs(out[c]) + rounding->out_tiny;
        s.delta_error += fabs(dout[c]) * (out_error[c] + rounding->sum * fabs(out[c]) + stored);
    }
    return s;
}

/* How far rounding may change the terms of a sum, for as many sums as an array has elements: the
 * sums of those distances and of their squares. */
typedef struct spread {
    double *magnitude, *square;
} spread;

static double *zeros_like(const ref_array *array)
{
    const int64_t *n = array->shape;
    return zeros(n[0] * n[1] * n[2] * n[3]);
}

static spread spread_new(const ref_array *array)
{
    return (spread){zeros_like(array), zeros_like(array)};
}

/* Whether rows are the same memory. Equal queries or equal keys have equal weights, and rounding
 * has the same effect on them. */
static bool repeats(const fa_tensor *t)
{
    return (t->shape[1] > 1 && t->stride[1] == 0) || (t->shape[2] > 1 && t->stride[2] == 0);
}

/* If all terms change in the same direction, a sum changes by the sum of the distances. If they are
 * independent, it changes by at most 4 times the root of the sum of the squares: see
 * ref_weights_error. */
static void spread_free(spread *s, bool independent, ref_array *array)
{
    const int64_t *n = array->shape;
    for (int64_t i = 0; i < n[0] * n[1] * n[2] * n[3]; i++) {
        const double moved = independent ? 4 * sqrt(s->square[i]) : s->magnitude[i];
        array->error[i] += fmin(s->magnitude[i], moved);
    }
    free(s->magnitude);
    free(s->square);
}

/* For all gradients that are sums of rounded products. */
typedef struct spreads {
    spread dq, dk, dv;
} spreads;

/* The last term of each of the gradients' sums, for add_terms. */
typedef struct last_terms {
    double *dq, *dk, *dv, *dbias, *dsinks;
} last_terms;

static last_terms last_terms_new(const ref_gradients *g)
{
    return (last_terms){zeros_like(&g->dq), zeros_like(&g->dk), zeros_like(&g->dv),
                        zeros_like(&g->dbias), zeros_like(&g->dsinks)};
}

static void last_terms_free(last_terms *last)
{
    free(last->dq);
    free(last->dk);
    free(last->dv);
    free(last->dbias);
    free(last->dsinks);
}

/* Where the gradients of a batch item's head are added. */
typedef struct backward {
    const loaded *l;
    const ref_item *item;
    int64_t h;
    ref_gradients *g;
    const last_terms *last;
    const spreads *rounded; /* NULL: everything stays float32 */
} backward;

/* A query, with the gradients of its logits after step 5 (dx) and of scale * q.k (dy), by key, and
 * how far dy changes if operands are rounded to tf32. */
typedef struct query {
    int64_t i;
    const double *q, *dout; /* (d), (d_v) */
    row_sums sums;
    row r;
    double *dx, *dx_error, *dy, *dy_error, *dy_moved; /* (n_k) */
} query;

static query query_new(const ref_inputs *in, const ref_item *item)
{
    query w = {.r = row_new(in, item)};
    w.dx = zeros(5 * item->n_k);
    w.dx_error = w.dx + item->n_k;
    w.dy = w.dx_error + item->n_k;
    w.dy_error = w.dy + item->n_k;
    w.dy_moved = w.dy_error + item->n_k;
    return w;
}

static void query_free(query *w)
{
    row_free(&w->r);
    free(w->dx);
}

static const double one = 1;

/* How far a weight changes when rounding queries and keys to tf32 changes its logit. */
static double moved_weight(const row *r, int64_t j) { return r->p[j] * expm1(r->x_moved[j]); }

/* How far the gradient of scale * q.k changes. It is p (dp - delta) times the softcap's slope
 * 1 - t^2, so it changes with the weight, dp and the slope. */
static double moved_logit(const backward *b, const row *r, int64_t j, double distance,
                          const products *dp)
{
    const fa_options *o = &b->l->in->options;
    const double u = b->l->in->rounding.operand, weight = moved_weight(r, j);
    const double of_dp = r->keep[j] * moved_by_operands(u, dp->dot, dp->magnitude, dp->square);
    const double of_slope =
        o->softcap > 0 ? 2 * sqrt(fmax(0, 1 - r->slope[j])) * r->x_moved[j] / (double)o->softcap
                       : 0;
    return (weight * distance + (r->p[j] + weight) * of_dp) * r->slope[j] +
           r->p[j] * distance * of_slope;
}

/* Computes what the logit of query and key j contributes to all gradients. */
static void derive_logit(const backward *b, query *w, int64_t j)
{
    const loaded *l = b->l;
    const row *r = &w->r;
    const double eps = l->in->rounding.sum;
    int64_t head_kv = b->h / (l->heads_q / l->heads_kv), block, key_row;
    ref_key_place(l->in, b->item, j, &block, &key_row);
    /* dp: the gradient of step 7's p */
    const products sums = sum_products(l->d_v, w->dout, row_of(&l->v, block, key_row, head_kv));
    const double dp = r->keep[j] * sums.dot, dp_magnitude = r->keep[j] * sums.magnitude;
    const double dx = r->p[j] * (dp - w->sums.delta);
    const double dx_error =
        r->p_error[j] * fabs(dp - w->sums.delta) +
        r->p[j] * (eps * dp_magnitude + w->sums.delta_error + eps * fabs(w->sums.delta));
    w->dx[j] = dx;
    w->dx_error[j] = dx_error;
    w->dy[j] = dx * r->slope[j];
    w->dy_error[j] = dx_error * r->slope[j] + fabs(dx) * r->slope_error[j];
    if (l->in->rounding.operand > 0)
        w->dy_moved[j] = moved_logit(b, r, j, fabs(dp - w->sums.delta), &sums);
}

static void add_to_dbias(const backward *b, const query *w, int64_t j)
{
    ref_array *dbias = &b->g->dbias;
    const int64_t at = ref_array_index(
        dbias, dbias->shape[0] == 1 ? 0 : b->item->b, dbias->shape[1] == 1 ? 0 : b->h,
        dbias->shape[2] == 1 ? 0 : w->i, dbias->shape[3] == 1 ? 0 : j);
    const ref_rounding *r = &b->l->in->rounding;
    const bool shared = dbias->shape[0] < ref_batch(b->l->in) || dbias->shape[1] < b->l->heads_q;
    double error = w->dx_error[j] + r->sum * fabs(w->dx[j]);
    if (shared && r->pair_shared) error += r->pair * fabs(w->dx[j]) + r->pair_tiny;
    add_terms(1, w->dx[j], error, &one, &dbias->value[at], &dbias->error[at], &b->last->dbias[at]);
}

/* Adds terms to elements of a gradient from `at` on (add_terms), and if they are rounded, to their
 * spread. moved: how far, for an x of 1. */
WITH_WIDE_VECTORS
static void add_to_gradient(int64_t n, double factor, double error, double moved,
                            const double *restrict x, const ref_array *g, double *last_terms_of_g,
                            const spread *rounded, int64_t at)
{
    add_terms(n, factor, error, x, g->value + at, g->error + at, last_terms_of_g + at);
    if (!rounded) return;
    double *restrict magnitude = rounded->magnitude + at, *restrict square = rounded->square + at;
    for (int64_t i = 0; i < n; i++) {
        magnitude[i] += moved * fabs(x[i]);
        square[i] += moved * moved * (x[i] * x[i]);
    }
}

/* How far rounding changes a factor of the gradients' products, and with it the other factor: by a
 * part of both. */
static double moved_factor(const ref_rounding *rounding, double factor)
{
    return (rounding->pair + 2 * rounding->operand) * fabs(factor);
}

/* Adds what key j contributes to the gradients of a query, and the query to those of the key. */
static void backward_pair(const backward *b, const query *w, int64_t j)
{
    const loaded *l = b->l;
    const row *r = &w->r;
    const spreads *rounded = b->rounded;
    const double eps = l->in->rounding.sum, tiny = rounded ? l->in->rounding.pair_tiny : 0;
    int64_t head_kv = b->h / (l->heads_q / l->heads_kv), block, key_row;
    if (r->x[j] == -INFINITY) return;
    ref_key_place(l->in, b->item, j, &block, &key_row);

    const int64_t token = b->item->start_q + w->i;
    const double factor = l->scale * w->dy[j];
    const double error = fabs(l->scale) * (w->dy_error[j] + eps * fabs(w->dy[j]) + tiny);
    const double moved = fabs(l->scale) * w->dy_moved[j] + moved_factor(&l->in->rounding, factor);
    add_to_gradient(l->d, factor, error, moved, row_of(&l->k, block, key_row, head_kv), &b->g->dq,
                    b->last->dq, rounded ? &rounded->dq : NULL,
                    ref_array_index(&b->g->dq, b->item->block_q, token, b->h, 0));
    add_to_gradient(l->d, factor, error, moved, w->q, &b->g->dk, b->last->dk,
                    rounded ? &rounded->dk : NULL,
                    ref_array_index(&b->g->dk, block, key_row, head_kv, 0));
    const double p = r->p[j] * r->keep[j], p_error = (r->p_error[j] + eps * r->p[j]) * r->keep[j];
    const double p_moved = moved_weight(r, j) * r->keep[j] + moved_factor(&l->in->rounding, p);
    add_to_gradient(l->d_v, p, p_error + tiny, p_moved, w->dout, &b->g->dv, b->last->dv,
                    rounded ? &rounded->dv : NULL,
                    ref_array_index(&b->g->dv, block, key_row, head_kv, 0));
}

/* The backward's weights are exact except for the log-sum-exp, which forward has computed from
 * rounded operands. */
static void move_weights(row *r)
{
    for (int64_t j = 0; j < r->n_k; j++) r->p_error[j] += r->p[j] * expm1(r->lse_moved);
    r->p_sink_error += r->p_sink * expm1(r->lse_moved);
}

/* Computes what a query contributes independently of the other queries: dx, dy, dbias and
 * dsinks. */
static void begin_query(const backward *b, query *w)
{
    const row *r = &w->r;
    for (int64_t j = 0; j < r->n_k; j++) {
        if (r->x[j] == -INFINITY) continue;
        derive_logit(b, w, j);
        if (b->g->dbias.value) add_to_dbias(b, w, j);
    }
    if (r->p_sink > 0 || isnan(r->p_sink)) { /* out does not use the sink, so its dp is 0 */
        const row_sums *s = &w->sums;
        const double error = r->p_sink_error * fabs(s->delta) +
                             r->p_sink * (s->delta_error + b->l->in->rounding.sum * fabs(s->delta));
        add_terms(1, -r->p_sink * s->delta, error, &one, &b->g->dsinks.value[b->h],
                  &b->g->dsinks.error[b->h], &b->last->dsinks[b->h]);
    }
}

/* This many queries are processed together for each key, so that a key's gradients stay in the
 * cache. */
enum { TOGETHER = 8 };

void ref_backward(const ref_inputs *in, const fa_tensor *dout, const float *dlse,
                  const int64_t *dbias_shape, ref_gradients *g)
{
    loaded l = load_inputs(in);
    ref_array douts = unpack(dout);
    const int64_t *k = in->k.shape;
    memset(g, 0, sizeof *g);
    g->dq = ref_array_new(in->q.shape[0], in->q.shape[1], l.heads_q, l.d);
    g->dk = ref_array_new(k[0], k[1], l.heads_kv, l.d);
    g->dv = ref_array_new(k[0], k[1], l.heads_kv, l.d_v);
    g->dsinks = ref_array_new(1, 1, 1, l.heads_q);
    if (dbias_shape)
        g->dbias = ref_array_new(dbias_shape[0], dbias_shape[1], dbias_shape[2], dbias_shape[3]);
    double *out = zeros(l.d_v), *out_error = zeros(l.d_v);
    const bool rounds =
        (in->rounding.pair > 0 || in->rounding.operand > 0) && dout->dtype == in->v.dtype;
    last_terms last = last_terms_new(g);
    spreads rounded;
    if (rounds) rounded = (spreads){spread_new(&g->dq), spread_new(&g->dk), spread_new(&g->dv)};

    for (int64_t n = 0; n < ref_batch(in); n++) {
        const ref_item item = ref_item_of(in, n);
        query queries[TOGETHER];
        for (int t = 0; t < TOGETHER; t++) queries[t] = query_new(in, &item);
        for (int64_t h = 0; h < l.heads_q; h++) {
            const backward b = {&l, &item, h, g, &last, rounds ? &rounded : NULL};
            for (int64_t first = 0; first < item.n_q; first += TOGETHER) {
                const int count = (int)(item.n_q - first < TOGETHER ? item.n_q - first : TOGETHER);
                for (int t = 0; t < count; t++) {
                    query *w = &queries[t];
                    const int64_t token = item.start_q + first + t;
                    const int64_t lse_at = (item.block_q * l.heads_q + h) * in->q.shape[1] + token;
                    w->i = first + t;
                    w->q = row_of(&l.q, item.block_q, token, h);
                    w->dout = row_of(&douts, item.block_q, token, h);
                    compute_row(&l, &item, h, w->i, &w->r);
                    compute_output(&l, &item, h, &w->r, out, out_error);
                    move_weights(&w->r);
                    w->sums =
                        compute_delta(&l, w->dout, out, out_error, dlse ? (double)dlse[lse_at] : 0);
                    begin_query(&b, w);
                }
                for (int64_t j = 0; j < item.n_k; j++)
                    for (int t = 0; t < count; t++) backward_pair(&b, &queries[t], j);
            }
        }
        for (int t = 0; t < TOGETHER; t++) query_free(&queries[t]);
    }
    if (rounds) {
        const bool independent =
            l.scale != 0 && !repeats(&in->q) && !repeats(&in->k) &&
            (in->rounding.operand == 0 || (!repeats(&in->v) && !repeats(dout)));
        spread_free(&rounded.dq, independent, &g->dq);
        spread_free(&rounded.dk, independent, &g->dk);
        spread_free(&rounded.dv, independent, &g->dv);
    }
    last_terms_free(&last);
    free(out);
    free(out_error);
    ref_array_free(&douts);
    unload_inputs(&l);
}

void ref_gradients_free(ref_gradients *g)
{
    ref_array_free(&g->dq);
    ref_array_free(&g->dk);
    ref_array_free(&g->dv);
    ref_array_free(&g->dbias);
    ref_array_free(&g->dsinks);
}

/* ------------------------------------------------------------------------------------------------
 * Weights and combine
 * ---------------------------------------------------------------------------------------------- */

void ref_weights(const ref_inputs *in, const int64_t *rows, int64_t num_rows, int64_t n_k,
                 ref_array *weights)
{
    loaded l = load_inputs(in);
    *weights = ref_array_new(ref_batch(in), l.heads_q, num_rows, n_k);
    for (int64_t b = 0; b < ref_batch(in); b++) {
        ref_item item = ref_item_of(in, b);
        row r = row_new(in, &item);
        for (int64_t h = 0; h < l.heads_q; h++)
            for (int64_t n = 0; n < num_rows; n++) {
                int64_t i = rows ? rows[n] : n;
                if (i >= item.n_q) continue;
                compute_row(&l, &item, h, i, &r);
                memcpy(row_of(weights, b, h, n), r.p, (size_t)item.n_k * sizeof *r.p);
                memcpy(error_row_of(weights, b, h, n), r.p_error, (size_t)item.n_k * sizeof *r.p);
            }
        row_free(&r);
    }
    unload_inputs(&l);
}

void ref_combine(const fa_tensor *parts, const float *const *part_lse, int64_t num_parts,
                 const int64_t shape[4], ref_array *out, ref_array *lse)
{
    const double eps = 16 * ref_epsilon(FA_FLOAT32);
    double *x = zeros(num_parts);
    *out = ref_array_new(shape[0], shape[1], shape[2], shape[3]);
    *lse = ref_array_new(shape[0], shape[2], shape[1], 1);
    for (int64_t b = 0; b < shape[0]; b++)
        for (int64_t i = 0; i < shape[1]; i++)
            for (int64_t h = 0; h < shape[2]; h++) {
                int64_t at = ref_array_index(lse, b, h, i, 0);
                for (int64_t p = 0; p < num_parts; p++) x[p] = (double)part_lse[p][at];
                double total = log_sum_exp(x, num_parts, -INFINITY);
                lse->value[at] = total;
                if (isfinite(total)) lse->error[at] = eps * (1 + fabs(total));
                for (int64_t p = 0; p < num_parts; p++)
                    for (int64_t c = 0; c < shape[3] && x[p] != -INFINITY; c++) {
                        double w = weight_of(x[p], total), value = ref_load(&parts[p], b, i, h, c);
                        int64_t at = ref_array_index(out, b, i, h, c);
                        out->value[at] += w * value;
                        out->error[at] += w * fabs(value) * eps * (1 + fabs(x[p]) + fabs(total));
                    }
            }
    free(x);
}
