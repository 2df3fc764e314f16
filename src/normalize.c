/*
 * Checks of the caller's arguments, and the fa_problem that is made from them.
 *
 * In this order: single tensors, aliasing, options, shapes, lengths, bias and mask, gradients, weights,
 * the whole problem, and combine.
 */
#include "normalize.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../kernels/check/check.h"
#include "error.h"

/* Largest extent. Leaves room for sums of positions and a diagonal in 64 bits, see mask.h. */
#define EXTENT_MAX ((int64_t)1 << 60)
#define DIAGONAL_MAX ((int64_t)1 << 62)
#define HEAD_DIM_MAX 512

/* ---- Single tensors -------------------------------------------------------------------------- */

/* What a tensor is used for decides which dtypes and strides are legal. */
typedef enum role {
    ROLE_INPUT,    /* q, k, v             */
    ROLE_RESULT,   /* out, or dout: read  */
    ROLE_OUTPUT,   /* written             */
    ROLE_BIAS,     /* read, any strides   */
    ROLE_MASK,     /* read, any strides   */
    ROLE_BIAS_GRAD /* written, any strides */
} role;

static const struct role_rules {
    const char *dtypes;
    bool fp8, boolean, written, dense_rows;
} rules[] = {
    [ROLE_INPUT] = {"float32, float16, bfloat16 or float8_e4m3", true, false, false, true},
    [ROLE_RESULT] = {"float32, float16 or bfloat16", false, false, false, true},
    [ROLE_OUTPUT] = {"float32, float16 or bfloat16", false, false, true, true},
    [ROLE_BIAS] = {"float32, float16 or bfloat16", false, false, false, false},
    [ROLE_MASK] = {"bool", false, true, false, false},
    [ROLE_BIAS_GRAD] = {"float32, float16 or bfloat16", false, false, true, false},
};

typedef struct axes_text {
    char text[96];
} axes_text;

/* Four extents or strides as text, "(2, 128, 8, 64)". */
static axes_text show(const int64_t axes[4])
{
    axes_text t;
    (void)snprintf(t.text, sizeof t.text, "(%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 ")",
                   axes[0], axes[1], axes[2], axes[3]);
    return t;
}

/* fa_dtype_size, without a call of a public function. */
static size_t element_size(fa_dtype dtype)
{
    static const uint8_t sizes[] = {4, 2, 2, 1, 1};
    return (size_t)dtype < sizeof sizes ? sizes[dtype] : 0;
}

/* size: a power of two. */
static bool is_aligned(const void *data, size_t size)
{
    return ((uintptr_t)data & (size - 1)) == 0;
}

static bool multiply(int64_t a, int64_t b, int64_t *product)
{
    return !__builtin_mul_overflow(a, b, product);
}

static bool add(int64_t a, int64_t b, int64_t *sum) { return !__builtin_add_overflow(a, b, sum); }

/* The number of elements. False if the product of the extents that are not 0 overflows: code that
 * loops over some of the axes must be able to count them. */
static bool count_elements(const int64_t shape[4], int64_t *count)
{
    int64_t product = 1;
    bool empty = false;
    for (int axis = 0; axis < 4; axis++) {
        if (shape[axis] == 0) empty = true;
        else if (!multiply(product, shape[axis], &product)) return false;
    }
    *count = empty ? 0 : product;
    return true;
}

static bool is_empty(const fa_tensor *t)
{
    return !t->shape[0] || !t->shape[1] || !t->shape[2] || !t->shape[3];
}

/* The bytes [low, high) relative to data that a tensor with elements spans. False on overflow. */
static bool find_span(const fa_tensor *t, int64_t *low, int64_t *high)
{
    const int64_t size = (int64_t)element_size(t->dtype);
    int64_t first = 0, behind = 1, length;
    for (int axis = 0; axis < 4; axis++) {
        int64_t step;
        if (!multiply(t->shape[axis] - 1, t->stride[axis], &step)) return false;
        if (step < 0 ? !add(first, step, &first) : !add(behind, step, &behind)) return false;
    }
    if (!multiply(first, size, low) || !multiply(behind, size, high)) return false;
    return !__builtin_sub_overflow(*high, *low, &length);
}

/*
 * True unless the strides nest: each axis, from the smallest stride up, steps over all that the axes
 * before it reach. Nested strides never meet; the others may (an interleaving such as extents (3, 2)
 * with strides (2, 3) does not, but is refused too). Needs a span that does not overflow.
 */
static bool may_meet_itself(const fa_tensor *t)
{
    int64_t extent[4], stride[4], reach = 0;
    int count = 0;
    for (int axis = 0; axis < 4; axis++) {
        if (t->shape[axis] == 0) return false;
        if (t->shape[axis] == 1) continue;
        int64_t step = t->stride[axis] < 0 ? -t->stride[axis] : t->stride[axis];
        int at = count++;
        for (; at > 0 && stride[at - 1] > step; at--)
            extent[at] = extent[at - 1], stride[at] = stride[at - 1];
        extent[at] = t->shape[axis], stride[at] = step;
    }
    for (int i = 0; i < count; i++) {
        if (stride[i] <= reach) return true;
        reach += (extent[i] - 1) * stride[i];
    }
    return false;
}

static fa_status check_dtype(const char *name, fa_dtype dtype, role r)
{
    bool is_float = dtype == FA_FLOAT32 || dtype == FA_FLOAT16 || dtype == FA_BFLOAT16;
    bool legal =
        rules[r].boolean ? dtype == FA_BOOL : is_float || (rules[r].fp8 && dtype == FA_FLOAT8_E4M3);
    FA_REQUIRE(legal, "%s.dtype is %d (%s): expected %s", name, (int)dtype, fa_dtype_name(dtype),
               rules[r].dtypes);
    return FA_OK;
}

static fa_status check_extents(const char *name, const fa_tensor *t)
{
    int64_t count;
    for (int axis = 0; axis < 4; axis++)
        FA_REQUIRE(t->shape[axis] >= 0 && t->shape[axis] <= EXTENT_MAX,
                   "%s.shape[%d] is %" PRId64 ": expected 0 to 2^60", name, axis, t->shape[axis]);
    FA_REQUIRE(count_elements(t->shape, &count),
               "%s.shape is %s: expected a product of the extents below 2^63", name,
               show(t->shape).text);
    return FA_OK;
}

static fa_status check_strides(const char *name, const fa_tensor *t, role r)
{
    int64_t low, high;
    if (is_empty(t)) return FA_OK;
    FA_REQUIRE(find_span(t, &low, &high),
               "%s.stride is %s with shape %s: expected byte offsets within 63 bits", name,
               show(t->stride).text, show(t->shape).text);
    FA_REQUIRE(!rules[r].dense_rows || t->shape[3] == 1 || t->stride[3] == 1,
               "%s.stride[3] is %" PRId64 ": expected 1, the elements of a row side by side", name,
               t->stride[3]);
    FA_REQUIRE(
        !rules[r].written || !may_meet_itself(t),
        "%s.stride is %s with shape %s: expected an output in which no two elements share an "
        "address",
        name, show(t->stride).text, show(t->shape).text);
    return FA_OK;
}

static fa_status check_alignment(const char *name, const void *data, size_t size)
{
    FA_REQUIRE(is_aligned(data, size), "%s is %p: expected an address aligned to %zu bytes", name,
               data, size);
    return FA_OK;
}

