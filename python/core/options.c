#include "options.h"

#include <string.h>

/* ---- Errors ---------------------------------------------------------------------------------- */

static PyObject *exception_of(fa_status status)
{
    switch (status) {
    case FA_ERROR_ARGUMENT: return PyExc_ValueError;
    case FA_ERROR_UNSUPPORTED: return unsupported_error;
    case FA_ERROR_MEMORY: return PyExc_MemoryError;
    default: return PyExc_RuntimeError;
    }
}

PyObject *call_result(fa_status status)
{
    if (status == FA_OK) Py_RETURN_NONE;
    PyErr_SetString(exception_of(status), fa_last_error());
    return NULL;
}

/* ---- The names of the options ---------------------------------------------------------------- */

/* In the order in which the Python layer passes them, so that each is found immediately. */
/* clang-format off */
#define OPTION_NAMES(X) \
    X(causal) X(scale) X(softcap) X(window) X(diagonal) X(bias) X(mask) X(alibi_slopes) X(sinks) \
    X(dropout_p) X(seed) X(offset) X(dropout_state) X(cu_seqlens_q) X(cu_seqlens_k) X(seqlens_q) \
    X(seqlens_k) X(max_seqlen_q) X(max_seqlen_k) X(block_table) X(q_descale) X(k_descale) \
    X(v_descale) X(deterministic) X(batch_invariant) X(threads) X(precision) X(stream) X(allocate) \
    X(attention_chunk) X(k_scale) X(v_scale)
/* clang-format on */

#define OPTION_ENUM(name) OPTION_##name,
#define OPTION_TEXT(name) #name,
typedef enum option { OPTION_NAMES(OPTION_ENUM) OPTION_COUNT } option;
_Static_assert((int)OPTION_COUNT <= (int)OPTIONS_MAX, "keywords");

static const char *const option_texts[] = {OPTION_NAMES(OPTION_TEXT)};
static PyObject *option_names[OPTION_COUNT]; /* interned */
static PyObject *text_bshd, *text_bhsd;

int options_module_init(void)
{
    for (int i = 0; i < OPTION_COUNT; i++) {
        option_names[i] = PyUnicode_InternFromString(option_texts[i]);
        if (!option_names[i]) return -1;
    }
    text_bshd = PyUnicode_InternFromString("bshd");
    text_bhsd = PyUnicode_InternFromString("bhsd");
    return text_bshd && text_bhsd ? 0 : -1;
}

/* Keywords are interned, so comparing pointers nearly always suffices. */
static int find_option(PyObject *name, int guess)
{
    if (guess < OPTION_COUNT && option_names[guess] == name) return guess;
    for (int i = 0; i < OPTION_COUNT; i++)
        if (option_names[i] == name) return i;
    for (int i = 0; i < OPTION_COUNT; i++)
        if (PyUnicode_Compare(option_names[i], name) == 0) return i;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_TypeError, "there is no option %R: help(flashattn.attention) lists them",
                     name);
    return -1;
}

/* Whether the caller leaves the dropout's seed to a random number generator. */
static bool must_draw(const keywords *given)
{
    PyObject *p = given->values[OPTION_dropout_p];
    if (!p || (PyFloat_Check(p) && PyFloat_AsDouble(p) == 0.0)) return false;
    return !given->values[OPTION_seed] && !given->values[OPTION_offset] &&
           !given->values[OPTION_dropout_state];
}

bool keywords_are_plain(PyObject *dict, keywords *given)
{
    PyObject *name, *value;
    Py_ssize_t at = 0;
    given->any = false;
    if (!PyDict_Check(dict)) return false;
    for (int i = 0; PyDict_Next(dict, &at, &name, &value); i++) {
        if (i == 0) memset(given->values, 0, sizeof given->values);
        given->any = true;
        const int which = find_option(name, i);
        if (which < 0) PyErr_Clear();
        if (which < 0 || which == OPTION_stream || which == OPTION_allocate) return false;
        if (value != Py_None) given->values[which] = value;
    }
    return !given->any || !must_draw(given);
}

/* ---- A call's arrays ------------------------------------------------------------------------- */

