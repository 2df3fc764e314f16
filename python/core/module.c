/*
 * The extension module flashattn._core: the library's calls with other libraries' arrays.
 * Positional arguments are the arrays and the layout, keyword arguments the options; a keyword
 * argument that is None counts as not given. The Python layer allocates results and knows to which
 * library the arrays belong.
 */
#include "append_call.h"
#include "ladder_call.h"
#include "dbias_workspace.h"
#include "options.h"
#include "api.h"
#include "torch_call.h"

#include <stdio.h>
#include <string.h>

PyObject *unsupported_error;

static int check_count(const char *name, Py_ssize_t count, Py_ssize_t expected)
{
    if (count == expected) return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd positional arguments, not %zd", name, expected,
                 count);
    return -1;
}

/* ---- What the calls share -------------------------------------------------------------------- */

static int read_inputs(call *c, PyObject *const *args)
{
    c->like = args[0];
    if (call_tensor(c, "q", args[0], false, &c->q) < 0) return -1;
    if (call_tensor(c, "k", args[1], false, &c->k) < 0) return -1;
    return call_tensor(c, "v", args[2], false, &c->v);
}

/* ---- Workspace on CUDA ----------------------------------------------------------------------- */

/* Most calls need none, and computing the size costs as much planning as the call. So a call is
 * tried without workspace, unless this thread's last call of the pass needed some. */
static _Thread_local bool workspace_expected[FA_PASS_WEIGHTS + 1];

/* One call of the library with everything that it reads. */
typedef struct work {
    fa_pass pass;
    fa_tensor out; /* weights: not used */
    float *lse;
    fa_gradients gradients;
    const int64_t *rows;
    int64_t num_rows;
    fa_tensor weights;
} work;

static fa_status run_work(const call *c, const work *w)
{
    const fa_options *o = &c->options;
    switch (w->pass) {
    case FA_PASS_FORWARD:
    case FA_PASS_DECODE:
        return fa_forward_located(w->pass, &c->q, &c->k, &c->v, &w->out, w->lse, o,
                                  c->where.cuda ? c->where.device_id : -1);
    case FA_PASS_BACKWARD:
        return fa_backward(&c->q, &c->k, &c->v, &w->out, w->lse, &w->gradients, o);
    default: return fa_weights(&c->q, &c->k, w->rows, w->num_rows, &w->weights, o);
    }
}

/* Calls the caller's allocator for workspace of this size, which the result keeps. NULL: a Python
 * error. */
static PyObject *allocate(call *c, size_t bytes, PyObject *q)
{
    array a;
    PyObject *memory = PyObject_CallFunction(c->allocator, "nO", (Py_ssize_t)bytes, q);
    if (!memory) return NULL;
    if (array_read(&a, "workspace", memory, &c->where) < 0) {
        Py_DECREF(memory);
        return NULL;
    }
    c->options.workspace = a.data;
    c->options.workspace_size = (size_t)array_count(&a) * (a.dtype.bits / 8u);
    array_release(&a);
    return memory;
}

/* Calls the caller's allocator for the workspace that the call needs. 1: there is more than before;
 * 0: there is not; -1: a Python error. *memory keeps it. */
static int get_workspace(call *c, const work *w, PyObject *q, PyObject **memory)
{
    const bool weights = w->pass == FA_PASS_WEIGHTS;
    size_t bytes = 0;
    fa_status status = fa_workspace_size(w->pass, &c->q, &c->k, weights ? NULL : &c->v,
                                         weights ? NULL : &w->out, &c->options, &bytes);
    if (status != FA_OK) {
        call_result(status);
        return -1;
    }
    workspace_expected[w->pass] = bytes > 0;
    if (w->pass == FA_PASS_BACKWARD)
        bytes += dbias_workspace(&c->q, &w->gradients.dbias, &c->options);
    if (bytes <= c->options.workspace_size) return 0;
    *memory = allocate(c, bytes, q);
    return *memory ? 1 : -1;
}