static fa_status check_data(const char *name, const fa_tensor *t, bool dry_run)
{
    const size_t size = element_size(t->dtype);
    FA_REQUIRE(t->data || dry_run || is_empty(t), "%s.data is NULL: expected data of shape %s",
               name, show(t->shape).text);
    FA_REQUIRE(is_aligned(t->data, size), "%s.data is %p: expected an address aligned to %zu bytes",
               name, t->data, size);
    return FA_OK;
}

/* All that can be said about a tensor by itself. */
static fa_status check_tensor(const char *name, const fa_tensor *t, role r, bool dry_run)
{
    FA_REQUIRE(t, "%s is NULL: expected a tensor", name);
    FA_TRY(check_dtype(name, t->dtype, r));
    FA_TRY(check_extents(name, t));
    FA_TRY(check_strides(name, t, r));
    return check_data(name, t, dry_run);
}

static fa_status check_axis(const char *name, const fa_tensor *t, int axis, int64_t expected,
                            const char *meaning)
{
    FA_REQUIRE(t->shape[axis] == expected, "%s.shape[%d] is %" PRId64 ": expected %" PRId64 " (%s)",
               name, axis, t->shape[axis], expected, meaning);
    return FA_OK;
}

/* The same extents as another tensor, up to its axis `axes`. */
static fa_status check_like(const char *name, const fa_tensor *t, const char *other_name,
                            const fa_tensor *other, int axes)
{
    for (int axis = 0; axis < axes; axis++)
        FA_REQUIRE(t->shape[axis] == other->shape[axis],
                   "%s.shape[%d] is %" PRId64 ": expected %" PRId64 " (%s.shape[%d])", name, axis,
                   t->shape[axis], other->shape[axis], other_name, axis);
    return FA_OK;
}

/* An address that nobody reads or writes. A tensor without data is either empty or part of a dry run;
 * the engines then still see that it is there, and may do arithmetic on its address and look at its
 * alignment. */
static _Alignas(256) char no_data;

/* A view is written directly to its destination: to copy one that was just made costs a
 * store-forwarding stall. No element of an empty tensor is ever read, so its strides, which nothing
 * has checked, become 0. So does the stride of an axis with one index if its bytes might not fit 63
 * bits. */
static void set_view(fa_view *view, const fa_tensor *t)
{
    const bool empty = is_empty(t);
    view->data = t->data ? t->data : &no_data;
    view->dtype = t->dtype;
    for (int axis = 0; axis < 4; axis++) {
        const int64_t stride = t->stride[axis];
        const bool moderate = stride >= -EXTENT_MAX && stride <= EXTENT_MAX;
        view->stride[axis] = empty || (t->shape[axis] == 1 && !moderate) ? 0 : stride;
    }
}

/* Rows are read as dense arrays, also those of one element. */
static void set_row_view(fa_view *view, const fa_tensor *t)
{
    set_view(view, t);
    view->stride[3] = 1;
}

/* An axis of extent 1 is the same for all: the engines index it like any other. */
static void set_broadcast_view(fa_view *view, const fa_tensor *t)
{
    set_view(view, t);
    for (int axis = 0; axis < 4; axis++)
        if (t->shape[axis] == 1) view->stride[axis] = 0;
}

/* ---- Aliasing -------------------------------------------------------------------------------- */

/* Memory that a call reads or writes: bytes of [low, high). */
typedef struct region {
    const char *name;
    const fa_tensor *tensor;    /* NULL: an array, which is all of the bytes */
    uintptr_t start, low, high; /* start: where element 0 lies */
    bool written;
} region;

enum { REGIONS_MAX = 32 };

typedef struct regions {
    region list[REGIONS_MAX];
    int count;
} regions;

static void add_tensor(regions *r, const char *name, const fa_tensor *t, bool written)
{
    int64_t low, high;
    if (!t || !t->data || is_empty(t) || !find_span(t, &low, &high)) return;
    uintptr_t start = (uintptr_t)t->data;
    r->list[r->count++] =
        (region){name, t, start, start + (uintptr_t)low, start + (uintptr_t)high, written};
}

static void add_array(regions *r, const char *name, const void *data, int64_t bytes, bool written)
{
    if (!data || bytes <= 0) return;
    uintptr_t start = (uintptr_t)data;
    r->list[r->count++] = (region){name, NULL, start, start, start + (uintptr_t)bytes, written};
}

/* Whether all bytes of [low, high) are the region's. */
static bool is_dense(const region *r)
{
    int64_t count;
    if (!r->tensor) return true;
    if (!count_elements(r->tensor->shape, &count) || may_meet_itself(r->tensor)) return false;
    return (int64_t)(r->high - r->low) == count * (int64_t)element_size(r->tensor->dtype);
}

/* Whether two regions certainly share a byte. Regions with holes may interleave, as slices of one
 * buffer do; the caller is trusted unless they start at the same element. */
static bool overlap(const region *a, const region *b)
{
    if (a->start == b->start) return true;
    return a->low < b->high && b->low < a->high && is_dense(a) && is_dense(b);
}

static fa_status check_apart(const regions *r)
{
    for (int i = 0; i < r->count; i++)
        for (int j = 0; r->list[i].written && j < r->count; j++) {
            const region *out = &r->list[i], *other = &r->list[j];
            if (i == j || !overlap(out, other)) continue;
            return fa_fail(
                FA_ERROR_ARGUMENT,
                "%s at %p overlaps %s at %p: expected an output apart from the inputs and "
                "the other outputs",
                out->name, (void *)out->start, other->name, (void *)other->start);
        }
    return FA_OK;
}

/* ---- Options --------------------------------------------------------------------------------- */

#define ALL_FLAGS                                                                                  \
    ((uint32_t)(FA_CAUSAL | FA_DIAGONAL | FA_WINDOW | FA_SCALE | FA_DETERMINISTIC |                \
                FA_BATCH_INVARIANT))

static fa_status check_flags(const fa_options *o)
{
    FA_REQUIRE(!(o->flags & ~ALL_FLAGS),
               "options.flags is 0x%" PRIx32 ": expected only the bits 0x%" PRIx32
               " that this version knows",
               o->flags, ALL_FLAGS);
    FA_REQUIRE(o->reserved == 0, "options.reserved is %" PRId32 ": expected 0", o->reserved);
    FA_REQUIRE(o->reserved_2 == 0, "options.reserved_2 is %" PRId32 ": expected 0", o->reserved_2);
    return FA_OK;
}

static fa_status check_workspace_given(const fa_options *o)
{
    FA_REQUIRE(o->workspace || o->workspace_size == 0,
               "options.workspace is NULL with workspace_size %zu: expected memory of that size",
               o->workspace_size);
    return FA_OK;
}