static int read_layout(PyObject *order, layout *result)
{
    if (order == text_bshd || order == text_bhsd) {
        *result = order == text_bhsd ? LAYOUT_BHSD : LAYOUT_BSHD;
        return 0;
    }
    bool text = PyUnicode_Check(order);
    *result = text && PyUnicode_Compare(order, text_bhsd) == 0 ? LAYOUT_BHSD : LAYOUT_BSHD;
    if (*result == LAYOUT_BHSD || (text && PyUnicode_Compare(order, text_bshd) == 0)) return 0;
    PyErr_Format(PyExc_ValueError, "layout is %R: expected 'bshd' or 'bhsd'", order);
    return -1;
}

static int read_uint64(const char *name, PyObject *value, uint64_t *result);

static int read_stream(call *c, PyObject *value)
{
    if (value == Py_None) return 0;
    uint64_t address;
    if (read_uint64("stream", value, &address) < 0) return -1;
    c->where.stream = (void *)(uintptr_t)address;
    c->where.stream_known = true;
    return 0;
}

static int find_stream(call *c, PyObject *const *values, PyObject *names)
{
    Py_ssize_t count = names ? PyTuple_Size(names) : 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (PyTuple_GetItem(names, i) == option_names[OPTION_stream])
            return read_stream(c, values[i]);
    return 0;
}

int call_begin(call *c, PyObject *order, PyObject *const *values, PyObject *names)
{
    memset(&c->where, 0, sizeof c->where);
    memset(&c->options, 0, sizeof c->options);
    c->count = 0;
    c->allocator = c->like = NULL;
    c->options.size = sizeof c->options;
    if (read_layout(order, &c->order) < 0) return -1;
    return find_stream(c, values, names);
}

void call_end(call *c)
{
    for (int i = 0; i < c->count; i++) array_release(&c->arrays[i]);
    c->count = 0;
}

static int read_array(call *c, array *a, const char *name, PyObject *object, bool written)
{
    if (array_read(a, name, object, &c->where) < 0) return -1;
    if (!written || !a->read_only) return 0;
    array_release(a);
    PyErr_Format(PyExc_ValueError, "%s is read-only: expected an array to write to", name);
    return -1;
}

/* The array lives until call_end. */
static array *add_array(call *c, const char *name, PyObject *object, bool written)
{
    if (c->count == ARRAYS_MAX) {
        PyErr_SetString(PyExc_ValueError, "too many arrays in one call");
        return NULL;
    }
    array *a = &c->arrays[c->count];
    if (read_array(c, a, name, object, written) < 0) return NULL;
    c->count++;
    return a;
}

static int wrong_dtype(const array *a, const char *expected)
{
    PyErr_Format(PyExc_ValueError, "%s.dtype is %s: expected %s", a->name, array_dtype_text(a).text,
                 expected);
    return -1;
}

static int wrong_axes(const array *a, const char *expected)
{
    PyErr_Format(PyExc_ValueError, "%s.ndim is %d: expected %s", a->name, a->ndim, expected);
    return -1;
}

/* float8: the argument may be float8 in some calls; the library refuses it in others. */
static int get_float_dtype(const array *a, bool float8, fa_dtype *dtype)
{
    if (array_is(a, kDLFloat, 32)) *dtype = FA_FLOAT32;
    else if (array_is(a, kDLFloat, 16)) *dtype = FA_FLOAT16;
    else if (array_is(a, kDLBfloat, 16)) *dtype = FA_BFLOAT16;
    else if (array_is(a, kDLFloat8_e4m3fn, 8)) *dtype = FA_FLOAT8_E4M3;
    else
        return wrong_dtype(a, float8 ? "float32, float16, bfloat16 or float8_e4m3fn"
                                     : "float32, float16 or bfloat16");
    return 0;
}

/* ---- Tensors --------------------------------------------------------------------------------- */

/* Axis i of the tensor is axis axes[i] of the array; -1: the array has no such axis. */
static void set_axes(fa_tensor *t, const array *a, const int axes[4])
{
    t->data = a->data;
    for (int i = 0; i < 4; i++) {
        t->shape[i] = axes[i] < 0 ? 1 : a->shape[axes[i]];
        t->stride[i] = axes[i] < 0 ? 0 : a->stride[axes[i]];
    }
}

