/*
 * Calls with PyTorch tensors that need nothing but a result. The test for such calls and the
 * allocation of results are in C, to keep the overhead of a small call low. flashattn.torch passes
 * the functions to call once; all other calls go through it.
 */
#ifndef FLASHATTN_PYTHON_TORCH_CALL_H
#define FLASHATTN_PYTHON_TORCH_CALL_H

#include "options.h"

/* use_torch(Tensor, Parameter, requires_grad, is_nested, is_neg, forward_ad, profiler,
 * dispatch_modes, function_modes, grad_enabled, determinism, is_ordinary, kind_of, count_write,
 * current_device, empty_cpu, empty_cuda, float32, float16, bfloat16, allocate, /). */
PyObject *core_use_torch(PyObject *self, PyObject *const *args, Py_ssize_t count);

/* mark_thread(only_device, /): this thread has a current CUDA context. only_device: whether PyTorch
 * knows no other device. */
PyObject *core_mark_thread(PyObject *self, PyObject *only);

/* Whether q, k and v (three objects) are plain tensors, and there are no gradients, transforms,
 * modes, tracing, profiler or autocast. False before use_torch. No error is set. */
bool torch_is_plain(PyObject *const *qkv);

/* Whether an option of a call with plain tensors can be read as it is: it is not a tensor, or a
 * tensor without wrappers, gradients or a view that only PyTorch can read. No error is set. */
bool torch_is_plain_argument(PyObject *object);

/* The same for out, which must be a tensor. */
bool torch_is_plain_out(PyObject *object);

/* Tells autograd that a tensor was written to. -1 with a Python error. */
int torch_count_write(PyObject *tensor);

/* Whether the library can use the arrays q, k and v as they are, in this thread. No error is
 * set. */
bool torch_can_work(const call *c);

/* Device memory for workspace: allocate(bytes, q), borrowed. */
PyObject *torch_allocator(void);

/* A new tensor (batch, ...) like q, with its type and memory order, and with v's last axis. */
PyObject *torch_new_out(const call *c);

/* A new float32 tensor (batch, heads, n_q), or (heads, n_q) if q has no batch. */
PyObject *torch_new_lse(const call *c);

#endif
