#include "ladder_call.h"

#ifndef FA_PYTHON_LADDER

static PyObject *refuse(void)
{
    PyErr_SetString(unsupported_error,
                    "the ladder is not in this build of flashattn: it needs CUDA (pip install with "
                    "-C cmake.define.FA_CUDA=all, and without FA_PYTHON_LADDER=OFF)");
    return NULL;
}

PyObject *core_ladder(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self, (void)args, (void)count;
    return refuse();
}

PyObject *core_ladder_rungs(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    return refuse();
}

#else

#include "ladder.h"

/* ---- The list -------------------------------------------------------------------------------- */

static PyObject *describe(const ladder_rung *rung)
{
    static const char *const types[] = {"float32", "tf32", "float16, bfloat16"};
    return Py_BuildValue("{si,ss,si,ss,si,ss}", "number", rung->number, "name", rung->name,
                         "architecture", rung->architecture, "types", types[rung->types],
                         "largest_dim", rung->largest_d, "idea", rung->idea);
}

PyObject *core_ladder_rungs(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < ladder_num_rungs(); i++) {
        PyObject *rung = describe(ladder_rung_at(i));
        if (!rung || PyList_Append(list, rung) < 0) Py_CLEAR(list);
        Py_XDECREF(rung);
    }
    return list;
}

/* ---- A run ----------------------------------------------------------------------------------- */

enum { NAME, Q, K, V, OUT, CAUSAL, SCALE, STREAM, ALLOCATE, ARGUMENT_COUNT };

/* The scores of a rung that stores them take at most this much, or as much as one head needs. */
enum { SCRATCH_BYTES = 1 << 28 };

/* Everything that lives as long as one run; arrays are in the order of the arguments. */
typedef struct run {
    location where;
    array arrays[4];
    int count;
    fa_dtype dtype;
    ladder_problem problem;
    PyObject *scratch;
} run;

static int fail(PyObject *exception, const char *sentence)
{
    PyErr_SetString(exception, sentence);
    return -1;
}

static const ladder_rung *find_rung(PyObject *name)
{
    for (int i = 0; PyUnicode_Check(name) && i < ladder_num_rungs(); i++) {
        const ladder_rung *rung = ladder_rung_at(i);
        if (PyUnicode_CompareWithASCIIString(name, rung->name) == 0) return rung;
    }
    PyErr_Format(PyExc_ValueError, "%R is not a rung: expected one of flashattn.ladder_rungs()",
                 name);
    return NULL;
}

static int read_dtype(const array *a, fa_dtype *dtype)
{
    if (array_is(a, kDLFloat, 32)) *dtype = FA_FLOAT32;
    else if (array_is(a, kDLFloat, 16)) *dtype = FA_FLOAT16;
    else if (array_is(a, kDLBfloat, 16)) *dtype = FA_BFLOAT16;
    else {
        PyErr_Format(PyExc_ValueError, "%s.dtype is %s: expected float32, float16 or bfloat16",
                     a->name, array_dtype_text(a).text);
        return -1;
    }
    return 0;
}

/* The extent of axis `back`, counted from the last; missing leading axes have the extent 1. */
static int64_t extent(const array *a, int back)
{
    return back < a->ndim ? a->shape[a->ndim - 1 - back] : 1;
}

/* Whether rows are one pitch apart, heads n rows, and items all heads. */
static bool has_pitch(const array *a, int64_t pitch)
{
    int64_t step = pitch;
    if (extent(a, 0) > 1 && a->stride[a->ndim - 1] != 1) return false;
    for (int back = 1; back < a->ndim; back++) {
        if (extent(a, back) > 1 && a->stride[a->ndim - 1 - back] != step) return false;
        step *= extent(a, back);
    }
    return true;
}

static int check_like_q(const run *r, const array *a)
{
    const array *q = &r->arrays[0];
    bool same =
        a->ndim == q->ndim && a->dtype.code == q->dtype.code && a->dtype.bits == q->dtype.bits;
    for (int axis = 0; same && axis < q->ndim; axis++) same = a->shape[axis] == q->shape[axis];
    if (same && has_pitch(a, r->problem.pitch)) return 0;
    PyErr_Format(PyExc_ValueError,
                 same ? "%s: expected rows %lld elements apart and nothing else between them"
                      : "%s: expected the shape and dtype of q",
                 a->name, (long long)r->problem.pitch);
    return -1;
}

