#include "torch_call.h"

#include <string.h>

/* In the order of use_torch's arguments. */
typedef enum borrowed {
    TENSOR,
    PARAMETER,
    REQUIRES_GRAD,
    FORWARD_AD,
    GRAD_ENABLED,
    DISPATCH_MODES,
    FUNCTORCH_LEVEL,
    ANY_AUTOCAST,
    CUDA_AUTOCAST,
    DETERMINISM,
    IS_NEG,
    CURRENT_DEVICE,
    EMPTY_CPU,
    EMPTY_CUDA,
    FLOAT32,
    FLOAT16,
    BFLOAT16,
    ALLOCATE,
    BORROWED_COUNT
} borrowed;

/* Set once, when flashattn.torch is imported, and held from then on. */
static PyObject *torch[BORROWED_COUNT];
static PyObject *name_current_level;
static descrgetfunc
    get_requires_grad; /* of torch[REQUIRES_GRAD]: it spares the search for the name */

static _Thread_local bool thread_has_context;
static _Thread_local bool only_device; /* that PyTorch knows: it must be the current one */

PyObject *core_use_torch(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != BORROWED_COUNT) {
        PyErr_Format(PyExc_TypeError, "use_torch takes %d arguments, not %zd", (int)BORROWED_COUNT,
                     count);
        return NULL;
    }
    name_current_level = PyUnicode_InternFromString("_current_level");
    void *get = PyType_GetSlot(Py_TYPE(args[REQUIRES_GRAD]), Py_tp_descr_get);
    if (!get && !PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "Tensor.requires_grad is no descriptor");
    if (PyErr_Occurred()) return NULL;
    memcpy(&get_requires_grad, &get, sizeof get);
    for (int i = BORROWED_COUNT - 1; i >= 0; i--) {
        Py_INCREF(args[i]);
        torch[i] = args[i];
    }
    array_keep_type(torch[TENSOR]);
    Py_RETURN_NONE;
}

PyObject *core_mark_thread(PyObject *self, PyObject *only)
{
    (void)self;
    const int truth = PyObject_IsTrue(only);
    if (truth < 0) return NULL;
    only_device = truth;
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
    return !is_false(get_requires_grad(torch[REQUIRES_GRAD], tensor, (PyObject *)Py_TYPE(tensor)));
}

static bool wants_gradients(PyObject *const *qkv)
{
    return wants_gradient(qkv[0]) || wants_gradient(qkv[1]) || wants_gradient(qkv[2]);
}

static bool has_no_forward_mode(void)
{
    PyObject *level = PyObject_GetAttr(torch[FORWARD_AD], name_current_level);
    const bool none = level && PyLong_AsLong(level) < 0;
    Py_XDECREF(level);
    return none;
}

static bool is_undisturbed(void)
{
    if (!has_no_forward_mode() || !says_no(DETERMINISM)) return false;
    return says_no(DISPATCH_MODES) && says_no(FUNCTORCH_LEVEL);
}

static bool are_plain(PyObject *const *qkv)
{
    if (wants_gradients(qkv) && !says_no(GRAD_ENABLED)) return false;
    return is_plain_tensor(qkv[0]) && is_plain_tensor(qkv[1]) && is_plain_tensor(qkv[2]);
}

bool torch_is_plain(PyObject *const *qkv)
{
    if (!torch[TENSOR]) return false;
    if (!is_plain_type(qkv[0]) || !is_plain_type(qkv[1]) || !is_plain_type(qkv[2])) return false;
    const bool plain = is_undisturbed() && are_plain(qkv);
    PyErr_Clear();
    return plain;
}

/* ---- Can the library work here? -------------------------------------------------------------- */

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
        if (!array_has_rows(&c->arrays[i])) return false;
    if (array_is(&c->arrays[0], kDLFloat8_e4m3fn, 8)) return false;
    const bool plain = says_no(c->where.cuda ? CUDA_AUTOCAST : ANY_AUTOCAST);
    PyErr_Clear();
    if (!plain || !c->where.cuda) return plain;
    if (!thread_has_context || !c->where.stream_known) return false;
    return only_device || is_current_device(c->where.device_id);
}

/* ---- Memory ---------------------------------------------------------------------------------- */

PyObject *torch_allocator(void) { return torch[ALLOCATE]; }

/* On the arrays' device, which is the current one. */
static PyObject *new_tensor(const call *c, int axes, const int64_t *shape, const int64_t *stride,
                            PyObject *dtype)
{
    PyObject *function = torch[c->where.cuda ? EMPTY_CUDA : EMPTY_CPU], *tensor = NULL;
    PyObject *sizes = array_tuple(axes, shape), *strides = array_tuple(axes, stride);
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

/* q has one of these: torch_can_work refuses float8, and the library knows no more. */
static PyObject *dtype_of(const array *q)
{
    if (array_is(q, kDLBfloat, 16)) return torch[BFLOAT16];
    return torch[array_is(q, kDLFloat, 16) ? FLOAT16 : FLOAT32];
}

PyObject *torch_new_out(const call *c)
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
    return new_tensor(c, axes, shape, stride, dtype_of(like));
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
