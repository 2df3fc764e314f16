/*
 * Tensors of PyTorch of which nothing is asked but a result: the test for that and the allocation
 * of results, in C, since a small call should cost no more than it must. flashattn.torch says once
 * what is called; all else goes through it.
 */
#ifndef FLASHATTN_PYTHON_TORCH_CALL_H
#define FLASHATTN_PYTHON_TORCH_CALL_H

#include "options.h"

/* use_torch(Tensor, Parameter, requires_grad, is_nested, is_neg, forward_ad, profiler, dispatch_modes,
 * function_modes, grad_enabled, determinism, is_ordinary, kind_of, count_write, current_device,
 * empty_cpu, empty_cuda, float32, float16, bfloat16, allocate, /). */
PyObject *core_use_torch(PyObject *self, PyObject *const *args, Py_ssize_t count);

/* mark_thread(only_device, /): this thread has a current CUDA context; whether PyTorch knows no other
 * device than the one. */
PyObject *core_mark_thread(PyObject *self, PyObject *only);

/* Whether q, k and v (three objects) are plain tensors, and neither gradients, transforms, modes,
 * tracing, a profiler nor autocast stand in the way. False before use_torch. No error is set. */
bool torch_is_plain(PyObject *const *qkv);

/* Whether an option, given beside plain tensors, can be read as it lies: no tensor, or one without
 * wrappers, gradients or a view that only PyTorch can read. No error is set. */
bool torch_is_plain_argument(PyObject *object);

/* The same of out, which must be a tensor. */
bool torch_is_plain_out(PyObject *object);

/* Tells autograd that a tensor was written to. -1 with a Python error. */
int torch_count_write(PyObject *tensor);

/* Whether the library can work with the arrays q, k and v as they lie, in this thread. No error is
 * set. */
bool torch_can_work(const call *c);

/* Device memory for workspace: allocate(bytes, q), borrowed. */
PyObject *torch_allocator(void);

/* A new tensor (batch, ...) as q, of its type and in its order in memory, with v's last axis. */
PyObject *torch_new_out(const call *c);

/* A new tensor float32 (batch, heads, n_q), or (heads, n_q) where q has no batch. */
PyObject *torch_new_lse(const call *c);

#endif