static int make_tensor(const call *c, const array *a, bool float8, fa_tensor *t)
{
    static const int axes[2][2][4] = {{{-1, 0, 1, 2}, {0, 1, 2, 3}}, {{-1, 1, 0, 2}, {0, 2, 1, 3}}};
    if (array_is(a, kDLInt, 8))
        t->dtype = FA_INT8; /* for keys and values; for others the library refuses it */
    else if (get_float_dtype(a, float8, &t->dtype) < 0) return -1;
    if (a->ndim != 3 && a->ndim != 4)
        return wrong_axes(a, c->order == LAYOUT_BSHD
                                 ? "4 (batch, sequence, head, dim), or 3 without a "
                                   "batch"
                                 : "4 (batch, head, sequence, dim), or 3 without a "
                                   "batch");
    set_axes(t, a, axes[c->order][a->ndim - 3]);
    return 0;
}

int call_tensor(call *c, const char *name, PyObject *object, bool written, fa_tensor *t)
{
    const array *a = add_array(c, name, object, written);
    return a ? make_tensor(c, a, !written, t) : -1;
}

static void set_score_axes(fa_tensor *t, const array *a)
{
    int axes[4];
    for (int i = 0; i < 4; i++) axes[i] = i - (4 - a->ndim);
    set_axes(t, a, axes);
}

int call_scores(call *c, const char *name, PyObject *object, bool written, fa_tensor *t)
{
    const array *a = add_array(c, name, object, written);
    if (!a || get_float_dtype(a, false, &t->dtype) < 0) return -1;
    set_score_axes(t, a);
    return 0;
}

/* One byte per element, as NumPy's and PyTorch's bool have. */
static int read_mask(call *c, PyObject *object)
{
    const array *a = add_array(c, "mask", object, false);
    if (!a) return -1;
    if (!array_is(a, kDLBool, 8)) return wrong_dtype(a, "bool; a float mask is a bias");
    c->mask.dtype = FA_BOOL;
    set_score_axes(&c->mask, a);
    c->options.mask = &c->mask;
    return 0;
}

/* ---- Plain arrays ---------------------------------------------------------------------------- */

static int check_plain(const array *a, int64_t count)
{
    if (!array_is_contiguous(a, 0)) {
        PyErr_Format(PyExc_ValueError, "%s is not contiguous: expected C order", a->name);
        return -1;
    }
    if (count >= 0 && array_count(a) != count) {
        PyErr_Format(PyExc_ValueError, "%s has %lld elements: expected %lld", a->name,
                     (long long)array_count(a), (long long)count);
        return -1;
    }
    return 0;
}

int call_floats(call *c, const char *name, PyObject *object, int64_t count, bool written,
                float **data)
{
    *data = NULL;
    if (object == Py_None) return 0;
    const array *a = add_array(c, name, object, written);
    if (!a) return -1;
    if (!array_is(a, kDLFloat, 32)) return wrong_dtype(a, "float32");
    *data = a->data;
    return check_plain(a, count);
}

/* (batch, heads, n_q); one item may also have (heads, n_q). */
static int read_lse(const array *a, const fa_tensor *q, float **data)
{
    if (!array_is(a, kDLFloat, 32)) return wrong_dtype(a, "float32");
    const int64_t expected[3] = {q->shape[0], q->shape[2], q->shape[1]};
    const int skipped = 3 - a->ndim;
    bool same = skipped == 0 || (skipped == 1 && q->shape[0] == 1);
    for (int i = 0; same && i < a->ndim; i++) same = a->shape[i] == expected[i + skipped];
    if (!same) {
        PyErr_Format(PyExc_ValueError,
                     "%s.shape is %s: expected (%lld, %lld, %lld), that is (batch, heads, n_q)",
                     a->name, array_shape_text(a).text, (long long)expected[0],
                     (long long)expected[1], (long long)expected[2]);
        return -1;
    }
    *data = a->data;
    return 0;
}

int call_lse(call *c, const char *name, PyObject *object, bool written, float **data)
{
    *data = NULL;
    if (object == Py_None) return 0;
    const array *a = add_array(c, name, object, written);
    if (!a || read_lse(a, &c->q, data) < 0) return -1;
    return check_plain(a, -1);
}

int call_part(call *c, part *p, PyObject *tensor, PyObject *lse)
{
    float *data = NULL;
    p->arrays[0].owner = p->arrays[1].owner = NULL;
    if (read_array(c, &p->arrays[0], p->name, tensor, false) < 0) return -1;
    if (make_tensor(c, &p->arrays[0], false, &p->tensor) < 0) return -1;
    if (read_array(c, &p->arrays[1], p->lse_name, lse, false) < 0) return -1;
    if (read_lse(&p->arrays[1], &p->tensor, &data) < 0) return -1;
    p->lse = data;
    for (int i = 0; i < 3; i++) {
        const int axis = i - (3 - p->arrays[1].ndim);
        p->lse_stride[i] = axis < 0 ? 0 : p->arrays[1].stride[axis];
    }
    return 0;
}

