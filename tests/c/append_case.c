#include "append_case.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "scalar.h"

static int64_t between(append_case *c, int64_t low, int64_t high)
{
    return ref_random_between(&c->random, low, high);
}

static bool once_in(append_case *c, int64_t n) { return ref_random_once_in(&c->random, n); }

static int32_t *make_integers(append_case *c, const char *name, int64_t n)
{
    return ref_buffers_new(&c->buffers, name, (size_t)n * sizeof(int32_t), sizeof(int32_t));
}

static void make_tensor(append_case *c, const char *name, fa_tensor *t, fa_dtype dtype, int64_t a,
                        int64_t b, int64_t heads, int64_t d, bool input)
{
    const ref_layout layout = ref_layout_random(&c->random, input, false);
    *t = (fa_tensor){NULL, dtype, {a, b, heads, d}, {0}};
    ref_buffers_tensor(&c->buffers, name, t, &layout);
    if (!input) ref_buffers_output(&c->buffers, t);
}

static void fill(append_case *c, const fa_tensor *t, double amplitude)
{
    for (int64_t a = 0; a < t->shape[0]; a++)
        for (int64_t b = 0; b < t->shape[1]; b++)
            for (int64_t h = 0; h < t->shape[2]; h++)
                for (int64_t e = 0; e < t->shape[3]; e++)
                    ref_store(t, a, b, h, e, amplitude * ref_random_normal(&c->random));
}

static fa_dtype draw_dtype(append_case *c) { return (fa_dtype)between(c, FA_FLOAT32, FA_BFLOAT16); }

static fa_dtype draw_cache_dtype(append_case *c, fa_dtype usual)
{
    static const fa_dtype types[] = {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16, FA_FLOAT8_E4M3, FA_INT8};
    return once_in(c, 2) ? usual : types[between(c, 0, 4)];
}

static bool is_small(fa_dtype dtype) { return dtype == FA_FLOAT8_E4M3 || dtype == FA_INT8; }

/* Lengths of one side: equal, padded, packed, or packed and padded. Returns the rows; *blocks: of axis 0. */
static int64_t draw_side(append_case *c, const char *name, bool packed, int64_t longest,
                         int64_t count[], const int32_t **cu, const int32_t **seqlens,
                         int64_t *blocks)
{
    const bool short_rows = once_in(c, 3);
    int64_t room[APPEND_MAX_BATCH], rows = longest;
    *blocks = packed ? 1 : c->batch;
    for (int64_t b = 0; b < c->batch; b++) room[b] = packed ? between(c, 0, longest) : longest;
    if (packed) {
        int32_t *starts = make_integers(c, name, c->batch + 1);
        starts[0] = once_in(c, 3) ? (int32_t)between(c, 1, 3) : 0;
        for (int64_t b = 0; b < c->batch; b++) starts[b + 1] = starts[b] + (int32_t)room[b];
        *cu = starts;
        rows = starts[c->batch] + (once_in(c, 2) ? between(c, 0, 3) : 0);
    }
    int32_t *lengths = short_rows ? make_integers(c, "seqlens", c->batch) : NULL;
    for (int64_t b = 0; b < c->batch; b++) {
        count[b] = lengths ? between(c, 0, room[b]) : room[b];
        if (lengths) lengths[b] = (int32_t)count[b];
    }
    *seqlens = lengths;
    return rows;
}

static void shuffle(append_case *c, int32_t *x, int64_t n)
{
    for (int64_t i = n - 1; i > 0; i--) {
        const int64_t j = between(c, 0, i);
        const int32_t y = x[i];
        x[i] = x[j];
        x[j] = y;
    }
}

