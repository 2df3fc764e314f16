/*
 * fa_append, for Python.
 */
#ifndef FLASHATTN_PYTHON_APPEND_CALL_H
#define FLASHATTN_PYTHON_APPEND_CALL_H

#include "options.h"

/* append(k_new, v_new, k_cache, v_cache, layout, /, **options): writes the new keys and values to
 * the cache, with the options of fa_append_options: lengths, left_padding, cache_index,
 * cu_seqlens_new, cu_seqlens_q, seqlens_new, seqlens_q, block_table, cos, sin (positions, r/2),
 * rotary_offset, rotary_positions, queries, queries_out, k_scale, v_scale, lengths_after,
 * block_table_after, row_table_after, cu_seqlens_after, interleaved, one_position, write_scales,
 * lengths_with_padding, threads, stream; allocate has no effect. Packed rows have no axis for the
 * batch. */
PyObject *core_append(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names);

#endif