void part_release(part *p)
{
    array_release(&p->arrays[0]);
    array_release(&p->arrays[1]);
}

/* Integers of this many bits are read in place; flashattn._arrays converts other arrays of
 * integers. */
static const array *add_integers(call *c, const char *name, PyObject *object, int bits)
{
    if (!PyList_Check(object) && !PyTuple_Check(object)) {
        array *a = add_array(c, name, object, false);
        if (!a || array_is(a, kDLInt, (uint8_t)bits)) return a;
        array_release(a);
        c->count--;
    }
    PyObject *module = PyImport_ImportModule("flashattn._arrays");
    if (!module) return NULL;
    PyObject *converted = PyObject_CallMethod(module, "as_integers", "sOiO", name, object, bits,
                                              c->like ? c->like : Py_None);
    Py_DECREF(module);
    const array *a = converted ? add_array(c, name, converted, false) : NULL;
    Py_XDECREF(converted);
    return a;
}

/* In PyTorch, integers of a batch without items have no memory, but the pointer must not be NULL,
 * which means not given. Nothing is read, but the pointer must be to memory where the call runs. */
static const int32_t *integers_of_no_items(const call *c)
{
    static const int32_t none;
    if (!c->where.cuda || !c->k.data) return &none;
    return (const int32_t *)((uintptr_t)c->k.data / sizeof none * sizeof none);
}

int call_ints(call *c, const char *name, PyObject *object, int axes, int64_t count,
              const int32_t **data, const array **read)
{
    const array *a = add_integers(c, name, object, 32);
    if (!a) return -1;
    if (a->ndim != axes) return wrong_axes(a, axes == 1 ? "1" : "2");
    *data = a->data ? a->data : integers_of_no_items(c);
    *read = a;
    return check_plain(a, count);
}

int call_written_ints(call *c, const char *name, PyObject *object, int64_t count, int32_t **data)
{
    const array *a = add_array(c, name, object, true);
    if (!a) return -1;
    if (!array_is(a, kDLInt, 32)) return wrong_dtype(a, "int32");
    *data = a->data;
    return check_plain(a, count);
}

int call_rows(call *c, PyObject *object, const int64_t **rows, int64_t *count)
{
    *rows = NULL;
    *count = c->q.shape[1];
    if (object == Py_None) return 0;
    const array *a = add_integers(c, "rows", object, 64);
    if (!a) return -1;
    if (a->ndim != 1) return wrong_axes(a, "1");
    /* An empty selection of rows must not be NULL. */
    static const int64_t no_row = 0;
    *rows = a->data ? a->data : &no_row;
    *count = a->shape[0];
    return check_plain(a, -1);
}

int64_t call_batch(const call *c)
{
    const fa_options *o = &c->options;
    return o->cu_seqlens_q || o->cu_seqlens_k ? o->num_sequences : c->q.shape[0];
}

/* ---- Options that are numbers ---------------------------------------------------------------- */

static int wrong_value(PyObject *error, const char *name, PyObject *value, const char *expected)
{
    PyErr_Clear();
    PyErr_Format(error, "%s is %.100R: expected %s", name, value, expected);
    return -1;
}

/* Python's or NumPy's bool. */
static bool is_truth_value(PyObject *value)
{
    if (PyBool_Check(value)) return true;
    if (PyFloat_Check(value) || PyLong_Check(value)) return false;
    PyObject *type = PyObject_GetAttrString((PyObject *)Py_TYPE(value), "__name__");
    const bool found = type && (PyUnicode_CompareWithASCIIString(type, "bool") == 0 ||
                                PyUnicode_CompareWithASCIIString(type, "bool_") == 0);
    Py_XDECREF(type);
    PyErr_Clear();
    return found;
}

/* 0 and 1 are accepted. Other objects that have a truth value, such as a pair, were meant for
 * another argument. */
int call_flag(const char *name, PyObject *value, uint32_t bit, uint32_t *flags)
{
    int truth = value == Py_True;
    if (!truth && value != Py_False) {
        const long number = PyLong_Check(value) ? PyLong_AsLong(value) : -1;
        if (is_truth_value(value)) truth = PyObject_IsTrue(value);
        else if (number == 0 || number == 1) truth = (int)number;
        else return wrong_value(PyExc_TypeError, name, value, "True or False");
    }
    if (truth > 0) *flags |= bit;
    return truth < 0 ? -1 : 0;
}