/* Where sequences are in the cache, with room for all that they get. Returns the longest position. */
static int64_t draw_cache(append_case *c, int64_t *blocks, int64_t *rows)
{
    fa_append_options *o = &c->o;
    const bool paged = once_in(c, 2);
    const int64_t spare = between(c, 0, 3), entries = c->batch + spare;
    int64_t longest = 0, need = 1;
    int32_t *lengths = once_in(c, 8) ? NULL : make_integers(c, "lengths", c->batch);
    int32_t *padding = once_in(c, 3) ? make_integers(c, "left_padding", c->batch) : NULL;
    for (int64_t b = 0; b < c->batch; b++) {
        const int64_t length = lengths ? between(c, 0, 20) : 0,
                      pad = padding ? between(c, 0, 4) : 0;
        const int64_t before =
            padding && o->flags & FA_LENGTHS_WITH_PADDING ? length : length + pad;
        if (lengths) lengths[b] = (int32_t)length;
        if (padding)
            padding[b] = (int32_t)(pad < before + c->count_new[b] ? pad : before + c->count_new[b]);
        if (length + c->count_new[b] > longest) longest = length + c->count_new[b];
        if (length + c->count_q[b] > longest) longest = length + c->count_q[b];
        if (before + c->count_new[b] > need) need = before + c->count_new[b];
    }
    if (!padding) o->flags &= ~(uint32_t)FA_LENGTHS_WITH_PADDING;
    if (once_in(c, 2)) {
        int32_t *order = make_integers(c, "cache_index", entries);
        for (int64_t b = 0; b < entries; b++) order[b] = (int32_t)b;
        shuffle(c, order, entries);
        o->cache_index = order;
    }
    o->lengths = lengths;
    o->left_padding = padding;
    *blocks = entries;
    *rows = need + between(c, 0, 3);
    if (!paged) return longest;
    *rows = between(c, 1, 9);
    const int64_t stride = (need + *rows - 1) / *rows + between(c, 0, 2);
    int32_t *table = make_integers(c, "block_table", entries * stride);
    for (int64_t i = 0; i < entries * stride; i++) table[i] = (int32_t)i;
    shuffle(c, table, entries * stride);
    o->block_table = table;
    o->block_table_stride = stride;
    o->block_table_rows = o->cache_index || once_in(c, 2) ? entries : 0;
    *blocks = entries * stride + between(c, 0, 2);
    return longest;
}

static void make_scale(append_case *c, const char *name, fa_tensor *t, const fa_tensor *cache,
                       const fa_tensor **option)
{
    const bool write = c->o.flags & FA_WRITE_SCALES;
    if (!is_small(cache->dtype) || (!write && once_in(c, 4))) return;
    int64_t shape[3];
    for (int axis = 0; axis < 3; axis++)
        shape[axis] = write || once_in(c, 2) ? cache->shape[axis] : 1;
    make_tensor(c, name, t, FA_FLOAT32, shape[0], shape[1], shape[2], 1, !write);
    *option = t;
    for (int64_t a = 0; a < shape[0] && !write; a++)
        for (int64_t b = 0; b < shape[1]; b++)
            for (int64_t h = 0; h < shape[2]; h++)
                ref_store(t, a, b, h, 0,
                          ldexp(1 + ref_random_unit(&c->random), (int)between(c, -7, 2)));
}

static void make_rotary(append_case *c, int64_t longest)
{
    fa_append_options *o = &c->o;
    const int64_t half = once_in(c, 2) ? c->d / 2 : between(c, 1, c->d / 2);
    const fa_dtype dtype = once_in(c, 2) ? FA_FLOAT32 : c->k_new.dtype;
    o->rotary_offset = once_in(c, 2) ? 0 : between(c, 0, c->d - 2 * half);
    if (once_in(c, 2)) o->flags |= FA_ROTARY_INTERLEAVED;
    if (once_in(c, 3)) o->flags |= FA_ROTARY_ONE_POSITION;
    if (once_in(c, 3)) {
        int32_t *starts = make_integers(c, "rotary_positions", c->batch);
        for (int64_t b = 0; b < c->batch; b++) starts[b] = (int32_t)between(c, 0, 9);
        o->rotary_positions = starts;
        longest = 9 + (c->n_new > c->n_q ? c->n_new : c->n_q);
    }
    longest += between(c, 1, 3);
    make_tensor(c, "cos", &c->cos, dtype, 1, longest, 1, half, true);
    make_tensor(c, "sin", &c->sin, dtype, 1, longest, 1, half, true);
    fill(c, &c->cos, 1);
    fill(c, &c->sin, 1);
    o->cos = &c->cos;
    o->sin = &c->sin;
}

static void make_queries(append_case *c, int64_t blocks, int64_t rows)
{
    const fa_dtype dtype = draw_dtype(c);
    c->in_place = once_in(c, 2);
    make_tensor(c, "q", &c->q, dtype, blocks, rows, c->heads_q, c->d, !c->in_place);
    fill(c, &c->q, 1);
    c->o.q = &c->q;
    if (c->in_place) return;
    make_tensor(c, "q_out", &c->q_out, draw_dtype(c), blocks, rows, c->heads_q, c->d, false);
    c->o.q_out = &c->q_out;
}

