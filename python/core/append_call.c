#include "append_call.h"

#include <string.h>

/* The positions of the arguments. */
enum { K_NEW, V_NEW, K_CACHE, V_CACHE, LAYOUT, ARGUMENT_COUNT };

/* The kind of an option, and where its value is stored: the offset of a field of fa_append_options,
 * a flag, or a tensor's number. */
typedef enum option_kind {
    INTS,
    WRITTEN,
    FLAG,
    TENSOR,
    ANGLES,
    NUMBER,
    THREADS,
    IGNORED
} option_kind;

typedef struct option {
    const char *name;
    option_kind kind;
    size_t at;
    uint32_t flag;
} option;

#define FIELD(name) offsetof(fa_append_options, name)
static const option options[] = {
    {"interleaved", FLAG, 0, FA_ROTARY_INTERLEAVED},
    {"one_position", FLAG, 0, FA_ROTARY_ONE_POSITION},
    {"write_scales", FLAG, 0, FA_WRITE_SCALES},
    {"lengths_with_padding", FLAG, 0, FA_LENGTHS_WITH_PADDING},
    {"cu_seqlens_new", INTS, FIELD(cu_seqlens_new), 0},
    {"cu_seqlens_q", INTS, FIELD(cu_seqlens_q), 0},
    {"lengths", INTS, FIELD(lengths), 0},
    {"left_padding", INTS, FIELD(left_padding), 0},
    {"cache_index", INTS, FIELD(cache_index), 0},
    {"seqlens_new", INTS, FIELD(seqlens_new), 0},
    {"seqlens_q", INTS, FIELD(seqlens_q), 0},
    {"rotary_positions", INTS, FIELD(rotary_positions), 0},
    {"block_table", INTS, FIELD(block_table), 0},
    {"cos", ANGLES, FIELD(cos), 0},
    {"sin", ANGLES, FIELD(sin), 0},
    {"queries_out", TENSOR, FIELD(q_out), 0},
    {"queries", TENSOR, FIELD(q), 0},
    {"k_scale", TENSOR, FIELD(k_scale), 0},
    {"v_scale", TENSOR, FIELD(v_scale), 0},
    {"lengths_after", WRITTEN, FIELD(lengths_after), 0},
    {"block_table_after", WRITTEN, FIELD(block_table_after), 0},
    {"row_table_after", WRITTEN, FIELD(row_table_after), 0},
    {"cu_seqlens_after", WRITTEN, FIELD(cu_seqlens_after), 0},
    {"rotary_offset", NUMBER, FIELD(rotary_offset), 0},
    {"threads", THREADS, 0, 0},
    {"stream", IGNORED, 0, 0},   /* call_begin has read it */
    {"allocate", IGNORED, 0, 0}, /* no workspace is needed */
};
enum { OPTION_COUNT = sizeof options / sizeof options[0], TENSOR_COUNT = 6 };

/* One call with everything that it reads. */
typedef struct append_call {
    call c;
    fa_tensor k_new, v_new, k_cache, v_cache, tensors[TENSOR_COUNT];
    int tensor_count;
    fa_append_options options;
} append_call;

/* ---- Options --------------------------------------------------------------------------------- */

static const option *find_option(PyObject *name)
{
    for (int i = 0; i < OPTION_COUNT; i++)
        if (PyUnicode_CompareWithASCIIString(name, options[i].name) == 0) return &options[i];
    PyErr_Format(PyExc_TypeError, "there is no option %R", name);
    return NULL;
}

/* Tables of angles have two axes, (positions, pairs). */
static int read_angles(append_call *a, const char *name, PyObject *value, fa_tensor *t)
{
    fa_tensor scores;
    if (call_scores(&a->c, name, value, false, &scores) < 0) return -1;
    *t = scores;
    if (a->c.arrays[a->c.count - 1].ndim != 2) {
        PyErr_Format(PyExc_ValueError, "%s.ndim is %d: expected 2 (positions, pairs)", name,
                     a->c.arrays[a->c.count - 1].ndim);
        return -1;
    }
    t->shape[1] = scores.shape[2], t->stride[1] = scores.stride[2];
    t->shape[2] = 1, t->stride[2] = 0;
    return 0;
}

static int read_tensor(append_call *a, const option *o, PyObject *value)
{
    fa_tensor *t = &a->tensors[a->tensor_count++];
    *(const fa_tensor **)(void *)((char *)&a->options + o->at) = t;
    if (o->kind == ANGLES) return read_angles(a, o->name, value, t);
    const bool scale = o->at == FIELD(k_scale) || o->at == FIELD(v_scale);
    const bool written = scale               ? a->options.flags & FA_WRITE_SCALES
                         : o->at == FIELD(q) ? !a->options.q_out
                                             : o->at == FIELD(q_out);
    return call_tensor(&a->c, o->name, value, written, t);
}

