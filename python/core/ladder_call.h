/*
 * The ladder of teaching kernels (ladder/), for Python: flashattn.torch stands before it.
 */
#ifndef FLASHATTN_PYTHON_LADDER_CALL_H
#define FLASHATTN_PYTHON_LADDER_CALL_H

#include "options.h"

/* ladder(name, q, k, v, out, causal, scale, stream, allocate, /): runs a rung. Arrays of three or four
 * axes ([batch,] heads, n, d) of one shape and type, rows 16 bytes or a multiple apart and nothing
 * else between them, aligned to 256 bytes. stream: None or an address. allocate(bytes, q). */
PyObject *core_ladder(PyObject *self, PyObject *const *args, Py_ssize_t count);

/* ladder_rungs(): a list of dictionaries, from the bottom up. */
PyObject *core_ladder_rungs(PyObject *self, PyObject *none);

#endif