/* Calls the library, without Python's lock. None, or NULL with a Python error. q: its library's
 * memory is used for workspace. */
static PyObject *run(call *c, const work *w, PyObject *q)
{
    PyObject *memory = NULL;
    fa_status status;
    const bool may_ask = c->where.cuda && c->allocator;
    if (may_ask) c->options.flags |= FA_FULL_WORKSPACE;
    int more = may_ask && workspace_expected[w->pass] ? get_workspace(c, w, q, &memory) : 0;
    do {
        if (more < 0) {
            Py_XDECREF(memory);
            return NULL;
        }
        Py_BEGIN_ALLOW_THREADS;
        status = run_work(c, w);
        Py_END_ALLOW_THREADS;
        if (status != FA_ERROR_WORKSPACE || !may_ask || memory) break;
        more = get_workspace(c, w, q, &memory);
    } while (more != 0);
    Py_XDECREF(memory);
    return call_result(status);
}

/* ---- Forward and decode ---------------------------------------------------------------------- */

static PyObject *run_forward(call *c, work *w, PyObject *const *args, PyObject *names)
{
    if (read_inputs(c, args) < 0) return NULL;
    if (call_tensor(c, "out", args[3], true, &w->out) < 0) return NULL;
    if (call_lse(c, "lse", args[4], true, &w->lse) < 0) return NULL;
    if (call_options(c, args + 6, names) < 0) return NULL;
    return run(c, w, args[0]);
}

static PyObject *forward_or_decode(const char *name, fa_pass pass, PyObject *const *args,
                                   Py_ssize_t count, PyObject *names)
{
    call c;
    work w;
    PyObject *result = NULL;
    if (check_count(name, count, 6) < 0) return NULL;
    w.pass = pass;
    if (call_begin(&c, args[5], args + 6, names) == 0) result = run_forward(&c, &w, args, names);
    call_end(&c);
    return result;
}

static PyObject *core_forward(PyObject *self, PyObject *const *args, Py_ssize_t count,
                              PyObject *names)
{
    (void)self;
    return forward_or_decode("forward", FA_PASS_FORWARD, args, count, names);
}

static PyObject *core_decode(PyObject *self, PyObject *const *args, Py_ssize_t count,
                             PyObject *names)
{
    (void)self;
    return forward_or_decode("decode", FA_PASS_DECODE, args, count, names);
}

/* ---- Forward and decode of plain arrays of NumPy and PyTorch --------------------------------- */

/* The positions of the arguments. */
enum { PLAIN_OUT = 3, PLAIN_RETURN_LSE, PLAIN_LAYOUT, PLAIN_OPTIONS, PLAIN_COUNT };

/* The caller's result: out, or (out, lse). */
static PyObject *give_results(PyObject *done, PyObject *out, PyObject *lse)
{
    if (!done) return NULL;
    Py_DECREF(done);
    if (lse) return PyTuple_Pack(2, out, lse);
    Py_INCREF(out);
    return out;
}

/* out and lse: new or the caller's; lse NULL: not wanted. If something cannot be read, the general
 * path handles the call: it knows more about its arrays and explains the error. */
static PyObject *run_into(call *c, work *w, PyObject *q, const keywords *given, PyObject *out,
                          PyObject *lse)
{
    if (call_tensor(c, "out", out, true, &w->out) < 0 ||
        call_lse(c, "lse", lse ? lse : Py_None, true, &w->lse) < 0 || call_keywords(c, given) < 0) {
        PyErr_Clear();
        Py_RETURN_NOTIMPLEMENTED;
    }
    return give_results(run(c, w, q), out, lse);
}

/* Rows with gaps are copied or refused elsewhere, and the result of float8 has another type. */
static bool numpy_can_work(const call *c)
{
    for (int i = 0; i < 3; i++)
        if (!array_has_rows(&c->arrays[i])) return false;
    return !array_is(&c->arrays[0], kDLFloat8_e4m3fn, 8);
}

