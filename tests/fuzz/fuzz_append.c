/*
 * fa_append on arbitrary structs, as fuzz_api.c does it for the other calls: contiguous and paged caches of every
 * type with scales that are read or written, packed rows, positions, rotary embedding in both layouts. Lengths,
 * indices and page numbers are arbitrary: the CPU reads and refuses them. Each tensor and each array has memory of
 * its own, the arrays no byte more than they need, so that the address sanitizer sees what goes beyond.
 */
#include "fuzz_input.h"

enum { MOST = 24 /* sequences, entries of a row of the table */, TABLE = 512, MEMORIES = 24 };

typedef struct fuzz_case {
    void *memories[MEMORIES];
    int count;
    fa_tensor k_new, v_new, k_cache, v_cache, q, q_out, cos, sin, k_scale, v_scale;
    int64_t batch;
    fa_append_options o;
    uint8_t newer_options[NEWER];
} fuzz_case;

/* Zeroed memory that lives as long as the case. */
static void *allocate(fuzz_case *c, size_t bytes)
{
    void *memory = calloc(1, bytes ? bytes : 1);
    if (!memory || c->count == MEMORIES) abort();
    c->memories[c->count++] = memory;
    return memory;
}

static fa_tensor take_own(input *in, fuzz_case *c, int64_t a, int64_t b, int64_t h, int64_t d,
                          fa_dtype dtype)
{
    const int64_t shape[4] = {a, b, h, d};
    return take_tensor(in, allocate(c, BUFFER), shape, dtype);
}

/* So many integers, mostly small; or none. */
static int32_t *take_array(input *in, fuzz_case *c, int64_t count)
{
    if (take(in) % 3 || count < 0 || count > TABLE) return NULL;
    int32_t *array = allocate(c, (size_t)count * sizeof *array);
    for (int64_t n = 0; n < count; n++) {
        const uint8_t first = take(in);
        array[n] = first < 240 ? first % 4 : (int32_t)take_integer(in);
    }
    return array;
}

/* Where sequences start, mostly without a gap. */
static const int32_t *take_starts(input *in, fuzz_case *c)
{
    if (take(in) % 3 || c->batch < 0 || c->batch > MOST) return NULL;
    int32_t *starts = allocate(c, (size_t)(c->batch + 1) * sizeof *starts);
    int32_t at = 0;
    for (int64_t b = 0; b <= c->batch; b++) {
        const uint8_t step = take(in);
        starts[b] = step < 250 ? at : (int32_t)take_integer(in);
        at += step % 3;
    }
    return starts;
}

/* Of a struct that is cut short the call may not see how many rows the table has. */
static void take_table(input *in, fuzz_case *c)
{
    fa_append_options *o = &c->o;
    int64_t count;
    o->block_table_stride = take(in) % 8 ? 1 + take(in) % 3 : take_integer(in);
    o->block_table_rows = take(in) % 4 ? c->batch : take_integer(in);
    const bool known = o->block_table_rows && o->size == sizeof *o;
    const int64_t rows = known || o->block_table_rows > c->batch ? o->block_table_rows : c->batch;
    if (!__builtin_mul_overflow(rows, o->block_table_stride, &count))
        o->block_table = take_array(in, c, count);
    if (!o->block_table) return;
    if (!__builtin_mul_overflow(c->batch, o->block_table_stride, &count))
        o->block_table_after = take_array(in, c, count);
}

/* Arrays that number all rows of the cache. A call that sees less of the struct sees none of them. */
static void take_rows_after(input *in, fuzz_case *c)
{
    fa_append_options *o = &c->o;
    int64_t count, rows = c->k_cache.shape[1];
    if (o->block_table && __builtin_mul_overflow(rows, o->block_table_stride, &rows)) return;
    if (!__builtin_mul_overflow(c->batch, rows, &count))
        o->row_table_after = take_array(in, c, count);
    if (take(in) % 2 && c->batch >= 0 && c->batch <= MOST)
        o->cu_seqlens_after = take_array(in, c, c->batch + 1);
}

static void take_rotary(input *in, fuzz_case *c, int64_t half, fa_dtype dtype)
{
    fa_append_options *o = &c->o;
    const int64_t positions = 1 + take(in) % 16;
    c->cos = take_own(in, c, 1, positions, 1, half, dtype);
    c->sin = take_own(in, c, 1, positions, 1, half, dtype);
    o->cos = &c->cos;
    if (take(in) % 16) o->sin = &c->sin;
    if (take(in) % 4 == 1) o->rotary_offset = take_integer(in);
    o->rotary_positions = take_array(in, c, c->batch);
}

static void take_queries(input *in, fuzz_case *c, int64_t heads, int64_t d, fa_dtype dtype)
{
    fa_append_options *o = &c->o;
    o->cu_seqlens_q = take_starts(in, c);
    o->seqlens_q = take_array(in, c, c->batch);
    const int64_t blocks = o->cu_seqlens_q ? 1 : c->batch, rows = take(in) % 24;
    c->q = take_own(in, c, blocks, rows, heads, d, dtype);
    o->q = &c->q;
    if (take(in) % 3 == 0) return;
    c->q_out = take_own(in, c, blocks, rows, heads, d, dtype);
    o->q_out = take(in) % 16 ? &c->q_out : &c->q;
}

