/*
 * The API's argument checks with arbitrary structs. Extents, strides, dtypes and options come from
 * the input; every tensor's data are one of a few buffers of a fixed size. The tensors of a call
 * that is accepted must fit: a tensor that reaches outside its buffer is replaced by one without
 * data before the call, because the caller's pointers are the one thing that a library cannot
 * check. The sanitizers detect wrong accesses. In addition, a call that fails must give a reason.
 */
#include <stdlib.h>
#include <string.h>

#include "fuzz_input.h"

enum { ARRAY = 64, TENSORS = 12, WORK = 1 << 22 };

/* The parts of a case. */
typedef struct fuzz_case {
    char buffers[TENSORS][BUFFER];
    int32_t lengths[4][ARRAY], table[ARRAY];
    float floats[4][ARRAY];
    uint64_t state[2];
    int64_t rows[ARRAY], lse_stride[2][3];
    fa_tensor q, k, v, out, bias, mask, weights;
    fa_gradients g;
    uint8_t newer_gradients[NEWER]; /* after each struct: the fields of a later version */
    fa_options o;
    uint8_t newer_options[NEWER];
} fuzz_case;

static const int32_t *take_lengths(input *in, int32_t *array, int64_t count)
{
    if (take(in) % 4) return NULL;
    if (count < 0 || count >= ARRAY) return NULL;
    for (int n = 0; n <= count; n++) array[n] = (int32_t)take_integer(in);
    return array;
}

static const float *take_floats(input *in, float *array, int64_t count)
{
    if (take(in) % 4) return NULL;
    if (count < 0 || count > ARRAY) return NULL;
    for (int n = 0; n < ARRAY; n++) array[n] = take_float(in);
    return array;
}

/* Slopes of all batch items are in their array, or so far outside that the call must refuse
 * them. */
static int64_t take_slope_stride(input *in, const fuzz_case *c)
{
    const int64_t stride = take_integer(in), batch = c->q.shape[0], heads = c->q.shape[2];
    const bool inside = stride >= 0 && stride <= ARRAY && batch >= 0 && batch <= ARRAY &&
                        batch * stride + heads <= ARRAY;
    const int64_t far = (int64_t)1 << 61;
    return inside || (batch > 1 && (stride > far || stride < -far)) ? stride : 0;
}

/* One sequence, whose pages are in the table whatever its distance to the next one is. */
static bool reads_few_pages(const fuzz_case *c)
{
    const fa_options *o = &c->o;
    return c->q.shape[0] == 1 && !o->cu_seqlens_q && !o->cu_seqlens_k && o->seqlens_k &&
           o->seqlens_k[0] <= ARRAY;
}

/* Strides of the two log-sum-exps of fa_combine that stay within `room` elements in both
 * directions, or that the call must refuse. */
static const int64_t *take_lse_strides(input *in, fuzz_case *c, int64_t room)
{
    static const int axes[3] = {0, 2, 1};
    if (take(in) % 4) return NULL;
    for (int part = 0; part < 2; part++) {
        __int128 reach = 0;
        for (int n = 0; n < 3; n++) {
            const int64_t extent = c->out.shape[axes[n]];
            c->lse_stride[part][n] = take_integer(in);
            const __int128 step = (__int128)c->lse_stride[part][n] * (extent > 0 ? extent - 1 : 0);
            reach += step < 0 ? -step : step;
        }
        if (reach > room && reach < (__int128)1 << 64) return NULL;
    }
    return c->lse_stride[0];
}

static void take_options(input *in, fuzz_case *c)
{
    fa_options *o = &c->o;
    int64_t heads = c->q.shape[2], batch = c->q.shape[0];
    o->size = take_size(in, sizeof *o);
    c->newer_options[take(in) % NEWER] = take(in) % 32 == 1;
    o->flags = take(in) % 4 ? take(in) & 63u : 0;
    if (take(in) % 16 == 1) o->device = (fa_device)(take(in) % 4);
    if (take(in) % 4 == 1) o->scale = take_float(in);
    if (take(in) % 4 == 1) o->softcap = take_float(in);
    if (take(in) % 4 == 1) o->diagonal = take_integer(in);
    if (take(in) % 4 == 1) o->window_left = take_integer(in);
    if (take(in) % 4 == 1) o->window_right = take_integer(in);
    if (take(in) % 8 == 1) o->attention_chunk = take_integer(in);
    if (c->bias.data) o->bias = &c->bias;
    if (c->mask.data) o->mask = &c->mask;
    o->alibi_slopes = take_floats(in, c->floats[0], heads);
    if (o->alibi_slopes && take(in) % 4 == 1) o->alibi_batch_stride = take_slope_stride(in, c);
    o->sinks = take_floats(in, c->floats[1], heads);
    if (take(in) % 4 == 1) o->dropout_p = take_float(in);
    if (take(in) % 8 == 1) o->dropout_state = c->state;
    if (take(in) % 4 == 1) o->num_sequences = batch = take_integer(in);
    o->cu_seqlens_q = take_lengths(in, c->lengths[0], batch);
    o->cu_seqlens_k = take_lengths(in, c->lengths[1], batch);
    o->seqlens_q = take_lengths(in, c->lengths[2], batch);
    o->seqlens_k = take_lengths(in, c->lengths[3], batch);
    if (take(in) % 4 == 1) o->max_seqlen_q = take_integer(in);
    if (take(in) % 4 == 1) o->max_seqlen_k = take_integer(in);
    o->threads = take(in) % 4;
    if (take(in) % 4 == 1) {
        int64_t stride = take_integer(in), count;
        if ((!__builtin_mul_overflow(stride, batch, &count) && count <= ARRAY) ||
            reads_few_pages(c)) {
            o->block_table_stride = stride;
            o->block_table = c->table;
            for (int n = 0; n < ARRAY; n++) c->table[n] = (int32_t)take_integer(in);
        }
    }
    if (take(in) % 8 == 1) o->precision = (fa_precision)(take(in) % 4);
}