static int read_arrays(run *r, PyObject *const *args)
{
    static const char *const names[] = {"q", "k", "v", "out"};
    for (; r->count < 4; r->count++)
        if (array_read(&r->arrays[r->count], names[r->count], args[Q + r->count], &r->where) < 0)
            return -1;
    const array *q = &r->arrays[0];
    if (q->ndim != 3 && q->ndim != 4)
        return fail(PyExc_ValueError,
                    "q: expected 4 axes (batch, heads, n, d), or 3 without a batch");
    if (!r->where.cuda)
        return fail(PyExc_ValueError, "q is on the CPU: the rungs of the ladder run on CUDA");
    if (read_dtype(q, &r->dtype) < 0) return -1;
    ladder_problem *p = &r->problem;
    p->d = extent(q, 0);
    p->n = extent(q, 1);
    p->heads = extent(q, 2) * extent(q, 3);
    p->pitch = ladder_pitch(r->dtype, p->d);
    for (int i = 0; i < 4; i++)
        if (check_like_q(r, &r->arrays[i]) < 0) return -1;
    p->q = r->arrays[0].data;
    p->k = r->arrays[1].data;
    p->v = r->arrays[2].data;
    p->out = r->arrays[3].data;
    return 0;
}

static int read_numbers(run *r, PyObject *const *args)
{
    ladder_problem *p = &r->problem;
    const int causal = PyObject_IsTrue(args[CAUSAL]);
    const double scale = PyFloat_AsDouble(args[SCALE]);
    if (causal < 0 || (scale == -1.0 && PyErr_Occurred())) return -1;
    p->causal = causal;
    p->scale = (float)scale;
    if (args[STREAM] != Py_None) {
        r->where.stream = PyLong_AsVoidPtr(args[STREAM]);
        r->where.stream_known = true;
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Memory for the scores of as many heads as fit into SCRATCH_BYTES, but at least one. */
static int get_scratch(run *r, PyObject *allocate, PyObject *q)
{
    ladder_problem *p = &r->problem;
    const double head = 4.0 * (double)p->n * (double)p->n;
    if (head > 0x1p62)
        return fail(PyExc_MemoryError, "n is too large for a rung that stores scores");
    int64_t heads = (int64_t)(SCRATCH_BYTES / head);
    if (heads > p->heads) heads = p->heads;
    if (heads < 1) heads = 1;
    const Py_ssize_t bytes = (Py_ssize_t)(4 * p->n * p->n * heads);
    array a;
    r->scratch = PyObject_CallFunction(allocate, "nO", bytes, q);
    if (!r->scratch || array_read(&a, "scratch", r->scratch, &r->where) < 0) return -1;
    p->scratch = a.data;
    p->scratch_bytes = (size_t)bytes;
    array_release(&a);
    return 0;
}

/* A wrong type or head dim is the caller's error; a missing kernel is not. */
static int load(run *r, const ladder_rung *rung, ladder_kernel *kernel)
{
    char error[LADDER_ERROR];
    fa_cuda_fault fault;
    const int64_t d = r->problem.d;
    if (!fa_cuda_open(&fault)) {
        ladder_fault(error, "opening the CUDA driver", &fault);
        return fail(PyExc_RuntimeError, error);
    }
    if (ladder_load(rung, r->dtype, d, kernel, error)) return 0;
    const bool theirs = !ladder_takes(rung, r->dtype) || d < 1 || d > rung->largest_d;
    return fail(theirs ? PyExc_ValueError : unsupported_error, error);
}

static int run_rung(run *r, PyObject *const *args)
{
    char error[LADDER_ERROR];
    bool done;
    ladder_kernel kernel;
    const ladder_rung *rung = find_rung(args[NAME]);
    if (!rung || read_numbers(r, args) < 0 || read_arrays(r, args) < 0) return -1;
    if (load(r, rung, &kernel) < 0) return -1;
    if (r->problem.n == 0 || r->problem.heads == 0) return 0;
    if (kernel.about.needs_scores && get_scratch(r, args[ALLOCATE], args[Q]) < 0) return -1;
    r->problem.stream = r->where.stream;
    Py_BEGIN_ALLOW_THREADS;
    done = ladder_run(&kernel, &r->problem, error);
    Py_END_ALLOW_THREADS;
    return done ? 0 : fail(PyExc_RuntimeError, error);
}

PyObject *core_ladder(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    run r = {.count = 0};
    if (count != ARGUMENT_COUNT) {
        PyErr_Format(PyExc_TypeError, "ladder takes %d arguments, not %zd", (int)ARGUMENT_COUNT,
                     count);
        return NULL;
    }
    const int status = run_rung(&r, args);
    for (int i = 0; i < r.count; i++) array_release(&r.arrays[i]);
    Py_XDECREF(r.scratch);
    if (status < 0) return NULL;
    Py_RETURN_NONE;
}

#endif