static int read_float(const char *name, PyObject *value, float *result)
{
    if (!PyFloat_Check(value) && is_truth_value(value))
        return wrong_value(PyExc_TypeError, name, value, "a number");
    double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred()) {
        const bool large = PyErr_ExceptionMatches(PyExc_OverflowError);
        return wrong_value(large ? PyExc_ValueError : PyExc_TypeError, name, value,
                           large ? "a number that fits into float32" : "a number");
    }
    *result = (float)number;
    if (isinf(*result) && !isinf(number))
        return wrong_value(PyExc_ValueError, name, value, "a number that fits into float32");
    return 0;
}

/* 0 means no softcap, so no other number may be rounded to it. */
static int read_softcap(PyObject *value, float *result)
{
    if (read_float("softcap", value, result) < 0) return -1;
    if (*result != 0 || PyFloat_AsDouble(value) == 0) return 0;
    return wrong_value(PyExc_ValueError, "softcap", value,
                       "0, or a number that float32 tells from 0");
}

/* A new reference. */
static PyObject *get_integer(const char *name, PyObject *value)
{
    PyObject *index = is_truth_value(value) ? NULL : PyNumber_Index(value);
    if (!index) wrong_value(PyExc_TypeError, name, value, "an integer");
    return index;
}

static int read_int64(const char *name, PyObject *value, int64_t *result)
{
    PyObject *index = get_integer(name, value);
    if (!index) return -1;
    *result = PyLong_AsLongLong(index);
    Py_DECREF(index);
    if (!PyErr_Occurred()) return 0;
    return wrong_value(PyExc_ValueError, name, value, "-2^63 to 2^63 - 1");
}

static int read_uint64(const char *name, PyObject *value, uint64_t *result)
{
    PyObject *index = get_integer(name, value);
    if (!index) return -1;
    *result = PyLong_AsUnsignedLongLong(index);
    Py_DECREF(index);
    if (!PyErr_Occurred()) return 0;
    return wrong_value(PyExc_ValueError, name, value, "0 to 2^64 - 1");
}

int call_threads(PyObject *value, int32_t *threads)
{
    int64_t number;
    if (read_int64("threads", value, &number) < 0) return -1;
    if (number < 0 || number > INT32_MAX)
        return wrong_value(PyExc_ValueError, "threads", value, "0 to 2^31 - 1");
    *threads = (int32_t)number;
    return 0;
}

static int read_precision(PyObject *value, fa_precision *precision)
{
    static const char *const names[] = {"float32", "tf32", "ieee"};
    for (int i = 0; PyUnicode_Check(value) && i < 3; i++) {
        if (PyUnicode_CompareWithASCIIString(value, names[i]) != 0) continue;
        *precision = (fa_precision)i;
        return 0;
    }
    return wrong_value(PyUnicode_Check(value) ? PyExc_ValueError : PyExc_TypeError, "precision",
                       value, "\"float32\", \"tf32\" or \"ieee\"");
}

static int read_side(const char *name, PyObject *value, int64_t *side)
{
    if (value != Py_None) return read_int64(name, value, side);
    *side = -1;
    return 0;
}

/* (left, right); -1 or None on both sides means no window at all. */
static int read_window(PyObject *value, fa_options *o)
{
    int status = -1;
    PyObject *left = NULL, *right = NULL;
    if (PySequence_Check(value) && PySequence_Size(value) == 2) {
        left = PySequence_GetItem(value, 0);
        right = PySequence_GetItem(value, 1);
    }
    if (!left || !right) {
        wrong_value(PyExc_ValueError, "window", value, "a pair (left, right)");
    } else {
        o->flags |= FA_WINDOW;
        if (read_side("window[0]", left, &o->window_left) == 0)
            status = read_side("window[1]", right, &o->window_right);
    }
    Py_XDECREF(left);
    Py_XDECREF(right);
    return status;
}

/* ---- Options that are arrays ----------------------------------------------------------------- */

static int read_bias(call *c, PyObject *value)
{
    if (call_scores(c, "bias", value, false, &c->bias) < 0) return -1;
    c->options.bias = &c->bias;
    return 0;
}

static int read_scale(call *c, const char *name, PyObject *value, fa_tensor *t,
                      const fa_tensor **option)
{
    if (call_tensor(c, name, value, false, t) < 0) return -1;
    *option = t;
    return 0;
}