static PyObject *numpy_new_out(const call *c, PyObject *q)
{
    const array *like = &c->arrays[0], *v = &c->arrays[2];
    int64_t shape[AXES_MAX];
    memcpy(shape, like->shape, sizeof shape);
    shape[like->ndim - 1] = v->shape[v->ndim - 1];
    return array_new_numpy(like->ndim, shape, q);
}

static PyObject *run_plain(call *c, work *w, PyObject *const *args, const keywords *given,
                           bool numpy, bool wants_lse)
{
    PyObject *out = args[PLAIN_OUT], *lse = NULL, *result = NULL;
    if (read_inputs(c, args) < 0) return NULL;
    if (!(numpy ? numpy_can_work(c) : torch_can_work(c))) Py_RETURN_NOTIMPLEMENTED;
    if (out != Py_None) Py_INCREF(out);
    else out = numpy ? numpy_new_out(c, args[0]) : torch_new_out(c);
    if (out && wants_lse) lse = torch_new_lse(c);
    if (!numpy) c->allocator = torch_allocator();
    if (out && (lse || !wants_lse)) result = run_into(c, w, args[0], given, out, lse);
    const bool wrote = result && result != Py_NotImplemented && args[PLAIN_OUT] != Py_None;
    if (wrote && !numpy && torch_count_write(out) < 0) Py_CLEAR(result);
    Py_XDECREF(out);
    Py_XDECREF(lse);
    return result;
}

/* NumPy's arrays are read without looking up a protocol. */
static bool are_plain_arguments(PyObject *out, const keywords *given)
{
    if (out != Py_None && !torch_is_plain_out(out)) return false;
    for (int i = 0; given->any && i < OPTIONS_MAX; i++)
        if (given->values[i] && !torch_is_plain_argument(given->values[i])) return false;
    return true;
}

static PyObject *plain_forward_or_decode(const char *name, fa_pass pass, PyObject *const *args,
                                         Py_ssize_t count)
{
    call c;
    work w;
    keywords given;
    PyObject *result = NULL;
    if (check_count(name, count, PLAIN_COUNT) < 0) return NULL;
    const bool numpy = array_is_numpy(args[0]);
    const int wants_lse = PyObject_IsTrue(args[PLAIN_RETURN_LSE]);
    if (wants_lse < 0) return NULL;
    if (numpy ? wants_lse : !torch_is_plain(args)) Py_RETURN_NOTIMPLEMENTED;
    if (!keywords_are_plain(args[PLAIN_OPTIONS], &given)) Py_RETURN_NOTIMPLEMENTED;
    if (!numpy && !are_plain_arguments(args[PLAIN_OUT], &given)) Py_RETURN_NOTIMPLEMENTED;
    w.pass = pass;
    if (call_begin(&c, args[PLAIN_LAYOUT], NULL, NULL) == 0)
        result = run_plain(&c, &w, args, &given, numpy, wants_lse);
    call_end(&c);
    return result;
}

static PyObject *core_plain_forward(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    return plain_forward_or_decode("plain_forward", FA_PASS_FORWARD, args, count);
}

static PyObject *core_plain_decode(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    return plain_forward_or_decode("plain_decode", FA_PASS_DECODE, args, count);
}

/* ---- Backward -------------------------------------------------------------------------------- */

/* The positions of backward's arguments. */
enum { Q, K, V, OUT, LSE, DOUT, DLSE, DQ, DK, DV, DBIAS, DSINKS, LAYOUT, BACKWARD_COUNT };

/* A gradient that is None is absent. */
static int read_gradient(call *c, const char *name, PyObject *object, fa_tensor *t)
{
    return object == Py_None ? 0 : call_tensor(c, name, object, true, t);
}

