/*
 * Checks of the caller's arguments, and the fa_problem that is made from them.
 *
 * In this order: single tensors, aliasing, options, shapes, lengths, bias and mask, gradients, weights,
 * the whole problem, append, and combine.
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

/* ---- Single tensors -------------------------------------------------------------------------- */

/* What a tensor is used for decides which dtypes and strides are legal. */
typedef enum role {
    ROLE_INPUT,     /* q             */
    ROLE_KEYS,      /* k, v */
    ROLE_RESULT,    /* out, or dout: read  */
    ROLE_OUTPUT,    /* written             */
    ROLE_BIAS,      /* read, any strides   */
    ROLE_MASK,      /* read, any strides   */
    ROLE_BIAS_GRAD, /* written, any strides */
    ROLE_CACHE      /* written by fa_append */
} role;

static const struct role_rules {
    const char *dtypes;
    bool fp8, int8, boolean, written, dense_rows;
} rules[] = {
    [ROLE_INPUT] = {"float32, float16, bfloat16 or float8_e4m3", true, false, false, false, true},
    [ROLE_KEYS] = {"float32, float16, bfloat16, float8_e4m3 or int8", true, true, false, false,
                   true},
    [ROLE_RESULT] = {"float32, float16 or bfloat16", false, false, false, false, true},
    [ROLE_OUTPUT] = {"float32, float16 or bfloat16", false, false, false, true, true},
    [ROLE_BIAS] = {"float32, float16 or bfloat16", false, false, false, false, false},
    [ROLE_MASK] = {"bool", false, false, true, false, false},
    [ROLE_BIAS_GRAD] = {"float32, float16 or bfloat16", false, false, false, true, false},
    [ROLE_CACHE] = {"float32, float16, bfloat16, float8_e4m3 or int8", true, true, false, true,
                    true},
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
    static const uint8_t sizes[] = {4, 2, 2, 1, 1, 1};
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
    bool legal = rules[r].boolean ? dtype == FA_BOOL
                                  : is_float || (rules[r].fp8 && dtype == FA_FLOAT8_E4M3) ||
                                        (rules[r].int8 && dtype == FA_INT8);
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

/* All checks that need only one tensor. */
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

/* Checks that the first `axes` extents equal those of another tensor. */
static fa_status check_like(const char *name, const fa_tensor *t, const char *other_name,
                            const fa_tensor *other, int axes)
{
    for (int axis = 0; axis < axes; axis++)
        FA_REQUIRE(t->shape[axis] == other->shape[axis],
                   "%s.shape[%d] is %" PRId64 ": expected %" PRId64 " (%s.shape[%d])", name, axis,
                   t->shape[axis], other->shape[axis], other_name, axis);
    return FA_OK;
}

/* An address that is never read or written. A tensor without data is either empty or part of a dry run.
 * With this address the engines still see that the tensor exists, and may do arithmetic on the address
 * and check its alignment. fa_problem's lacks_data tells where q, k or v has it in a dry run. */
static _Alignas(256) char no_data;

/* Writes the view directly to its destination: copying a view that was just made costs a
 * store-forwarding stall. An empty tensor is never read and its strides were not checked, so they
 * become 0. The stride of an axis with one index also becomes 0 if its bytes might not fit into 63
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

/* Rows are read as dense arrays, even rows of one element. */
static void set_row_view(fa_view *view, const fa_tensor *t)
{
    set_view(view, t);
    view->stride[3] = 1;
}

/* An axis of extent 1 gets stride 0, so that the engines can index it like any other. */
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

/* Whether two regions certainly share a byte. Regions with holes may be interleaved without sharing
 * bytes, like slices of one buffer. Then the caller is trusted, unless they start at the same element. */
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
                FA_BATCH_INVARIANT | FA_FULL_WORKSPACE))

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

/* Fields that need another field: setting only one of them is an error. */
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
    FA_REQUIRE(o->attention_chunk >= 0 && o->attention_chunk <= EXTENT_MAX,
               "options.attention_chunk is %" PRId64
               ": expected 1 to 2^60 positions, or 0 for no chunks",
               o->attention_chunk);
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

/* A weight is kept if bits >= threshold. A threshold of 65536 would drop everything although p < 1. */
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

/* A window's bound, or -1 if it is so large that it hides nothing: sums of others, positions and a diagonal fit into 64 bits.
 * diagonal: as far as it moves keys to the side of the bound. */
static int64_t find_window(int64_t window, int64_t diagonal)
{
    const int64_t most = 2 * EXTENT_MAX + (diagonal > 0 ? diagonal : 0);
    return window < most ? window : -1;
}