/* The number of sequences must be the same for both sides. */
static int read_cu_seqlens(call *c, const char *name, PyObject *value, const int32_t **data)
{
    const array *a;
    fa_options *o = &c->options;
    bool first = !o->cu_seqlens_q && !o->cu_seqlens_k;
    if (call_ints(c, name, value, 1, first ? -1 : o->num_sequences + 1, data, &a) < 0) return -1;
    if (first) o->num_sequences = a->shape[0] - 1;
    if (a->shape[0] > 0) return 0;
    PyErr_Format(PyExc_ValueError, "%s is empty: expected one entry more than sequences", name);
    return -1;
}

static int read_seqlens(call *c, const char *name, PyObject *value, const int32_t **data)
{
    const array *a;
    return call_ints(c, name, value, 1, call_batch(c), data, &a);
}

static int read_block_table(call *c, PyObject *value)
{
    const array *a;
    if (call_ints(c, "block_table", value, 2, -1, &c->options.block_table, &a) < 0) return -1;
    c->options.block_table_stride = a->shape[1];
    /* A table without columns has no memory, but must not be NULL. */
    if (a->shape[1] == 0) {
        PyErr_Format(PyExc_ValueError, "block_table.shape is %s: expected at least one page each",
                     array_shape_text(a).text);
        return -1;
    }
    if (a->shape[0] == call_batch(c)) return 0;
    PyErr_Format(PyExc_ValueError, "block_table.shape[0] is %lld: expected %lld (the batch)",
                 (long long)a->shape[0], (long long)call_batch(c));
    return -1;
}

/* (heads) for all, or (batch, heads). */
static int read_alibi(call *c, PyObject *value)
{
    const array *a = add_array(c, "alibi_slopes", value, false);
    if (!a) return -1;
    if (!array_is(a, kDLFloat, 32)) return wrong_dtype(a, "float32");
    if (a->ndim != 1 && a->ndim != 2) return wrong_axes(a, "1 (heads) or 2 (batch, heads)");
    int64_t heads = c->q.shape[2], batch = call_batch(c);
    bool per_item = a->ndim == 2 && a->shape[0] != 1;
    if (a->shape[a->ndim - 1] != heads || (per_item && a->shape[0] != batch)) {
        PyErr_Format(PyExc_ValueError, "alibi_slopes.shape is %s: expected (%lld,) or (%lld, %lld)",
                     array_shape_text(a).text, (long long)heads, (long long)batch,
                     (long long)heads);
        return -1;
    }
    if (!array_is_contiguous(a, a->ndim - 1)) {
        PyErr_Format(
            PyExc_ValueError,
            "alibi_slopes.strides[%d] is %lld: expected 1, the heads of an item side by side",
            a->ndim - 1, (long long)a->stride[a->ndim - 1]);
        return -1;
    }
    c->options.alibi_slopes = a->data;
    c->options.alibi_batch_stride =
        per_item && a->data ? a->stride[0] : 0; /* without items there are no slopes */
    return 0;
}

static int read_floats(call *c, const char *name, PyObject *value, int64_t count,
                       const float **data)
{
    float *floats;
    if (call_floats(c, name, value, count, false, &floats) < 0) return -1;
    *data = floats;
    return 0;
}

/* PyTorch supports few operations on uint64, so int64 with the same bits is accepted. */
static int read_dropout_state(call *c, PyObject *value)
{
    const array *a = add_array(c, "dropout_state", value, false);
    if (!a) return -1;
    if (!array_is(a, kDLInt, 64) && !array_is(a, kDLUInt, 64))
        return wrong_dtype(a, "uint64 or int64");
    c->options.dropout_state = a->data;
    return check_plain(a, 2);
}

/* ---- All of them ----------------------------------------------------------------------------- */