static void make_lengths_after(append_case *c)
{
    c->after = make_integers(c, "lengths_after", c->batch);
    ref_buffers_whole_output(&c->buffers, c->after);
    c->o.lengths_after = c->after;
}

static void make_table_after(append_case *c)
{
    c->table = make_integers(c, "block_table_after", c->batch * c->o.block_table_stride);
    ref_buffers_whole_output(&c->buffers, c->table);
    c->o.block_table_after = c->table;
}

/* Rows from one block of a cache to the next; 0: not a whole number. */
static int64_t rows_apart_of(const fa_tensor *t)
{
    if (t->shape[1] <= 1) return 1;
    if (t->shape[0] <= 1) return t->shape[1];
    return t->stride[0] % t->stride[1] || t->stride[0] < t->shape[1] * t->stride[1]
               ? 0
               : t->stride[0] / t->stride[1];
}

static int64_t room_of(const append_case *c)
{
    return c->k_cache.shape[1] * (c->o.block_table ? c->o.block_table_stride : 1);
}

/* Arrays that number all rows of the cache, if it can have them. */
static void make_rows_after(append_case *c)
{
    const int64_t apart = rows_apart_of(&c->k_cache);
    if (apart == 0 || (c->has_v && rows_apart_of(&c->v_cache) != apart)) return;
    c->rows = make_integers(c, "row_table_after", c->batch * room_of(c));
    ref_buffers_whole_output(&c->buffers, c->rows);
    c->o.row_table_after = c->rows;
    if (c->o.block_table || c->o.cache_index) return;
    c->cu = make_integers(c, "cu_seqlens_after", c->batch + 1);
    ref_buffers_whole_output(&c->buffers, c->cu);
    c->o.cu_seqlens_after = c->cu;
}

static void keep_all(append_case *c)
{
    size_t bytes = 0;
    for (int i = 0; i < c->buffers.count; i++) bytes += c->buffers.list[i].bytes;
    char *to = c->before = malloc(bytes + 1);
    if (!to) abort();
    for (int i = 0; i < c->buffers.count; to += c->buffers.list[i++].bytes)
        memcpy(to, c->buffers.list[i].data, c->buffers.list[i].bytes);
    ref_buffers_freeze(&c->buffers);
}