static int read_gradients(call *c, PyObject *const *args, fa_gradients *g)
{
    float *dlse;
    memset(g, 0, sizeof *g);
    g->size = sizeof *g;
    if (call_tensor(c, "dout", args[DOUT], false, &g->dout) < 0) return -1;
    if (call_lse(c, "dlse", args[DLSE], false, &dlse) < 0) return -1;
    g->dlse = dlse;
    if (read_gradient(c, "dq", args[DQ], &g->dq) < 0) return -1;
    if (read_gradient(c, "dk", args[DK], &g->dk) < 0) return -1;
    if (read_gradient(c, "dv", args[DV], &g->dv) < 0) return -1;
    if (args[DBIAS] != Py_None && call_scores(c, "dbias", args[DBIAS], true, &g->dbias) < 0)
        return -1;
    return call_floats(c, "dsinks", args[DSINKS], c->q.shape[2], true, &g->dsinks);
}

static PyObject *run_backward(call *c, PyObject *const *args, PyObject *names)
{
    work w;
    w.pass = FA_PASS_BACKWARD;
    if (read_inputs(c, args) < 0) return NULL;
    if (call_tensor(c, "out", args[OUT], false, &w.out) < 0) return NULL;
    if (call_lse(c, "lse", args[LSE], false, &w.lse) < 0) return NULL;
    if (read_gradients(c, args, &w.gradients) < 0) return NULL;
    if (call_options(c, args + BACKWARD_COUNT, names) < 0) return NULL;
    return run(c, &w, args[Q]);
}

static PyObject *core_backward(PyObject *self, PyObject *const *args, Py_ssize_t count,
                               PyObject *names)
{
    (void)self;
    call c;
    PyObject *result = NULL;
    if (check_count("backward", count, BACKWARD_COUNT) < 0) return NULL;
    if (call_begin(&c, args[LAYOUT], args + BACKWARD_COUNT, names) == 0)
        result = run_backward(&c, args, names);
    call_end(&c);
    return result;
}

/* ---- Combine --------------------------------------------------------------------------------- */

/* The library's arguments, one for each part. */
typedef struct parts {
    Py_ssize_t count, read;
    part *each;
    fa_tensor *tensors;
    const float **lses;
    int64_t (*lse_strides)[3];
} parts;

static int parts_begin(parts *p, PyObject *tensors, PyObject *lses)
{
    if (!PyTuple_Check(tensors) || !PyTuple_Check(lses)) {
        PyErr_SetString(PyExc_TypeError, "parts and lses: expected tuples");
        return -1;
    }
    p->count = PyTuple_Size(tensors);
    if (PyTuple_Size(lses) != p->count) {
        PyErr_Format(PyExc_ValueError, "len(lses) is %zd: expected %zd, as many as parts",
                     PyTuple_Size(lses), p->count);
        return -1;
    }
    const size_t count = p->count > 0 ? (size_t)p->count : 1;
    p->each = PyMem_Malloc(count * sizeof *p->each);
    p->tensors = PyMem_Malloc(count * sizeof *p->tensors);
    p->lses = PyMem_Malloc(count * sizeof *p->lses);
    p->lse_strides = PyMem_Malloc(count * sizeof *p->lse_strides);
    if (p->each && p->tensors && p->lses && p->lse_strides) return 0;
    PyErr_NoMemory();
    return -1;
}

static void parts_end(parts *p)
{
    for (Py_ssize_t i = 0; i < p->read; i++) part_release(&p->each[i]);
    PyMem_Free(p->each);
    PyMem_Free(p->tensors);
    PyMem_Free(p->lses);
    PyMem_Free(p->lse_strides);
}

/* The names are only composed if a part is wrong. */
static int read_part(call *c, part *p, PyObject *tensor, PyObject *lse, Py_ssize_t i)
{
    char name[32], lse_name[32];
    p->name = "parts", p->lse_name = "lses";
    if (call_part(c, p, tensor, lse) == 0) return 0;
    (void)snprintf(name, sizeof name, "parts[%zd]", i);
    (void)snprintf(lse_name, sizeof lse_name, "lses[%zd]", i);
    part_release(p);
    PyErr_Clear();
    p->name = name, p->lse_name = lse_name;
    if (call_part(c, p, tensor, lse) == 0) PyErr_SetString(PyExc_RuntimeError, "parts changed");
    part_release(p);
    return -1;
}

