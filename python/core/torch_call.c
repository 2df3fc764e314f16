#include "torch_call.h"

/* In the order of use_torch's arguments. */
typedef enum borrowed {
    TENSOR,
    PARAMETER,
    FORWARD_AD,
    GRAD_ENABLED,
    DISPATCH_MODES,
    FUNCTORCH_LEVEL,
    AUTOCAST,
    DETERMINISM,
    IS_NEG,
    CURRENT_DEVICE,
    EMPTY_CPU,
    EMPTY_CUDA,
    FLOAT32,
    ALLOCATE,
    BORROWED_COUNT
} borrowed;

/* Set once, when flashattn.torch is imported, and held from then on. */
static PyObject *torch[BORROWED_COUNT];
static PyObject *name_requires_grad, *name_current_level, *name_dtype;

static _Thread_local bool thread_has_context;

PyObject *core_use_torch(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != BORROWED_COUNT) {
        PyErr_Format(PyExc_TypeError, "use_torch takes %d arguments, not %zd", (int)BORROWED_COUNT,
                     count);
        return NULL;
    }
    name_requires_grad = PyUnicode_InternFromString("requires_grad");
    name_current_level = PyUnicode_InternFromString("_current_level");
    name_dtype = PyUnicode_InternFromString("dtype");
    if (PyErr_Occurred()) return NULL;
    for (int i = BORROWED_COUNT - 1; i >= 0; i--) {
        Py_INCREF(args[i]);
        torch[i] = args[i];
    }
    array_keep_type(torch[TENSOR]);
    Py_RETURN_NONE;
}

PyObject *core_mark_thread(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    thread_has_context = true;
    Py_RETURN_NONE;
}

/* ---- Is it a plain call? --------------------------------------------------------------------- */

static bool is_false(PyObject *value)
{
    const bool result = value && PyObject_IsTrue(value) == 0;
    Py_XDECREF(value);
    return result;
}

static bool says_no(borrowed question) { return is_false(PyObject_CallNoArgs(torch[question])); }

static bool is_plain_type(PyObject *object)
{
    PyObject *type = (PyObject *)Py_TYPE(object);
    return type == torch[TENSOR] || type == torch[PARAMETER];
}

static bool is_plain_tensor(PyObject *tensor)
{
    return is_false(PyObject_CallFunctionObjArgs(torch[IS_NEG], tensor, NULL));
}

static bool wants_gradient(PyObject *tensor)
{
    return !is_false(PyObject_GetAttr(tensor, name_requires_grad));
}

static bool records_gradients(PyObject *const *qkv)
{
    const bool wanted = wants_gradient(qkv[0]) || wants_gradient(qkv[1]) || wants_gradient(qkv[2]);
    return wanted && !says_no(GRAD_ENABLED);
}

static bool has_no_forward_mode(void)
{
    PyObject *level = PyObject_GetAttr(torch[FORWARD_AD], name_current_level);
    const bool none = level && PyLong_AsLong(level) < 0;
    Py_XDECREF(level);
    return none;
}

static bool is_undisturbed(PyObject *const *qkv)
{
    if (records_gradients(qkv) || !has_no_forward_mode()) return false;
    if (!says_no(DISPATCH_MODES) || !says_no(FUNCTORCH_LEVEL)) return false;
    if (!says_no(AUTOCAST) || !says_no(DETERMINISM)) return false;
    return is_plain_tensor(qkv[0]) && is_plain_tensor(qkv[1]) && is_plain_tensor(qkv[2]);
}

bool torch_is_plain(PyObject *const *qkv, PyObject *names)
{
    if (!torch[TENSOR]) return false;
    if (!is_plain_type(qkv[0]) || !is_plain_type(qkv[1]) || !is_plain_type(qkv[2])) return false;
    if (call_needs_preparation(names)) return false;
    const bool plain = is_undisturbed(qkv);
    PyErr_Clear();
    return plain;
}