static int64_t count_sequences(const append_call *a)
{
    return a->options.num_sequences > 0 ? a->options.num_sequences : a->k_new.shape[0];
}

static int read_integers(append_call *a, const option *o, PyObject *value)
{
    fa_append_options *to = &a->options;
    const bool table = o->at == FIELD(block_table);
    const bool packing = o->at == FIELD(cu_seqlens_new) || o->at == FIELD(cu_seqlens_q);
    const array *read;
    const int32_t **data = (const int32_t **)(void *)((char *)to + o->at);
    const int64_t count = table || packing ? -1 : count_sequences(a);
    if (call_ints(&a->c, o->name, value, table ? 2 : 1, count, data, &read) < 0) return -1;
    if (table) {
        to->block_table_rows = read->shape[0];
        to->block_table_stride = read->shape[1];
    }
    if (!packing) return 0;
    if (read->shape[0] == 0 || (to->num_sequences && to->num_sequences != read->shape[0] - 1)) {
        PyErr_Format(PyExc_ValueError, "%s has %lld elements: expected one more than sequences",
                     o->name, (long long)read->shape[0]);
        return -1;
    }
    to->num_sequences = read->shape[0] - 1;
    return 0;
}

static int read_written(append_call *a, const option *o, PyObject *value)
{
    const int64_t pages = a->options.block_table ? a->options.block_table_stride : 1;
    int64_t count = count_sequences(a);
    if (o->at == FIELD(block_table_after)) count *= pages;
    if (o->at == FIELD(row_table_after)) count *= pages * a->k_cache.shape[1];
    if (o->at == FIELD(cu_seqlens_after)) count++;
    return call_written_ints(&a->c, o->name, value, count,
                             (int32_t **)(void *)((char *)&a->options + o->at));
}

static int read_number(const option *o, PyObject *value, int64_t *number)
{
    *number = PyLong_AsLongLong(value);
    if (*number != -1 || !PyErr_Occurred()) return 0;
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "%s is %.100R: expected an integer", o->name, value);
    return -1;
}

static int read_option(append_call *a, const option *o, PyObject *value)
{
    switch (o->kind) {
    case INTS: return read_integers(a, o, value);
    case WRITTEN: return read_written(a, o, value);
    case FLAG: return call_flag(o->name, value, o->flag, &a->options.flags);
    case TENSOR:
    case ANGLES: return read_tensor(a, o, value);
    case NUMBER: return read_number(o, value, &a->options.rotary_offset);
    case THREADS: return call_threads(value, &a->options.threads);
    default: return 0;
    }
}

/* In the order of the table: flags first, then the options that determine the number of
 * sequences. */
static int read_options(append_call *a, PyObject *const *values, PyObject *names)
{
    PyObject *given[OPTION_COUNT] = {NULL};
    const Py_ssize_t count = names ? PyTuple_Size(names) : 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const option *o = find_option(PyTuple_GetItem(names, i));
        if (!o) return -1;
        if (values[i] != Py_None) given[o - options] = values[i];
    }
    for (int i = 0; i < OPTION_COUNT; i++)
        if (given[i] && read_option(a, &options[i], given[i]) < 0) return -1;
    return 0;
}

/* ---- The call -------------------------------------------------------------------------------- */

static int read_arrays(append_call *a, PyObject *const *args)
{
    call *c = &a->c;
    c->like = args[K_NEW];
    if (call_tensor(c, "k_new", args[K_NEW], false, &a->k_new) < 0) return -1;
    if (call_tensor(c, "v_new", args[V_NEW], false, &a->v_new) < 0) return -1;
    if (call_tensor(c, "k_cache", args[K_CACHE], true, &a->k_cache) < 0) return -1;
    return call_tensor(c, "v_cache", args[V_CACHE], true, &a->v_cache);
}

static PyObject *run_append(append_call *a)
{
    fa_append_options *o = &a->options;
    fa_status status;
    o->device = a->c.where.cuda ? FA_DEVICE_CUDA : FA_DEVICE_CPU;
    o->stream = a->c.where.cuda ? a->c.where.stream : NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = fa_append(&a->k_new, &a->v_new, &a->k_cache, &a->v_cache, o);
    Py_END_ALLOW_THREADS;
    return call_result(status);
}

PyObject *core_append(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    (void)self;
    append_call a = {.tensor_count = 0};
    PyObject *result = NULL;
    if (count != ARGUMENT_COUNT) {
        PyErr_Format(PyExc_TypeError, "append takes %d positional arguments, not %zd",
                     (int)ARGUMENT_COUNT, count);
        return NULL;
    }
    a.options.size = sizeof a.options;
    if (call_begin(&a.c, args[LAYOUT], args + ARGUMENT_COUNT, names) == 0 &&
        read_arrays(&a, args) == 0 && read_options(&a, args + ARGUMENT_COUNT, names) == 0)
        result = run_append(&a);
    call_end(&a.c);
    return result;
}