static int read_parts(call *c, PyObject *tensors, PyObject *lses, parts *p)
{
    for (Py_ssize_t i = 0; i < p->count; i++) {
        part *one = &p->each[i];
        if (read_part(c, one, PyTuple_GetItem(tensors, i), PyTuple_GetItem(lses, i), i) < 0)
            return -1;
        p->read = i + 1;
        p->tensors[i] = one->tensor;
        p->lses[i] = one->lse;
        memcpy(p->lse_strides[i], one->lse_stride, sizeof one->lse_stride);
    }
    return 0;
}

static fa_status merge(const call *c, const parts *p, float *lse)
{
    fa_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = fa_combine(p->tensors, p->lses, p->count, &c->q, lse, &c->options);
    Py_END_ALLOW_THREADS;
    return status;
}

/* On CUDA, more parts than fit in one launch may need workspace, whose size is only specified in
 * the header. */
static PyObject *run_combine(call *c, parts *p, PyObject *const *args, PyObject *names)
{
    float *lse;
    PyObject *memory = NULL;
    /* The parts first: an out that the caller has not given has their type. */
    if (read_parts(c, args[0], args[1], p) < 0) return NULL;
    if (call_tensor(c, "out", args[2], true, &c->q) < 0) return NULL;
    c->k = c->v = c->q;
    if (call_lse(c, "lse", args[3], true, &lse) < 0) return NULL;
    if (call_options(c, args + 5, names) < 0) return NULL;
    c->options.part_lse_stride = p->lse_strides[0];
    fa_status status = merge(c, p, lse);
    if (status == FA_ERROR_WORKSPACE && c->allocator) {
        const int64_t *n = c->q.shape;
        const size_t rows = (size_t)n[0] * (size_t)n[1] * (size_t)n[2];
        memory = allocate(c, rows * ((size_t)n[3] + 1) * sizeof(float), args[2]);
        if (!memory) return NULL;
        status = merge(c, p, lse);
    }
    Py_XDECREF(memory);
    return call_result(status);
}

static PyObject *core_combine(PyObject *self, PyObject *const *args, Py_ssize_t count,
                              PyObject *names)
{
    (void)self;
    call c;
    parts p;
    PyObject *result = NULL;
    memset(&p, 0, sizeof p);
    if (check_count("combine", count, 5) < 0) return NULL;
    if (call_begin(&c, args[4], args + 5, names) == 0 && parts_begin(&p, args[0], args[1]) == 0)
        result = run_combine(&c, &p, args, names);
    parts_end(&p);
    call_end(&c);
    return result;
}

/* ---- Weights --------------------------------------------------------------------------------- */

static PyObject *run_weights(call *c, PyObject *const *args, PyObject *names)
{
    work w;
    w.pass = FA_PASS_WEIGHTS;
    c->like = args[0];
    if (call_tensor(c, "q", args[0], false, &c->q) < 0) return NULL;
    if (call_tensor(c, "k", args[1], false, &c->k) < 0) return NULL;
    if (call_rows(c, args[2], &w.rows, &w.num_rows) < 0) return NULL;
    if (call_scores(c, "weights", args[3], true, &w.weights) < 0) return NULL;
    if (call_options(c, args + 5, names) < 0) return NULL;
    if (args[2] == Py_None && c->options.cu_seqlens_q) w.num_rows = w.weights.shape[2];
    return run(c, &w, args[0]);
}

static PyObject *core_weights(PyObject *self, PyObject *const *args, Py_ssize_t count,
                              PyObject *names)
{
    (void)self;
    call c;
    PyObject *result = NULL;
    if (check_count("weights", count, 5) < 0) return NULL;
    if (call_begin(&c, args[4], args + 5, names) == 0) result = run_weights(&c, args, names);
    call_end(&c);
    return result;
}

