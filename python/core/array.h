/*
 * Arrays of other libraries, read through DLPack without copying.
 */
#ifndef FLASHATTN_PYTHON_ARRAY_H
#define FLASHATTN_PYTHON_ARRAY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "dlpack.h"
#include "flashattn.h"

/* fa_tensor has no more axes. */
enum { AXES_MAX = 4 };

/* One array: where its elements are, and the owner of their memory. */
typedef struct array {
    const char *name; /* for errors */
    void *data;
    DLDataType dtype;
    int ndim;
    int64_t shape[AXES_MAX];
    int64_t stride[AXES_MAX]; /* in elements */
    bool read_only;
    PyObject *owner; /* a new reference that holds the memory, or NULL */
} array;

/* The common location of all arrays of one call. */
typedef struct location {
    bool known;
    bool cuda;
    int32_t device_id;
    bool stream_known;
    /* With CUDA: the stream on which the call runs and on which the arrays must be ready. */
    void *stream;
    const char *first; /* the array that determined it */
    /* Of the array read last, which holds a reference to it; and that type's exchange table. */
    PyTypeObject *type;
    const DLPackExchangeAPI *exchange;
} location;

/* Looks up objects that are needed repeatedly. -1 with a Python error. */
int array_module_init(void);

/* Remembers how to read arrays of the type that most calls have, and holds a reference to the
 * type. */
void array_keep_type(PyObject *type);

/* Reads `object`. -1 with a Python error. On success array_release must follow. */
int array_read(array *a, const char *name, PyObject *object, location *where);

void array_release(array *a);

/* Whether it is a numpy.ndarray, and not of a derived class. */
bool array_is_numpy(PyObject *object);

/* A new numpy.ndarray in C order, of the type of `like`'s elements. */
PyObject *array_new_numpy(int axes, const int64_t *shape, PyObject *like);

/* A tuple of integers. */
PyObject *array_tuple(int count, const int64_t *values);

/* The name of an element type in errors, for example "float64". */
typedef struct dtype_text {
    char text[24];
} dtype_text;

dtype_text array_dtype_text(const array *a);

/* A shape in errors, for example "(2, 3)". */
typedef struct shape_text {
    char text[AXES_MAX * 22 + 3];
} shape_text;

shape_text array_shape_text(const array *a);

bool array_is(const array *a, uint8_t code, uint8_t bits);

/* The number of elements. The array exists, so this cannot overflow. */
int64_t array_count(const array *a);

/* Whether the elements of the last axis are contiguous. */
bool array_has_rows(const array *a);

/* Whether the axes from `from` on are in C order without gaps. */
bool array_is_contiguous(const array *a, int from);

#endif
