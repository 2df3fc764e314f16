#include "array.h"

#include <stdio.h>
#include <string.h>

/* Created once, when the module is imported. */
static PyObject *numpy_array_type, *numpy_masked_type, *numpy_empty;
static PyObject *no_arguments;
static PyObject *versioned_keywords; /* {"max_version": (1, 0)} */
static PyObject *name_dlpack, *name_dlpack_device, *name_exchange, *name_requires_grad;
static PyObject *name_array_struct, *name_dtype;

/* DLPack's numbers from 0 on. The bits follow in front of kDLBool. */
static const char *const dtype_names[] = {"int",
                                          "uint",
                                          "float",
                                          "opaque handle",
                                          "bfloat",
                                          "complex",
                                          "bool",
                                          "float8_e3m4",
                                          "float8_e4m3",
                                          "float8_e4m3b11fnuz",
                                          "float8_e4m3fn",
                                          "float8_e4m3fnuz",
                                          "float8_e5m2",
                                          "float8_e5m2fnuz",
                                          "float8_e8m0fnu",
                                          "float6_e2m3fn",
                                          "float6_e3m2fn",
                                          "float4_e2m1fn"};

dtype_text array_dtype_text(const array *a)
{
    dtype_text t;
    const DLDataType d = a->dtype;
    if (d.code >= sizeof dtype_names / sizeof dtype_names[0])
        (void)snprintf(t.text, sizeof t.text, "DLPack type %d", (int)d.code);
    else if (d.code >= kDLBool) (void)snprintf(t.text, sizeof t.text, "%s", dtype_names[d.code]);
    else (void)snprintf(t.text, sizeof t.text, "%s%d", dtype_names[d.code], (int)d.bits);
    return t;
}

shape_text array_shape_text(const array *a)
{
    shape_text t;
    size_t at = 0;
    t.text[at++] = '(';
    for (int i = 0; i < a->ndim; i++)
        at += (size_t)snprintf(t.text + at, sizeof t.text - at, i ? ", %lld" : "%lld",
                               (long long)a->shape[i]);
    (void)snprintf(t.text + at, sizeof t.text - at, a->ndim == 1 ? ",)" : ")");
    return t;
}

bool array_is(const array *a, uint8_t code, uint8_t bits)
{
    return a->dtype.code == code && a->dtype.bits == bits && a->dtype.lanes == 1;
}

int64_t array_count(const array *a)
{
    int64_t count = 1;
    for (int axis = 0; axis < a->ndim; axis++) count *= a->shape[axis];
    return count;
}

bool array_has_rows(const array *a)
{
    return a->stride[a->ndim - 1] == 1 || a->shape[a->ndim - 1] == 1;
}

bool array_is_contiguous(const array *a, int from)
{
    int64_t step = 1;
    if (array_count(a) == 0) return true;
    for (int axis = a->ndim - 1; axis >= from; axis--) {
        if (a->shape[axis] > 1 && a->stride[axis] != step) return false;
        step *= a->shape[axis];
    }
    return true;
}

void array_release(array *a) { Py_CLEAR(a->owner); }

/* ---- Where an array is ----------------------------------------------------------------------- */

static const char *place_text(bool cuda, int32_t id, char text[24])
{
    if (cuda) (void)snprintf(text, 24, "cuda:%d", (int)id);
    else (void)snprintf(text, 24, "cpu");
    return text;
}

/* The first array of a call determines the location of all others. */
static int check_location(const char *name, DLDevice device, location *where)
{
    char here[24], there[24];
    bool host = device.device_type == kDLCPU || device.device_type == kDLCUDAHost;
    bool cuda = device.device_type == kDLCUDA || device.device_type == kDLCUDAManaged;
    if (!host && !cuda) {
        PyErr_Format(PyExc_ValueError,
                     "%s is on a device of DLPack type %d: expected the CPU (1) or CUDA (2)", name,
                     (int)device.device_type);
        return -1;
    }
    int32_t id = cuda ? device.device_id : 0;
    if (!where->known) {
        where->known = true, where->cuda = cuda, where->device_id = id;
        where->first = name;
        return 0;
    }
    if (where->cuda == cuda && where->device_id == id) return 0;
    PyErr_Format(PyExc_ValueError, "%s is on %s: expected %s, where %s is", name,
                 place_text(cuda, id, here), place_text(where->cuda, where->device_id, there),
                 where->first);
    return -1;
}