void append_case_make(append_case *c, uint64_t seed)
{
    memset(c, 0, sizeof *c);
    c->random.state = seed;
    fa_append_options *o = &c->o;
    o->size = sizeof *o;
    o->threads = (int32_t)between(c, 0, 3);
    c->batch = once_in(c, 12) ? 0 : between(c, 1, APPEND_MAX_BATCH);
    c->n_new = once_in(c, 2) ? 1 : between(c, 0, 9);
    c->n_q = once_in(c, 2) ? c->n_new : between(c, 0, 6);
    c->heads_kv = between(c, 1, 3);
    c->heads_q = c->heads_kv * between(c, 1, 3);
    c->d = once_in(c, 8) ? 576 : between(c, 2, 140);
    c->d_v = once_in(c, 2) ? between(c, 1, 512) : between(c, 1, 140);
    c->has_v = !once_in(c, 5);
    const bool rotary = !once_in(c, 3), queries = rotary && once_in(c, 2);
    const bool packed = once_in(c, 3),
               packed_q = queries && (packed ? !once_in(c, 4) : once_in(c, 4));
    if (once_in(c, 3)) o->flags |= FA_WRITE_SCALES;
    if (once_in(c, 2)) o->flags |= FA_LENGTHS_WITH_PADDING; /* if there is any */
    int64_t blocks_new, blocks_q = 0, rows_q = 0, cache_blocks, cache_rows;
    const int64_t rows_new = draw_side(c, "cu_seqlens_new", packed, c->n_new, c->count_new,
                                       &o->cu_seqlens_new, &o->seqlens_new, &blocks_new);
    if (queries)
        rows_q = draw_side(c, "cu_seqlens_q", packed_q, c->n_q, c->count_q, &o->cu_seqlens_q,
                           &o->seqlens_q, &blocks_q);
    if (packed || packed_q) o->num_sequences = c->batch;
    const int64_t longest = draw_cache(c, &cache_blocks, &cache_rows);
    const fa_dtype dtype = draw_dtype(c);
    make_tensor(c, "k_new", &c->k_new, dtype, blocks_new, rows_new, c->heads_kv, c->d, true);
    make_tensor(c, "k_cache", &c->k_cache, draw_cache_dtype(c, dtype), cache_blocks, cache_rows,
                c->heads_kv, c->d, false);
    fill(c, &c->k_new, 1);
    make_scale(c, "k_scale", &c->k_scale, &c->k_cache, &o->k_scale);
    if (c->has_v) {
        make_tensor(c, "v_new", &c->v_new, dtype, blocks_new, rows_new, c->heads_kv, c->d_v, true);
        make_tensor(c, "v_cache", &c->v_cache, draw_cache_dtype(c, c->k_cache.dtype), cache_blocks,
                    cache_rows, c->heads_kv, c->d_v, false);
        fill(c, &c->v_new, 1);
        make_scale(c, "v_scale", &c->v_scale, &c->v_cache, &o->v_scale);
    }
    if (rotary) make_rotary(c, longest);
    if (queries) make_queries(c, blocks_q, rows_q);
    if (once_in(c, 2)) make_lengths_after(c);
    if (o->block_table && once_in(c, 2)) make_table_after(c);
    if (once_in(c, 2)) make_rows_after(c);
    keep_all(c);
    snprintf(c->text, sizeof c->text,
             "batch %lld n_new %lld%s n_q %lld%s heads %lld/%lld d %lld d_v %lld k %s to %s v %s, "
             "rotary %lld+%lld flags %x%s%s",
             (long long)c->batch, (long long)c->n_new, packed ? " packed" : "", (long long)c->n_q,
             packed_q ? " packed" : "", (long long)c->heads_q, (long long)c->heads_kv,
             (long long)c->d, (long long)c->d_v, fa_dtype_name(dtype),
             fa_dtype_name(c->k_cache.dtype), c->has_v ? fa_dtype_name(c->v_cache.dtype) : "none",
             (long long)o->rotary_offset, (long long)(rotary ? 2 * c->cos.shape[3] : 0),
             (unsigned)o->flags, o->block_table ? " paged" : "", c->in_place ? " in place" : "");
}

void append_case_free(append_case *c)
{
    ref_buffers_free(&c->buffers);
    free(c->before);
}

const fa_tensor *append_case_v_new(const append_case *c) { return c->has_v ? &c->v_new : NULL; }
const fa_tensor *append_case_v_cache(const append_case *c) { return c->has_v ? &c->v_cache : NULL; }

/* ---- What must be there ---------------------------------------------------------------------- */

/* The same tensor in the copy that was made before the call. */
static fa_tensor earlier(const append_case *c, const fa_tensor *t)
{
    fa_tensor copy = *t;
    char *at = c->before;
    for (int i = 0; i < c->buffers.count; at += c->buffers.list[i++].bytes) {
        const ref_buffer *b = &c->buffers.list[i];
        const ptrdiff_t offset = (char *)t->data - b->data;
        if (offset >= 0 && (size_t)offset < b->bytes) copy.data = at + offset;
    }
    return copy;
}

/* Element e of a row after the rotation, and how large its terms are. */
static double rotated(const append_case *c, const fa_tensor *t, int64_t block, int64_t row,
                      int64_t head, int64_t e, int64_t position, double *magnitude)
{
    const fa_append_options *o = &c->o;
    const double x = ref_load(t, block, row, head, e);
    const int64_t half = o->cos ? c->cos.shape[3] : 0, at = e - o->rotary_offset;
    *magnitude = fabs(x);
    if (position < 0 || at < 0 || at >= 2 * half) return x;
    const bool pairs = o->flags & FA_ROTARY_INTERLEAVED;
    const int64_t pair = pairs ? at / 2 : at % half;
    const bool second = pairs ? at % 2 : at >= half;
    const int64_t other = e + (second ? -1 : 1) * (pairs ? 1 : half);
    const double y = ref_load(t, block, row, head, other);
    const double cosine = ref_load(&c->cos, 0, position, 0, pair);
    const double sine = ref_load(&c->sin, 0, position, 0, pair);
    *magnitude = fabs(x * cosine) + fabs(y * sine);
    return second ? x * cosine + y * sine : x * cosine - y * sine;
}

