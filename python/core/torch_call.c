#include "torch_call.h"

#include <string.h>

/* In the order of use_torch's arguments. */
typedef enum borrowed {
    TENSOR,
    PARAMETER,
    REQUIRES_GRAD,
    IS_NESTED,
    IS_NEG,
    FORWARD_AD,
    PROFILER,
    DISPATCH_MODES,
    FUNCTION_MODES,
    GRAD_ENABLED,
    DETERMINISM,
    IS_ORDINARY,
    KIND_OF,
    COUNT_WRITE,
    CURRENT_DEVICE,
    EMPTY_CPU,
    EMPTY_CUDA,
    FLOAT32,
    FLOAT16,
    BFLOAT16,
    ALLOCATE,
    BORROWED_COUNT
} borrowed;

/* Objects that are kept between calls would need a lock if Python threads run in parallel. */
#ifdef Py_GIL_DISABLED
enum { KEEPS = 0 };
#else
enum { KEEPS = 1 };
#endif

/* Set once, when flashattn.torch is imported, and never released. */
static PyObject *torch[BORROWED_COUNT];
static PyObject *forward_ad, *profiler; /* those modules' names */
static PyObject *name_current_level, *name_is_enabled;

/* The C functions of those that take no arguments, because a call through Python takes as long as
 * the function itself. NULL: it must be called through Python. */
static PyCFunction direct[BORROWED_COUNT];
static PyObject *direct_self[BORROWED_COUNT];

/* For properties: this avoids looking up the name. */
static descrgetfunc get_property[BORROWED_COUNT];

static _Thread_local bool thread_has_context;
/* PyTorch knows only one device, which must be the current one. */
static _Thread_local bool only_device;

static void find_direct(borrowed which)
{
    PyObject *function = torch[which];
    if (!PyCFunction_Check(function) || PyCFunction_GetFlags(function) != METH_NOARGS) return;
    direct[which] = PyCFunction_GetFunction(function);
    direct_self[which] = PyCFunction_GetSelf(function);
}

static int find_getter(borrowed which, PyObject *property)
{
    void *get = PyType_GetSlot(Py_TYPE(property), Py_tp_descr_get);
    if (!get && !PyErr_Occurred())
        PyErr_Format(PyExc_TypeError, "%R is not a descriptor", property);
    if (PyErr_Occurred()) return -1;
    memcpy(&get_property[which], &get, sizeof get);
    return 0;
}

static int find_names(PyObject *const *args)
{
    if (find_getter(REQUIRES_GRAD, args[REQUIRES_GRAD]) < 0) return -1;
    if (find_getter(IS_NESTED, args[IS_NESTED]) < 0) return -1;
    name_current_level = PyUnicode_InternFromString("_current_level");
    name_is_enabled = PyUnicode_InternFromString("_is_profiler_enabled");
    forward_ad = PyObject_GetAttrString(args[FORWARD_AD], "__dict__");
    profiler = PyObject_GetAttrString(args[PROFILER], "__dict__");
    return name_current_level && name_is_enabled && forward_ad && profiler ? 0 : -1;
}