/* ---- From DLPack's structures to array ------------------------------------------------------- */

static int read_view(array *a, const DLTensor *t, location *where)
{
    if (t->ndim < 0 || t->ndim > AXES_MAX) {
        PyErr_Format(PyExc_ValueError, "%s.ndim is %d: expected at most %d", a->name, (int)t->ndim,
                     (int)AXES_MAX);
        return -1;
    }
    if (check_location(a->name, t->device, where) < 0) return -1;
    a->data = t->data ? (char *)t->data + t->byte_offset : NULL;
    a->dtype = t->dtype;
    a->ndim = t->ndim;
    int64_t step = 1;
    for (int axis = t->ndim - 1; axis >= 0; axis--) {
        a->shape[axis] = t->shape[axis];
        a->stride[axis] = t->strides ? t->strides[axis] : step;
        step *= t->shape[axis];
    }
    /* The library would treat an option without an address as not given. */
    if (a->data || array_count(a) == 0) return 0;
    PyErr_Format(PyExc_ValueError, "%s of shape %s has no memory: expected an array with data",
                 a->name, array_shape_text(a).text);
    return -1;
}

/* ---- Errors of other libraries --------------------------------------------------------------- */

static bool has_foreign_bytes(PyObject *object)
{
    PyObject *dtype = PyObject_GetAttr(object, name_dtype);
    PyObject *native = dtype ? PyObject_GetAttrString(dtype, "isnative") : NULL;
    const bool foreign = native == Py_False;
    Py_XDECREF(native);
    Py_XDECREF(dtype);
    PyErr_Clear();
    return foreign;
}

/* The first line of an error. PyTorch's errors continue with their place in its source code. A new
 * reference, or NULL. */
static PyObject *first_line(PyObject *error)
{
    PyObject *text = PyObject_Str(error);
    PyObject *parts = text ? PyObject_CallMethod(text, "partition", "s", "\n") : NULL;
    PyObject *line = parts ? PyTuple_GetItem(parts, 0) : NULL;
    Py_XINCREF(line);
    Py_XDECREF(parts);
    Py_XDECREF(text);
    PyErr_Clear();
    return line;
}

/* The library of an array explains why it does not export the array, but does not name the
 * argument. */
static void name_error(const char *name, PyObject *object)
{
    PyObject *type, *value, *trace;
    if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError))
        return;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *dtype = PyObject_GetAttr(object, name_dtype);
    PyErr_Clear();
    PyObject *why = first_line(value ? value : type);
    if (has_foreign_bytes(object))
        PyErr_Format(PyExc_ValueError, "%s.dtype is %S: expected this machine's byte order", name,
                     dtype);
    else
        PyErr_Format(PyExc_ValueError, "%s (%S, dtype %S) cannot be read through DLPack: %S", name,
                     (PyObject *)Py_TYPE(object), dtype ? dtype : Py_None, why ? why : type);
    Py_XDECREF(why);
    Py_XDECREF(dtype);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

/* ---- By the exchange table: creates no Python object ----------------------------------------- */

/* The table of a type, or NULL without an error. */
static const DLPackExchangeAPI *ask_for_exchange(PyTypeObject *type)
{
    PyObject *capsule = PyObject_GetAttr((PyObject *)type, name_exchange);
    const DLPackExchangeAPI *api = NULL;
    if (capsule) api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    /* The type holds a reference to the capsule, and the table lives as long as the process. */
    Py_XDECREF(capsule);
    if (!api) PyErr_Clear();
    if (api && (api->header.version.major != 1 || !api->dltensor_from_py_object_no_sync))
        return NULL;
    return api;
}

/* Set once, by array_keep_type. */
static PyTypeObject *kept_type;
static const DLPackExchangeAPI *kept_exchange;

void array_keep_type(PyObject *type)
{
    Py_INCREF(type);
    kept_exchange = ask_for_exchange((PyTypeObject *)type);
    kept_type = (PyTypeObject *)type;
}