/* ---- Questions ------------------------------------------------------------------------------- */

/* The arguments of a dry run: pass, q, k, v or None, out or None, layout. */
typedef struct dry_run {
    call c;
    fa_pass pass;
    fa_tensor out;
    const fa_tensor *v_given, *out_given;
} dry_run;

static int read_pass(PyObject *name, fa_pass *pass)
{
    static const char *const names[] = {"forward", "backward", "decode", "weights"};
    for (int i = 0; PyUnicode_Check(name) && i < 4; i++) {
        *pass = (fa_pass)i;
        if (PyUnicode_CompareWithASCIIString(name, names[i]) == 0) return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "the pass is %R: expected 'forward', 'backward', 'decode' or 'weights'", name);
    return -1;
}

static int read_dry_run(dry_run *x, PyObject *const *args, PyObject *names)
{
    call *c = &x->c;
    x->v_given = x->out_given = NULL;
    if (read_pass(args[0], &x->pass) < 0) return -1;
    c->like = args[1];
    if (call_tensor(c, "q", args[1], false, &c->q) < 0) return -1;
    if (call_tensor(c, "k", args[2], false, &c->k) < 0) return -1;
    if (args[3] != Py_None) {
        if (call_tensor(c, "v", args[3], false, &c->v) < 0) return -1;
        x->v_given = &c->v;
    }
    if (args[4] != Py_None) {
        if (call_tensor(c, "out", args[4], false, &x->out) < 0) return -1;
        x->out_given = &x->out;
    }
    return call_options(c, args + 6, names);
}

static PyObject *answer_supported(dry_run *x)
{
    call *c = &x->c;
    fa_status status = fa_supported(x->pass, &c->q, &c->k, x->v_given, x->out_given, &c->options);
    if (status == FA_OK) Py_RETURN_NONE;
    return PyUnicode_FromString(fa_last_error());
}

static PyObject *answer_describe(dry_run *x)
{
    char text[512];
    call *c = &x->c;
    fa_status status = fa_describe(x->pass, &c->q, &c->k, x->v_given, x->out_given, &c->options,
                                   text, sizeof text);
    return status == FA_OK ? PyUnicode_FromString(text) : call_result(status);
}

static PyObject *run_dry(const char *name, PyObject *(*answer)(dry_run *), PyObject *const *args,
                         Py_ssize_t count, PyObject *names)
{
    dry_run x;
    PyObject *result = NULL;
    if (check_count(name, count, 6) < 0) return NULL;
    if (call_begin(&x.c, args[5], args + 6, names) == 0 && read_dry_run(&x, args, names) == 0)
        result = answer(&x);
    call_end(&x.c);
    return result;
}

static PyObject *core_supported(PyObject *self, PyObject *const *args, Py_ssize_t count,
                                PyObject *names)
{
    (void)self;
    return run_dry("supported", answer_supported, args, count, names);
}

static PyObject *core_describe(PyObject *self, PyObject *const *args, Py_ssize_t count,
                               PyObject *names)
{
    (void)self;
    return run_dry("describe", answer_describe, args, count, names);
}

/* ---- The machine ----------------------------------------------------------------------------- */

static PyObject *core_version(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    return PyUnicode_FromString(fa_version_string());
}

static PyObject *core_cpu_info(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    fa_cpu_info info;
    fa_status status = fa_get_cpu_info(&info);
    if (status != FA_OK) return call_result(status);
    return Py_BuildValue("{sssssisi}", "isa", info.isa, "isas", info.isas, "threads",
                         (int)info.threads, "vector_bits", (int)info.vector_bits);
}

static PyObject *core_cuda_info(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    fa_cuda_info info;
    fa_status status = fa_get_cuda_info(&info);
    if (status != FA_OK) return call_result(status);
    return Py_BuildValue("{sisiss}", "device_count", (int)info.device_count, "driver_version",
                         (int)info.driver_version, "detail", info.detail);
}