PyObject *core_use_torch(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != BORROWED_COUNT) {
        PyErr_Format(PyExc_TypeError, "use_torch takes %d arguments, not %zd", (int)BORROWED_COUNT,
                     count);
        return NULL;
    }
    if (find_names(args) < 0) return NULL;
    for (int i = BORROWED_COUNT - 1; i >= 0; i--) {
        Py_INCREF(args[i]);
        torch[i] = args[i];
        find_direct((borrowed)i);
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

/* ---- Plain calls ----------------------------------------------------------------------------- */

static PyObject *call_torch(borrowed name)
{
    const PyCFunction function = direct[name];
    return function ? function(direct_self[name], NULL) : PyObject_CallNoArgs(torch[name]);
}

/* False or 0. Comparing the pointer is nearly always enough. */
static bool is_false(PyObject *value)
{
    const bool result =
        value == Py_False || (value && value != Py_True && PyObject_IsTrue(value) == 0);
    Py_XDECREF(value);
    return result;
}

static bool says_no(borrowed name) { return is_false(call_torch(name)); }

static bool has_not(borrowed property, PyObject *tensor)
{
    return is_false(get_property[property](torch[property], tensor, (PyObject *)Py_TYPE(tensor)));
}

static bool is_not_nested(PyObject *tensor) { return has_not(IS_NESTED, tensor); }

static bool is_plain_type(PyObject *object)
{
    PyObject *type = (PyObject *)Py_TYPE(object);
    return type == torch[TENSOR] || type == torch[PARAMETER];
}

static bool has_no_forward_mode(void)
{
    PyObject *level = PyDict_GetItemWithError(forward_ad, name_current_level);
    return level && PyLong_AsLong(level) < 0;
}

static bool has_no_profiler(void)
{
    return PyDict_GetItemWithError(profiler, name_is_enabled) == Py_False;
}

/* Whether nothing intercepts calls, independently of the tensors. */
static bool is_undisturbed(void)
{
    return has_no_forward_mode() && has_no_profiler() && says_no(DISPATCH_MODES) &&
           says_no(FUNCTION_MODES) && says_no(DETERMINISM);
}

/* ---- The tensors' kind ----------------------------------------------------------------------- */

/* PyTorch's own test, made for torch.compile, of whether tensors are like others: of the same types
 * and device, without gradients, and dispatched in the same way, which transforms, tracing and
 * autocast (but not all modes) would change. It replaces many tests. The first kinds are kept. */
enum { KINDS = 4, KINDS_TRIED = 4 * KINDS };
static struct {
    PyObject *test;
    Py_ssize_t count; /* the number of tensors that it takes */
} plain_kinds[KINDS];
static int kinds_tried, kinds_kept;

/* The test does not accept the same tensor twice. */
static PyObject *without_twins(PyObject *const *qkv)
{
    PyObject *q = qkv[0], *k = qkv[1], *v = qkv[2];
    if (q == k) return k == v ? PyTuple_Pack(1, q) : PyTuple_Pack(2, q, v);
    return k == v || q == v ? PyTuple_Pack(2, q, k) : PyTuple_Pack(3, q, k, v);
}

static bool is_of_kind(PyObject *test, PyObject *tensors)
{
    PyObject *answer = PyObject_CallObject(test, tensors);
    if (!answer) PyErr_Clear();
    Py_XDECREF(answer);
    return answer == Py_True;
}

static bool are_of_a_kept_kind(PyObject *tensors)
{
    const Py_ssize_t count = PyTuple_Size(tensors);
    for (int i = 0; i < kinds_kept; i++)
        if (plain_kinds[i].count == count && is_of_kind(plain_kinds[i].test, tensors)) return true;
    return false;
}

/* For ordinary tensors. */
static void keep_kind(PyObject *tensors)
{
    if (!KEEPS || kinds_kept == KINDS || kinds_tried == KINDS_TRIED) return;
    kinds_tried++;
    PyObject *test = PyObject_CallObject(torch[KIND_OF], tensors);
    if (test && test != Py_None) {
        plain_kinds[kinds_kept].test = test;
        plain_kinds[kinds_kept++].count = PyTuple_Size(tensors);
    } else {
        Py_XDECREF(test);
    }
}

static bool want_gradients(PyObject *tensors)
{
    const Py_ssize_t count = PyTuple_Size(tensors);
    bool wanted = false;
    for (Py_ssize_t i = 0; i < count; i++)
        wanted = wanted || !has_not(REQUIRES_GRAD, PyTuple_GetItem(tensors, i));
    return wanted && !says_no(GRAD_ENABLED);
}

static bool are_ordinary(PyObject *tensors)
{
    if (want_gradients(tensors)) return false;
    PyObject *answer = PyObject_CallObject(torch[IS_ORDINARY], tensors);
    Py_XDECREF(answer);
    return answer == Py_True;
}

bool torch_is_plain(PyObject *const *qkv)
{
    if (!torch[TENSOR]) return false;
    if (!is_plain_type(qkv[0]) || !is_plain_type(qkv[1]) || !is_plain_type(qkv[2])) return false;
    /* The next tests would end the process if a tensor were nested. */
    bool plain = is_undisturbed() && is_not_nested(qkv[0]) &&
                 (qkv[1] == qkv[0] || is_not_nested(qkv[1])) &&
                 (qkv[2] == qkv[0] || qkv[2] == qkv[1] || is_not_nested(qkv[2]));
    PyObject *tensors = plain ? without_twins(qkv) : NULL;
    if (tensors && !are_of_a_kept_kind(tensors)) {
        plain = are_ordinary(tensors);
        if (plain) keep_kind(tensors);
    }
    plain = plain && tensors;
    Py_XDECREF(tensors);
    PyErr_Clear();
    return plain;
}

/* ---- Other arguments ------------------------------------------------------------------------- */

static bool is_read_as_it_lies(PyObject *tensor)
{
    if (!has_not(IS_NESTED, tensor)) return false;
    if (!is_false(PyObject_CallFunctionObjArgs(torch[IS_NEG], tensor, NULL))) return false;
    return has_not(REQUIRES_GRAD, tensor) || says_no(GRAD_ENABLED);
}

bool torch_is_plain_argument(PyObject *object)
{
    if (PyLong_Check(object) || PyFloat_Check(object) || PyTuple_Check(object)) return true;
    const bool plain = (PyObject *)Py_TYPE(object) == torch[TENSOR]
                           ? is_read_as_it_lies(object)
                           : PyObject_IsInstance(object, torch[TENSOR]) == 0;
    PyErr_Clear();
    return plain;
}

bool torch_is_plain_out(PyObject *object)
{
    const bool plain = (PyObject *)Py_TYPE(object) == torch[TENSOR] && is_read_as_it_lies(object);
    PyErr_Clear();
    return plain;
}

int torch_count_write(PyObject *tensor)
{
    PyObject *none = PyObject_CallFunctionObjArgs(torch[COUNT_WRITE], tensor, NULL);
    Py_XDECREF(none);
    return none ? 0 : -1;
}

/* ---- Whether the library can work in place --------------------------------------------------- */

static bool is_current_device(int32_t id)
{
    PyObject *current = call_torch(CURRENT_DEVICE);
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
    if (!c->where.cuda) return true;
    if (!thread_has_context || !c->where.stream_known) return false;
    return only_device || is_current_device(c->where.device_id);
}

/* ---- Memory ---------------------------------------------------------------------------------- */

PyObject *torch_allocator(void) { return torch[ALLOCATE]; }

/* The arguments of the last new tensor: shapes repeat, and creating the arguments takes ten
 * objects. */
typedef struct request {
    int axes;
    int64_t shape[AXES_MAX], stride[AXES_MAX];
    PyObject *dtype;
    PyObject *arguments; /* (shape, stride, dtype) */
} request;

static bool is_same_request(const request *a, const request *b)
{
    const size_t bytes = (size_t)a->axes * sizeof a->shape[0];
    return a->axes == b->axes && a->dtype == b->dtype && memcmp(a->shape, b->shape, bytes) == 0 &&
           memcmp(a->stride, b->stride, bytes) == 0;
}

static PyObject *make_arguments(const request *r)
{
    PyObject *shape = array_tuple(r->axes, r->shape), *stride = array_tuple(r->axes, r->stride);
    PyObject *arguments = shape && stride ? PyTuple_Pack(3, shape, stride, r->dtype) : NULL;
    Py_XDECREF(shape);
    Py_XDECREF(stride);
    return arguments;
}

/* A new reference; *last keeps another. */
static PyObject *get_arguments(request *r, request *last)
{
    if (last->arguments && is_same_request(r, last)) r->arguments = last->arguments;
    else r->arguments = make_arguments(r);
    if (!KEEPS || !r->arguments) return r->arguments;
    Py_INCREF(r->arguments);
    if (r->arguments != last->arguments) {
        Py_XDECREF(last->arguments);
        *last = *r;
    }
    return r->arguments;
}

/* On the arrays' device, which is the current one. */
static PyObject *new_tensor(const call *c, request *r, request *last)
{
    PyObject *arguments = get_arguments(r, last);
    if (!arguments) return NULL;
    PyObject *tensor =
        PyObject_CallObject(torch[c->where.cuda ? EMPTY_CUDA : EMPTY_CPU], arguments);
    Py_DECREF(arguments);
    return tensor;
}

/* The axes from the outermost in memory to the innermost, without those that broadcast. */
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

/* q has one of these: torch_can_work refuses float8, and the library supports no others. */
static PyObject *dtype_of(const array *q)
{
    if (array_is(q, kDLBfloat, 16)) return torch[BFLOAT16];
    return torch[array_is(q, kDLFloat, 16) ? FLOAT16 : FLOAT32];
}

PyObject *torch_new_out(const call *c)
{
    static request last;
    const array *like = &c->arrays[0], *v = &c->arrays[2];
    const int axes = like->ndim;
    request r = {.axes = axes, .dtype = dtype_of(like)};
    int64_t step = 1;
    int order[AXES_MAX];
    order_axes(like, order);
    for (int i = axes - 1; i >= 0; i--) {
        const int axis = order[i];
        r.shape[axis] = axis == axes - 1 ? v->shape[v->ndim - 1] : like->shape[axis];
        r.stride[axis] = step;
        step *= r.shape[axis] > 1 ? r.shape[axis] : 1;
    }
    return new_tensor(c, &r, &last);
}

PyObject *torch_new_lse(const call *c)
{
    static request last;
    const int64_t heads = c->q.shape[2], rows = c->q.shape[1], step = rows > 1 ? rows : 1;
    const int64_t shape[3] = {c->q.shape[0], heads, rows};
    const int64_t stride[3] = {step * (heads > 1 ? heads : 1), step, 1};
    const int skipped = c->arrays[0].ndim == 3;
    request r = {.axes = 3 - skipped, .dtype = torch[FLOAT32]};
    memcpy(r.shape, shape + skipped, sizeof shape - (size_t)skipped * sizeof shape[0]);
    memcpy(r.stride, stride + skipped, sizeof stride - (size_t)skipped * sizeof stride[0]);
    return new_tensor(c, &r, &last);
}