/* How far an element of a type may be from its value divided by the scale, in units of the scale. */
static double allowed(fa_dtype dtype, double x, double error)
{
    if (dtype == FA_INT8) return 0.5 + error;
    return fabs(x) * ref_epsilon(dtype) / 2 + ref_smallest(dtype) + error;
}

typedef struct row_place {
    int64_t from_block, from_row, to_block, to_row, position;
} row_place;

static void check_row(append_case *c, ref_report *r, const char *name, const fa_tensor *from,
                      const fa_tensor *to, const fa_tensor *scale, const row_place *p, int64_t head)
{
    const bool written = scale && c->o.flags & FA_WRITE_SCALES;
    const double most = to->dtype == FA_INT8 ? 127 : 448;
    double factor = 1, largest = 0, magnitude;
    for (int64_t e = 0; e < to->shape[3]; e++)
        largest = fmax(largest, fabs(rotated(c, from, p->from_block, p->from_row, head, e,
                                             p->position, &magnitude)));
    if (scale) {
        factor = ref_load(scale, scale->shape[0] == 1 ? 0 : p->to_block,
                          scale->shape[1] == 1 ? 0 : p->to_row, scale->shape[2] == 1 ? 0 : head, 0);
        if (written && !(fabs(factor - largest / most) <= 1e-5 * largest / most))
            ref_fail(r, "scale of %s is %g, expected %g", name, factor, largest / most);
    }
    for (int64_t e = 0; e < to->shape[3]; e++) {
        double want =
            rotated(c, from, p->from_block, p->from_row, head, e, p->position, &magnitude);
        const double got = ref_load(to, p->to_block, p->to_row, head, e);
        const double error = 1e-6 * magnitude / factor;
        want /= factor;
        if (is_small(to->dtype)) want = fmax(fmin(want, most), -most);
        if (!(fabs(got - want) <= allowed(to->dtype, want, factor == 0 ? 0 : error)) && factor != 0)
            ref_fail(r, "%s[%lld, %lld, %lld, %lld] is %g, expected %g", name,
                     (long long)p->to_block, (long long)p->to_row, (long long)head, (long long)e,
                     got, want);
    }
}

/* Rows that no key or query of the call goes to. */
static void check_untouched(append_case *c, ref_report *r, const char *name, const fa_tensor *t,
                            const bool *touched)
{
    const fa_tensor old = earlier(c, t);
    const size_t size = fa_dtype_size(t->dtype);
    for (int64_t a = 0; a < t->shape[0]; a++)
        for (int64_t b = 0; b < t->shape[1]; b++)
            for (int64_t h = 0; h < t->shape[2] && !touched[a * t->shape[1] + b]; h++)
                for (int64_t e = 0; e < t->shape[3]; e++) {
                    const int64_t at =
                        a * t->stride[0] + b * t->stride[1] + h * t->stride[2] + e * t->stride[3];
                    if (memcmp((char *)t->data + at * (int64_t)size,
                               (char *)old.data + at * (int64_t)size, size) != 0)
                        ref_fail(r, "%s[%lld, %lld, %lld] has changed, to which no row goes", name,
                                 (long long)a, (long long)b, (long long)h);
                }
}

static bool *make_marks(int64_t n)
{
    bool *marks = calloc((size_t)n + 1, sizeof *marks);
    if (!marks) abort();
    return marks;
}

static int64_t position_of(const append_case *c, int64_t b, int64_t number)
{
    const fa_append_options *o = &c->o;
    if (!o->cos) return -1;
    return number + (o->rotary_positions ? o->rotary_positions[b] : o->lengths ? o->lengths[b] : 0);
}

static row_place place_of(const append_case *c, int64_t b, int64_t t)
{
    const fa_append_options *o = &c->o;
    const int64_t entry = o->cache_index ? o->cache_index[b] : b;
    const bool counted = o->flags & FA_LENGTHS_WITH_PADDING;
    const int64_t row = (o->left_padding && !counted ? o->left_padding[b] : 0) +
                        (o->lengths ? o->lengths[b] : 0) + t;
    row_place p = {o->cu_seqlens_new ? 0 : b, o->cu_seqlens_new ? o->cu_seqlens_new[b] + t : t,
                   entry, row, position_of(c, b, t)};
    if (o->block_table) {
        p.to_block = o->block_table[entry * o->block_table_stride + row / c->k_cache.shape[1]];
        p.to_row = row % c->k_cache.shape[1];
    }
    return p;
}