static void take_scales(input *in, fuzz_case *c)
{
    const fa_tensor *caches[] = {&c->k_cache, &c->v_cache};
    fa_tensor *scales[] = {&c->k_scale, &c->v_scale};
    for (int i = 0; i < 2; i++) {
        const int64_t *shape = caches[i]->shape;
        const uint8_t one = c->o.flags & FA_WRITE_SCALES ? 0 : take(in);
        *scales[i] = take_own(in, c, one & 1 ? 1 : shape[0], one & 2 ? 1 : shape[1],
                              one & 4 ? 1 : shape[2], 1, FA_FLOAT32);
    }
    if (take(in) % 8) c->o.k_scale = &c->k_scale;
    if (take(in) % 8) c->o.v_scale = &c->v_scale;
}

static fuzz_case *take_case(input *in)
{
    static const fa_dtype cache_types[] = {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16, FA_FLOAT8_E4M3,
                                           FA_INT8};
    fuzz_case *c = calloc(1, sizeof *c);
    if (!c) abort();
    fa_append_options *o = &c->o;
    o->size = take_size(in, sizeof *o);
    c->newer_options[take(in) % NEWER] = take(in) % 32 == 1;
    c->batch = take(in) % 5;
    if (take(in) % 16 == 1) c->batch = o->num_sequences = take_integer(in);
    const int64_t rows = take(in) % 24, heads_kv = take(in) % 4, d = take(in) % 24;
    const int64_t heads = heads_kv * (1 + take(in) % 3), d_v = take(in) % 24;
    const fa_dtype dtype = (fa_dtype)(take(in) % 3), cache_type = cache_types[take(in) % 5];
    if (take(in) % 2) o->flags = take(in) % 16 ? take(in) & 15u : take(in);
    o->cu_seqlens_new = take_starts(in, c);
    o->seqlens_new = take_array(in, c, c->batch);
    const int64_t blocks = o->cu_seqlens_new ? 1 : c->batch;
    c->k_new = take_own(in, c, blocks, rows, heads_kv, d, dtype);
    c->v_new = take_own(in, c, blocks, rows, heads_kv, d_v, dtype);
    const int64_t cache_blocks = take(in) % 8, cache_rows = take(in) % 16;
    c->k_cache = take_own(in, c, cache_blocks, cache_rows, heads_kv, d, cache_type);
    c->v_cache = take_own(in, c, cache_blocks, cache_rows, heads_kv, d_v, cache_type);
    o->lengths = take_array(in, c, c->batch);
    o->left_padding = take_array(in, c, c->batch);
    o->cache_index = take_array(in, c, c->batch);
    o->lengths_after = take_array(in, c, c->batch);
    if (take(in) % 2) take_table(in, c);
    if (take(in) % 2) take_rows_after(in, c);
    if (take(in) % 2) take_rotary(in, c, take(in) % 12, dtype);
    if (take(in) % 3 == 1) take_queries(in, c, heads, d, dtype);
    if ((o->cu_seqlens_new || o->cu_seqlens_q) && take(in) % 32) o->num_sequences = c->batch;
    if (take(in) % 2) take_scales(in, c);
    o->threads = take(in) % 4;
    if (take(in) % 32 == 1) o->device = (fa_device)(take(in) % 4);
    if (take(in) % 32 == 1) o->reserved = (int32_t)take_integer(in);
    return c;
}

/* A case must end within a second. */
static bool has_few_rows(const fa_tensor *t)
{
    for (int axis = 0; axis < 3; axis++)
        if (t->shape[axis] > 4096) return false;
    return true;
}

/* Whether the arrays are as long as the call expects, which may not see all of the struct: an entry for each row of
 * axis 0, or for each packed sequence. */
static bool has_long_arrays(const fuzz_case *c)
{
    fa_append_options o = {0};
    memcpy(&o, &c->o, c->o.size && c->o.size < sizeof o ? c->o.size : sizeof o);
    const int64_t batch = o.cu_seqlens_new || o.cu_seqlens_q ? o.num_sequences : c->k_new.shape[0];
    return batch <= c->batch;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    input in = {bytes, size};
    fuzz_case *c = take_case(&in);
    const uint8_t choice = take(&in);
    const fa_tensor *v_new = choice % 16 == 1 || choice % 16 == 2 ? NULL : &c->v_new;
    const fa_tensor *v_cache = choice % 16 == 1 || choice % 16 == 3 ? NULL : &c->v_cache;
    if (choice % 16 == 4)
        c->v_cache = c->k_cache; /* the call must refuse it, if there is something to write */
    if (has_few_rows(&c->k_new) && has_few_rows(&c->q) && has_long_arrays(c))
        must_say_why(
            fa_append(&c->k_new, v_new, &c->k_cache, v_cache, choice == 255 ? NULL : &c->o));
    while (c->count > 0) free(c->memories[--c->count]);
    free(c);
    return 0;
}