/* Fields that mean nothing without another one: set alone they are a mistake. */
static fa_status check_companions(const fa_options *o)
{
    FA_REQUIRE(o->flags & FA_DIAGONAL || o->diagonal == 0,
               "options.diagonal is %" PRId64 ": expected 0, as FA_DIAGONAL is not set",
               o->diagonal);
    FA_REQUIRE(o->flags & FA_WINDOW || o->window_left == 0,
               "options.window_left is %" PRId64 ": expected 0, as FA_WINDOW is not set",
               o->window_left);
    FA_REQUIRE(o->flags & FA_WINDOW || o->window_right == 0,
               "options.window_right is %" PRId64 ": expected 0, as FA_WINDOW is not set",
               o->window_right);
    FA_REQUIRE(o->alibi_slopes || o->alibi_batch_stride == 0,
               "options.alibi_batch_stride is %" PRId64 ": expected 0 without options.alibi_slopes",
               o->alibi_batch_stride);
    FA_REQUIRE(o->cu_seqlens_q || o->cu_seqlens_k || o->num_sequences == 0,
               "options.num_sequences is %" PRId64 ": expected 0 without options.cu_seqlens_q or "
               "options.cu_seqlens_k",
               o->num_sequences);
    FA_REQUIRE(o->cu_seqlens_q || o->max_seqlen_q == 0,
               "options.max_seqlen_q is %" PRId64 ": expected 0 without options.cu_seqlens_q",
               o->max_seqlen_q);
    FA_REQUIRE(o->cu_seqlens_k || o->max_seqlen_k == 0,
               "options.max_seqlen_k is %" PRId64 ": expected 0 without options.cu_seqlens_k",
               o->max_seqlen_k);
    FA_REQUIRE(o->block_table || o->block_table_stride == 0,
               "options.block_table_stride is %" PRId64 ": expected 0 without options.block_table",
               o->block_table_stride);
    FA_TRY(check_workspace_given(o));
    FA_REQUIRE(!o->part_lse_stride,
               "options.part_lse_stride is set: expected NULL, as only fa_combine uses it");
    FA_REQUIRE(!o->dropout_state || (o->dropout_seed == 0 && o->dropout_offset == 0),
               "options.dropout_seed is %" PRIu64 " and dropout_offset %" PRIu64
               ": expected 0, as options.dropout_state stands for them",
               o->dropout_seed, o->dropout_offset);
    return FA_OK;
}

static fa_status check_ranges(const fa_options *o)
{
    const int precision = (int)o->precision;
    FA_REQUIRE(precision >= FA_PRECISION_FLOAT32 && precision <= FA_PRECISION_IEEE,
               "options.precision is %d: expected FA_PRECISION_FLOAT32, FA_PRECISION_TF32 or "
               "FA_PRECISION_IEEE",
               precision);
    FA_REQUIRE(isfinite(o->scale), "options.scale is %g: expected a finite number",
               (double)o->scale);
    FA_REQUIRE(isfinite(o->softcap) && o->softcap >= 0.0f,
               "options.softcap is %g: expected 0 (none) or a finite number above 0",
               (double)o->softcap);
    FA_REQUIRE(o->diagonal >= -DIAGONAL_MAX && o->diagonal <= DIAGONAL_MAX,
               "options.diagonal is %" PRId64 ": expected -2^62 to 2^62", o->diagonal);
    FA_REQUIRE(o->window_left >= -1,
               "options.window_left is %" PRId64 ": expected >= 0, or -1 for no limit",
               o->window_left);
    FA_REQUIRE(o->window_right >= -1,
               "options.window_right is %" PRId64 ": expected >= 0, or -1 for no limit",
               o->window_right);
    FA_REQUIRE(o->dropout_p >= 0.0f && o->dropout_p < 1.0f,
               "options.dropout_p is %g: expected 0 <= p < 1", (double)o->dropout_p);
    FA_REQUIRE(o->threads >= 0,
               "options.threads is %" PRId32 ": expected > 0, or 0 for OpenMP's choice",
               o->threads);
    FA_REQUIRE(o->num_sequences >= 0 && o->num_sequences <= EXTENT_MAX,
               "options.num_sequences is %" PRId64 ": expected 0 to 2^60", o->num_sequences);
    FA_REQUIRE(o->max_seqlen_q >= 0,
               "options.max_seqlen_q is %" PRId64 ": expected > 0, or 0 for unknown",
               o->max_seqlen_q);
    FA_REQUIRE(o->max_seqlen_k >= 0,
               "options.max_seqlen_k is %" PRId64 ": expected > 0, or 0 for unknown",
               o->max_seqlen_k);
    FA_REQUIRE(
        !o->block_table || (o->block_table_stride >= 1 && o->block_table_stride <= EXTENT_MAX),
        "options.block_table_stride is %" PRId64 ": expected 1 to 2^60 table entries per batch "
        "item",
        o->block_table_stride);
    return FA_OK;
}

/* A pointer of fa_options that leads to an array, and how it must be aligned. */
static const struct option_array {
    const char *name;
    size_t field, alignment;
} option_arrays[] = {
    {"options.alibi_slopes", offsetof(fa_options, alibi_slopes), sizeof(float)},
    {"options.sinks", offsetof(fa_options, sinks), sizeof(float)},
    {"options.dropout_state", offsetof(fa_options, dropout_state), sizeof(uint64_t)},
    {"options.cu_seqlens_q", offsetof(fa_options, cu_seqlens_q), sizeof(int32_t)},
    {"options.cu_seqlens_k", offsetof(fa_options, cu_seqlens_k), sizeof(int32_t)},
    {"options.seqlens_q", offsetof(fa_options, seqlens_q), sizeof(int32_t)},
    {"options.seqlens_k", offsetof(fa_options, seqlens_k), sizeof(int32_t)},
    {"options.block_table", offsetof(fa_options, block_table), sizeof(int32_t)},
    {"options.q_descale", offsetof(fa_options, q_descale), sizeof(float)},
    {"options.k_descale", offsetof(fa_options, k_descale), sizeof(float)},
    {"options.v_descale", offsetof(fa_options, v_descale), sizeof(float)},
    {"options.part_lse_stride", offsetof(fa_options, part_lse_stride), sizeof(int64_t)},
};

static fa_status check_option_arrays(const fa_options *o)
{
    for (size_t i = 0; i < sizeof option_arrays / sizeof option_arrays[0]; i++) {
        const void *data;
        memcpy(&data, (const char *)o + option_arrays[i].field, sizeof data);
        FA_TRY(check_alignment(option_arrays[i].name, data, option_arrays[i].alignment));
    }
    return FA_OK;
}

static fa_status check_stream(const fa_options *o, fa_device device)
{
    FA_REQUIRE(device != FA_DEVICE_CPU || !o->stream,
               "options.stream is %p: expected NULL, as the call runs on the CPU", o->stream);
    return FA_OK;
}

static fa_status check_options(const fa_options *o, fa_device device)
{
    FA_TRY(check_flags(o));
    FA_TRY(check_companions(o));
    FA_TRY(check_ranges(o));
    FA_TRY(check_option_arrays(o));
    return check_stream(o, device);
}

/* keep if bits >= threshold: 65536 would drop everything although p < 1. */
static uint32_t dropout_threshold(float p)
{
    double threshold = floor(65536.0 * (double)p + 0.5);
    return threshold > 65535.0 ? 65535u : (uint32_t)threshold;
}

static void set_dropout(const fa_arguments *a, fa_problem *p)
{
    const fa_options *o = a->options;
    p->dropout_threshold = dropout_threshold(o->dropout_p);
    p->dropout_scale = 1.0f / (1.0f - o->dropout_p);
    p->dropout_seed = o->dropout_seed;
    p->dropout_offset = o->dropout_offset;
    if (p->device != FA_DEVICE_CPU) {
        p->dropout_state = o->dropout_state;
    } else if (o->dropout_state && !a->dry_run) {
        p->dropout_seed = o->dropout_state[0];
        p->dropout_offset = o->dropout_state[1];
    }
}