/* ---- Can the library work here? -------------------------------------------------------------- */

static bool has_rows(const array *a)
{
    return a->stride[a->ndim - 1] == 1 || a->shape[a->ndim - 1] == 1;
}

static bool is_current_device(int32_t id)
{
    PyObject *current = PyObject_CallNoArgs(torch[CURRENT_DEVICE]);
    const bool same = current && PyLong_AsLong(current) == id;
    Py_XDECREF(current);
    PyErr_Clear();
    return same;
}

bool torch_can_work(const call *c)
{
    for (int i = 0; i < 3; i++)
        if (!has_rows(&c->arrays[i])) return false;
    if (array_is(&c->arrays[0], kDLFloat8_e4m3fn, 8)) return false;
    if (!c->where.cuda) return true;
    return thread_has_context && c->where.stream_known && is_current_device(c->where.device_id);
}

/* ---- Memory ---------------------------------------------------------------------------------- */

PyObject *torch_allocator(void) { return torch[ALLOCATE]; }

static PyObject *make_tuple(int count, const int64_t *values)
{
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple && i < count; i++) {
        PyObject *number = PyLong_FromLongLong(values[i]);
        if (number) (void)PyTuple_SetItem(tuple, i, number);
        else Py_CLEAR(tuple);
    }
    return tuple;
}

/* On the arrays' device, which is the current one. */
static PyObject *new_tensor(const call *c, int axes, const int64_t *shape, const int64_t *stride,
                            PyObject *dtype)
{
    PyObject *function = torch[c->where.cuda ? EMPTY_CUDA : EMPTY_CPU], *tensor = NULL;
    PyObject *sizes = make_tuple(axes, shape), *strides = make_tuple(axes, stride);
    if (sizes && strides)
        tensor = PyObject_CallFunctionObjArgs(function, sizes, strides, dtype, NULL);
    Py_XDECREF(sizes);
    Py_XDECREF(strides);
    return tensor;
}

/* The axes from the outermost in memory to the innermost; those that broadcast have no place. */
static void order_axes(const array *a, int order[AXES_MAX])
{
    bool known = true;
    for (int i = 0; i < a->ndim; i++) known = known && a->stride[i] > 0, order[i] = i;
    for (int i = 1; known && i < a->ndim - 1; i++)
        for (int j = i; j > 0 && a->stride[order[j - 1]] < a->stride[order[j]]; j--) {
            const int outer = order[j];
            order[j] = order[j - 1];
            order[j - 1] = outer;
        }
}

PyObject *torch_new_out(const call *c, PyObject *q)
{
    const array *like = &c->arrays[0], *v = &c->arrays[2];
    int64_t shape[AXES_MAX], stride[AXES_MAX], step = 1;
    int order[AXES_MAX];
    const int axes = like->ndim;
    order_axes(like, order);
    for (int i = axes - 1; i >= 0; i--) {
        const int axis = order[i];
        shape[axis] = axis == axes - 1 ? v->shape[v->ndim - 1] : like->shape[axis];
        stride[axis] = step;
        step *= shape[axis] > 1 ? shape[axis] : 1;
    }
    PyObject *dtype = PyObject_GetAttr(q, name_dtype);
    PyObject *out = dtype ? new_tensor(c, axes, shape, stride, dtype) : NULL;
    Py_XDECREF(dtype);
    return out;
}

PyObject *torch_new_lse(const call *c)
{
    const int64_t *q = c->q.shape;
    const int64_t rows = q[1], heads = q[2];
    const int64_t shape[3] = {q[0], heads, rows};
    const int64_t step = rows > 1 ? rows : 1;
    const int64_t stride[3] = {step * (heads > 1 ? heads : 1), step, 1};
    const int skipped = c->arrays[0].ndim == 3;
    return new_tensor(c, 3 - skipped, shape + skipped, stride + skipped, torch[FLOAT32]);
}