/* Most calls have arrays of a single type. An array that has been read keeps its type alive. */
static const DLPackExchangeAPI *find_exchange(PyObject *object, location *where)
{
    if (Py_TYPE(object) == kept_type) return kept_exchange;
    if (Py_TYPE(object) != where->type) {
        where->exchange = ask_for_exchange(Py_TYPE(object));
        where->type = Py_TYPE(object);
    }
    return where->exchange;
}

static int read_by_exchange(array *a, PyObject *object, const DLPackExchangeAPI *api,
                            location *where)
{
    DLTensor view;
    if (api->dltensor_from_py_object_no_sync(object, &view) < 0) {
        name_error(a->name, object);
        return -1;
    }
    if (read_view(a, &view, where) < 0) return -1;
    if (where->cuda && !where->stream_known) {
        if (api->current_work_stream(kDLCUDA, where->device_id, &where->stream) < 0) return -1;
        where->stream_known = true;
    }
    Py_INCREF(object);
    a->owner = object;
    return 0;
}

/* ---- NumPy's arrays, by its array interface: three times as fast as its DLPack --------------- */

/* https://numpy.org/doc/stable/reference/arrays.interface.html: what the capsule __array_struct__
 * holds. */
typedef struct numpy_view {
    int two; /* always 2 */
    int axes;
    char kind;
    int item_size;
    int flags;
    intptr_t *shape, *strides; /* strides in bytes */
    void *data;
    PyObject *description;
} numpy_view;

enum { NUMPY_NATIVE_BYTES = 0x200, NUMPY_WRITEABLE = 0x400 };

/* False: an element type that must be read in another way, or not at all. */
static bool numpy_dtype(const numpy_view *n, DLDataType *dtype)
{
    static const struct {
        char kind;
        uint8_t code;
    } kinds[] = {{'f', kDLFloat}, {'i', kDLInt}, {'u', kDLUInt}, {'b', kDLBool}};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (kinds[i].kind != n->kind) continue;
        *dtype = (DLDataType){kinds[i].code, (uint8_t)(8 * n->item_size), 1};
        return n->item_size > 0 && n->item_size <= 16 && n->flags & NUMPY_NATIVE_BYTES;
    }
    return false;
}

/* False without an error: this array must be read by DLPack, which also explains errors. */
static bool copy_numpy_view(array *a, const numpy_view *n)
{
    if (n->two != 2 || n->axes < 0 || n->axes > AXES_MAX || !numpy_dtype(n, &a->dtype))
        return false;
    for (int axis = 0; axis < n->axes; axis++) {
        if (n->strides[axis] % n->item_size != 0) return false;
        a->shape[axis] = n->shape[axis];
        a->stride[axis] = n->strides[axis] / n->item_size;
    }
    a->data = n->data;
    a->ndim = n->axes;
    a->read_only = !(n->flags & NUMPY_WRITEABLE);
    return true;
}

/* 1: done; 0: by DLPack; -1: a Python error. */
static int read_numpy(array *a, PyObject *object, location *where)
{
    PyObject *capsule = PyObject_GetAttr(object, name_array_struct);
    if (!capsule) return -1;
    const numpy_view *n = PyCapsule_GetPointer(capsule, NULL);
    const int done = n ? copy_numpy_view(a, n) : -1;
    if (done == 1 && check_location(a->name, (DLDevice){kDLCPU, 0}, where) == 0) {
        a->owner = capsule;
        return 1;
    }
    Py_DECREF(capsule);
    return done == 0 ? 0 : -1;
}

bool array_is_numpy(PyObject *object) { return (PyObject *)Py_TYPE(object) == numpy_array_type; }

PyObject *array_tuple(int count, const int64_t *values)
{
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple && i < count; i++) {
        PyObject *number = PyLong_FromLongLong(values[i]);
        if (number) (void)PyTuple_SetItem(tuple, i, number);
        else Py_CLEAR(tuple);
    }
    return tuple;
}

PyObject *array_new_numpy(int axes, const int64_t *shape, PyObject *like)
{
    PyObject *sizes = array_tuple(axes, shape), *dtype = PyObject_GetAttr(like, name_dtype);
    PyObject *result = NULL;
    if (sizes && dtype) result = PyObject_CallFunctionObjArgs(numpy_empty, sizes, dtype, NULL);
    Py_XDECREF(sizes);
    Py_XDECREF(dtype);
    return result;
}

/* ---- By a capsule ---------------------------------------------------------------------------- */