static int read_number_option(call *c, option which, PyObject *value)
{
    fa_options *o = &c->options;
    switch (which) {
    case OPTION_causal: return call_flag("causal", value, FA_CAUSAL, &o->flags);
    case OPTION_deterministic:
        return call_flag("deterministic", value, FA_DETERMINISTIC, &o->flags);
    case OPTION_batch_invariant:
        return call_flag("batch_invariant", value, FA_BATCH_INVARIANT, &o->flags);
    case OPTION_scale: o->flags |= FA_SCALE; return read_float("scale", value, &o->scale);
    case OPTION_softcap: return read_softcap(value, &o->softcap);
    case OPTION_window: return read_window(value, o);
    case OPTION_diagonal:
        o->flags |= FA_DIAGONAL;
        return read_int64("diagonal", value, &o->diagonal);
    case OPTION_attention_chunk: return read_int64("attention_chunk", value, &o->attention_chunk);
    case OPTION_dropout_p: return read_float("dropout_p", value, &o->dropout_p);
    case OPTION_seed: return read_uint64("seed", value, &o->dropout_seed);
    case OPTION_offset: return read_uint64("offset", value, &o->dropout_offset);
    case OPTION_max_seqlen_q: return read_int64("max_seqlen_q", value, &o->max_seqlen_q);
    case OPTION_max_seqlen_k: return read_int64("max_seqlen_k", value, &o->max_seqlen_k);
    case OPTION_threads: return call_threads(value, &o->threads);
    case OPTION_precision: return read_precision(value, &o->precision);
    case OPTION_allocate: c->allocator = value; return 0;
    default: return 0; /* the stream: call_begin has read it */
    }
}

static int read_option(call *c, option which, PyObject *value)
{
    fa_options *o = &c->options;
    int64_t heads_kv = c->k.shape[2];
    switch (which) {
    case OPTION_bias: return read_bias(c, value);
    case OPTION_mask: return read_mask(c, value);
    case OPTION_alibi_slopes: return read_alibi(c, value);
    case OPTION_sinks: return read_floats(c, "sinks", value, c->q.shape[2], &o->sinks);
    case OPTION_dropout_state: return read_dropout_state(c, value);
    case OPTION_seqlens_q: return read_seqlens(c, "seqlens_q", value, &o->seqlens_q);
    case OPTION_seqlens_k: return read_seqlens(c, "seqlens_k", value, &o->seqlens_k);
    case OPTION_block_table: return read_block_table(c, value);
    case OPTION_q_descale:
        return read_floats(c, "q_descale", value, call_batch(c) * heads_kv, &o->q_descale);
    case OPTION_k_descale:
        return read_floats(c, "k_descale", value, call_batch(c) * heads_kv, &o->k_descale);
    case OPTION_v_descale:
        return read_floats(c, "v_descale", value, call_batch(c) * heads_kv, &o->v_descale);
    case OPTION_k_scale: return read_scale(c, "k_scale", value, &c->k_scale, &o->k_scale);
    case OPTION_v_scale: return read_scale(c, "v_scale", value, &c->v_scale, &o->v_scale);
    default: return read_number_option(c, which, value);
    }
}

/* These determine the batch, with which other options are compared. */
static int read_packing(call *c, const keywords *given)
{
    fa_options *o = &c->options;
    PyObject *q = given->values[OPTION_cu_seqlens_q], *k = given->values[OPTION_cu_seqlens_k];
    if (q && read_cu_seqlens(c, "cu_seqlens_q", q, &o->cu_seqlens_q) < 0) return -1;
    return k ? read_cu_seqlens(c, "cu_seqlens_k", k, &o->cu_seqlens_k) : 0;
}

static int read_all(call *c, const keywords *given)
{
    if (read_packing(c, given) < 0) return -1;
    for (int i = 0; i < OPTION_COUNT; i++) {
        PyObject *value = given->values[i];
        if (!value || i == OPTION_cu_seqlens_q || i == OPTION_cu_seqlens_k) continue;
        if (read_option(c, (option)i, value) < 0) return -1;
    }
    return 0;
}

int call_keywords(call *c, const keywords *given)
{
    if (given->any && read_all(c, given) < 0) return -1;
    fa_options *o = &c->options;
    o->device = c->where.cuda ? FA_DEVICE_CUDA : FA_DEVICE_CPU;
    o->stream = c->where.cuda ? c->where.stream : NULL;
    return 0;
}

int call_options(call *c, PyObject *const *values, PyObject *names)
{
    keywords given;
    const Py_ssize_t count = names ? PyTuple_Size(names) : 0;
    given.any = count > 0;
    if (count > 0) memset(given.values, 0, sizeof given.values);
    for (Py_ssize_t i = 0; i < count; i++) {
        const int which = find_option(PyTuple_GetItem(names, i), (int)i);
        if (which < 0) return -1;
        if (values[i] != Py_None) given.values[which] = values[i];
    }
    return call_keywords(c, &given);
}