static void check_keys(append_case *c, ref_report *r)
{
    bool *touched = make_marks(c->k_cache.shape[0] * c->k_cache.shape[1]);
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t t = 0; t < c->count_new[b]; t++) {
            row_place p = place_of(c, b, t);
            touched[p.to_block * c->k_cache.shape[1] + p.to_row] = true;
            for (int64_t h = 0; h < c->heads_kv; h++) {
                check_row(c, r, "k_cache", &c->k_new, &c->k_cache, c->o.k_scale, &p, h);
                row_place v = p;
                v.position = -1;
                if (c->has_v)
                    check_row(c, r, "v_cache", &c->v_new, &c->v_cache, c->o.v_scale, &v, h);
            }
        }
    check_untouched(c, r, "k_cache", &c->k_cache, touched);
    if (c->has_v) check_untouched(c, r, "v_cache", &c->v_cache, touched);
    const bool write = c->o.flags & FA_WRITE_SCALES;
    if (write && c->o.k_scale) check_untouched(c, r, "k_scale", &c->k_scale, touched);
    if (write && c->o.v_scale) check_untouched(c, r, "v_scale", &c->v_scale, touched);
    free(touched);
}

static void check_queries(append_case *c, ref_report *r)
{
    const fa_tensor *to = c->in_place ? &c->q : &c->q_out;
    const fa_tensor from = earlier(c, &c->q);
    bool *touched = make_marks(to->shape[0] * to->shape[1]);
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t t = 0; t < c->count_q[b]; t++) {
            const bool packed = c->o.cu_seqlens_q;
            const int64_t block = packed ? 0 : b, row = packed ? c->o.cu_seqlens_q[b] + t : t;
            const bool one = c->o.flags & FA_ROTARY_ONE_POSITION;
            const row_place p = {block, row, block, row, position_of(c, b, one ? 0 : t)};
            touched[block * to->shape[1] + row] = true;
            for (int64_t h = 0; h < c->heads_q; h++)
                check_row(c, r, "q_out", &from, to, NULL, &p, h);
        }
    check_untouched(c, r, "q_out", to, touched);
    free(touched);
}

/* Keys of a sequence, if no length is wild. */
static int64_t length_after(const append_case *c, int64_t b)
{
    const bool counted = c->o.flags & FA_LENGTHS_WITH_PADDING;
    return (c->o.lengths ? c->o.lengths[b] : 0) + c->count_new[b] -
           (counted ? c->o.left_padding[b] : 0);
}

static void check_lengths_after(const append_case *c, ref_report *r)
{
    for (int64_t b = 0; c->after && b < c->batch; b++) {
        const int64_t want = length_after(c, b);
        if (c->after[b] != want)
            ref_fail(r, "lengths_after[%lld] is %d, expected %lld", (long long)b, (int)c->after[b],
                     (long long)want);
    }
}

/* Whatever cache_index holds: the nearest row. */
static void check_table_after(const append_case *c, ref_report *r)
{
    const fa_append_options *o = &c->o;
    const int64_t stride = o->block_table_stride;
    const int64_t rows = o->block_table_rows ? o->block_table_rows : c->batch;
    for (int64_t b = 0; c->table && b < c->batch; b++) {
        int64_t row = o->cache_index ? o->cache_index[b] : b;
        row = row < 0 ? 0 : row < rows ? row : rows - 1;
        for (int64_t i = 0; i < stride; i++)
            if (c->table[b * stride + i] != o->block_table[row * stride + i])
                ref_fail(r, "block_table_after[%lld, %lld] is %d, expected %d", (long long)b,
                         (long long)i, (int)c->table[b * stride + i],
                         (int)o->block_table[row * stride + i]);
    }
}