/* Options that only need to be copied. This comes after the shapes, because the scale depends on d. */
static void set_options(const fa_arguments *a, fa_problem *p)
{
    const fa_options *o = a->options;
    bool window = o->flags & FA_WINDOW, scale = o->flags & FA_SCALE || o->scale != 0.0f;
    const int64_t diagonal = o->flags & FA_DIAGONAL ? o->diagonal : 0;
    p->scale = scale ? o->scale : (float)(1.0 / sqrt((double)p->d));
    p->softcap = o->softcap;
    p->precision = is_float32(p) ? o->precision : FA_PRECISION_FLOAT32;
    p->causal = o->flags & FA_CAUSAL;
    p->diagonal_given = o->flags & FA_DIAGONAL;
    p->deterministic = o->flags & FA_DETERMINISTIC;
    p->batch_invariant = o->flags & FA_BATCH_INVARIANT;
    p->full_workspace = o->flags & FA_FULL_WORKSPACE;
    p->diagonal = o->diagonal;
    p->window_left = window ? find_window(o->window_left, diagonal) : -1;
    p->window_right = window ? find_window(o->window_right, -diagonal) : -1;
    p->attention_chunk = o->attention_chunk;
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

static fa_status check_head_dim(const char *name, const fa_tensor *t, int max)
{
    FA_REQUIRE(t->shape[3] >= 1 && t->shape[3] <= max,
               "%s.shape[3] is %" PRId64 ": expected a head dim from 1 to %d", name, t->shape[3],
               max);
    return FA_OK;
}

static fa_status set_queries(const fa_arguments *a, fa_problem *p)
{
    const fa_tensor *q = a->q;
    const fa_options *o = a->options;
    FA_TRY(check_tensor("q", q, ROLE_INPUT, a->dry_run));
    FA_TRY(check_head_dim("q", q, FA_HEAD_DIM_MAX));
    p->batch = o->cu_seqlens_q || o->cu_seqlens_k ? o->num_sequences : q->shape[0];
    if (o->cu_seqlens_q) FA_TRY(check_axis("q", q, 0, 1, "packed by options.cu_seqlens_q"));
    else FA_TRY(check_axis("q", q, 0, p->batch, "options.num_sequences"));
    p->blocks_q = q->shape[0];
    p->rows_q = p->n_q = p->max_q = q->shape[1];
    if (o->max_seqlen_q > 0 && o->max_seqlen_q < p->n_q) p->max_q = o->max_seqlen_q;
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
    FA_TRY(check_tensor("k", k, ROLE_KEYS, a->dry_run));
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

/* fa_weights needs no values, and its dry run may leave them out. */
static fa_status set_values(const fa_arguments *a, fa_problem *p)
{
    const fa_tensor *v = a->v;
    p->d_v = p->d;
    if (!v && p->pass == FA_PASS_WEIGHTS) return FA_OK;
    FA_TRY(check_tensor("v", v, ROLE_KEYS, a->dry_run));
    FA_TRY(check_like("v", v, "k", a->k, 3));
    FA_TRY(check_head_dim("v", v, FA_VALUE_DIM_MAX));
    p->d_v = v->shape[3];
    set_row_view(&p->v, v);
    return FA_OK;
}

/* A tensor of out's shape. */
static fa_status check_out_shape(const char *name, const fa_tensor *t, const fa_arguments *a,
                                 const fa_problem *p)
{
    FA_TRY(check_like(name, t, "q", a->q, 3));
    return a->v ? check_axis(name, t, 3, p->d_v, "v.shape[3]")
                : check_head_dim(name, t, FA_VALUE_DIM_MAX);
}

/* The output that a dry run without one stands for: contiguous, of the queries' type, or bfloat16 if that has 8 bits. */
static fa_tensor make_usual_out(const fa_arguments *a)
{
    const int64_t *q = a->q->shape;
    const fa_dtype dtype = fa_dtype_size(a->q->dtype) == 1 ? FA_BFLOAT16 : a->q->dtype;
    return fa_bshd(NULL, dtype, q[0], q[1], q[2], a->v->shape[3]);
}

/* fa_weights has no out, and a dry run need not give one. */
static fa_status set_out(const fa_arguments *a, fa_problem *p)
{
    if (!a->out && p->pass == FA_PASS_WEIGHTS) return FA_OK;
    if (!a->out && a->dry_run) {
        const fa_tensor usual = make_usual_out(a);
        set_row_view(&p->out, &usual);
        return FA_OK;
    }
    role r = p->pass == FA_PASS_BACKWARD ? ROLE_RESULT : ROLE_OUTPUT;
    FA_TRY(check_tensor("out", a->out, r, a->dry_run));
    FA_TRY(check_out_shape("out", a->out, a, p));
    set_row_view(&p->out, a->out);
    return FA_OK;
}

/* The slopes of batch item b lie b strides after those of the first item. */
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

static bool has_8_bits(const fa_tensor *t)
{
    return t->dtype == FA_FLOAT8_E4M3 || t->dtype == FA_INT8;
}

/* Scales are only for 8-bit elements. */
static fa_status check_descale(char letter, const float *descale, const fa_tensor *t)
{
    FA_REQUIRE(
        !descale || !t || has_8_bits(t),
        "options.%c_descale is set and %c.dtype is %s: expected float8_e4m3%s, or no descale",
        letter, letter, fa_dtype_name(t->dtype), letter == 'q' ? "" : " or int8");
    return FA_OK;
}

static fa_status refuse_8_bits(char letter, const fa_tensor *t)
{
    if (!has_8_bits(t)) return FA_OK;
    return fa_fail(FA_ERROR_UNSUPPORTED,
                   "%c.dtype is %s, which the backward pass does not support: expected "
                   "float32, float16 or bfloat16",
                   letter, fa_dtype_name(t->dtype));
}

/* Scales of a cache: float32, the extents of its first three axes, or 1 where all share one. written: by the call, so
 * that each row has its own. */
static fa_status check_scale_shape(const char *name, const fa_tensor *t, const char *of,
                                   const fa_tensor *cache, bool written, bool dry_run)
{
    FA_TRY(check_tensor(name, t, written ? ROLE_BIAS_GRAD : ROLE_BIAS, dry_run));
    FA_REQUIRE(t->dtype == FA_FLOAT32, "%s.dtype is %d (%s): expected float32", name, (int)t->dtype,
               fa_dtype_name(t->dtype));
    for (int axis = 0; axis < 3; axis++)
        FA_REQUIRE(t->shape[axis] == cache->shape[axis] || (t->shape[axis] == 1 && !written),
                   "%s.shape[%d] is %" PRId64 ": expected %" PRId64 " (%s.shape[%d])%s", name, axis,
                   t->shape[axis], cache->shape[axis], of, axis,
                   written ? ", as FA_WRITE_SCALES writes one for each row" : " or 1");
    return check_axis(name, t, 3, 1, "one scale for a row");
}

/* letter: 'k' or 'v'; t: NULL: fa_weights has no values. */
static fa_status set_key_scale(char letter, const fa_tensor *scale, const float *descale,
                               const fa_tensor *t, bool dry_run, fa_view *view)
{
    const char name[] = {letter, 0};
    if (!scale || !t) return FA_OK;
    FA_REQUIRE(has_8_bits(t),
               "options.%c_scale is set and %c.dtype is %s: expected float8_e4m3 or int8, or no "
               "scale",
               letter, letter, fa_dtype_name(t->dtype));
    FA_REQUIRE(!descale,
               "options.%c_scale and %c_descale are both set: expected one of them at most", letter,
               letter);
    FA_TRY(check_scale_shape(letter == 'k' ? "options.k_scale" : "options.v_scale", scale, name, t,
                             false, dry_run));
    set_broadcast_view(view, scale);
    return FA_OK;
}

static fa_status check_8_bits(const fa_arguments *a)
{
    const fa_options *o = a->options;
    FA_TRY(check_descale('q', o->q_descale, a->q));
    FA_TRY(check_descale('k', o->k_descale, a->k));
    FA_TRY(check_descale('v', o->v_descale, a->v));
    if (a->pass != FA_PASS_BACKWARD) return FA_OK;
    FA_TRY(refuse_8_bits('q', a->q));
    FA_TRY(refuse_8_bits('k', a->k));
    return refuse_8_bits('v', a->v);
}

/* Only in a dry run: else check_data has refused it. */
static bool misses_data(const fa_tensor *t) { return !t->data && !is_empty(t); }

static fa_status set_shapes(const fa_arguments *a, fa_problem *p)
{
    FA_TRY(set_queries(a, p));
    FA_TRY(set_keys(a, p));
    FA_TRY(set_values(a, p));
    FA_TRY(set_out(a, p));
    FA_TRY(check_counts(p));
    p->lacks_data = misses_data(a->q) || misses_data(a->k) || (a->v && misses_data(a->v));
    FA_TRY(check_alibi_stride(a->options, p));
    FA_TRY(set_lse(a, p));
    FA_TRY(check_8_bits(a));
    FA_TRY(set_key_scale('k', a->options->k_scale, a->options->k_descale, a->k, a->dry_run,
                         &p->k_scale));
    return set_key_scale('v', a->options->v_scale, a->options->v_descale, a->v, a->dry_run,
                         &p->v_scale);
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

/* The length of sequence b, at most what the tensor has room for. */
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

/* Reads the lengths if they are in host memory and the call will use them. */
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

/* Checks the table entries that the sequences use. */
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

/* Writes the error with the messages of the checks above. */
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

/* The extents and lengths with which a tensor of scores is compared. */
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

/* If the lengths vary, any extent is accepted that covers the longest sequence. */
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
    if (!dout->data && is_empty(a->out)) return FA_OK; /* it is not read */
    FA_REQUIRE(dout->data, "gradients.dout.data is NULL: expected the gradient of out");
    FA_TRY(check_tensor("gradients.dout", dout, ROLE_RESULT, false));
    FA_TRY(check_like("gradients.dout", dout, "out", a->out, 4));
    set_row_view(&p->dout, dout);
    p->dlse = a->gradients->dlse;
    return check_alignment("gradients.dlse", p->dlse, sizeof(float));
}

/* The gradient of q, k or v, if it is wanted. */
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

/* If an output overlapped one of these arrays, the call would change the addresses that it uses. */
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
    add_tensor(r, "options.k_scale", o->k_scale, false);
    add_tensor(r, "options.v_scale", o->v_scale, false);
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

/* ---- Append ---------------------------------------------------------------------------------- */

/* The pointers of fa_append_options that lead to int32 arrays; wants_q: meaningless without q. */
static const struct append_array {
    const char *name;
    size_t field;
    bool wants_q, wants_tables, written;
} append_arrays[] = {
    {"options.lengths", offsetof(fa_append_options, lengths), false, false, false},
    {"options.left_padding", offsetof(fa_append_options, left_padding), false, false, false},
    {"options.cache_index", offsetof(fa_append_options, cache_index), false, false, false},
    {"options.cu_seqlens_new", offsetof(fa_append_options, cu_seqlens_new), false, false, false},
    {"options.seqlens_new", offsetof(fa_append_options, seqlens_new), false, false, false},
    {"options.cu_seqlens_q", offsetof(fa_append_options, cu_seqlens_q), true, false, false},
    {"options.seqlens_q", offsetof(fa_append_options, seqlens_q), true, false, false},
    {"options.block_table", offsetof(fa_append_options, block_table), false, false, false},
    {"options.rotary_positions", offsetof(fa_append_options, rotary_positions), false, true, false},
    {"options.lengths_after", offsetof(fa_append_options, lengths_after), false, false, true},
    {"options.block_table_after", offsetof(fa_append_options, block_table_after), false, false,
     true},
    {"options.row_table_after", offsetof(fa_append_options, row_table_after), false, false, true},
    {"options.cu_seqlens_after", offsetof(fa_append_options, cu_seqlens_after), false, false, true},
};
enum { APPEND_ARRAYS = sizeof append_arrays / sizeof append_arrays[0] };

static const int32_t *append_array_of(const fa_append_options *o, int i)
{
    const int32_t *data;
    memcpy(&data, (const char *)o + append_arrays[i].field, sizeof data);
    return data;
}

static fa_status check_append_companions(const fa_append_options *o)
{
    const uint32_t rotary = FA_ROTARY_INTERLEAVED | FA_ROTARY_ONE_POSITION;
    FA_REQUIRE(!o->cos == !o->sin, "options.%s is NULL: expected both tables or none",
               o->cos ? "sin" : "cos");
    FA_REQUIRE(o->cos || !(o->flags & rotary),
               "options.flags is 0x%" PRIx32 ": expected no FA_ROTARY_ bit without options.cos",
               o->flags);
    FA_REQUIRE(o->cos || o->rotary_offset == 0,
               "options.rotary_offset is %" PRId64 ": expected 0 without options.cos",
               o->rotary_offset);
    FA_REQUIRE(o->cos || !o->q, "options.q is set: expected NULL without options.cos");
    FA_REQUIRE(o->q || !o->q_out, "options.q_out is set: expected NULL without options.q");
    FA_REQUIRE(o->cu_seqlens_new || o->cu_seqlens_q || o->num_sequences == 0,
               "options.num_sequences is %" PRId64
               ": expected 0 without options.cu_seqlens_new or options.cu_seqlens_q",
               o->num_sequences);
    FA_REQUIRE(o->block_table || (o->block_table_stride == 0 && o->block_table_rows == 0),
               "options.block_table_stride is %" PRId64 " and block_table_rows %" PRId64
               ": expected 0 without options.block_table",
               o->block_table_stride, o->block_table_rows);
    FA_REQUIRE(o->block_table || !o->block_table_after,
               "options.block_table_after is set: expected NULL without options.block_table");
    FA_REQUIRE(
        !o->cu_seqlens_after || !(o->block_table || o->cache_index),
        "options.cu_seqlens_after is set: expected NULL with options.%s, for the keys are not "
        "in the order of the sequences",
        o->block_table ? "block_table" : "cache_index");
    FA_REQUIRE(o->left_padding || !(o->flags & FA_LENGTHS_WITH_PADDING),
               "options.flags is 0x%" PRIx32
               ": expected no FA_LENGTHS_WITH_PADDING without options.left_padding",
               o->flags);
    for (int i = 0; i < APPEND_ARRAYS; i++) {
        const int32_t *data = append_array_of(o, i);
        FA_REQUIRE(!data || o->q || !append_arrays[i].wants_q,
                   "%s is set: expected NULL without options.q", append_arrays[i].name);
        FA_REQUIRE(!data || o->cos || !append_arrays[i].wants_tables,
                   "%s is set: expected NULL without options.cos", append_arrays[i].name);
        FA_TRY(check_alignment(append_arrays[i].name, data, sizeof(int32_t)));
    }
    return FA_OK;
}

static fa_status check_append_options(const fa_append_options *o, fa_device device)
{
    const uint32_t known =
        FA_ROTARY_INTERLEAVED | FA_ROTARY_ONE_POSITION | FA_WRITE_SCALES | FA_LENGTHS_WITH_PADDING;
    FA_REQUIRE(!(o->flags & ~known),
               "options.flags is 0x%" PRIx32 ": expected only the bits 0x%" PRIx32
               " that this version knows",
               o->flags, known);
    FA_REQUIRE(o->reserved == 0, "options.reserved is %" PRId32 ": expected 0", o->reserved);
    FA_TRY(check_append_companions(o));
    FA_REQUIRE(o->num_sequences >= 0 && o->num_sequences <= EXTENT_MAX,
               "options.num_sequences is %" PRId64 ": expected 0 to 2^60", o->num_sequences);
    FA_REQUIRE(
        !o->block_table || (o->block_table_stride >= 1 && o->block_table_stride <= EXTENT_MAX),
        "options.block_table_stride is %" PRId64 ": expected 1 to 2^60 table entries per row",
        o->block_table_stride);
    FA_REQUIRE(o->block_table_rows >= 0 && o->block_table_rows <= EXTENT_MAX,
               "options.block_table_rows is %" PRId64 ": expected 0 to 2^60", o->block_table_rows);
    FA_REQUIRE(o->threads >= 0,
               "options.threads is %" PRId32 ": expected > 0, or 0 for OpenMP's choice",
               o->threads);
    FA_REQUIRE(device != FA_DEVICE_CPU || !o->stream,
               "options.stream is %p: expected NULL, as the call runs on the CPU", o->stream);
    return FA_OK;
}

static fa_status set_new_rows(const fa_append_call *c, fa_append_problem *p)
{
    const fa_append_options *o = c->options;
    const fa_tensor *k = c->k_new, *v = c->v_new;
    FA_TRY(check_tensor("k_new", k, ROLE_RESULT, false));
    FA_TRY(check_head_dim("k_new", k, FA_HEAD_DIM_MAX));
    p->arrays.batch = o->cu_seqlens_new || o->cu_seqlens_q ? o->num_sequences : k->shape[0];
    if (o->cu_seqlens_new) FA_TRY(check_axis("k_new", k, 0, 1, "packed by options.cu_seqlens_new"));
    else FA_TRY(check_axis("k_new", k, 0, p->arrays.batch, "options.num_sequences"));
    p->blocks_new = k->shape[0];
    p->arrays.rows_new = k->shape[1];
    p->heads_kv = k->shape[2];
    p->d = k->shape[3];
    set_row_view(&p->k_new, k);
    FA_REQUIRE(!v == !c->v_cache, "%s is NULL: expected both v_new and v_cache, or neither",
               v ? "v_cache" : "v_new");
    if (!v) return FA_OK;
    FA_TRY(check_tensor("v_new", v, ROLE_RESULT, false));
    FA_TRY(check_like("v_new", v, "k_new", k, 3));
    FA_TRY(check_head_dim("v_new", v, FA_VALUE_DIM_MAX));
    p->d_v = v->shape[3];
    set_row_view(&p->v_new, v);
    return FA_OK;
}

/* Rows from one block of a cache to the next. */
static fa_status find_rows_apart(const char *name, const fa_tensor *t, int64_t *apart)
{
    const int64_t blocks = t->shape[0], rows = t->shape[1], block = t->stride[0],
                  row = t->stride[1];
    *apart = rows <= 1 ? 1 : rows;
    if (blocks <= 1 || rows <= 1) return FA_OK;
    FA_REQUIRE(row > 0 && block % row == 0 && block / row >= rows,
               "%s.stride is {%" PRId64 ", %" PRId64 ", ...}: expected blocks that are a whole "
               "number of rows apart, at least %" PRId64
               ", as options.row_table_after or cu_seqlens_after is set",
               name, block, row, rows);
    *apart = block / row;
    return FA_OK;
}

/* For the arrays that number all rows of the cache. */
static fa_status set_rows_apart(const fa_append_call *c, fa_append_arrays *a)
{
    int64_t others, entries, rows;
    if (!c->options->row_table_after && !c->options->cu_seqlens_after) return FA_OK;
    FA_TRY(find_rows_apart("k_cache", c->k_cache, &a->rows_apart));
    if (c->v_cache) {
        FA_TRY(find_rows_apart("v_cache", c->v_cache, &others));
        FA_REQUIRE(others == a->rows_apart,
                   "blocks of k_cache are %" PRId64 " and of v_cache %" PRId64
                   " rows apart: expected the same, as options.row_table_after or "
                   "cu_seqlens_after is set",
                   a->rows_apart, others);
    }
    FA_REQUIRE(multiply(a->cache_blocks, a->rows_apart, &rows) && rows <= INT32_MAX &&
                   a->cache_rows <= INT32_MAX,
               "k_cache has %" PRId64 " blocks that are %" PRId64
               " rows apart: expected fewer than 2^31 rows, as options.row_table_after or "
               "cu_seqlens_after is set",
               a->cache_blocks, a->rows_apart);
    FA_REQUIRE(multiply(a->batch, fa_append_room(a), &entries) && entries <= EXTENT_MAX,
               "k_cache.shape[1] is %" PRId64 " and the batch %" PRId64
               ": expected at most 2^60 entries of options.row_table_after",
               a->cache_rows, a->batch);
    return FA_OK;
}

/* Without new keys the cache is not written. */
static bool writes_keys(const fa_append_problem *p)
{
    return p->blocks_new > 0 && p->arrays.rows_new > 0;
}

static fa_status set_cache(const fa_append_call *c, fa_append_problem *p)
{
    const fa_append_options *o = c->options;
    const fa_tensor *k = c->k_cache, *v = c->v_cache;
    fa_append_arrays *a = &p->arrays;
    const role r = writes_keys(p) ? ROLE_CACHE : ROLE_KEYS;
    FA_TRY(check_tensor("k_cache", k, r, false));
    FA_TRY(check_axis("k_cache", k, 2, p->heads_kv, "k_new.shape[2]"));
    FA_TRY(check_axis("k_cache", k, 3, p->d, "k_new.shape[3]"));
    set_row_view(&p->k_cache, k);
    a->cache_blocks = k->shape[0];
    a->cache_rows = k->shape[1];
    a->block_table_stride = o->block_table_stride;
    a->block_table_rows = o->block_table_rows ? o->block_table_rows : a->batch;
    if (o->block_table) {
        int64_t entries;
        FA_REQUIRE(a->cache_rows >= 1, "k_cache.shape[1] is 0: expected a page size of at least "
                                       "1, as options.block_table is set");
        FA_REQUIRE(multiply(a->block_table_stride, a->cache_rows, &entries) &&
                       entries <= EXTENT_MAX &&
                       multiply(a->block_table_stride, a->block_table_rows, &entries) &&
                       entries <= EXTENT_MAX &&
                       multiply(a->block_table_stride, a->batch, &entries) && entries <= EXTENT_MAX,
                   "options.block_table_stride is %" PRId64 " with %" PRId64
                   " rows and pages of %" PRId64 " keys (k_cache.shape[1]): expected products up "
                   "to 2^60",
                   a->block_table_stride, a->block_table_rows, a->cache_rows);
    }
    FA_REQUIRE(o->cache_index || o->block_table || a->cache_blocks >= a->batch,
               "k_cache.shape[0] is %" PRId64 ": expected at least %" PRId64
               " (the batch), as options.cache_index is NULL",
               a->cache_blocks, a->batch);
    FA_REQUIRE(o->cache_index || !o->block_table || a->block_table_rows >= a->batch,
               "options.block_table_rows is %" PRId64 ": expected at least %" PRId64
               " (the batch), as options.cache_index is NULL",
               a->block_table_rows, a->batch);
    if (v) {
        FA_TRY(check_tensor("v_cache", v, r, false));
        FA_TRY(check_like("v_cache", v, "k_cache", k, 3));
        FA_TRY(check_axis("v_cache", v, 3, p->d_v, "v_new.shape[3]"));
        set_row_view(&p->v_cache, v);
    }
    return set_rows_apart(c, a);
}

static fa_status check_rotary_table(const char *name, const fa_tensor *t, const fa_tensor *cos)
{
    FA_TRY(check_tensor(name, t, ROLE_RESULT, false));
    FA_TRY(check_axis(name, t, 0, 1, "one table for all"));
    FA_TRY(check_axis(name, t, 2, 1, "one table for all heads"));
    FA_REQUIRE(t->shape[1] >= 1, "%s.shape[1] is 0: expected at least one position", name);
    return check_like(name, t, "options.cos", cos, 4);
}

static fa_status set_rotary(const fa_append_call *c, fa_append_problem *p)
{
    const fa_append_options *o = c->options;
    const fa_tensor *cos = o->cos;
    if (!cos) return FA_OK;
    FA_TRY(check_rotary_table("options.cos", cos, cos));
    FA_TRY(check_rotary_table("options.sin", o->sin, cos));
    FA_REQUIRE(cos->shape[3] >= 1 && cos->shape[3] <= p->d / 2,
               "options.cos.shape[3] is %" PRId64 ": expected 1 to %" PRId64
               ", half the columns of k_new",
               cos->shape[3], p->d / 2);
    FA_REQUIRE(o->rotary_offset >= 0 && o->rotary_offset <= p->d - 2 * cos->shape[3],
               "options.rotary_offset is %" PRId64 ": expected 0 to %" PRId64 ", so that %" PRId64
               " columns of k_new follow",
               o->rotary_offset, p->d - 2 * cos->shape[3], 2 * cos->shape[3]);
    p->rotary_dim = 2 * cos->shape[3];
    p->rotary_offset = o->rotary_offset;
    p->arrays.positions = cos->shape[1];
    set_row_view(&p->cos, cos);
    set_row_view(&p->sin, o->sin);
    return FA_OK;
}

static bool same_place(const fa_tensor *a, const fa_tensor *b)
{
    return a->data == b->data && a->dtype == b->dtype &&
           memcmp(a->stride, b->stride, sizeof a->stride) == 0;
}

static fa_status set_append_queries(const fa_append_call *c, fa_append_problem *p)
{
    const fa_append_options *o = c->options;
    const fa_tensor *q = o->q, *out = o->q_out ? o->q_out : o->q;
    if (!q) return FA_OK;
    FA_TRY(check_tensor("options.q", q, o->q_out ? ROLE_RESULT : ROLE_OUTPUT, false));
    if (o->cu_seqlens_q) FA_TRY(check_axis("options.q", q, 0, 1, "packed by options.cu_seqlens_q"));
    else FA_TRY(check_axis("options.q", q, 0, p->arrays.batch, "the batch"));
    FA_TRY(check_axis("options.q", q, 3, p->d, "k_new.shape[3]"));
    FA_TRY(check_tensor("options.q_out", out, ROLE_OUTPUT, false));
    FA_TRY(check_like("options.q_out", out, "options.q", q, 4));
    p->blocks_q = q->shape[0];
    p->arrays.rows_q = q->shape[1];
    p->heads_q = q->shape[2];
    set_row_view(&p->q, q);
    set_row_view(&p->q_out, out);
    return FA_OK;
}

/* Scales of keys or values; cache: NULL: there are none of these. */
static fa_status set_scale(const char *name, const fa_tensor *scale, const char *cache_name,
                           const fa_tensor *cache, bool write, fa_view *view)
{
    const bool eight = cache && has_8_bits(cache);
    FA_REQUIRE(!eight || scale || !write, "%s is NULL: expected where FA_WRITE_SCALES shall write",
               name);
    if (!scale) return FA_OK;
    FA_REQUIRE(eight, "%s is set and %s is %s: expected float8_e4m3 or int8, or no scale", name,
               cache_name, cache ? fa_dtype_name(cache->dtype) : "NULL");
    FA_TRY(check_scale_shape(name, scale, cache_name, cache, write, false));
    set_broadcast_view(view, scale);
    return FA_OK;
}

static fa_status check_append_aliasing(const fa_append_call *c, const fa_append_problem *p)
{
    const fa_append_options *o = c->options;
    const fa_append_arrays *a = &p->arrays;
    const int64_t entry = (int64_t)sizeof(int32_t);
    const bool write = o->flags & FA_WRITE_SCALES;
    const int64_t bytes[APPEND_ARRAYS] = {a->batch * entry,
                                          a->batch * entry,
                                          a->batch * entry,
                                          (a->batch + 1) * entry,
                                          a->batch * entry,
                                          (a->batch + 1) * entry,
                                          a->batch * entry,
                                          a->block_table_stride * a->block_table_rows * entry,
                                          a->batch * entry,
                                          a->batch * entry,
                                          a->batch * a->block_table_stride * entry,
                                          a->batch * fa_append_room(a) * entry,
                                          (a->batch + 1) * entry};
    regions r;
    r.count = 0;
    add_tensor(&r, "k_new", c->k_new, false);
    add_tensor(&r, "v_new", c->v_new, false);
    add_tensor(&r, "k_cache", c->k_cache, writes_keys(p));
    add_tensor(&r, "v_cache", c->v_cache, writes_keys(p));
    add_tensor(&r, "options.cos", o->cos, false);
    add_tensor(&r, "options.sin", o->sin, false);
    if (o->q && (!o->q_out || same_place(o->q, o->q_out))) {
        add_tensor(&r, "options.q", o->q, true);
    } else {
        add_tensor(&r, "options.q", o->q, false);
        add_tensor(&r, "options.q_out", o->q_out, true);
    }
    add_tensor(&r, "options.k_scale", o->k_scale, write);
    add_tensor(&r, "options.v_scale", o->v_scale, write);
    for (int i = 0; i < APPEND_ARRAYS; i++)
        add_array(&r, append_arrays[i].name, append_array_of(o, i), bytes[i],
                  append_arrays[i].written);
    return check_apart(&r);
}

/* One side's lengths in host memory: of the new keys, or of the queries. */
typedef struct append_side {
    const char *name, *rows_name;
    const int32_t *cu_seqlens, *seqlens;
    int64_t rows;
} append_side;

static fa_status check_append_cu_seqlens(const append_side *s, int64_t batch)
{
    const int32_t *cu = s->cu_seqlens;
    FA_REQUIRE(cu[0] >= 0, "options.cu_seqlens_%s[0] is %" PRId32 ": expected >= 0", s->name,
               cu[0]);
    for (int64_t b = 0; b < batch; b++)
        FA_REQUIRE(cu[b + 1] >= cu[b],
                   "options.cu_seqlens_%s[%" PRId64 "] is %" PRId32 ": expected >= %" PRId32
                   ", the entry before it",
                   s->name, b + 1, cu[b + 1], cu[b]);
    FA_REQUIRE(cu[batch] <= s->rows,
               "options.cu_seqlens_%s[%" PRId64 "] is %" PRId32 ": expected <= %" PRId64 " (%s)",
               s->name, batch, cu[batch], s->rows, s->rows_name);
    return FA_OK;
}

static fa_status read_append_count(const append_side *s, int64_t b, int64_t *count)
{
    const int64_t room = s->cu_seqlens ? (int64_t)s->cu_seqlens[b + 1] - s->cu_seqlens[b] : s->rows;
    *count = s->seqlens ? s->seqlens[b] : room;
    FA_REQUIRE(*count >= 0 && *count <= room,
               "options.seqlens_%s[%" PRId64 "] is %" PRId64 ": expected 0 to %" PRId64, s->name, b,
               *count, room);
    return FA_OK;
}

/* Number 0 to count - 1 of keys or queries of sequence b. */
static fa_status check_positions(const fa_append_problem *p, int64_t b, int64_t count)
{
    const fa_append_arrays *a = &p->arrays;
    if (!p->rotary_dim || count == 0) return FA_OK;
    const bool own = a->rotary_positions;
    const int64_t start = own ? a->rotary_positions[b] : fa_append_length(a, b);
    FA_REQUIRE(start >= 0 && start + count <= a->positions,
               "options.%s[%" PRId64 "] is %" PRId64 " with %" PRId64
               " rows to rotate: expected positions of 0 to %" PRId64 " (options.cos.shape[1])",
               own ? "rotary_positions" : "lengths", b, start, count, a->positions - 1);
    return FA_OK;
}

/* The cache's rows for `count` new keys of sequence b. */
static fa_status check_append_place(const fa_append_problem *p, int64_t b, int64_t count)
{
    const fa_append_arrays *a = &p->arrays;
    const int64_t entries = a->block_table ? a->block_table_rows : a->cache_blocks;
    const int64_t room = fa_append_room(a), entry = a->cache_index ? a->cache_index[b] : b;
    const int64_t length = fa_append_length(a, b);
    const int64_t padding = a->left_padding ? a->left_padding[b] : 0;
    const int64_t begin = length + (a->lengths_with_padding ? 0 : padding), end = begin + count;
    FA_REQUIRE(length >= 0, "options.lengths[%" PRId64 "] is %" PRId64 ": expected >= 0", b,
               length);
    FA_REQUIRE(padding >= 0, "options.left_padding[%" PRId64 "] is %" PRId64 ": expected >= 0", b,
               padding);
    FA_REQUIRE(entry >= 0 && entry < entries,
               "options.cache_index[%" PRId64 "] is %" PRId64 ": expected 0 to %" PRId64 " (%s)", b,
               entry, entries - 1,
               a->block_table ? "rows of options.block_table" : "k_cache.shape[0]");
    FA_REQUIRE(padding <= end,
               "options.left_padding[%" PRId64 "] is %" PRId64 ": expected at most %" PRId64
               " rows, as FA_LENGTHS_WITH_PADDING is set",
               b, padding, end);
    FA_REQUIRE(end <= room,
               "options.lengths[%" PRId64 "] is %" PRId64 " with %" PRId64
               " rows of padding%s and %" PRId64 " new keys: expected at most %" PRId64
               " in all (%s)",
               b, length, padding, a->lengths_with_padding ? " among them" : "", count, room,
               a->block_table ? "the pages of a row of options.block_table" : "k_cache.shape[1]");
    /* Pages that keys are written to, or that the table of rows shall have. */
    for (int64_t row = a->row_table_after ? padding : begin; a->block_table && row < end;) {
        const int64_t i = row / a->cache_rows, at = entry * a->block_table_stride + i;
        FA_REQUIRE(a->block_table[at] >= 0 && a->block_table[at] < a->cache_blocks,
                   "options.block_table[%" PRId64 "] (row %" PRId64 ", entry %" PRId64
                   ") is %" PRId32 ": expected 0 <= page < %" PRId64 " (k_cache.shape[0])",
                   at, entry, i, a->block_table[at], a->cache_blocks);
        row = (i + 1) * a->cache_rows;
    }
    return FA_OK;
}

/* Checks of the arrays in host memory. */
static fa_status check_append_arrays(const fa_append_problem *p)
{
    const fa_append_arrays *a = &p->arrays;
    const append_side new = {"new", "k_new.shape[1]", a->cu_seqlens_new, a->seqlens_new,
                             a->rows_new};
    const append_side q = {"q", "options.q.shape[1]", a->cu_seqlens_q, a->seqlens_q, a->rows_q};
    if (a->cu_seqlens_new) FA_TRY(check_append_cu_seqlens(&new, a->batch));
    if (a->cu_seqlens_q) FA_TRY(check_append_cu_seqlens(&q, a->batch));
    for (int64_t b = 0; b < a->batch; b++) {
        int64_t count, queries = 0;
        FA_TRY(read_append_count(&new, b, &count));
        FA_TRY(check_append_place(p, b, count));
        FA_TRY(check_positions(p, b, count));
        if (!p->q.data) continue;
        FA_TRY(read_append_count(&q, b, &queries));
        FA_TRY(check_positions(p, b, p->one_position && queries ? 1 : queries));
    }
    return FA_OK;
}

static void set_append_arrays(const fa_append_options *o, fa_append_arrays *a)
{
    a->lengths = o->lengths;
    a->left_padding = o->left_padding;
    a->cache_index = o->cache_index;
    a->cu_seqlens_new = o->cu_seqlens_new;
    a->seqlens_new = o->seqlens_new;
    a->cu_seqlens_q = o->cu_seqlens_q;
    a->seqlens_q = o->seqlens_q;
    a->block_table = o->block_table;
    a->rotary_positions = o->rotary_positions;
    a->lengths_after = o->lengths_after;
    a->block_table_after = o->block_table_after;
    a->row_table_after = o->row_table_after;
    a->cu_seqlens_after = o->cu_seqlens_after;
    a->lengths_with_padding = (o->flags & FA_LENGTHS_WITH_PADDING) != 0;
}

/* Rows times heads must be countable. */
static fa_status check_append_counts(const fa_append_problem *p)
{
    const int64_t rows[4] = {p->blocks_new, p->arrays.rows_new, p->heads_kv, 1};
    const int64_t queries[4] = {p->blocks_q, p->arrays.rows_q, p->heads_q, 1};
    int64_t n = 0, m = 0;
    FA_REQUIRE(count_elements(rows, &n) && count_elements(queries, &m) && n <= EXTENT_MAX &&
                   m <= EXTENT_MAX,
               "k_new has %" PRId64 " x %" PRId64 " rows of %" PRId64 " heads, options.q %" PRId64
               " x %" PRId64 " of %" PRId64 ": expected products up to 2^60",
               rows[0], rows[1], rows[2], queries[0], queries[1], queries[2]);
    return FA_OK;
}

fa_status fa_append_problem_make(const fa_append_call *c, fa_append_problem *p)
{
    const fa_append_options *o = c->options;
    memset(p, 0, sizeof *p);
    p->device = c->device;
    p->interleaved = o->flags & FA_ROTARY_INTERLEAVED;
    p->one_position = o->flags & FA_ROTARY_ONE_POSITION;
    p->write_scales = o->flags & FA_WRITE_SCALES;
    p->threads = o->threads;
    p->stream = o->stream;
    FA_TRY(check_append_options(o, c->device));
    set_append_arrays(o, &p->arrays);
    FA_TRY(set_new_rows(c, p));
    FA_TRY(set_cache(c, p));
    FA_TRY(set_rotary(c, p));
    FA_TRY(set_append_queries(c, p));
    FA_TRY(set_scale("options.k_scale", o->k_scale, "k_cache", c->k_cache, p->write_scales,
                     &p->k_scale));
    FA_TRY(set_scale("options.v_scale", o->v_scale, "v_cache", c->v_cache, p->write_scales,
                     &p->v_scale));
    FA_TRY(check_append_counts(p));
    FA_TRY(check_append_aliasing(c, p));
    return c->device == FA_DEVICE_CPU ? check_append_arrays(p) : FA_OK;
}

/* ---- Combine --------------------------------------------------------------------------------- */

/* Options that merging does not use. */
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
    UNUSED(attention_chunk), UNUSED(k_scale), UNUSED(v_scale),
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

/* The outputs, which no part may overlap, and the size of each log-sum-exp. */
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

/* Names are made only for a part that is wrong. */
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
    FA_TRY(check_head_dim("out", out, FA_VALUE_DIM_MAX));
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