static int get_device(PyObject *object, DLDevice *device)
{
    PyObject *pair = PyObject_CallMethodObjArgs(object, name_dlpack_device, NULL);
    if (!pair) return -1;
    if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
        PyErr_SetString(PyExc_TypeError, "__dlpack_device__() did not give a pair");
    } else {
        device->device_type = (int32_t)PyLong_AsLong(PyTuple_GetItem(pair, 0));
        device->device_id = (int32_t)PyLong_AsLong(PyTuple_GetItem(pair, 1));
    }
    Py_DECREF(pair);
    return PyErr_Occurred() ? -1 : 0;
}

/* {"stream": s, "max_version": (1, 0)}. The protocol calls the default stream of CUDA 1, not 0. */
static PyObject *make_cuda_keywords(const location *where)
{
    PyObject *keywords = PyDict_Copy(versioned_keywords);
    PyObject *stream = where->stream ? PyLong_FromVoidPtr(where->stream) : PyLong_FromLong(1);
    if (keywords && stream && PyDict_SetItemString(keywords, "stream", stream) == 0) {
        Py_DECREF(stream);
        return keywords;
    }
    Py_XDECREF(keywords);
    Py_XDECREF(stream);
    return NULL;
}

/* Producers from before DLPack 1.0 do not know max_version. */
static PyObject *call_dlpack(PyObject *method, PyObject *keywords)
{
    PyObject *capsule = PyObject_Call(method, no_arguments, keywords);
    if (capsule || !PyErr_ExceptionMatches(PyExc_TypeError)) return capsule;
    PyErr_Clear();
    PyObject *older = PyDict_Copy(keywords);
    if (!older) return NULL;
    if (PyDict_DelItemString(older, "max_version") == 0)
        capsule = PyObject_Call(method, no_arguments, older);
    Py_DECREF(older);
    return capsule;
}

static PyObject *get_capsule(const char *name, PyObject *object, location *where)
{
    PyObject *method = PyObject_GetAttr(object, name_dlpack);
    if (!method) {
        PyErr_Clear();
        PyObject *type = PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__name__");
        PyErr_Format(PyExc_TypeError,
                     "%s is of type %S: expected an array that speaks DLPack (__dlpack__), as "
                     "those of NumPy, PyTorch, CuPy and JAX do",
                     name, type ? type : Py_None);
        Py_XDECREF(type);
        return NULL;
    }
    PyObject *capsule = NULL;
    DLDevice device = {kDLCPU, 0};
    /* NumPy's arrays are in host memory, so their device need not be queried. */
    bool known = array_is_numpy(object);
    if (known || get_device(object, &device) == 0) {
        bool cuda = device.device_type == kDLCUDA || device.device_type == kDLCUDAManaged;
        PyObject *keywords = versioned_keywords;
        if (cuda) keywords = make_cuda_keywords(where);
        else Py_INCREF(keywords);
        if (keywords) capsule = call_dlpack(method, keywords);
        Py_XDECREF(keywords);
    }
    if (!capsule) name_error(name, object);
    Py_DECREF(method);
    return capsule;
}

/* The capsule keeps its name, so that its own destructor frees its contents when we release it. */
static int read_capsule(array *a, PyObject *capsule, location *where)
{
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        DLManagedTensorVersioned *m = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (m->version.major != 1) {
            PyErr_Format(PyExc_BufferError, "%s speaks DLPack %u.%u: expected version 1", a->name,
                         (unsigned)m->version.major, (unsigned)m->version.minor);
            return -1;
        }
        a->read_only = m->flags & DLPACK_FLAG_BITMASK_READ_ONLY;
        return read_view(a, &m->dl_tensor, where);
    }
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        DLManagedTensor *m = PyCapsule_GetPointer(capsule, "dltensor");
        return read_view(a, &m->dl_tensor, where);
    }
    PyErr_Format(PyExc_TypeError, "%s.__dlpack__() did not give a DLPack capsule", a->name);
    return -1;
}

/* NumPy exports masked elements as if they were not masked. */
static bool is_masked(PyObject *object)
{
    return numpy_masked_type && PyObject_IsInstance(object, numpy_masked_type) == 1;
}

