/*
 * The ladder of teaching kernels (ladder/), for Python. flashattn.torch calls this.
 */
#ifndef FLASHATTN_PYTHON_LADDER_CALL_H
#define FLASHATTN_PYTHON_LADDER_CALL_H

#include "options.h"

/* ladder(name, q, k, v, out, causal, scale, stream, allocate, /): runs a rung. Arrays of three or
 * four axes ([batch,] heads, n, d) of one shape and type, aligned to 256 bytes; rows are a multiple
 * of 16 bytes apart, without other gaps. stream: None or an address. allocate(bytes, q). */
PyObject *core_ladder(PyObject *self, PyObject *const *args, Py_ssize_t count);

/* ladder_rungs(): a list of dictionaries, in the order of the ladder. */
PyObject *core_ladder_rungs(PyObject *self, PyObject *none);

#endif