static fuzz_case *take_case(input *in)
{
    fuzz_case *c = calloc(1, sizeof *c);
    if (!c) abort();
    int64_t batch = take(in) % 4, heads_kv = take(in) % 4, heads = heads_kv * (1 + take(in) % 3);
    int64_t n_q = take(in) % 24, n_k = take(in) % 24, d = take(in) % 24, d_v = take(in) % 24;
    fa_dtype dtype = (fa_dtype)(take(in) % 3);
    const int64_t q[4] = {batch, n_q, heads, d}, k[4] = {batch, n_k, heads_kv, d};
    const int64_t v[4] = {batch, n_k, heads_kv, d_v}, out[4] = {batch, n_q, heads, d_v};
    const int64_t scores[4] = {batch, heads, n_q, n_k};
    c->q = take_tensor(in, c->buffers[0], q, dtype);
    c->k = take_tensor(in, c->buffers[1], k, dtype);
    c->v = take_tensor(in, c->buffers[2], v, dtype);
    c->out = take_tensor(in, c->buffers[3], out, dtype);
    if (take(in) % 4 == 1) c->bias = take_tensor(in, c->buffers[4], scores, dtype);
    if (take(in) % 4 == 1) c->mask = take_tensor(in, c->buffers[5], scores, FA_BOOL);
    c->weights = take_tensor(in, c->buffers[6], scores, dtype);
    c->g.size = take_size(in, sizeof c->g);
    c->newer_gradients[take(in) % NEWER] = take(in) % 32 == 1;
    c->g.dout = take_tensor(in, c->buffers[7], out, dtype);
    c->g.dq = take_tensor(in, c->buffers[8], q, dtype);
    c->g.dk = take_tensor(in, c->buffers[9], k, dtype);
    c->g.dv = take_tensor(in, c->buffers[10], v, dtype);
    if (c->bias.data) c->g.dbias = take_tensor(in, c->buffers[11], scores, dtype);
    take_options(in, c);
    return c;
}

/* The elements of an lse for a tensor like q or out, (blocks, heads, rows); -1 if they are too
 * many. */
static int64_t count_lse(const fa_tensor *t)
{
    int64_t count;
    if (__builtin_mul_overflow(t->shape[0], t->shape[1], &count) ||
        __builtin_mul_overflow(count, t->shape[2], &count) || count < 0 || count > WORK)
        return -1;
    return count;
}

enum { LSE_ROOM = 1024 }; /* before and after the middle */

/* Enough for attention and for combine; NULL if that would be too much. */
static float *make_lse(const fuzz_case *c)
{
    int64_t q = count_lse(&c->q), out = count_lse(&c->out);
    if (q < 0 || out < 0) return NULL;
    return calloc((size_t)(q > out ? q : out) + 1 + 2 * LSE_ROOM, sizeof(float));
}

/* Extents of empty axes may be huge: a case must end within a second. */
static bool is_small(const fa_tensor *t)
{
    for (int axis = 0; axis < 4; axis++)
        if (t->shape[axis] > 4096) return false;
    return true;
}

static void ask(fuzz_case *c)
{
    char text[64];
    size_t workspace;
    for (int pass = 0; pass <= FA_PASS_WEIGHTS + 1; pass++) {
        must_say_why(fa_supported((fa_pass)pass, &c->q, &c->k, &c->v, &c->out, &c->o));
        must_say_why(
            fa_describe((fa_pass)pass, &c->q, &c->k, &c->v, &c->out, &c->o, text, sizeof text));
        must_say_why(
            fa_workspace_size((fa_pass)pass, &c->q, &c->k, &c->v, &c->out, &c->o, &workspace));
    }
}

static void call(input *in, fuzz_case *c, float *lse, uint8_t choice)
{
    switch (choice % 5) {
    case 0: must_say_why(fa_forward(&c->q, &c->k, &c->v, &c->out, lse, &c->o)); break;
    case 1: must_say_why(fa_decode(&c->q, &c->k, &c->v, &c->out, lse, &c->o)); break;
    case 2: must_say_why(fa_backward(&c->q, &c->k, &c->v, &c->out, lse, &c->g, &c->o)); break;
    case 3:
        must_say_why(fa_weights(&c->q, &c->k, c->rows, choice % ARRAY, &c->weights, &c->o));
        break;
    default: {
        const fa_tensor parts[2] = {c->v, c->q};
        const float *part_lse[2] = {lse + LSE_ROOM, lse + LSE_ROOM};
        fa_options o = {.size = sizeof o, .threads = take(in) % 4};
        o.part_lse_stride = take_lse_strides(in, c, LSE_ROOM);
        must_say_why(
            fa_combine(parts, part_lse, choice % 3, &c->out, NULL, choice & 64 ? &c->o : &o));
    }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    input in = {bytes, size};
    fuzz_case *c = take_case(&in);
    uint8_t choice = take(&in);
    ask(c);
    float *lse = make_lse(c);
    bool small = is_small(&c->q) && is_small(&c->k) && is_small(&c->v) && is_small(&c->out) &&
                 is_small(&c->weights) && c->q.shape[0] < ARRAY && c->o.num_sequences < ARRAY;
    if (small && lse) call(&in, c, lse, choice);
    free(lse);
    free(c);
    return 0;
}
