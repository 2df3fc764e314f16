/*
 * Handlers for XLA's foreign function interface, in plain C: JAX programs call the library without
 * Python. flashattn/jax.py registers them and defines what it passes:
 *
 *     forward   q, k, v, arrays...                         -> out, lse
 *     backward  q, k, v, out, lse, dout, dlse, arrays...   -> dq, dk, dv [, dbias] [, dsinks]
 *
 * for XLA's platform "cpu", and the same for "CUDA", where arrays are on the GPU and the work is
 * queued on XLA's stream. The attributes are `arrays` (the options that the further arrays are:
 * enum option_array), `integers` (enum integer) and `floats` (enum number). Arrays are in C order;
 * jax.py has checked shapes.
 *
 * The structures below are the part of XLA's binary interface that is needed here (major version 0,
 * which XLA checks when a handler is registered). They are declared here, because the header comes
 * with JAX, which a build of this package does not need. If the header is found, they are compared
 * with it.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "dbias_workspace.h"
#include "flashattn.h"

#if defined(__GNUC__) || defined(__clang__)
#define EXPORTED __attribute__((visibility("default")))
#else
#define EXPORTED
#endif

/* ---- XLA's binary interface ------------------------------------------------------------------ */

enum { XLA_MAJOR = 0, XLA_MINOR = 1 };
enum { XLA_STAGE_EXECUTE = 3, XLA_EXTENSION_METADATA = 1 };
enum {
    XLA_INVALID_ARGUMENT = 3,
    XLA_RESOURCE_EXHAUSTED = 8,
    XLA_UNIMPLEMENTED = 12,
    XLA_INTERNAL = 13
};
enum { XLA_PRED = 1, XLA_F16 = 10, XLA_F32 = 11, XLA_BF16 = 16 };

typedef struct xla_error xla_error; /* XLA's own type */

typedef struct xla_extension {
    size_t size;
    int type;
    struct xla_extension *next;
} xla_extension;

typedef struct xla_version {
    size_t size;
    xla_extension *extensions;
    int major, minor;
} xla_version;

typedef struct xla_metadata {
    size_t size;
    xla_version version;
    uint32_t traits;
} xla_metadata;

typedef struct xla_metadata_extension {
    xla_extension base;
    xla_metadata *metadata;
} xla_metadata_extension;

typedef struct xla_error_arguments {
    size_t size;
    xla_extension *extensions;
    const char *message;
    int code;
} xla_error_arguments;

typedef struct xla_stream_arguments {
    size_t size;
    xla_extension *extensions;
    void *context;
    void *stream; /* result: a CUstream */
} xla_stream_arguments;

/* Device memory. For an allocation, `data` is the result; to free it, there is no alignment. */
typedef struct xla_allocate_arguments {
    size_t size;
    xla_extension *extensions;
    void *context;
    size_t bytes;
    size_t alignment;
    void *data;
} xla_allocate_arguments;

typedef struct xla_free_arguments {
    size_t size;
    xla_extension *extensions;
    void *context;
    size_t bytes;
    void *data;
} xla_free_arguments;

typedef struct xla_api {
    size_t size;
    xla_extension *extensions;
    xla_version version;
    const void *internal;
    xla_error *(*create_error)(xla_error_arguments *);
    void (*not_used_1[3])(void);
    xla_error *(*get_stream)(xla_stream_arguments *);
    void (*not_used_2[4])(void);
    xla_error *(*allocate)(xla_allocate_arguments *);
    xla_error *(*free)(xla_free_arguments *);
} xla_api;

typedef struct xla_buffer {
    size_t size;
    xla_extension *extensions;
    int dtype;
    void *data;
    int64_t rank;
    int64_t *shape;
} xla_buffer;

typedef struct xla_array {
    int dtype;
    size_t count;
    void *data;
} xla_array;

typedef struct xla_text {
    const char *data;
    size_t length;
} xla_text;

/* Arguments and results have the same layout. */
typedef struct xla_buffers {
    size_t size;
    xla_extension *extensions;
    int64_t count;
    int *types;
    xla_buffer **buffers;
} xla_buffers;

