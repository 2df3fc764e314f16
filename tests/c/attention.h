/*
 * A problem for tests: tensors with guard bands, random contents, the library's results and the
 * comparison with the reference.
 */
#ifndef TEST_ATTENTION_H
#define TEST_ATTENTION_H

#include "buffers.h"
#include "check.h"
#include "random.h"
#include "reference.h"
#include "scalar.h"

typedef struct shape {
    int64_t batch, heads_q, heads_kv, n_q, n_k, d, d_v;
} shape;

typedef struct attention {
    shape s;
    ref_random random;
    ref_buffers buffers;
    ref_inputs in; /* q, k, v, options */
    fa_tensor out, dout, dq, dk, dv;
    float *lse, *dlse; /* without dlse (NULL), backward has none */
    fa_tensor bias, mask, dbias;
    float *dsinks;
} attention;

/* Contiguous tensors of one dtype; q, k, v, dout hold random numbers, outputs NaN. */
void attention_make(attention *a, uint64_t seed, shape s, fa_dtype dtype);

/* The same with a layout for each of q, k, v, out (and the gradients likewise); NULL:
 * contiguous. */
void attention_make_as(attention *a, uint64_t seed, shape s, fa_dtype dtype, const ref_layout *q,
                       const ref_layout *k, const ref_layout *v, const ref_layout *out);
void attention_free(attention *a);

/* One option, with random values. */
typedef enum option {
    OPTION_CAUSAL,
    OPTION_DIAGONAL,
    OPTION_WINDOW,
    OPTION_SCALE,
    OPTION_SOFTCAP,
    OPTION_BIAS,
    OPTION_MASK,
    OPTION_ALIBI,
    OPTION_SINKS,
    OPTION_DROPOUT,
    NUM_OPTIONS
} option;

const char *option_name(option o);
void attention_set(attention *a, option o);

/* Fills t with random numbers of variance amplitude^2. */
void attention_fill(attention *a, const fa_tensor *t, double amplitude);

/* Sets all outputs to NaN again. */
void attention_poison(attention *a);

/* Runs the pass and compares all its results and the memory around them with the reference; what:
 * describes the case in messages. Backward runs forward first. */
void attention_check_forward(attention *a, const char *what);
void attention_check_decode(attention *a, const char *what);
void attention_check_backward(attention *a, const char *what);

/* Only makes the call; a failing status is a failed check. */
bool attention_forward(attention *a, const char *what);
bool attention_backward(attention *a, const char *what);

/* Whether all elements of two tensors of one shape and dtype have the same bits. */
bool same_bits(const fa_tensor *x, const fa_tensor *y);

extern const fa_dtype float_dtypes[3];

#endif