/* fa_weights has no values, whose dtype is then 0: float32. */
static bool is_float32(const fa_problem *p)
{
    return p->q.dtype == FA_FLOAT32 && p->k.dtype == FA_FLOAT32 && p->v.dtype == FA_FLOAT32;
}

/* The options that need no more than a copy. Comes after the shapes: the scale depends on d. */
static void set_options(const fa_arguments *a, fa_problem *p)
{
    const fa_options *o = a->options;
    bool window = o->flags & FA_WINDOW, scale = o->flags & FA_SCALE || o->scale != 0.0f;
    p->scale = scale ? o->scale : (float)(1.0 / sqrt((double)p->d));
    p->softcap = o->softcap;
    p->precision = is_float32(p) ? o->precision : FA_PRECISION_FLOAT32;
    p->causal = o->flags & FA_CAUSAL;
    p->diagonal_given = o->flags & FA_DIAGONAL;
    p->deterministic = o->flags & FA_DETERMINISTIC;
    p->batch_invariant = o->flags & FA_BATCH_INVARIANT;
    p->diagonal = o->diagonal;
    p->window_left = window ? o->window_left : -1;
    p->window_right = window ? o->window_right : -1;
    p->alibi_slopes = o->alibi_slopes;
    p->alibi_batch_stride = o->alibi_batch_stride;
    p->sinks = o->sinks;
    p->cu_seqlens_q = o->cu_seqlens_q;
    p->cu_seqlens_k = o->cu_seqlens_k;
    p->seqlens_q = o->seqlens_q;
    p->seqlens_k = o->seqlens_k;
    p->block_table = o->block_table;
    p->block_table_stride = o->block_table_stride;
    p->q_descale = o->q_descale;
    p->k_descale = o->k_descale;
    p->v_descale = o->v_descale;
    p->threads = o->threads;
    p->stream = o->stream;
    p->workspace = o->workspace;
    p->workspace_size = o->workspace_size;
    set_dropout(a, p);
}

/* ---- Shapes of q, k, v, out and lse ---------------------------------------------------------- */

static fa_status check_head_dim(const char *name, const fa_tensor *t)
{
    FA_REQUIRE(t->shape[3] >= 1 && t->shape[3] <= HEAD_DIM_MAX,
               "%s.shape[3] is %" PRId64 ": expected a head dim from 1 to %d", name, t->shape[3],
               HEAD_DIM_MAX);
    return FA_OK;
}

static fa_status set_queries(const fa_arguments *a, fa_problem *p)
{
    const fa_tensor *q = a->q;
    const fa_options *o = a->options;
    FA_TRY(check_tensor("q", q, ROLE_INPUT, a->dry_run));
    FA_TRY(check_head_dim("q", q));
    p->batch = o->cu_seqlens_q || o->cu_seqlens_k ? o->num_sequences : q->shape[0];
    if (o->cu_seqlens_q) FA_TRY(check_axis("q", q, 0, 1, "packed by options.cu_seqlens_q"));
    else FA_TRY(check_axis("q", q, 0, p->batch, "options.num_sequences"));
    p->blocks_q = q->shape[0];
    p->rows_q = p->n_q = q->shape[1];
    p->heads_q = q->shape[2];
    p->d = q->shape[3];
    set_row_view(&p->q, q);
    return FA_OK;
}

/* What axis 0 and 1 of k hold: a batch, one packed sequence of rows, or pages. */
static fa_status set_key_rows(const fa_arguments *a, fa_problem *p)
{
    const fa_tensor *k = a->k;
    const fa_options *o = a->options;
    p->blocks_k = k->shape[0];
    p->rows_k = p->n_k = k->shape[1];
    if (o->block_table) {
        FA_REQUIRE(!o->cu_seqlens_k,
                   "options.cu_seqlens_k is set with options.block_table: expected "
                   "packed or paged keys, not both");
        FA_REQUIRE(o->seqlens_k, "options.seqlens_k is NULL: expected the lengths, as "
                                 "options.block_table is set");
        FA_REQUIRE(k->shape[1] >= 1, "k.shape[1] is 0: expected a page size of at least 1, as "
                                     "options.block_table is set");
        FA_REQUIRE(multiply(o->block_table_stride, k->shape[1], &p->n_k) && p->n_k <= EXTENT_MAX,
                   "options.block_table_stride is %" PRId64 " with pages of %" PRId64
                   " rows (k.shape[1]): expected a product up to 2^60",
                   o->block_table_stride, k->shape[1]);
        return FA_OK;
    }
    if (o->cu_seqlens_k) return check_axis("k", k, 0, 1, "packed by options.cu_seqlens_k");
    return check_axis("k", k, 0, p->batch,
                      o->cu_seqlens_q ? "options.num_sequences" : "q.shape[0]");
}

static fa_status set_keys(const fa_arguments *a, fa_problem *p)
{
    const fa_tensor *k = a->k;
    FA_TRY(check_tensor("k", k, ROLE_INPUT, a->dry_run));
    FA_TRY(set_key_rows(a, p));
    FA_TRY(check_axis("k", k, 3, p->d, "q.shape[3]"));
    p->heads_kv = k->shape[2];
    bool grouped = p->heads_kv ? p->heads_q % p->heads_kv == 0 : p->heads_q == 0;
    FA_REQUIRE(grouped,
               "q.shape[2] is %" PRId64 ": expected a multiple of k.shape[2], which is %" PRId64,
               p->heads_q, p->heads_kv);
    set_row_view(&p->k, k);
    return FA_OK;
}

/* fa_weights needs no values, and a dry run of it may leave them out. */
static fa_status set_values(const fa_arguments *a, fa_problem *p)
{
    const fa_tensor *v = a->v;
    p->d_v = p->d;
    if (!v && p->pass == FA_PASS_WEIGHTS) return FA_OK;
    FA_TRY(check_tensor("v", v, ROLE_INPUT, a->dry_run));
    FA_TRY(check_like("v", v, "k", a->k, 3));
    FA_TRY(check_head_dim("v", v));
    p->d_v = v->shape[3];
    set_row_view(&p->v, v);
    return FA_OK;
}

/* A tensor of out's shape. */
static fa_status check_out_shape(const char *name, const fa_tensor *t, const fa_arguments *a,
                                 const fa_problem *p)
{
    FA_TRY(check_like(name, t, "q", a->q, 3));
    return a->v ? check_axis(name, t, 3, p->d_v, "v.shape[3]") : check_head_dim(name, t);
}

/* fa_weights has no out, and a dry run need not give one. */
static fa_status set_out(const fa_arguments *a, fa_problem *p)
{
    if (!a->out && (a->dry_run || p->pass == FA_PASS_WEIGHTS)) return FA_OK;
    role r = p->pass == FA_PASS_BACKWARD ? ROLE_RESULT : ROLE_OUTPUT;
    FA_TRY(check_tensor("out", a->out, r, a->dry_run));
    FA_TRY(check_out_shape("out", a->out, a, p));
    set_row_view(&p->out, a->out);
    return FA_OK;
}

/* Batch item b's slopes lie b strides from the first one's. */
static fa_status check_alibi_stride(const fa_options *o, const fa_problem *p)
{
    int64_t last = 0;
    const bool fits = p->batch < 2 || multiply(p->batch - 1, o->alibi_batch_stride, &last);
    FA_REQUIRE(fits && last >= -EXTENT_MAX && last <= EXTENT_MAX,
               "options.alibi_batch_stride is %" PRId64 " with a batch of %" PRId64
               ": expected slopes within 2^60 elements",
               o->alibi_batch_stride, p->batch);
    return FA_OK;
}