/* ---- The module ------------------------------------------------------------------------------ */

/* A fast call has a different type from the table's; the flags tell which. */
#define FAST(function) ((PyCFunction)(void (*)(void))(function))
enum { FAST_KEYWORDS = METH_FASTCALL | METH_KEYWORDS };

static PyMethodDef methods[] = {
    {"forward", FAST(core_forward), FAST_KEYWORDS,
     "forward(q, k, v, out, lse, layout, /, **options)"},
    {"decode", FAST(core_decode), FAST_KEYWORDS, "decode(q, k, v, out, lse, layout, /, **options)"},
    {"plain_forward", FAST(core_plain_forward), METH_FASTCALL,
     "plain_forward(q, k, v, out, return_lse, layout, options, /): for arrays of NumPy, and "
     "tensors of "
     "PyTorch of which nothing else is asked; else NotImplemented, and nothing is done"},
    {"plain_decode", FAST(core_plain_decode), METH_FASTCALL,
     "plain_decode(q, k, v, out, return_lse, layout, options, /): as plain_forward"},
    {"use_torch", FAST(core_use_torch), METH_FASTCALL, "use_torch(...): see torch_call.h"},
    {"mark_thread", core_mark_thread, METH_O,
     "mark_thread(only_device, /): this thread has a current CUDA context"},
    {"backward", FAST(core_backward), FAST_KEYWORDS,
     "backward(q, k, v, out, lse, dout, dlse, dq, dk, dv, dbias, dsinks, layout, /, **options)"},
    {"combine", FAST(core_combine), FAST_KEYWORDS,
     "combine(parts, part_lses, out, lse, layout, /, **options)"},
    {"append", FAST(core_append), FAST_KEYWORDS,
     "append(k_new, v_new, k_cache, v_cache, layout, /, **options): see append_call.h"},
    {"weights", FAST(core_weights), FAST_KEYWORDS,
     "weights(q, k, rows, weights, layout, /, **options)"},
    {"supported", FAST(core_supported), FAST_KEYWORDS,
     "supported(pass_name, q, k, v, out, layout, /, **options): None, or why not"},
    {"describe", FAST(core_describe), FAST_KEYWORDS,
     "describe(pass_name, q, k, v, out, layout, /, **options): which kernel would run, and why"},
    {"ladder", FAST(core_ladder), METH_FASTCALL,
     "ladder(name, q, k, v, out, causal, scale, stream, allocate, /): runs a rung of the ladder"},
    {"ladder_rungs", core_ladder_rungs, METH_NOARGS, "ladder_rungs(): what rungs there are"},
    {"version", core_version, METH_NOARGS, "version(): the library's version"},
    {"cpu_info", core_cpu_info, METH_NOARGS, "cpu_info(): what the CPU engine runs on"},
    {"cuda_info", core_cuda_info, METH_NOARGS, "cuda_info(): what CUDA devices there are"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    "flashattn._core",
    "The C library's calls on arrays, by DLPack.",
    -1,
    methods,
    NULL,
    NULL,
    NULL,
    NULL,
};

static int add_error(PyObject *m)
{
    unsupported_error = PyErr_NewExceptionWithDoc(
        "flashattn.UnsupportedError",
        "The call is legal, but this backend cannot do it; the message names the option.",
        PyExc_NotImplementedError, NULL);
    if (!unsupported_error) return -1;
    Py_INCREF(unsupported_error);
    return PyModule_AddObject(m, "UnsupportedError", unsupported_error);
}

PyMODINIT_FUNC PyInit__core(void)
{
    if (array_module_init() < 0 || options_module_init() < 0) return NULL;
    PyObject *m = PyModule_Create(&module);
    if (!m || add_error(m) < 0) {
        Py_XDECREF(m);
        return NULL;
    }
#ifdef Py_GIL_DISABLED
    /* Calls share only constants. */
    PyUnstable_Module_SetGIL(m, Py_MOD_GIL_NOT_USED);
#endif
    return m;
}
