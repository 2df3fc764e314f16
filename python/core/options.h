/*
 * Converts keyword arguments of a call to fa_options, and arrays to tensors and checked pointers.
 */
#ifndef FLASHATTN_PYTHON_OPTIONS_H
#define FLASHATTN_PYTHON_OPTIONS_H

#include "array.h"

/* flashattn.UnsupportedError, which is created when the module is imported. */
extern PyObject *unsupported_error;

/* The order of q's, k's, v's and out's axes in the caller's arrays. */
typedef enum layout { LAYOUT_BSHD, LAYOUT_BHSD } layout;

enum { ARRAYS_MAX = 32 };

/* None, or NULL with the exception for the status, with the library's message. */
PyObject *call_result(fa_status status);

/* Everything that lives as long as one call. */
typedef struct call {
    location where;
    layout order;
    array arrays[ARRAYS_MAX];
    int count;
    fa_options options;
    fa_tensor q, k, v, bias, mask, k_scale, v_scale;
    /* Borrowed: the array whose library and location converted integers use; or NULL. */
    PyObject *like;
    PyObject *allocator; /* borrowed: allocator(bytes, q) gives CUDA workspace; NULL: none */
} call;

/* Keyword arguments by option; NULL: not given. */
enum { OPTIONS_MAX = 32 };
typedef struct keywords {
    bool any;
    PyObject *values[OPTIONS_MAX];
} keywords;

int options_module_init(void);

/* order: "bshd" or "bhsd". values and names: the keywords; of these only the stream is read. */
int call_begin(call *c, PyObject *order, PyObject *const *values, PyObject *names);
void call_end(call *c);

/* A tensor with axes (batch, sequence, head, dim), in the call's layout; an array of three axes has
 * no batch. written: it must not be read-only. */
int call_tensor(call *c, const char *name, PyObject *object, bool written, fa_tensor *t);

/* A tensor with axes (batch, head, query, key); missing leading axes have the extent 1. */
int call_scores(call *c, const char *name, PyObject *object, bool written, fa_tensor *t);

/* Contiguous float32 with `count` elements; None gives NULL. */
int call_floats(call *c, const char *name, PyObject *object, int64_t count, bool written,
                float **data);

/* A log-sum-exp for c->q: contiguous float32 (batch, heads, n_q); None gives NULL. */
int call_lse(call *c, const char *name, PyObject *object, bool written, float **data);

/* One of the parts that are merged. */
typedef struct part {
    const char *name, *lse_name; /* for errors */
    array arrays[2];             /* not in the call, because there may be any number of parts */
    fa_tensor tensor;
    const float *lse;
    int64_t lse_stride[3]; /* batch, heads, n_q */
} part;

/* part_release must follow, whatever it returns. */
int call_part(call *c, part *p, PyObject *tensor, PyObject *lse);
void part_release(part *p);

/* int32 (count) that will be written. */
int call_written_ints(call *c, const char *name, PyObject *object, int64_t count, int32_t **data);

/* int32 with this many axes, and `count` elements if that is not negative. read: the array. */
int call_ints(call *c, const char *name, PyObject *object, int axes, int64_t count,
              const int32_t **data, const array **read);

/* Python's or NumPy's truth value, 0 or 1: sets the bit if it is true. */
int call_flag(const char *name, PyObject *value, uint32_t bit, uint32_t *flags);

/* 0 to 2^31 - 1. */
int call_threads(PyObject *value, int32_t *threads);

/* Integers with one axis; None gives NULL. */
int call_rows(call *c, PyObject *object, const int64_t **rows, int64_t *count);

/* The keywords after the positional arguments; must be called after q and k have been read.
 * `values` are the arguments for the names in the tuple `names`, which may be NULL. */
int call_options(call *c, PyObject *const *values, PyObject *names);

/* The options of a plain call, from a dict. False: one is unknown, or needs more than the library's
 * call: it selects memory or a stream, or needs random numbers. No error is set. */
bool keywords_are_plain(PyObject *dict, keywords *given);

/* Like call_options. */
int call_keywords(call *c, const keywords *given);

/* The batch size, which is num_sequences for packed rows. */
int64_t call_batch(const call *c);

#endif