/* The number of (batch, head, row) triples, times 4 bytes, must not overflow. */
static fa_status check_counts(const fa_problem *p)
{
    const int64_t queries[4] = {p->batch, p->heads_q, p->n_q, (int64_t)sizeof(float)};
    const int64_t keys[4] = {p->batch, p->heads_kv, p->n_k, (int64_t)sizeof(float)};
    int64_t count;
    FA_REQUIRE(count_elements(queries, &count),
               "batch %" PRId64 ", q.shape[2] %" PRId64 " and %" PRId64
               " queries: expected a product below 2^61",
               p->batch, p->heads_q, p->n_q);
    FA_REQUIRE(count_elements(keys, &count),
               "batch %" PRId64 ", k.shape[2] %" PRId64 " and %" PRId64
               " keys: expected a product below 2^61",
               p->batch, p->heads_kv, p->n_k);
    return FA_OK;
}

static fa_status set_lse(const fa_arguments *a, fa_problem *p)
{
    bool needed = p->pass == FA_PASS_BACKWARD && !a->dry_run && !is_empty(a->q);
    FA_REQUIRE(a->lse || !needed, "lse is NULL: expected the log-sum-exp that fa_forward wrote");
    p->lse = (float *)a->lse; /* const in fa_backward, whose engine only reads it */
    return check_alignment("lse", a->lse, sizeof(float));
}

/* Scales only mean something for 8-bit floats. */
static fa_status check_descale(char letter, const float *descale, const fa_tensor *t)
{
    FA_REQUIRE(!descale || !t || t->dtype == FA_FLOAT8_E4M3,
               "options.%c_descale is set and %c.dtype is %s: expected float8_e4m3, or no descale",
               letter, letter, fa_dtype_name(t->dtype));
    return FA_OK;
}

static fa_status refuse_fp8(char letter, const fa_tensor *t)
{
    if (t->dtype != FA_FLOAT8_E4M3) return FA_OK;
    return fa_fail(FA_ERROR_UNSUPPORTED,
                   "%c.dtype is float8_e4m3, which the backward pass does not support: expected "
                   "float32, float16 or bfloat16",
                   letter);
}

static fa_status check_fp8(const fa_arguments *a)
{
    const fa_options *o = a->options;
    FA_TRY(check_descale('q', o->q_descale, a->q));
    FA_TRY(check_descale('k', o->k_descale, a->k));
    FA_TRY(check_descale('v', o->v_descale, a->v));
    if (a->pass != FA_PASS_BACKWARD) return FA_OK;
    FA_TRY(refuse_fp8('q', a->q));
    FA_TRY(refuse_fp8('k', a->k));
    return refuse_fp8('v', a->v);
}

static fa_status set_shapes(const fa_arguments *a, fa_problem *p)
{
    FA_TRY(set_queries(a, p));
    FA_TRY(set_keys(a, p));
    FA_TRY(set_values(a, p));
    FA_TRY(set_out(a, p));
    FA_TRY(check_counts(p));
    FA_TRY(check_alibi_stride(a->options, p));
    FA_TRY(set_lse(a, p));
    return check_fp8(a);
}

/* ---- Lengths --------------------------------------------------------------------------------- */

/* How long the sequences of one side are. */
typedef struct lengths {
    bool vary;  /* by cu_seqlens or seqlens; else all are `longest` */
    bool known; /* longest has been read from them                  */
    int64_t longest;
} lengths;

/* The queries' or the keys' side of the options, for errors that name them. */
typedef struct side {
    char letter; /* 'q' or 'k' */
    const int32_t *cu_seqlens, *seqlens;
    int64_t max_seqlen;
    int64_t batch;
    int64_t rows; /* packed: rows of the tensor; else how long a sequence can be */
} side;

static fa_status check_cu_seqlens(const side *s)
{
    const int32_t *cu = s->cu_seqlens;
    FA_REQUIRE(cu[0] >= 0, "options.cu_seqlens_%c[0] is %" PRId32 ": expected >= 0", s->letter,
               cu[0]);
    for (int64_t b = 0; b < s->batch; b++)
        FA_REQUIRE(cu[b + 1] >= cu[b],
                   "options.cu_seqlens_%c[%" PRId64 "] is %" PRId32 ": expected >= %" PRId32
                   ", the entry before it",
                   s->letter, b + 1, cu[b + 1], cu[b]);
    FA_REQUIRE(cu[s->batch] <= s->rows,
               "options.cu_seqlens_%c[%" PRId64 "] is %" PRId32 ": expected <= %" PRId64
               " (%c.shape[1])",
               s->letter, s->batch, cu[s->batch], s->rows, s->letter);
    return FA_OK;
}

/* Sequence b's length, at most the room that the tensor has for it. */
static fa_status read_length(const side *s, int64_t b, int64_t *length)
{
    int64_t room = s->cu_seqlens ? (int64_t)s->cu_seqlens[b + 1] - s->cu_seqlens[b] : s->rows;
    *length = s->seqlens ? s->seqlens[b] : room;
    FA_REQUIRE(*length >= 0 && *length <= room,
               "options.seqlens_%c[%" PRId64 "] is %" PRId64 ": expected 0 to %" PRId64, s->letter,
               b, *length, room);
    FA_REQUIRE(s->max_seqlen == 0 || *length <= s->max_seqlen,
               "options.max_seqlen_%c is %" PRId64 ": expected at least %" PRId64
               ", the length of sequence %" PRId64,
               s->letter, s->max_seqlen, *length, b);
    return FA_OK;
}

/* Reads the lengths if they are in host memory and the call is going to use them. */
static fa_status read_lengths(const side *s, bool follow, lengths *result)
{
    *result = (lengths){s->cu_seqlens || s->seqlens, false, s->rows};
    if (!result->vary || !follow) return FA_OK;
    if (s->cu_seqlens) FA_TRY(check_cu_seqlens(s));
    result->known = true;
    result->longest = 0;
    for (int64_t b = 0; b < s->batch; b++) {
        int64_t length;
        FA_TRY(read_length(s, b, &length));
        if (length > result->longest) result->longest = length;
    }
    return FA_OK;
}

/* The table entries that the sequences' lengths reach. */
static fa_status check_pages(const fa_problem *p)
{
    for (int64_t b = 0; b < p->batch; b++) {
        int64_t used = ((int64_t)p->seqlens_k[b] + p->rows_k - 1) / p->rows_k;
        for (int64_t i = 0; i < used; i++) {
            int64_t entry = b * p->block_table_stride + i;
            int32_t page = p->block_table[entry];
            FA_REQUIRE(page >= 0 && page < p->blocks_k,
                       "options.block_table[%" PRId64 "] (batch item %" PRId64 ", entry %" PRId64
                       ") is %" PRId32 ": expected 0 <= page < %" PRId64 " (k.shape[0])",
                       entry, b, i, page, p->blocks_k);
        }
    }
    return FA_OK;
}