/* Where keys are, if nothing is wild. Entries behind the last key are as they were. */
static void check_rows_after(const append_case *c, ref_report *r)
{
    const fa_append_options *o = &c->o;
    const int64_t apart = rows_apart_of(&c->k_cache), rows = c->k_cache.shape[1];
    for (int64_t b = 0; c->rows && b < c->batch; b++)
        for (int64_t j = 0; j < room_of(c); j++) {
            const int64_t row = j + (o->left_padding ? o->left_padding[b] : 0);
            int64_t block = o->cache_index ? o->cache_index[b] : b, want = -1;
            if (j < length_after(c, b)) {
                if (o->block_table)
                    block = o->block_table[block * o->block_table_stride + row / rows];
                want = block * apart + row % rows;
            }
            if (c->rows[b * room_of(c) + j] != want)
                ref_fail(r, "row_table_after[%lld, %lld] is %d, expected %lld", (long long)b,
                         (long long)j, (int)c->rows[b * room_of(c) + j], (long long)want);
        }
    for (int64_t b = 0; c->cu && b <= c->batch; b++) {
        int64_t want = b * apart + (b < c->batch && o->left_padding ? o->left_padding[b] : 0);
        if (b == c->batch) want = b > 0 ? (b - 1) * apart + rows : 0;
        if (c->cu[b] != want)
            ref_fail(r, "cu_seqlens_after[%lld] is %d, expected %lld", (long long)b, (int)c->cu[b],
                     (long long)want);
    }
}

void append_case_check(append_case *c, ref_report *report)
{
    check_lengths_after(c, report);
    check_table_after(c, report);
    check_rows_after(c, report);
    check_keys(c, report);
    if (c->o.q) check_queries(c, report);
    ref_buffers_check(&c->buffers, report);
}

/* ---- Wild arrays ----------------------------------------------------------------------------- */

static void spoil(append_case *c, const int32_t *array, int64_t n)
{
    static const int32_t wild[] = {-1, INT32_MIN, INT32_MAX, 1000, -7, 1 << 20, 0, 5, 64};
    for (int64_t i = 0; array && i < n; i++)
        if (once_in(c, 2))
            ((int32_t *)(uintptr_t)array)[i] =
                once_in(c, 3) ? (int32_t)ref_random_bits(&c->random) : wild[between(c, 0, 8)];
}

void append_case_spoil(append_case *c)
{
    fa_append_options *o = &c->o;
    const int64_t rows = o->block_table_rows ? o->block_table_rows : c->batch;
    spoil(c, o->lengths, c->batch);
    spoil(c, o->left_padding, c->batch);
    spoil(c, o->cache_index, c->batch);
    spoil(c, o->cu_seqlens_new, c->batch + 1);
    spoil(c, o->cu_seqlens_q, c->batch + 1);
    spoil(c, o->seqlens_new, c->batch);
    spoil(c, o->seqlens_q, c->batch);
    spoil(c, o->rotary_positions, c->batch);
    spoil(c, o->block_table, rows * o->block_table_stride);
    free(c->before);
    keep_all(c);
}

void append_case_check_inside(const append_case *c, ref_report *report)
{
    const int64_t rows = c->k_cache.shape[1];
    const int64_t room = c->o.block_table ? rows * c->o.block_table_stride : rows;
    for (int64_t b = 0; c->after && b < c->batch; b++) {
        const int64_t after = c->after[b], before = c->o.lengths ? c->o.lengths[b] : 0;
        const int64_t least = before < 0 || c->o.left_padding ? 0 : before < room ? before : room;
        if (after < least || after > room || (before < 0 && after != 0))
            ref_fail(report, "lengths_after[%lld] is %lld behind %lld: expected %lld to %lld",
                     (long long)b, (long long)after, (long long)before, (long long)least,
                     (long long)room);
    }
    check_table_after(c, report);
    const int64_t apart = rows_apart_of(&c->k_cache);
    for (int64_t i = 0; c->rows && i < c->batch * room_of(c); i++)
        if (c->rows[i] != -1 && (c->rows[i] < 0 || c->rows[i] / apart >= c->k_cache.shape[0] ||
                                 c->rows[i] % apart >= rows))
            ref_fail(report, "row_table_after[%lld] is %d: expected a row of the cache",
                     (long long)i, (int)c->rows[i]);
    for (int64_t b = 0; c->cu && b < c->batch; b++)
        if (c->cu[b] < b * apart || c->cu[b] > b * apart + rows)
            ref_fail(report, "cu_seqlens_after[%lld] is %d: expected %lld to %lld", (long long)b,
                     (int)c->cu[b], (long long)(b * apart), (long long)(b * apart + rows));
    ref_buffers_check(&c->buffers, report);
}