static int read_by_capsule(array *a, PyObject *object, location *where)
{
    if (is_masked(object)) {
        PyErr_Format(PyExc_TypeError,
                     "%s is a masked array of NumPy: expected a plain one, as filled() gives",
                     a->name);
        return -1;
    }
    PyObject *capsule = get_capsule(a->name, object, where);
    if (!capsule) return -1;
    if (read_capsule(a, capsule, where) < 0) {
        Py_DECREF(capsule);
        return -1;
    }
    a->owner = capsule;
    return 0;
}

/* ---- Arrays that refuse to be exported ------------------------------------------------------- */

/* Element types that NumPy only knows from ml_dtypes, which its DLPack does not export. */
static const struct {
    const char *name, *bits;
    DLDataType dtype;
} foreign[] = {
    {"bfloat16", "uint16", {kDLBfloat, 16, 1}},
    {"float8_e4m3fn", "uint8", {kDLFloat8_e4m3fn, 8, 1}},
};

static int find_foreign(PyObject *object)
{
    int found = -1;
    PyObject *dtype = PyObject_GetAttrString(object, "dtype");
    PyObject *name = dtype ? PyObject_Str(dtype) : NULL;
    PyErr_Clear();
    for (int i = 0; name && i < (int)(sizeof foreign / sizeof foreign[0]); i++)
        if (PyUnicode_CompareWithASCIIString(name, foreign[i].name) == 0) found = i;
    Py_XDECREF(dtype);
    Py_XDECREF(name);
    return found;
}

/* The same memory in a form that can be exported, or NULL without an error. *dtype: the actual type
 * of the elements, if bits is not 0. */
static PyObject *exportable(PyObject *object, DLDataType *dtype)
{
    PyObject *result = NULL;
    dtype->bits = 0;
    if (array_is_numpy(object)) {
        int kind = find_foreign(object);
        if (kind < 0) return NULL;
        *dtype = foreign[kind].dtype;
        result = PyObject_CallMethod(object, "view", "s", foreign[kind].bits);
    } else {
        PyObject *flag = PyObject_GetAttr(object, name_requires_grad);
        if (flag && PyObject_IsTrue(flag) == 1)
            result = PyObject_CallMethod(object, "detach", NULL);
        Py_XDECREF(flag);
    }
    PyErr_Clear();
    return result;
}

static int read_as_it_is(array *a, PyObject *object, location *where)
{
    if (array_is_numpy(object)) {
        const int done = read_numpy(a, object, where);
        return done ? (done < 0 ? -1 : 0) : read_by_capsule(a, object, where);
    }
    const DLPackExchangeAPI *api = find_exchange(object, where);
    return api ? read_by_exchange(a, object, api, where) : read_by_capsule(a, object, where);
}

int array_read(array *a, const char *name, PyObject *object, location *where)
{
    PyObject *type, *value, *trace;
    DLDataType dtype;
    memset(a, 0, sizeof *a);
    a->name = name;
    if (read_as_it_is(a, object, where) == 0) return 0;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *other = exportable(object, &dtype);
    if (!other) {
        PyErr_Restore(type, value, trace);
        return -1;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    int status = read_as_it_is(a, other, where);
    Py_DECREF(other);
    if (status == 0 && dtype.bits) a->dtype = dtype;
    return status;
}

int array_module_init(void)
{
    PyObject *numpy = PyImport_ImportModule("numpy");
    if (!numpy) return -1;
    numpy_array_type = PyObject_GetAttrString(numpy, "ndarray");
    numpy_empty = PyObject_GetAttrString(numpy, "empty");
    Py_DECREF(numpy);
    PyObject *masked = PyImport_ImportModule("numpy.ma");
    numpy_masked_type = masked ? PyObject_GetAttrString(masked, "MaskedArray") : NULL;
    Py_XDECREF(masked);
    no_arguments = PyTuple_New(0);
    versioned_keywords = Py_BuildValue("{s(ii)}", "max_version", 1, 0);
    name_dlpack = PyUnicode_InternFromString("__dlpack__");
    name_dlpack_device = PyUnicode_InternFromString("__dlpack_device__");
    name_exchange = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    name_array_struct = PyUnicode_InternFromString("__array_struct__");
    name_requires_grad = PyUnicode_InternFromString("requires_grad");
    name_dtype = PyUnicode_InternFromString("dtype");
    return PyErr_Occurred() ? -1 : 0;
}