/* What is wrong, in the words of the checks above. */
static void word_report(const fa_check_report *r, char *text, size_t size)
{
    const char letter = r->side ? 'k' : 'q';
    switch (r->kind) {
    case FA_CHECK_FIRST:
        (void)snprintf(text, size, "options.cu_seqlens_%c[0] is %" PRId64 ": expected >= 0", letter,
                       r->value);
        return;
    case FA_CHECK_ORDER:
        (void)snprintf(text, size,
                       "options.cu_seqlens_%c[%" PRId64 "] is %" PRId64 ": expected >= %" PRId64
                       ", the entry before it",
                       letter, r->index, r->value, r->low);
        return;
    case FA_CHECK_LAST:
        (void)snprintf(text, size,
                       "options.cu_seqlens_%c[%" PRId64 "] is %" PRId64 ": expected <= %" PRId64
                       " (%c.shape[1])",
                       letter, r->index, r->value, r->high, letter);
        return;
    case FA_CHECK_LENGTH:
        (void)snprintf(text, size,
                       "options.seqlens_%c[%" PRId64 "] is %" PRId64 ": expected 0 to %" PRId64,
                       letter, r->index, r->value, r->high);
        return;
    case FA_CHECK_MAX:
        (void)snprintf(text, size,
                       "options.max_seqlen_%c is %" PRId64 ": expected at least %" PRId64
                       ", the length of sequence %" PRId64,
                       letter, r->value, r->low, r->index);
        return;
    case FA_CHECK_PAGE:
        (void)snprintf(text, size,
                       "options.block_table[%" PRId64 "] (batch item %" PRId64 ", entry %" PRId64
                       ") is %" PRId64 ": expected 0 <= page < %" PRId64 " (k.shape[0])",
                       r->index, r->index / r->block_table_stride, r->index % r->block_table_stride,
                       r->value, r->high);
        return;
    default:
        (void)snprintf(text, size,
                       "rows[%" PRId64 "] is %" PRId64 ": expected 0 <= row < %" PRId64
                       " (q.shape[1])",
                       r->index, r->value, r->high);
    }
}

fa_status fa_problem_report(const fa_check_report *r, const char *where)
{
    char text[320];
    word_report(r, text, sizeof text);
    return fa_fail(FA_ERROR_ARGUMENT, "%s; %s", text, where);
}

static fa_status check_lengths(const fa_arguments *a, const fa_problem *p, lengths *queries,
                               lengths *keys)
{
    const fa_options *o = a->options;
    bool follow = !a->dry_run && p->device == FA_DEVICE_CPU;
    const side q = {'q', o->cu_seqlens_q, o->seqlens_q, o->max_seqlen_q, p->batch, p->n_q};
    const side k = {'k', o->cu_seqlens_k, o->seqlens_k, o->max_seqlen_k, p->batch, p->n_k};
    FA_TRY(read_lengths(&q, follow, queries));
    FA_TRY(read_lengths(&k, follow, keys));
    return p->block_table && follow ? check_pages(p) : FA_OK;
}

/* ---- Bias, mask, and other tensors over (batch, head, query, key) ---------------------------- */

/* The extents and lengths that a tensor of scores is compared with. */
typedef struct score_axes {
    int64_t batch, heads;
    lengths queries, keys;
} score_axes;

static fa_status check_axis_or_1(const char *name, const fa_tensor *t, int axis, int64_t expected,
                                 const char *meaning)
{
    FA_REQUIRE(t->shape[axis] == 1 || t->shape[axis] == expected,
               "%s.shape[%d] is %" PRId64 ": expected %" PRId64 " (%s) or 1", name, axis,
               t->shape[axis], expected, meaning);
    return FA_OK;
}

/* Where the lengths vary, any extent will do that covers the longest sequence. */
static fa_status check_length_axis(const char *name, const fa_tensor *t, int axis, const lengths *l,
                                   const char *meaning)
{
    if (!l->vary) return check_axis_or_1(name, t, axis, l->longest, meaning);
    FA_REQUIRE(!l->known || t->shape[axis] == 1 || t->shape[axis] >= l->longest,
               "%s.shape[%d] is %" PRId64 ": expected 1 or at least %" PRId64
               " (%s of the longest sequence)",
               name, axis, t->shape[axis], l->longest, meaning);
    return FA_OK;
}

static fa_status check_score_shape(const char *name, const fa_tensor *t, const score_axes *axes)
{
    FA_TRY(check_axis_or_1(name, t, 0, axes->batch, "the batch"));
    FA_TRY(check_axis_or_1(name, t, 1, axes->heads, "q.shape[2]"));
    FA_TRY(check_length_axis(name, t, 2, &axes->queries, "queries"));
    return check_length_axis(name, t, 3, &axes->keys, "keys");
}

static fa_status set_bias_and_mask(const fa_arguments *a, const score_axes *axes, fa_problem *p)
{
    const fa_tensor *bias = a->options->bias, *mask = a->options->mask;
    if (bias) {
        FA_TRY(check_tensor("options.bias", bias, ROLE_BIAS, a->dry_run));
        FA_TRY(check_score_shape("options.bias", bias, axes));
        set_broadcast_view(&p->bias, bias);
    }
    if (mask) {
        FA_TRY(check_tensor("options.mask", mask, ROLE_MASK, a->dry_run));
        FA_TRY(check_score_shape("options.mask", mask, axes));
        set_broadcast_view(&p->mask, mask);
    }
    return FA_OK;
}

/* ---- Gradients ------------------------------------------------------------------------------- */

static fa_status set_dout(const fa_arguments *a, fa_problem *p)
{
    const fa_tensor *dout = &a->gradients->dout;
    if (!dout->data && is_empty(a->out)) return FA_OK; /* nobody reads it */
    FA_REQUIRE(dout->data, "gradients.dout.data is NULL: expected the gradient of out");
    FA_TRY(check_tensor("gradients.dout", dout, ROLE_RESULT, false));
    FA_TRY(check_like("gradients.dout", dout, "out", a->out, 4));
    set_row_view(&p->dout, dout);
    p->dlse = a->gradients->dlse;
    return check_alignment("gradients.dlse", p->dlse, sizeof(float));
}

/* The gradient of q, k or v, if it is asked for. */
static fa_status set_gradient(const char *name, const fa_tensor *gradient, const char *of,
                              const fa_tensor *t, fa_view *view)
{
    if (!gradient->data) return FA_OK;
    FA_TRY(check_tensor(name, gradient, ROLE_OUTPUT, false));
    FA_TRY(check_like(name, gradient, of, t, 4));
    set_row_view(view, gradient);
    return FA_OK;
}

static fa_status set_dbias(const fa_arguments *a, const score_axes *axes, fa_problem *p)
{
    const fa_tensor *dbias = &a->gradients->dbias;
    if (!dbias->data) return FA_OK;
    FA_REQUIRE(a->options->bias,
               "gradients.dbias is set: expected no data, as options.bias is NULL");
    FA_TRY(check_tensor("gradients.dbias", dbias, ROLE_BIAS_GRAD, false));
    FA_TRY(check_score_shape("gradients.dbias", dbias, axes));
    set_broadcast_view(&p->dbias, dbias);
    memcpy(p->dbias_shape, dbias->shape, sizeof p->dbias_shape);
    return FA_OK;
}