typedef struct xla_attributes {
    size_t size;
    xla_extension *extensions;
    int64_t count;
    int *types;
    xla_text **names; /* in alphabetical order */
    void **values;
} xla_attributes;

typedef struct xla_frame {
    size_t size;
    xla_extension *extensions;
    const xla_api *api;
    void *context;
    int stage;
    xla_buffers arguments;
    xla_buffers results;
    xla_attributes attributes;
} xla_frame;

#if defined(__has_include)
#if __has_include("xla/ffi/api/c_api.h")
#include "xla/ffi/api/c_api.h"
#define SAME(ours, theirs, field, theirs_field)                                                    \
    _Static_assert(offsetof(ours, field) == offsetof(theirs, theirs_field), #field)
SAME(xla_frame, XLA_FFI_CallFrame, api, api);
SAME(xla_frame, XLA_FFI_CallFrame, stage, stage);
SAME(xla_frame, XLA_FFI_CallFrame, arguments, args);
SAME(xla_frame, XLA_FFI_CallFrame, results, rets);
SAME(xla_frame, XLA_FFI_CallFrame, attributes, attrs);
SAME(xla_buffers, XLA_FFI_Args, buffers, args);
SAME(xla_buffers, XLA_FFI_Rets, buffers, rets);
SAME(xla_attributes, XLA_FFI_Attrs, values, attrs);
SAME(xla_buffer, XLA_FFI_Buffer, dtype, dtype);
SAME(xla_buffer, XLA_FFI_Buffer, data, data);
SAME(xla_buffer, XLA_FFI_Buffer, shape, dims);
SAME(xla_array, XLA_FFI_Array, data, data);
SAME(xla_api, XLA_FFI_Api, create_error, XLA_FFI_Error_Create);
SAME(xla_api, XLA_FFI_Api, get_stream, XLA_FFI_Stream_Get);
SAME(xla_api, XLA_FFI_Api, allocate, XLA_FFI_DeviceMemory_Allocate);
SAME(xla_api, XLA_FFI_Api, free, XLA_FFI_DeviceMemory_Free);
SAME(xla_stream_arguments, XLA_FFI_Stream_Get_Args, stream, stream);
SAME(xla_allocate_arguments, XLA_FFI_DeviceMemory_Allocate_Args, data, data);
SAME(xla_free_arguments, XLA_FFI_DeviceMemory_Free_Args, data, data);
SAME(xla_frame, XLA_FFI_CallFrame, context, ctx);
SAME(xla_error_arguments, XLA_FFI_Error_Create_Args, code, errc);
SAME(xla_metadata_extension, XLA_FFI_Metadata_Extension, metadata, metadata);
SAME(xla_metadata, XLA_FFI_Metadata, version, api_version);
SAME(xla_metadata, XLA_FFI_Metadata, traits, traits);
_Static_assert(XLA_FFI_API_MAJOR == XLA_MAJOR, "another binary interface");
#endif
#endif

/* ---- Arguments from jax.py ------------------------------------------------------------------- */

enum attribute { ARRAYS, FLOATS, INTEGERS, ATTRIBUTE_COUNT };

enum integer {
    BHSD,
    FLAGS,
    DIAGONAL,
    LEFT,
    RIGHT,
    MAX_Q,
    MAX_K,
    THREADS,
    PRECISION,
    INTEGER_COUNT
};

enum number { SCALE, SOFTCAP, DROPOUT_P, NUMBER_COUNT };

enum option_array {
    BIAS,
    SINKS,
    MASK,
    ALIBI_SLOPES,
    DROPOUT_STATE,
    CU_SEQLENS_Q,
    CU_SEQLENS_K,
    SEQLENS_Q,
    SEQLENS_K,
    BLOCK_TABLE,
    OPTION_ARRAY_COUNT
};

typedef struct call {
    const xla_frame *frame;
    const int64_t *integers;
    fa_tensor q, k, v, bias, mask;
    bool has_bias, has_sinks;
    fa_options options;
} call;

static xla_error *fail(const xla_frame *frame, int code, const char *message)
{
    xla_error_arguments arguments = {
        .size = sizeof arguments,
        .message = message,
        .code = code,
    };
    return frame->api->create_error(&arguments);
}

static xla_error *finish(const xla_frame *frame, fa_status status)
{
    switch (status) {
    case FA_OK: return NULL;
    case FA_ERROR_ARGUMENT: return fail(frame, XLA_INVALID_ARGUMENT, fa_last_error());
    case FA_ERROR_UNSUPPORTED: return fail(frame, XLA_UNIMPLEMENTED, fa_last_error());
    case FA_ERROR_MEMORY: return fail(frame, XLA_RESOURCE_EXHAUSTED, fa_last_error());
    default: return fail(frame, XLA_INTERNAL, fa_last_error());
    }
}

static fa_dtype dtype_of(const xla_buffer *buffer)
{
    switch (buffer->dtype) {
    case XLA_F32: return FA_FLOAT32;
    case XLA_F16: return FA_FLOAT16;
    case XLA_BF16: return FA_BFLOAT16;
    case XLA_PRED: return FA_BOOL;
    default: return (fa_dtype)-1; /* the library's error names the argument */
    }
}

/* Any array with up to four axes; missing leading axes have the extent 1. */
static fa_tensor tensor_of(const xla_buffer *buffer)
{
    fa_tensor t = {.data = buffer->data, .dtype = dtype_of(buffer)};
    int64_t stride = 1;
    for (int axis = 3; axis >= 0; axis--) {
        int64_t from = axis - 4 + buffer->rank;
        t.shape[axis] = from >= 0 ? buffer->shape[from] : 1;
        t.stride[axis] = stride;
        stride *= t.shape[axis];
    }
    return t;
}

static void swap(int64_t *a, int64_t *b)
{
    int64_t first = *a;
    *a = *b;
    *b = first;
}

/* An array in the caller's layout, as (batch, sequence, head, dim). */
static fa_tensor rows_of(const call *c, const xla_buffer *buffer)
{
    fa_tensor t = tensor_of(buffer);
    if (c->integers[BHSD]) {
        swap(&t.shape[1], &t.shape[2]);
        swap(&t.stride[1], &t.stride[2]);
    }
    return t;
}

static fa_tensor argument(const call *c, int64_t index)
{
    return rows_of(c, c->frame->arguments.buffers[index]);
}

static fa_tensor result(const call *c, int64_t index)
{
    return rows_of(c, c->frame->results.buffers[index]);
}

/* Bias and mask: a copy in memory, in which axes of extent 1 broadcast. */
static void set_scores(fa_tensor *t, const fa_tensor **option, const xla_buffer *buffer)
{
    *t = tensor_of(buffer);
    *option = t;
}

static void set_array(call *c, int64_t which, const xla_buffer *buffer)
{
    fa_options *o = &c->options;
    int64_t last = buffer->rank > 0 ? buffer->shape[buffer->rank - 1] : 1;
    switch ((enum option_array)which) {
    case BIAS: set_scores(&c->bias, &o->bias, buffer), c->has_bias = true; break;
    case SINKS: o->sinks = buffer->data, c->has_sinks = true; break;
    case MASK: set_scores(&c->mask, &o->mask, buffer); break;
    case ALIBI_SLOPES:
        o->alibi_slopes = buffer->data;
        o->alibi_batch_stride = buffer->rank > 1 ? last : 0;
        break;
    case DROPOUT_STATE: o->dropout_state = buffer->data; break;
    case CU_SEQLENS_Q: o->cu_seqlens_q = buffer->data, o->num_sequences = last - 1; break;
    case CU_SEQLENS_K: o->cu_seqlens_k = buffer->data, o->num_sequences = last - 1; break;
    case SEQLENS_Q: o->seqlens_q = buffer->data; break;
    case SEQLENS_K: o->seqlens_k = buffer->data; break;
    case BLOCK_TABLE: o->block_table = buffer->data, o->block_table_stride = last; break;
    case OPTION_ARRAY_COUNT: break;
    }
}

static void set_numbers(fa_options *o, const int64_t *integers, const float *numbers)
{
    o->size = sizeof *o;
    o->flags = (uint32_t)integers[FLAGS];
    o->diagonal = integers[DIAGONAL];
    o->window_left = integers[LEFT];
    o->window_right = integers[RIGHT];
    o->max_seqlen_q = integers[MAX_Q];
    o->max_seqlen_k = integers[MAX_K];
    o->threads = (int32_t)integers[THREADS];
    o->precision = (fa_precision)integers[PRECISION];
    o->scale = numbers[SCALE];
    o->softcap = numbers[SOFTCAP];
    o->dropout_p = numbers[DROPOUT_P];
}

/* jax.py and this file belong to one package: a difference means a broken installation. */
static bool is_call(const xla_frame *frame, int64_t tensors, int64_t results)
{
    const xla_attributes *a = &frame->attributes;
    if (a->count != ATTRIBUTE_COUNT || frame->results.count < results) return false;
    const xla_array *arrays = a->values[ARRAYS];
    const xla_array *numbers = a->values[FLOATS], *integers = a->values[INTEGERS];
    return frame->arguments.count == tensors + (int64_t)arrays->count &&
           numbers->count == NUMBER_COUNT && integers->count == INTEGER_COUNT;
}

/* False: not a call that jax.py makes. tensors, results: the minimum numbers of each. */
static bool read_call(call *c, const xla_frame *frame, int64_t tensors, int64_t results)
{
    memset(c, 0, sizeof *c);
    if (!is_call(frame, tensors, results)) return false;
    c->frame = frame;
    const xla_array *arrays = frame->attributes.values[ARRAYS];
    const xla_array *numbers = frame->attributes.values[FLOATS];
    const xla_array *integers = frame->attributes.values[INTEGERS];
    c->integers = integers->data;
    set_numbers(&c->options, integers->data, numbers->data);
    const int64_t *which = arrays->data;
    for (int64_t i = 0; i < (int64_t)arrays->count; i++)
        set_array(c, which[i], frame->arguments.buffers[tensors + i]);
    c->q = argument(c, 0);
    c->k = argument(c, 1);
    c->v = argument(c, 2);
    return true;
}

/* XLA first queries the version of the interface that a handler was made for. Only members that
 * every minor version has are used, so the result is the caller's own version. */
static bool is_metadata_query(const xla_frame *frame)
{
    if (!frame->extensions || frame->extensions->type != XLA_EXTENSION_METADATA) return false;
    xla_metadata *metadata = ((xla_metadata_extension *)frame->extensions)->metadata;
    bool known = frame->api && frame->api->version.major == XLA_MAJOR;
    metadata->version.major = XLA_MAJOR;
    metadata->version.minor = known ? frame->api->version.minor : XLA_MINOR;
    metadata->traits = 0;
    return true;
}

static const char *const not_from_here =
    "flashattn: the arguments are not those of this version's flashattn.jax: install it again";

/* ---- CUDA ------------------------------------------------------------------------------------ */

/* What a call needs on its device. */
typedef struct device_work {
    fa_pass pass;
    fa_tensor out;
    float *lse;
    fa_gradients gradients;
    void *memory; /* XLA's memory for workspace, or NULL */
    size_t bytes; /* of it */
} device_work;

/* XLA aligns only to 16 bytes; the library needs 256. */
enum { XLA_ALIGNMENT = 16, WORKSPACE_ALIGNMENT = 256 };

static xla_error *use_stream(call *c)
{
    xla_stream_arguments a = {.size = sizeof a, .context = c->frame->context};
    xla_error *error = c->frame->api->get_stream(&a);
    c->options.stream = a.stream;
    return error;
}

/* XLA's device memory, until the queued call has run: XLA reuses it in the stream's order. */
static xla_error *allocate_workspace(call *c, device_work *w)
{
    const xla_frame *frame = c->frame;
    size_t needed;
    fa_status status =
        fa_workspace_size(w->pass, &c->q, &c->k, &c->v, &w->out, &c->options, &needed);
    if (status != FA_OK || needed == 0) return finish(frame, status);
    needed += dbias_workspace(&c->q, &w->gradients.dbias, &c->options);
    w->bytes = needed + WORKSPACE_ALIGNMENT - XLA_ALIGNMENT;
    xla_allocate_arguments a = {
        .size = sizeof a, .context = frame->context, .bytes = w->bytes, .alignment = XLA_ALIGNMENT};
    xla_error *error = frame->api->allocate(&a);
    if (error) return error;
    w->memory = a.data;
    const size_t skipped =
        (WORKSPACE_ALIGNMENT - (uintptr_t)a.data % WORKSPACE_ALIGNMENT) % WORKSPACE_ALIGNMENT;
    c->options.workspace = (char *)a.data + skipped;
    c->options.workspace_size = needed;
    return NULL;
}

static xla_error *free_workspace(const call *c, const device_work *w)
{
    xla_free_arguments a = {
        .size = sizeof a, .context = c->frame->context, .bytes = w->bytes, .data = w->memory};
    return w->memory ? c->frame->api->free(&a) : NULL;
}

/* ---- The handlers ---------------------------------------------------------------------------- */

static fa_status run(const call *c, const device_work *w)
{
    if (w->pass == FA_PASS_FORWARD)
        return fa_forward(&c->q, &c->k, &c->v, &w->out, w->lse, &c->options);
    return fa_backward(&c->q, &c->k, &c->v, &w->out, w->lse, &w->gradients, &c->options);
}

static xla_error *run_on(fa_device device, call *c, device_work *w)
{
    xla_error *error = NULL;
    c->options.device = device;
    if (device == FA_DEVICE_CPU) return finish(c->frame, run(c, w));
    if ((error = use_stream(c)) || (error = allocate_workspace(c, w))) return error;
    error = finish(c->frame, run(c, w));
    xla_error *other = free_workspace(c, w);
    return error ? error : other;
}

static xla_error *forward(fa_device device, xla_frame *frame)
{
    call c;
    if (is_metadata_query(frame) || frame->stage != XLA_STAGE_EXECUTE) return NULL;
    if (!read_call(&c, frame, 3, 2)) return fail(frame, XLA_INTERNAL, not_from_here);
    device_work w = {
        .pass = FA_PASS_FORWARD, .out = result(&c, 0), .lse = frame->results.buffers[1]->data};
    return run_on(device, &c, &w);
}

static xla_error *backward(fa_device device, xla_frame *frame)
{
    enum { OUT = 3, LSE, DOUT, DLSE, TENSORS };
    call c;
    if (is_metadata_query(frame) || frame->stage != XLA_STAGE_EXECUTE) return NULL;
    if (!read_call(&c, frame, TENSORS, 3)) return fail(frame, XLA_INTERNAL, not_from_here);
    device_work w = {.pass = FA_PASS_BACKWARD,
                     .out = argument(&c, OUT),
                     .lse = frame->arguments.buffers[LSE]->data};
    w.gradients = (fa_gradients){
        .size = sizeof w.gradients,
        .dout = argument(&c, DOUT),
        .dlse = frame->arguments.buffers[DLSE]->data,
        .dq = result(&c, 0),
        .dk = result(&c, 1),
        .dv = result(&c, 2),
    };
    int64_t next = 3;
    if (frame->results.count != next + c.has_bias + c.has_sinks)
        return fail(frame, XLA_INTERNAL, not_from_here);
    if (c.has_bias) w.gradients.dbias = tensor_of(frame->results.buffers[next++]);
    if (c.has_sinks) w.gradients.dsinks = frame->results.buffers[next]->data;
    return run_on(device, &c, &w);
}

EXPORTED xla_error *fa_xla_forward(xla_frame *frame);
EXPORTED xla_error *fa_xla_backward(xla_frame *frame);
EXPORTED xla_error *fa_xla_forward_cuda(xla_frame *frame);
EXPORTED xla_error *fa_xla_backward_cuda(xla_frame *frame);

xla_error *fa_xla_forward(xla_frame *frame) { return forward(FA_DEVICE_CPU, frame); }

xla_error *fa_xla_backward(xla_frame *frame) { return backward(FA_DEVICE_CPU, frame); }

xla_error *fa_xla_forward_cuda(xla_frame *frame) { return forward(FA_DEVICE_CUDA, frame); }

xla_error *fa_xla_backward_cuda(xla_frame *frame) { return backward(FA_DEVICE_CUDA, frame); }