static fa_status set_gradients(const fa_arguments *a, const score_axes *axes, fa_problem *p)
{
    const fa_gradients *g = a->gradients;
    if (!g) return FA_OK;
    FA_TRY(set_dout(a, p));
    FA_TRY(set_gradient("gradients.dq", &g->dq, "q", a->q, &p->dq));
    FA_TRY(set_gradient("gradients.dk", &g->dk, "k", a->k, &p->dk));
    FA_TRY(set_gradient("gradients.dv", &g->dv, "v", a->v, &p->dv));
    FA_TRY(set_dbias(a, axes, p));
    FA_REQUIRE(!g->dsinks || a->options->sinks,
               "gradients.dsinks is set: expected NULL, as options.sinks is NULL");
    p->dsinks = g->dsinks;
    return check_alignment("gradients.dsinks", g->dsinks, sizeof(float));
}

/* ---- Weights --------------------------------------------------------------------------------- */

/* The number of rows when all are asked for. */
static fa_status check_all_rows(int64_t num_rows, const lengths *queries)
{
    FA_REQUIRE(queries->vary || num_rows == queries->longest,
               "num_rows is %" PRId64 ": expected %" PRId64 " (q.shape[1]), as rows is NULL",
               num_rows, queries->longest);
    FA_REQUIRE(!queries->known || num_rows >= queries->longest,
               "num_rows is %" PRId64 ": expected at least %" PRId64
               " (queries of the longest sequence), as rows is NULL",
               num_rows, queries->longest);
    return FA_OK;
}

static fa_status check_rows(const fa_arguments *a, const fa_problem *p)
{
    FA_TRY(check_alignment("rows", a->rows, sizeof(int64_t)));
    if (p->device != FA_DEVICE_CPU) return FA_OK;
    for (int64_t r = 0; r < a->num_rows; r++)
        FA_REQUIRE(a->rows[r] >= 0 && a->rows[r] < p->n_q,
                   "rows[%" PRId64 "] is %" PRId64 ": expected 0 <= row < %" PRId64 " (q.shape[1])",
                   r, a->rows[r], p->n_q);
    return FA_OK;
}

static fa_status check_weights_shape(const fa_arguments *a, const score_axes *axes)
{
    const fa_tensor *w = a->weights;
    FA_TRY(check_tensor("weights", w, ROLE_OUTPUT, false));
    FA_TRY(check_axis("weights", w, 0, axes->batch, "the batch"));
    FA_TRY(check_axis("weights", w, 1, axes->heads, "q.shape[2]"));
    FA_TRY(check_axis("weights", w, 2, a->num_rows, "num_rows"));
    if (!axes->keys.vary) return check_axis("weights", w, 3, axes->keys.longest, "keys");
    FA_REQUIRE(!axes->keys.known || w->shape[3] >= axes->keys.longest,
               "weights.shape[3] is %" PRId64 ": expected at least %" PRId64
               " (keys of the longest sequence)",
               w->shape[3], axes->keys.longest);
    return FA_OK;
}

static fa_status set_weights(const fa_arguments *a, const score_axes *axes, fa_problem *p)
{
    if (p->pass != FA_PASS_WEIGHTS) return FA_OK;
    p->num_weight_rows = a->dry_run ? p->n_q : a->num_rows;
    if (a->dry_run) return FA_OK;
    FA_REQUIRE(a->num_rows >= 0 && a->num_rows <= EXTENT_MAX,
               "num_rows is %" PRId64 ": expected 0 to 2^60", a->num_rows);
    if (a->rows) FA_TRY(check_rows(a, p));
    else FA_TRY(check_all_rows(a->num_rows, &axes->queries));
    FA_TRY(check_weights_shape(a, axes));
    p->weight_rows = a->rows;
    set_row_view(&p->weights, a->weights);
    p->n_k = a->weights->shape[3]; /* the engine fills all of it */
    return FA_OK;
}

/* ---- The whole problem ----------------------------------------------------------------------- */

/* If an output overlapped one of these, the call would change its own addresses while it runs. */
static void add_index_arrays(const fa_options *o, const fa_problem *p, regions *r)
{
    const int64_t entry = (int64_t)sizeof(int32_t);
    int64_t table; /* up to the first entry of the last batch item: how much is behind it depends on
         * lengths */
    add_array(r, "options.cu_seqlens_q", o->cu_seqlens_q, (p->batch + 1) * entry, false);
    add_array(r, "options.cu_seqlens_k", o->cu_seqlens_k, (p->batch + 1) * entry, false);
    add_array(r, "options.seqlens_q", o->seqlens_q, p->batch * entry, false);
    add_array(r, "options.seqlens_k", o->seqlens_k, p->batch * entry, false);
    if (p->batch == 0 || !o->block_table) return;
    if (!multiply(p->batch - 1, o->block_table_stride, &table) || table >= EXTENT_MAX) return;
    add_array(r, "options.block_table", o->block_table, (table + 1) * entry, false);
}

static void add_inputs(const fa_arguments *a, const fa_problem *p, regions *r)
{
    const fa_options *o = a->options;
    const int64_t per_head = (int64_t)sizeof(float);
    add_tensor(r, "q", a->q, false);
    add_tensor(r, "k", a->k, false);
    add_tensor(r, "v", a->v, false);
    add_tensor(r, "options.bias", o->bias, false);
    add_tensor(r, "options.mask", o->mask, false);
    add_array(r, "options.sinks", o->sinks, p->heads_q * per_head, false);
    add_array(r, "options.alibi_slopes", o->alibi_slopes, p->heads_q * per_head, false);
    add_index_arrays(o, p, r);
    add_array(r, "options.dropout_state", o->dropout_state, 2 * (int64_t)sizeof(uint64_t), false);
}

static void add_outputs(const fa_arguments *a, const fa_problem *p, regions *r)
{
    bool backward = p->pass == FA_PASS_BACKWARD;
    int64_t lse_bytes = p->blocks_q * p->heads_q * p->rows_q * (int64_t)sizeof(float);
    add_tensor(r, "out", a->out, !backward);
    add_array(r, "lse", a->lse, lse_bytes, !backward);
    add_tensor(r, "weights", a->weights, true);
    int64_t row_bytes;
    if (a->rows && multiply(a->num_rows, (int64_t)sizeof(int64_t), &row_bytes))
        add_array(r, "rows", a->rows, row_bytes, false);
    const fa_gradients *g = a->gradients;
    if (!g) return;
    add_tensor(r, "gradients.dout", &g->dout, false);
    add_array(r, "gradients.dlse", g->dlse, lse_bytes, false);
    add_tensor(r, "gradients.dq", &g->dq, true);
    add_tensor(r, "gradients.dk", &g->dk, true);
    add_tensor(r, "gradients.dv", &g->dv, true);
    add_tensor(r, "gradients.dbias", &g->dbias, true);
    add_array(r, "gradients.dsinks", g->dsinks, p->heads_q * (int64_t)sizeof(float), true);
}

static fa_status check_aliasing(const fa_arguments *a, const fa_problem *p)
{
    regions r;
    r.count = 0;
    add_inputs(a, p, &r);
    add_outputs(a, p, &r);
    return check_apart(&r);
}

fa_status fa_problem_make(const fa_arguments *a, fa_problem *p)
{
    memset(p, 0, sizeof *p);
    p->pass = a->pass;
    p->device = a->device;
    FA_TRY(check_options(a->options, a->device));
    FA_TRY(set_shapes(a, p));
    set_options(a, p);
    score_axes axes = {.batch = p->batch, .heads = p->heads_q};
    FA_TRY(check_lengths(a, p, &axes.queries, &axes.keys));
    FA_TRY(set_bias_and_mask(a, &axes, p));
    FA_TRY(set_gradients(a, &axes, p));
    FA_TRY(set_weights(a, &axes, p));
    return check_aliasing(a, p);
}

/* ---- Combine --------------------------------------------------------------------------------- */

/* The options that merging has no use for. */
static const struct unused_option {
    const char *name;
    size_t field, size;
} unused_by_combine[] = {
/* clang-format off */
#define UNUSED(field) {#field, offsetof(fa_options, field), sizeof(((fa_options *)NULL)->field)}
    UNUSED(scale), UNUSED(softcap), UNUSED(diagonal), UNUSED(window_left), UNUSED(window_right),
    UNUSED(bias), UNUSED(mask), UNUSED(alibi_slopes), UNUSED(alibi_batch_stride), UNUSED(sinks),
    UNUSED(dropout_p), UNUSED(dropout_seed), UNUSED(dropout_offset), UNUSED(dropout_state),
    UNUSED(num_sequences), UNUSED(cu_seqlens_q), UNUSED(cu_seqlens_k), UNUSED(seqlens_q),
    UNUSED(seqlens_k), UNUSED(max_seqlen_q), UNUSED(max_seqlen_k), UNUSED(block_table),
    UNUSED(block_table_stride), UNUSED(q_descale), UNUSED(k_descale), UNUSED(v_descale),
    UNUSED(precision),
#undef UNUSED
    /* clang-format on */
};

static fa_status check_combine_options(const fa_options *o, fa_device device)
{
    const uint32_t used = FA_DETERMINISTIC | FA_BATCH_INVARIANT;
    FA_TRY(check_flags(o));
    FA_REQUIRE(!(o->flags & ~used),
               "options.flags is 0x%" PRIx32 ": expected only FA_DETERMINISTIC "
               "and FA_BATCH_INVARIANT in fa_combine",
               o->flags);
    for (size_t i = 0; i < sizeof unused_by_combine / sizeof unused_by_combine[0]; i++) {
        const char *bytes = (const char *)o + unused_by_combine[i].field;
        for (size_t j = 0; j < unused_by_combine[i].size; j++)
            FA_REQUIRE(bytes[j] == 0,
                       "options.%s is set: expected 0, as fa_combine has no use for it",
                       unused_by_combine[i].name);
    }
    FA_TRY(check_ranges(o));
    FA_TRY(check_workspace_given(o));
    FA_TRY(check_alignment("options.part_lse_stride", o->part_lse_stride, sizeof(int64_t)));
    return check_stream(o, device);
}

/* What every part must stay clear of, and the size of each log-sum-exp. */
static void add_combine_outputs(const fa_combine_problem *c, const fa_tensor *out, regions *r,
                                int64_t *lse_bytes)
{
    const int64_t *shape = out->shape;
    *lse_bytes = shape[0] * shape[1] * shape[2] * (int64_t)sizeof(float);
    add_tensor(r, "out", out, true);
    add_array(r, "lse", c->lse, *lse_bytes, true);
}

/* Part i's log-sum-exp, with the axes (batch, head, query, 1). */
static fa_tensor part_lse_tensor(const fa_combine_problem *c, int64_t i)
{
    const int64_t *stride = c->part_lse_stride;
    fa_tensor t = {(void *)c->part_lse[i], /* only read */
                   FA_FLOAT32,
                   {c->batch, c->heads, c->n_q, 1},
                   {c->heads * c->n_q, c->n_q, 1, 1}};
    for (int axis = 0; stride && axis < 3; axis++) t.stride[axis] = stride[3 * i + axis];
    return t;
}

static fa_status check_part_as(const char *name, const char *lse_name, const fa_combine_problem *c,
                               const fa_tensor *out, int64_t i)
{
    const fa_tensor *part = &c->parts[i];
    FA_TRY(check_tensor(name, part, ROLE_RESULT, false));
    FA_TRY(check_like(name, part, "out", out, 4));
    FA_REQUIRE(c->part_lse[i] || is_empty(out), "%s is NULL: expected the log-sum-exp of %s",
               lse_name, name);
    FA_TRY(check_alignment(lse_name, c->part_lse[i], sizeof(float)));
    const fa_tensor lse = part_lse_tensor(c, i);
    int64_t low, high;
    FA_REQUIRE(is_empty(&lse) || find_span(&lse, &low, &high),
               "options.part_lse_stride of %s is (%" PRId64 ", %" PRId64 ", %" PRId64
               ") with batch %" PRId64 ", %" PRId64 " heads and %" PRId64
               " queries: expected byte offsets within 63 bits",
               lse_name, lse.stride[0], lse.stride[1], lse.stride[2], lse.shape[0], lse.shape[1],
               lse.shape[2]);

    regions r;
    int64_t lse_bytes;
    r.count = 0;
    add_combine_outputs(c, out, &r, &lse_bytes);
    add_tensor(&r, name, part, false);
    add_tensor(&r, lse_name, &lse, false);
    return check_apart(&r);
}

/* The names are only put together for a part that is wrong. */
static fa_status check_part(const fa_combine_problem *c, const fa_tensor *out, int64_t i)
{
    char name[48], lse_name[48];
    if (check_part_as("parts", "part_lse", c, out, i) == FA_OK) return FA_OK;
    (void)snprintf(name, sizeof name, "parts[%" PRId64 "]", i);
    (void)snprintf(lse_name, sizeof lse_name, "part_lse[%" PRId64 "]", i);
    return check_part_as(name, lse_name, c, out, i);
}

static fa_status check_combine_out(const fa_combine_problem *c, const fa_tensor *out)
{
    FA_TRY(check_tensor("out", out, ROLE_OUTPUT, false));
    FA_TRY(check_head_dim("out", out));
    const int64_t rows[4] = {out->shape[0], out->shape[1], out->shape[2], (int64_t)sizeof(float)};
    int64_t lse_bytes;
    FA_REQUIRE(count_elements(rows, &lse_bytes),
               "out.shape is %s: expected a product of the first three extents below 2^61",
               show(out->shape).text);
    FA_TRY(check_alignment("lse", c->lse, sizeof(float)));
    regions r;
    r.count = 0;
    add_combine_outputs(c, out, &r, &lse_bytes);
    return check_apart(&r);
}

fa_status fa_combine_problem_make(const fa_tensor *out, const fa_options *options,
                                  fa_combine_problem *c)
{
    FA_TRY(check_combine_options(options, c->device));
    FA_TRY(check_combine_out(c, out));
    FA_REQUIRE(c->num_parts >= 0, "num_parts is %" PRId64 ": expected >= 0", c->num_parts);
    FA_REQUIRE(c->parts || c->num_parts == 0,
               "parts is NULL: expected %" PRId64 " tensors (num_parts)", c->num_parts);
    FA_REQUIRE(c->part_lse || c->num_parts == 0,
               "part_lse is NULL: expected %" PRId64 " pointers (num_parts)", c->num_parts);
    c->batch = out->shape[0];
    c->heads = out->shape[2];
    c->n_q = out->shape[1];
    c->d_v = out->shape[3];
    set_row_view(&c->out, out);
    c->part_lse_stride = options->part_lse_stride;
    c->threads = options->threads;
    c->stream = options->stream;
    c->workspace = options->workspace;
    c->workspace_size = options->workspace_size;
    for (int64_t i = 0; i < c->num_parts; i++) FA_TRY(check_part(c, out, i));
    return FA_OK;
}
