#include "random_problem.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "buffers.h"
#include "random.h"
#include "scalar.h"

enum { MAX_BATCH = 4, MAX_PARTS = 5 };

/* Multiply-adds of one problem: the reference takes milliseconds; with many tiles, for problems
 * that are checked in parallel, about a tenth of a second. */
static const double usual_work = 6e6, large_work = 5e7;
static const double usual_tiles_work = 6e7, large_tiles_work = 5e8;

typedef struct problem {
    uint64_t number;
    ref_random random;
    random_pass pass;
    int run; /* number of the run, of the settings' runs */
    ref_buffers buffers;
    ref_inputs in; /* q, k, v and the options */
    fa_tensor bias, mask, k_scale, v_scale;
    fa_tensor out, dout, dq, dk, dv, dbias, weights;
    float *lse, *dlse, *dsinks;
    int64_t *rows, num_rows;

    /* n_q, n_k: the longest possible sequence. */
    int64_t batch, heads_q, heads_kv, n_q, n_k, d, d_v;
    bool packed_q, packed_k, padded_q, padded_k, paged;
    int64_t page_size, pages;
    int64_t *length_q, *length_k; /* (batch), owned */
    int64_t longest_k;            /* of length_k */
    bool *seen;                   /* (batch, Hkv, longest_k): whether any query may see the key */
    bool hide_unseen;             /* unseen keys stay NaN */
    bool plain;                   /* most tensors are contiguous and aligned */
    bool strided;                 /* many axes are broadcast */
    bool shows_dropout;
    bool about_bias; /* RANDOM_BIAS */
    double amplitude, bias_holes;
    bool checks_exactness; /* RANDOM_PEAKED */
    random_peak peak;
    int64_t first_shown; /* RANDOM_DROPOUT: the key that is visible in column 0 of the values */
    fa_tensor parts[MAX_PARTS];
    float *part_lse[MAX_PARTS];
    int64_t num_parts;
    char *text; /* the description, and where its end is */
    size_t text_size, text_length;
} problem;

static void say(problem *p, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(problem *p, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    size_t room = p->text_size - p->text_length;
    int n = vsnprintf(p->text + p->text_length, room, format, arguments);
    va_end(arguments);
    if (n > 0) p->text_length += (size_t)n < room ? (size_t)n : room - 1;
}

static bool once_in(problem *p, int64_t n) { return ref_random_once_in(&p->random, n); }

static int64_t between(problem *p, int64_t low, int64_t high)
{
    return ref_random_between(&p->random, low, high);
}

static double uniform(problem *p, double low, double high)
{
    return low + (high - low) * ref_random_unit(&p->random);
}

const char *random_pass_name(random_pass pass)
{
    static const char *const names[] = {"forward", "backward", "decode", "weights", "combine"};
    const bool known = pass >= RANDOM_FORWARD && pass <= RANDOM_COMBINE;
    return known ? names[pass] : "unknown";
}

/* ------------------------------------------------------------------------------------------------
 * Sizes
 * ---------------------------------------------------------------------------------------------- */

/* Small, at the edge of a tile, or any length. */
static int64_t draw_length(problem *p)
{
    static const int64_t tiles[] = {6, 8, 12, 14, 16, 32, 64, 96, 128, 168, 192, 256, 264, 512};
    int64_t tile = tiles[between(p, 0, (int64_t)(sizeof tiles / sizeof *tiles) - 1)];
    switch (between(p, 0, 3)) {
    case 0: return between(p, 0, 20);
    case 1:
    case 2: return tile * (once_in(p, 4) ? 2 : 1) + between(p, -1, 1);
    default: return between(p, 0, 600);
    }
}

/* Lengths of many tiles, and at their edges. */
static int64_t draw_tiles_length(problem *p)
{
    static const int64_t tiles[] = {32, 64, 80, 96, 112, 128, 160, 176, 192, 256};
    const int64_t tile = tiles[between(p, 0, (int64_t)(sizeof tiles / sizeof *tiles) - 1)];
    switch (between(p, 0, 7)) {
    case 0: return between(p, 0, 20);
    case 1:
    case 2:
    case 3: return tile * between(p, 1, 8) + between(p, -1, 1);
    case 4: return between(p, 600, 1500);
    default: return between(p, 0, 600);
    }
}

/* The head dims that kernels with tensor cores are compiled for, and others. */
static int64_t draw_tiles_dim(problem *p)
{
    static const int64_t usual[] = {64, 64, 80, 96, 128, 128, 192, 256};
    if (!once_in(p, 5)) return usual[between(p, 0, 7)];
    return once_in(p, 6) ? between(p, 257, 512) : between(p, 1, 256);
}

static void draw_tiles_sizes(problem *p)
{
    static const int64_t groups[] = {1, 1, 2, 3, 4, 8};
    p->heads_q = p->heads_kv * groups[between(p, 0, 5)];
    p->n_q = draw_tiles_length(p);
    p->n_k = once_in(p, 3) ? p->n_q : draw_tiles_length(p);
    p->d = draw_tiles_dim(p);
    p->d_v = once_in(p, 6) ? draw_tiles_dim(p) : p->d;
    if (once_in(p, 12)) p->d = 192, p->d_v = 128;
}

static int64_t draw_dim(problem *p)
{
    static const int64_t usual[] = {32, 64, 80, 96, 128, 192};
    if (once_in(p, 2)) return usual[between(p, 0, 5)];
    if (once_in(p, 4)) return between(p, 1, 512);
    return between(p, 1, 80);
}

static double work_of(const problem *p)
{
    return (double)(p->batch * p->heads_q) * (double)(p->n_q * p->n_k) * (double)(p->d + p->d_v);
}

/* Makes the problem smaller, one random extent at a time, until it is cheap enough. */
static void shrink(problem *p, double work)
{
    while (work_of(p) > work) {
        switch (between(p, 0, 4)) {
        case 0: p->batch = p->batch > 1 ? p->batch - 1 : 1; break;
        case 1:
            if (p->heads_kv > 1) p->heads_q -= p->heads_q / p->heads_kv, p->heads_kv--;
            else if (p->heads_q > 1) p->heads_q--;
            break;
        case 2: p->d = p->d > 8 ? p->d / 2 : p->d; break;
        case 3: p->d_v = p->d_v > 8 ? p->d_v / 2 : p->d_v; break;
        default:
            if (!once_in(p, 4)) break;
            if (p->n_k > p->n_q) p->n_k = p->n_k * 3 / 4;
            else p->n_q = p->n_q * 3 / 4;
        }
    }
}

/* ------------------------------------------------------------------------------------------------
 * One class of faults
 * ---------------------------------------------------------------------------------------------- */

/* The classes whose faults occur only in forward or decode, or in backward if that is requested. */
static bool fixes_pass(const random_settings *settings)
{
    const random_focus focus = settings->focus;
    if (focus == RANDOM_INVARIANCE) return settings->pass != RANDOM_BACKWARD;
    if (focus == RANDOM_QUANTIZED) return settings->pass == RANDOM_BACKWARD;
    if (focus == RANDOM_LATENT)
        return settings->pass == RANDOM_BACKWARD && settings->device == FA_DEVICE_CUDA;
    return focus == RANDOM_SPLIT || focus == RANDOM_DROPOUT;
}

static void focus_pass(problem *p, const random_settings *settings)
{
    const random_focus focus = settings->focus;
    if (focus == RANDOM_ANYTHING) return;
    p->pass = RANDOM_FORWARD;
    if (focus == RANDOM_SPLIT || (focus == RANDOM_INVARIANCE && once_in(p, 2)))
        p->pass = RANDOM_DECODE;
}

/* More than 65,535 of something, and few of everything else. */
static void draw_grid_sizes(problem *p)
{
    p->batch = 1;
    p->heads_kv = between(p, 1, 2);
    p->heads_q = p->heads_kv * between(p, 1, 2);
    p->n_q = between(p, 0, 2);
    p->n_k = between(p, 0, 3);
    p->d = p->d_v = once_in(p, 2) ? 64 : 16;
    if (p->number % 2 == 0) {
        p->batch = 65536 + between(p, 0, 999);
        p->heads_kv = p->heads_q = 1;
    } else {
        p->heads_q = 65536 + 8 * between(p, 0, 99);
        p->heads_kv = once_in(p, 2) ? p->heads_q : p->heads_q / 8;
    }
}

/* Every head dim; then, for each tile length, every possible remainder of keys. */
static void draw_tail_sizes(problem *p)
{
    static const int64_t tiles[] = {64, 80, 96, 128, 176, 192};
    int64_t n = (int64_t)(p->number % RANDOM_NUM_TAILS);
    p->batch = 1;
    p->heads_kv = 1;
    p->heads_q = between(p, 1, 2);
    p->n_q = between(p, 1, 200);
    if (n < 256) {
        p->d = p->d_v = n + 1;
        p->n_k = between(p, 1, 300);
        return;
    }
    int which = 0;
    for (n -= 256; n >= tiles[which]; which++) n -= tiles[which];
    p->n_k = tiles[which] * between(p, 0, 2) + n;
    p->d = p->d_v = once_in(p, 2) ? 64 : 128;
}

static int64_t draw_wide_dim(problem *p)
{
    static const int64_t usual[] = {264, 320, 328, 384, 448, 512};
    return once_in(p, 6) ? between(p, 257, 512) : usual[between(p, 0, 5)];
}

/* The widest head dims, with the work that they need. */
static void draw_wide_sizes(problem *p)
{
    p->batch = between(p, 1, 2);
    p->heads_kv = 1;
    p->heads_q = between(p, 1, 3);
    p->n_q = once_in(p, 3) ? 128 * between(p, 1, 3) + between(p, -1, 1) : between(p, 1, 400);
    p->n_k = once_in(p, 3) ? 128 * between(p, 1, 4) + between(p, -1, 1) : between(p, 1, 500);
    if (once_in(p, 3)) p->n_k = p->n_q;
    p->d = draw_wide_dim(p);
    p->d_v = once_in(p, 4) ? 8 * between(p, 1, 64) : p->d;
}

/* The same head dims in another class, whose lengths become shorter. The values of RANDOM_DROPOUT
 * are unchanged. */
static void widen_heads(problem *p, const random_settings *settings)
{
    const int64_t d_v = p->d_v;
    p->d = p->d_v = draw_wide_dim(p);
    if (settings->focus == RANDOM_DROPOUT) p->d_v = d_v;
    else if (once_in(p, 4)) p->d_v = between(p, 1, 512);
    else if (once_in(p, 8)) p->d = between(p, 1, 256);
    while (work_of(p) > (settings->small ? usual_work / 4 : usual_work)) {
        if (p->n_k > p->n_q) p->n_k = p->n_k * 3 / 4;
        else p->n_q = p->n_q * 3 / 4;
    }
}

/* Latent attention: one key/value head, many query heads, and few or some queries. */
static void draw_latent_sizes(problem *p)
{
    p->batch = between(p, 1, 2);
    p->heads_kv = once_in(p, 4) ? 2 : 1;
    p->heads_q = p->heads_kv * (once_in(p, 2) ? 16 : between(p, 1, 20));
    p->n_q = once_in(p, 3) ? between(p, 1, 40) : between(p, 1, 4);
    p->n_k = between(p, 1, 200);
    p->d = once_in(p, 2) ? 576 : between(p, 513, 576);
    p->d_v = once_in(p, 2) ? 512 : between(p, 1, 512);
}

/* The options of RANDOM_PEAKED: one in each problem, or none. */
typedef enum peaked_option {
    PEAKED_FULL = 0,
    PEAKED_CAUSAL,
    PEAKED_ALIBI,
    PEAKED_WINDOW,
    PEAKED_SOFTCAP,
    PEAKED_BIAS,
    PEAKED_SINKS,
    PEAKED_GROUPS,
    PEAKED_LENGTHS,
    NUM_PEAKED_OPTIONS
} peaked_option;

static peaked_option peaked_option_of(const problem *p)
{
    return (peaked_option)(p->number % NUM_PEAKED_OPTIONS);
}

/* Whether the exactness of a softcap is tested: kernels may be less exact if the log-sum-exp is not
 * requested. */
static bool has_capped_peaks(const problem *p)
{
    return p->checks_exactness && peaked_option_of(p) == PEAKED_SOFTCAP;
}

/* As many rows as are needed to compare two errors, and keys of several tiles. */
static void draw_peaked_sizes(problem *p, const random_settings *settings)
{
    static const int64_t dims[] = {64, 128, 96, 256, 320, 192, 512};
    enum { DIMS = sizeof dims / sizeof dims[0] };
    _Static_assert(NUM_PEAKED_OPTIONS == 9 && DIMS == 7 && RANDOM_NUM_PEAKS == 13,
                   "without common divisors, and odd, for there are two types");
    const double work = settings->few_queries ? 4e7 : 2e8;
    p->checks_exactness = true;
    p->peak = (random_peak)(p->number % RANDOM_NUM_PEAKS);
    p->batch = 1;
    p->heads_kv = 1;
    p->heads_q = peaked_option_of(p) == PEAKED_GROUPS ? 4 : 1;
    p->d = p->d_v = dims[p->number % DIMS];
    if (p->d == 192 && once_in(p, 3)) p->d_v = 128;
    p->n_k = settings->few_queries ? between(p, 512, 1024) : between(p, 512, 2048);
    p->n_q = settings->few_queries ? between(p, 64, 128) : between(p, 256, 768);
    if (p->number % 5 ==
        3) { /* most rows of a tile are after the last query: they must not count */
        p->n_q = between(p, 2, 6);
        p->heads_q *= settings->few_queries ? 2 : 16;
        p->heads_kv = p->heads_q / (peaked_option_of(p) == PEAKED_GROUPS ? 4 : 1);
    }
    if (once_in(p, 2)) p->n_k -= p->n_k % 128;
    while (work_of(p) > work && p->n_q > 64) p->n_q = p->n_q * 3 / 4;
}

/* Many heads with keys of several tiles. Kernels compute head dims of 8 like those of 64. */
static void draw_many_heads(problem *p, const random_settings *settings)
{
    static const int64_t dims[] = {8, 8, 8, 72, 136, 200};
    if (p->pass == RANDOM_COMBINE) return;
    p->heads_kv = between(p, 3, 24);
    p->heads_q = p->heads_kv * (once_in(p, 4) ? between(p, 2, 4) : 1);
    p->batch = between(p, 1, 10);
    p->n_k = between(p, 129, 1100);
    if (p->pass != RANDOM_DECODE) p->n_q = once_in(p, 3) ? between(p, 1, 700) : p->n_k;
    p->d = p->d_v = dims[between(p, 0, 5)];
    while (work_of(p) > (settings->tiles ? 4 * usual_tiles_work : large_work)) {
        if (p->batch > 1 && p->n_k < 400) p->batch--;
        else if (p->n_k > p->n_q || p->n_q < 64) p->n_k = p->n_k * 3 / 4;
        else p->n_q = p->n_q * 3 / 4;
    }
}

static void focus_sizes(problem *p, const random_settings *settings)
{
    switch (settings->focus) {
    case RANDOM_HEADS: draw_many_heads(p, settings); break;
    case RANDOM_PEAKED: draw_peaked_sizes(p, settings); break;
    case RANDOM_GRID: draw_grid_sizes(p); break;
    case RANDOM_TAILS: draw_tail_sizes(p); break;
    case RANDOM_WIDE: draw_wide_sizes(p); break;
    case RANDOM_LATENT: draw_latent_sizes(p); break;
    case RANDOM_EMPTY:
        if (once_in(p, 4)) p->n_q = 0;
        if (once_in(p, 4)) p->n_k = 0;
        if (once_in(p, 12)) p->batch = 0;
        break;
    case RANDOM_LENGTHS:
    case RANDOM_PAGED:
    case RANDOM_SPLIT:
    case RANDOM_INVARIANCE: p->batch = between(p, 2, MAX_BATCH); break;
    case RANDOM_MASKS:
        if (p->n_k == p->n_q) p->n_k += between(p, 1, 150);
        break;
    case RANDOM_DROPOUT:
        p->n_k = between(p, 1, 900);
        p->n_q = between(p, 1, 300);
        p->d_v = between(p, 1, 256);
        break;
    case RANDOM_BIAS:
        if (settings->many_heads) draw_many_heads(p, settings);
        break;
    case RANDOM_ANYTHING:
    case RANDOM_UNUSED:
    case RANDOM_CHUNKS:
    case RANDOM_QUANTIZED:
    case RANDOM_STRIDES: break;
    }
}

/* The kind of lengths: 0 equal, 1 packed, 2 packed queries and paged keys, 3 to 5 padded queries,
 * keys, both, 6 paged. */
static int64_t draw_length_kind(problem *p, const random_settings *settings)
{
    switch (settings->focus) {
    case RANDOM_EMPTY:
    case RANDOM_UNUSED:
    case RANDOM_LENGTHS: return between(p, 1, 6);
    case RANDOM_PAGED: return once_in(p, 2) ? 2 : 6;
    case RANDOM_TAILS: return 0;
    case RANDOM_PEAKED: return peaked_option_of(p) == PEAKED_LENGTHS ? 5 : 0;
    case RANDOM_GRID: return p->batch > 1 ? between(p, 0, 1) * between(p, 0, 6) : 0;
    default: return once_in(p, 2) ? 0 : between(p, 1, 6);
    }
}

/* One length of a batch. Critical lengths are more frequent in the classes that test them. */
static int64_t draw_ragged_length(problem *p, const random_settings *settings, int64_t max)
{
    if (settings->focus == RANDOM_PEAKED) return between(p, max - max / 4, max);
    const bool edges = settings->focus == RANDOM_EMPTY || settings->focus == RANDOM_LENGTHS;
    if (edges && once_in(p, 3)) return 0;
    if (edges && once_in(p, 4)) return max > 0 ? 1 : 0;
    return between(p, 0, max);
}

static int64_t *make_array(int64_t n)
{
    int64_t *array = calloc((size_t)n + 1, sizeof *array);
    if (!array) abort();
    return array;
}

static void draw_sizes(problem *p, const random_settings *settings)
{
    static const random_pass passes[] = {
        RANDOM_FORWARD,  RANDOM_FORWARD, RANDOM_FORWARD, RANDOM_BACKWARD, RANDOM_BACKWARD,
        RANDOM_BACKWARD, RANDOM_DECODE,  RANDOM_DECODE,  RANDOM_WEIGHTS,  RANDOM_COMBINE};
    p->pass = passes[between(p, 0, 9)];
    if (settings->attend && !settings->all_passes && p->pass != RANDOM_DECODE)
        p->pass = RANDOM_FORWARD;
    focus_pass(p, settings);
    if (settings->one_pass && !fixes_pass(settings)) p->pass = settings->pass;
    p->batch = once_in(p, 3) ? between(p, 2, MAX_BATCH) : 1;
    p->heads_kv = between(p, 1, 3);
    p->heads_q =
        p->heads_kv * (once_in(p, 2) ? 1 : between(p, 2, p->pass == RANDOM_DECODE ? 9 : 4));
    p->n_q = draw_length(p);
    p->n_k = once_in(p, 3) ? p->n_q : draw_length(p);
    p->d = draw_dim(p);
    p->d_v = once_in(p, 3) ? draw_dim(p) : p->d;
    if (settings->tiles) draw_tiles_sizes(p);
    if (p->pass == RANDOM_DECODE) {
        p->n_q = between(p, 1, 5);
        if (once_in(p, 2)) p->n_k = between(p, 0, 5000);
    }
    if (p->pass == RANDOM_COMBINE) {
        p->n_q = between(p, 0, 70);
        p->n_k = 1;
    }
    const bool large = once_in(p, 20);
    const double work = settings->tiles ? (large ? large_tiles_work : usual_tiles_work)
                                        : (large ? large_work : usual_work);
    shrink(p, settings->small ? work / 4 : work);
    focus_sizes(p, settings);
    if (settings->wide_heads) widen_heads(p, settings);
    p->length_q = make_array(p->batch);
    p->length_k = make_array(p->batch);
}

/* ------------------------------------------------------------------------------------------------
 * Types and tensors
 * ---------------------------------------------------------------------------------------------- */

static fa_dtype draw_dtype(problem *p) { return (fa_dtype)between(p, FA_FLOAT32, FA_BFLOAT16); }

static void set_dtypes(problem *p, fa_dtype dtype)
{
    p->in.q.dtype = p->in.k.dtype = p->in.v.dtype = p->out.dtype = p->bias.dtype = dtype;
    p->dout.dtype = p->dq.dtype = p->dk.dtype = p->dv.dtype = p->dbias.dtype = dtype;
    p->weights.dtype = dtype;
    p->mask.dtype = FA_BOOL;
}

/* The dtypes of keys and values in a quantized cache. */
static void draw_cache_dtypes(problem *p)
{
    p->in.k.dtype = once_in(p, 2) ? FA_INT8 : FA_FLOAT8_E4M3;
    p->in.v.dtype = once_in(p, 2) ? p->in.k.dtype : once_in(p, 2) ? FA_INT8 : FA_FLOAT8_E4M3;
}

static void draw_dtypes(problem *p, const random_settings *settings)
{
    fa_dtype common = draw_dtype(p);
    if (settings->one_dtype) {
        set_dtypes(p, settings->dtype);
        if (settings->focus == RANDOM_QUANTIZED) draw_cache_dtypes(p);
        return;
    }
    if (p->checks_exactness) {
        common = p->number % 2 ? FA_FLOAT16 : FA_BFLOAT16;
        p->in.q.dtype = p->in.k.dtype = p->in.v.dtype = p->out.dtype = p->bias.dtype = common;
        return;
    }
    if (settings->tiles && common == FA_FLOAT32 &&
        !once_in(p, 4)) /* tensor cores are for 16 bits */
        common = once_in(p, 2) ? FA_FLOAT16 : FA_BFLOAT16;
    p->in.q.dtype = p->in.k.dtype = p->in.v.dtype = p->out.dtype = common;
    p->dout.dtype = p->dq.dtype = p->dk.dtype = p->dv.dtype = common;
    p->dbias.dtype = once_in(p, 2) ? FA_FLOAT32 : common;
    p->bias.dtype = once_in(p, 2) || p->about_bias ? common : draw_dtype(p);
    p->weights.dtype = once_in(p, 2) ? FA_FLOAT32 : common;
    p->mask.dtype = FA_BOOL;
    if (once_in(p, 6)) { /* mixed types */
        p->in.k.dtype = draw_dtype(p);
        p->in.v.dtype = once_in(p, 2) ? p->in.k.dtype : draw_dtype(p);
        p->out.dtype = draw_dtype(p);
        p->dout.dtype = draw_dtype(p);
        p->dq.dtype = draw_dtype(p);
        p->dk.dtype = draw_dtype(p);
        p->dv.dtype = draw_dtype(p);
    }
    if (settings->focus == RANDOM_QUANTIZED) {
        draw_cache_dtypes(p);
        return;
    }
    if (p->pass != RANDOM_BACKWARD && once_in(p, 12)) {
        p->in.k.dtype = p->in.v.dtype = FA_FLOAT8_E4M3;
        if (once_in(p, 2)) p->in.q.dtype = FA_FLOAT8_E4M3;
    }
}

static void set_shape(fa_tensor *t, int64_t a, int64_t b, int64_t c, int64_t d)
{
    t->shape[0] = a;
    t->shape[1] = b;
    t->shape[2] = c;
    t->shape[3] = d;
}

static void make_tensor(problem *p, const char *name, fa_tensor *t, bool input, bool any_last)
{
    ref_layout layout = ref_layout_random(&p->random, input, any_last);
    if (p->checks_exactness || (p->plain && !once_in(p, 3))) /* like most callers' tensors */
        layout = (ref_layout){.order = {0, 1, 2, 3}, .aligned_data = true, .aligned_strides = true};
    for (int axis = 0; p->strided && input && axis < (any_last ? 4 : 3); axis++)
        if (once_in(p, 4)) layout.broadcast[axis] = true;
    ref_buffers_tensor(&p->buffers, name, t, &layout);
    if (!input) ref_buffers_output(&p->buffers, t);
    say(p, " %s:%s(%lld,%lld,%lld,%lld)/(%lld,%lld,%lld,%lld)", name, fa_dtype_name(t->dtype),
        (long long)t->shape[0], (long long)t->shape[1], (long long)t->shape[2],
        (long long)t->shape[3], (long long)t->stride[0], (long long)t->stride[1],
        (long long)t->stride[2], (long long)t->stride[3]);
}

static float *make_floats(problem *p, const char *name, int64_t n)
{
    return ref_buffers_new(&p->buffers, name, (size_t)n * sizeof(float), sizeof(float));
}

static float *make_output_floats(problem *p, const char *name, int64_t n)
{
    float *x = make_floats(p, name, n);
    ref_buffers_whole_output(&p->buffers, x);
    return x;
}

static float *make_random_floats(problem *p, const char *name, int64_t n, double low, double high)
{
    float *x = make_floats(p, name, n);
    for (int64_t i = 0; i < n; i++) x[i] = (float)uniform(p, low, high);
    return x;
}

static int32_t *make_integers(problem *p, const char *name, int64_t n)
{
    return ref_buffers_new(&p->buffers, name, (size_t)n * sizeof(int32_t), sizeof(int32_t));
}

/* ------------------------------------------------------------------------------------------------
 * Lengths and pages
 * ---------------------------------------------------------------------------------------------- */

/* Cumulative lengths; returns the number of rows of the packed tensor, some of which come after the
 * last sequence. */
static int64_t make_packed(problem *p, const char *name, const int64_t *length, bool used_less,
                           int64_t *used, const int32_t **cu, const int32_t **seqlens)
{
    int32_t *starts = make_integers(p, name, p->batch + 1);
    int32_t *lengths = used_less ? make_integers(p, "seqlens", p->batch) : NULL;
    starts[0] = once_in(p, 3) ? (int32_t)between(p, 1, 5) : 0;
    for (int64_t b = 0; b < p->batch; b++) {
        starts[b + 1] = starts[b] + (int32_t)length[b];
        used[b] = lengths ? between(p, 0, length[b]) : length[b];
        if (lengths) lengths[b] = (int32_t)used[b];
    }
    *cu = starts;
    *seqlens = lengths;
    return starts[p->batch] + (once_in(p, 2) ? between(p, 1, 9) : 0);
}

static const int32_t *make_padded(problem *p, const char *name, const int64_t *length)
{
    int32_t *lengths = make_integers(p, name, p->batch);
    for (int64_t b = 0; b < p->batch; b++) lengths[b] = (int32_t)length[b];
    return lengths;
}

/* A block table with more pages than are needed, in random order; two items may share a page if
 * nothing is written to it. */
static void make_pages(problem *p)
{
    fa_options *o = &p->in.options;
    int64_t stride = (p->n_k + p->page_size - 1) / p->page_size + between(p, 0, 2);
    if (stride == 0) stride = 1;
    int32_t *table = make_integers(p, "block_table", p->batch * stride);
    p->pages = p->batch * stride + between(p, 1, 3);
    int64_t start = between(p, 0, p->pages - 1), step = 1;
    while (p->pages % (step + 1) == 0) step++;
    step = p->pages > 2 ? step + 1 : 1; /* with this step, pages may be shared */
    for (int64_t b = 0; b < p->batch; b++) {
        int64_t used = (p->length_k[b] + p->page_size - 1) / p->page_size;
        for (int64_t n = 0; n < stride; n++) {
            int64_t page = (start + (b * stride + n) * step) % p->pages;
            /* Entries after `used` are not read. */
            table[b * stride + n] = n < used ? (int32_t)page : INT32_MIN;
        }
    }
    o->block_table = table;
    o->block_table_stride = stride;
    p->n_k = stride * p->page_size;
}

static void draw_lengths(problem *p, const random_settings *settings, int64_t *rows_q,
                         int64_t *blocks_q, int64_t *rows_k, int64_t *blocks_k)
{
    fa_options *o = &p->in.options;
    int64_t *spare_q = make_array(p->batch), *spare_k = make_array(p->batch);
    const int64_t kind = draw_length_kind(p, settings);
    /* 1, 2: only queries, or only keys, are packed, and the others are padded. */
    const int64_t apart = kind == 1 ? between(p, 0, 7) : 0;
    p->packed_q = (kind == 1 && apart != 2) || kind == 2;
    p->packed_k = kind == 1 && apart != 1;
    p->padded_q = kind == 3 || kind == 5 || apart == 2;
    p->padded_k = kind == 4 || kind == 5 || apart == 1;
    p->paged = kind == 6 || kind == 2;
    for (int64_t b = 0; b < p->batch; b++) {
        bool ragged_q = p->packed_q || p->padded_q,
             ragged_k = p->packed_k || p->padded_k || p->paged;
        p->length_q[b] = spare_q[b] = ragged_q ? draw_ragged_length(p, settings, p->n_q) : p->n_q;
        p->length_k[b] = spare_k[b] = ragged_k ? draw_ragged_length(p, settings, p->n_k) : p->n_k;
    }
    *blocks_q = *blocks_k = p->batch;
    *rows_q = p->n_q;
    *rows_k = p->n_k;
    if (p->packed_q || p->packed_k) o->num_sequences = p->batch;
    if (p->packed_q) {
        *rows_q = p->n_q = make_packed(p, "cu_seqlens_q", spare_q, once_in(p, 4), p->length_q,
                                       &o->cu_seqlens_q, &o->seqlens_q);
        *blocks_q = 1;
        if (once_in(p, 2)) o->max_seqlen_q = p->n_q + 1;
    }
    if (p->packed_k) {
        *rows_k = p->n_k = make_packed(p, "cu_seqlens_k", spare_k, once_in(p, 4), p->length_k,
                                       &o->cu_seqlens_k, &o->seqlens_k);
        *blocks_k = 1;
        if (once_in(p, 2)) o->max_seqlen_k = p->n_k + 1;
    }
    if (p->padded_q) o->seqlens_q = make_padded(p, "seqlens_q", p->length_q);
    if (p->padded_k || p->paged) o->seqlens_k = make_padded(p, "seqlens_k", p->length_k);
    if (p->paged) {
        static const int64_t sizes[] = {1, 2, 3, 7, 17, 8, 16, 32, 64, 128, 256};
        p->page_size =
            sizes[settings->tiles && !once_in(p, 4) ? between(p, 5, 10) : between(p, 0, 8)];
        if (settings->focus == RANDOM_GRID) p->page_size = sizes[between(p, 0, 2)]; /* many pages */
        if (settings->focus == RANDOM_PAGED)
            p->page_size = once_in(p, 4) ? between(p, 1, 300) : sizes[between(p, 0, 10)];
        make_pages(p);
        *rows_k = p->page_size;
        *blocks_k = p->pages;
    }
    if (kind) {
        say(p, " lengths");
        for (int64_t b = 0; b < p->batch && b < MAX_BATCH; b++)
            say(p, " %lldx%lld", (long long)p->length_q[b], (long long)p->length_k[b]);
        say(p, "%s%s%s", p->packed_q ? " packed_q" : "", p->packed_k ? " packed_k" : "",
            p->paged ? " paged" : "");
    }
    free(spare_q);
    free(spare_k);
}

/* ------------------------------------------------------------------------------------------------
 * Options
 * ---------------------------------------------------------------------------------------------- */

/* The farthest legal diagonal: all keys are on one side of it. */
#define FAR_DIAGONAL ((int64_t)1 << 62)

/* A window's bound that hides nothing: -1, or mostly a number near 2^63, to which no position can be added. */
static int64_t draw_no_bound(const problem *p)
{
    return p->number / 16 % 4 == 0 ? -1 : INT64_MAX - (int64_t)(p->number / 64 % 2 * 1000);
}

static void draw_position_masks(problem *p, const random_settings *settings)
{
    fa_options *o = &p->in.options;
    const int64_t forced = settings->focus == RANDOM_MASKS ? between(p, 1, 3) : 0;
    if (once_in(p, 3) || forced == 1) {
        o->flags |= FA_CAUSAL;
        say(p, " causal");
    }
    if (once_in(p, 6) || forced == 2) {
        o->flags |= FA_DIAGONAL;
        o->diagonal = between(p, -p->n_q - 3, p->n_k + 3);
        if (p->number % 8 == 3) o->diagonal = o->diagonal < 0 ? -FAR_DIAGONAL : FAR_DIAGONAL;
        say(p, " diagonal=%lld", (long long)o->diagonal);
    }
    if (once_in(p, 4) || forced == 3) {
        o->flags |= FA_WINDOW;
        o->window_left = once_in(p, 4) ? draw_no_bound(p) : between(p, 0, p->n_k);
        o->window_right =
            once_in(p, 4) ? draw_no_bound(p) : between(p, 0, once_in(p, 2) ? 3 : p->n_k);
        say(p, " window=%lld,%lld", (long long)o->window_left, (long long)o->window_right);
    }
    if (settings->unseen_keys) {
        o->flags |= FA_CAUSAL | FA_DIAGONAL;
        o->diagonal = p->n_k / 2 - p->n_q;
        say(p, " causal diagonal=%lld", (long long)o->diagonal);
    }
}

/* From one position to more than there are. */
static void draw_attention_chunk(problem *p)
{
    fa_options *o = &p->in.options;
    static const int64_t usual[] = {1, 2, 8, 16, 32, 64, 100, 128, 256};
    o->attention_chunk = once_in(p, 2) ? usual[between(p, 0, 8)] : between(p, 1, p->n_k + 3);
    if (!once_in(p, 3)) o->flags |= FA_CAUSAL;
    say(p, "%s chunk=%lld", o->flags & FA_CAUSAL ? " causal" : "", (long long)o->attention_chunk);
}

/* The longest of the lengths, or a little more, which is valid too. */
static int64_t draw_extent(problem *p, const int64_t *length)
{
    int64_t longest = 0;
    for (int64_t b = 0; b < p->batch; b++)
        if (length[b] > longest) longest = length[b];
    return longest + (once_in(p, 2) ? between(p, 2, 5) : 0);
}

/* The full extents of a tensor over (batch, head, query, key). */
static void set_score_shape(problem *p, fa_tensor *t)
{
    bool vary_q = p->packed_q || p->padded_q, vary_k = p->packed_k || p->padded_k || p->paged;
    set_shape(t, p->batch, p->heads_q, vary_q ? draw_extent(p, p->length_q) : p->n_q,
              vary_k ? draw_extent(p, p->length_k) : p->n_k);
}

/* The extents of a bias or mask: full, or 1 where it broadcasts. */
static void draw_score_shape(problem *p, fa_tensor *t)
{
    set_score_shape(p, t);
    for (int axis = 0; axis < 4; axis++)
        if (once_in(p, 4)) t->shape[axis] = 1;
}

static void draw_mask(problem *p)
{
    double density = once_in(p, 3) ? 0.05 : uniform(p, 0.3, 1);
    draw_score_shape(p, &p->mask);
    make_tensor(p, "mask", &p->mask, true, true);
    p->in.options.mask = &p->mask;
    for (int64_t b = 0; b < p->mask.shape[0]; b++)
        for (int64_t h = 0; h < p->mask.shape[1]; h++)
            for (int64_t i = 0; i < p->mask.shape[2]; i++) {
                bool empty = once_in(p, 10);
                for (int64_t j = 0; j < p->mask.shape[3]; j++) {
                    bool see = !empty && ref_random_unit(&p->random) < density;
                    uint8_t byte = see ? (uint8_t)between(p, 1, 255) : 0;
                    int64_t at = b * p->mask.stride[0] + h * p->mask.stride[1] +
                                 i * p->mask.stride[2] + j * p->mask.stride[3];
                    ((uint8_t *)p->mask.data)[at] = byte;
                }
            }
}

static void draw_dropout(problem *p)
{
    fa_options *o = &p->in.options;
    uint64_t seed = ref_random_bits(&p->random), offset = ref_random_bits(&p->random);
    o->dropout_p = once_in(p, 5) ? 0.9f : (float)uniform(p, 0.01, 0.6);
    if (once_in(p, 3)) {
        uint64_t *state = ref_buffers_new(&p->buffers, "dropout_state", 16, 8);
        state[0] = seed;
        state[1] = offset;
        o->dropout_state = state;
    } else {
        o->dropout_seed = seed;
        o->dropout_offset = offset;
    }
    say(p, " dropout=%g", (double)o->dropout_p);
}

/* Whether to choose an option that changes scores or weights: with probability 1 / n; never in
 * the class of the widest head dims, whose kernels have no such options, or if the settings
 * forbid it. */
static bool weighs_otherwise(problem *p, const random_settings *settings, int64_t n)
{
    return settings->focus != RANDOM_WIDE && !settings->plain_scores && once_in(p, n);
}

static void draw_peaked_options(problem *p)
{
    fa_options *o = &p->in.options;
    const peaked_option option = peaked_option_of(p);
    if (option == PEAKED_CAUSAL || option == PEAKED_ALIBI || option == PEAKED_GROUPS) {
        o->flags |= FA_CAUSAL;
        say(p, " causal");
    }
    if (option == PEAKED_ALIBI) {
        o->alibi_slopes = make_random_floats(p, "alibi_slopes", p->heads_q, 0, 0.05);
        say(p, " alibi=%g", (double)o->alibi_slopes[0]);
    }
    if (option == PEAKED_WINDOW) {
        o->flags |= FA_WINDOW;
        o->window_left = between(p, p->n_k / 4, p->n_k / 2);
        o->window_right = between(p, 0, 100);
        say(p, " window=%lld,%lld", (long long)o->window_left, (long long)o->window_right);
    }
    if (option == PEAKED_SOFTCAP) {
        o->softcap = (float)uniform(p, 15, 50);
        say(p, " softcap=%g", (double)o->softcap);
    }
    if (option == PEAKED_BIAS) {
        set_score_shape(p, &p->bias);
        make_tensor(p, "bias", &p->bias, true, false);
        o->bias = &p->bias;
    }
    if (option == PEAKED_SINKS) {
        o->sinks = make_random_floats(p, "sinks", p->heads_q, -3, 3);
        say(p, " sinks");
    }
}

static void draw_bias(problem *p)
{
    draw_score_shape(p, &p->bias);
    if (p->about_bias && !once_in(p, 4)) { /* shared at most by batch items or by heads */
        const bool each_batch = once_in(p, 2), each_head = once_in(p, 2);
        set_score_shape(p, &p->bias);
        if (!each_batch) p->bias.shape[0] = 1;
        if (!each_head) p->bias.shape[1] = 1;
    }
    make_tensor(p, "bias", &p->bias, true, true);
    p->in.options.bias = &p->bias;
    p->bias_holes = once_in(p, 4) ? 0.3 : 0;
}

static void draw_options(problem *p, const random_settings *settings)
{
    fa_options *o = &p->in.options;
    o->size = sizeof *o;
    o->device = settings->device;
    if (p->pass != RANDOM_COMBINE) o->precision = settings->precision;
    o->threads = settings->threads ? settings->threads : (int32_t)between(p, 1, 3);
    if (p->checks_exactness) {
        if (p->pass != RANDOM_COMBINE) draw_peaked_options(p);
        return;
    }
    if (once_in(p, 8)) o->flags |= FA_DETERMINISTIC;
    if (once_in(p, 8) || settings->focus == RANDOM_INVARIANCE) o->flags |= FA_BATCH_INVARIANT;
    say(p, " threads=%d", (int)o->threads);
    if (p->pass == RANDOM_COMBINE) return;

    draw_position_masks(p, settings);
    if (settings->focus == RANDOM_CHUNKS) draw_attention_chunk(p);
    if (weighs_otherwise(p, settings, 5)) {
        o->scale = once_in(p, 4) ? 0 : (float)uniform(p, -0.5, 0.5);
        o->flags |= FA_SCALE;
        say(p, " scale=%g", (double)o->scale);
    }
    if (weighs_otherwise(p, settings, 6)) {
        o->softcap = (float)uniform(p, 0.5, 30);
        say(p, " softcap=%g", (double)o->softcap);
    }
    /* Distances from a far diagonal are so large that ALiBi leaves no bit of the scores. */
    const bool far = o->diagonal == FAR_DIAGONAL || o->diagonal == -FAR_DIAGONAL;
    if (weighs_otherwise(p, settings, 6) && !far) {
        bool each = once_in(p, 2);
        int64_t stride = each ? p->heads_q + between(p, 0, 3) : 0;
        o->alibi_slopes = make_random_floats(p, "alibi_slopes", p->heads_q + stride * p->batch, 0,
                                             once_in(p, 4) ? 1 : 0.05);
        o->alibi_batch_stride = stride;
        say(p, " alibi%s", each ? "(batch)" : "");
    }
    if (once_in(p, 6)) {
        float *sinks = make_random_floats(p, "sinks", p->heads_q, -3, 3);
        if (once_in(p, 4)) sinks[0] = -INFINITY;
        o->sinks = sinks;
        say(p, " sinks");
    }
    const bool dropout = weighs_otherwise(p, settings, 6) || settings->focus == RANDOM_DROPOUT;
    if (dropout && p->pass != RANDOM_WEIGHTS) draw_dropout(p);
    const bool masks = settings->focus == RANDOM_EMPTY || settings->focus == RANDOM_UNUSED;
    if (weighs_otherwise(p, settings, masks ? 3 : 6)) draw_mask(p);
    if (p->about_bias || weighs_otherwise(p, settings, 5)) draw_bias(p);
    if (settings->focus != RANDOM_QUANTIZED && p->in.k.dtype == FA_FLOAT8_E4M3 && once_in(p, 2)) {
        int64_t n = p->batch * p->heads_kv;
        if (p->in.q.dtype == FA_FLOAT8_E4M3)
            o->q_descale = make_random_floats(p, "q_descale", n, 0.3, 2);
        o->k_descale = make_random_floats(p, "k_descale", n, 0.3, 2);
        o->v_descale = make_random_floats(p, "v_descale", n, 0.3, 2);
        say(p, " descale");
    }
}

/* ------------------------------------------------------------------------------------------------
 * Contents: only what may be read gets a value, everything else stays NaN
 * ---------------------------------------------------------------------------------------------- */

static void fill_row(problem *p, const fa_tensor *t, int64_t a, int64_t b, int64_t c,
                     double amplitude)
{
    for (int64_t e = 0; e < t->shape[3]; e++)
        ref_store(t, a, b, c, e, amplitude * ref_random_normal(&p->random));
}

static void find_seen_keys(problem *p)
{
    int64_t group = p->heads_q / p->heads_kv;
    for (int64_t b = 0; b < p->batch; b++)
        if (p->length_k[b] > p->longest_k) p->longest_k = p->length_k[b];
    p->seen = calloc((size_t)(p->batch * p->heads_kv * p->longest_k) + 1, sizeof *p->seen);
    if (!p->seen) abort();
    for (int64_t b = 0; b < p->batch; b++) {
        ref_item item = ref_item_of(&p->in, b);
        for (int64_t h = 0; h < p->heads_q; h++)
            for (int64_t j = 0; j < item.n_k; j++) {
                bool *seen = &p->seen[(b * p->heads_kv + h / group) * p->longest_k + j];
                for (int64_t i = 0; i < item.n_q && !*seen; i++)
                    *seen = ref_may_see(&p->in, &item, h, i, j);
            }
    }
}

/* Values are 1 in one column and 0 in all others. So that column of out is the key's own weight,
 * which is 0 if and only if it was dropped. */
static void show_key(problem *p, int64_t block, int64_t row, int64_t head, int64_t j)
{
    for (int64_t c = 0; c < p->d_v; c++)
        ref_store(&p->in.v, block, row, head, c, j - p->first_shown == c ? 1 : 0);
}

/* A row of keys or values, and its scale, if there are scales. */
static void fill_key(problem *p, const fa_tensor *t, const fa_tensor *scale, int64_t block,
                     int64_t row, int64_t h, double amplitude)
{
    const bool int8 = t->dtype == FA_INT8;
    fill_row(p, t, block, row, h, int8 ? 40 * amplitude : amplitude);
    if (!scale) return;
    ref_store(scale, scale->shape[0] == 1 ? 0 : block, scale->shape[1] == 1 ? 0 : row,
              scale->shape[2] == 1 ? 0 : h, 0, uniform(p, 0.3, 2) / (int8 ? 40 : 1));
}

static void fill_keys(problem *p, const ref_item *item)
{
    for (int64_t j = 0; j < item->n_k; j++)
        for (int64_t h = 0; h < p->heads_kv; h++) {
            int64_t block, row;
            if (p->hide_unseen && !p->seen[(item->b * p->heads_kv + h) * p->longest_k + j])
                continue;
            ref_key_place(&p->in, item, j, &block, &row);
            fill_key(p, &p->in.k, p->in.options.k_scale, block, row, h, p->amplitude);
            if (!p->in.v.data) continue;
            if (p->shows_dropout) show_key(p, block, row, h, j);
            else fill_key(p, &p->in.v, p->in.options.v_scale, block, row, h, 1);
        }
}

static void fill_queries(problem *p, const ref_item *item)
{
    for (int64_t i = 0; i < item->n_q; i++)
        for (int64_t h = 0; h < p->heads_q; h++) {
            fill_row(p, &p->in.q, item->block_q, item->start_q + i, h, p->amplitude);
            if (p->dout.data) fill_row(p, &p->dout, item->block_q, item->start_q + i, h, 1);
            if (p->dlse)
                p->dlse[(item->block_q * p->heads_q + h) * p->in.q.shape[1] + item->start_q + i] =
                    (float)ref_random_normal(&p->random);
        }
}

static void fill_bias(problem *p, const ref_item *item)
{
    const fa_tensor *t = &p->bias;
    for (int64_t h = 0; h < p->heads_q; h++)
        for (int64_t i = 0; i < item->n_q; i++)
            for (int64_t j = 0; j < item->n_k; j++) {
                if (!ref_may_see(&p->in, item, h, i, j)) continue;
                bool hole = p->bias_holes > 0 && ref_random_unit(&p->random) < p->bias_holes;
                ref_store(t, t->shape[0] == 1 ? 0 : item->b, t->shape[1] == 1 ? 0 : h,
                          t->shape[2] == 1 ? 0 : i, t->shape[3] == 1 ? 0 : j,
                          hole ? -INFINITY : uniform(p, -2, 2));
            }
}

/* ---- Peaked rows ----------------------------------------------------------------------------- */

static void scale_row(const fa_tensor *t, int64_t a, int64_t b, int64_t c, double factor)
{
    for (int64_t e = 0; e < t->shape[3]; e++)
        ref_store(t, a, b, c, e, factor * ref_load(t, a, b, c, e));
}

/* A key that the query may see; -1 if none is found. */
static int64_t draw_seen_key(problem *p, const ref_item *item, int64_t h, int64_t i)
{
    for (int tries = 0; tries < 64; tries++) {
        const int64_t j = between(p, 0, item->n_k - 1);
        if (ref_may_see(&p->in, item, h, i, j)) return j;
    }
    return -1;
}

/* A fifth of the query, and a key. */
static void aim_query(problem *p, const ref_item *item, int64_t h, int64_t i)
{
    const int64_t j = draw_seen_key(p, item, h, i), row_q = item->start_q + i;
    int64_t block, row;
    if (j < 0) return;
    ref_key_place(&p->in, item, j, &block, &row);
    for (int64_t e = 0; e < p->d; e++)
        ref_store(&p->in.q, item->block_q, row_q, h, e,
                  0.2 * ref_load(&p->in.q, item->block_q, row_q, h, e) +
                      ref_load(&p->in.k, block, row, h / (p->heads_q / p->heads_kv), e));
}

/* A component that all queries share, so that one key can have a large score for all of them: +1 or
 * -1. */
static double common_part(int64_t e) { return e * 2654435761u >> 7 & 1 ? 1 : -1; }
static const double common_share = 0.7;

/* Adds about this many powers of two to the scores of all queries with key j. */
static void raise_key(problem *p, const ref_item *item, int64_t j, double bits)
{
    const double each = bits / (1.4427 * common_share * sqrt((double)p->d));
    int64_t block, row;
    ref_key_place(&p->in, item, j, &block, &row);
    for (int64_t h = 0; h < p->heads_kv; h++) {
        if (p->hide_unseen && !p->seen[(item->b * p->heads_kv + h) * p->longest_k + j]) continue;
        for (int64_t e = 0; e < p->d; e++)
            ref_store(&p->in.k, block, row, h, e, each * common_part(e));
    }
}

static void shape_query(problem *p, const ref_item *item, int64_t h, int64_t i)
{
    const int64_t row = item->start_q + i;
    static const double factors[RANDOM_NUM_PEAKS] = {
        [PEAK_4] = 4, [PEAK_16] = 16, [PEAK_64] = 64, [PEAK_2] = 2};
    switch (p->peak) {
    case PEAK_SPIKE: aim_query(p, item, h, i); break;
    case PEAK_FEW:
        if (i % 8 == 5) scale_row(&p->in.q, item->block_q, row, h, 6);
        break;
    case PEAK_EQUAL: scale_row(&p->in.q, item->block_q, row, h, 0); break;
    case PEAK_GROWN:
    case PEAK_IMMENSE:
    case PEAK_FIRST:
    case PEAK_SECOND:
        for (int64_t e = 0; e < p->d; e++)
            ref_store(&p->in.q, item->block_q, row, h, e,
                      common_share *
                          (common_part(e) + ref_load(&p->in.q, item->block_q, row, h, e)));
        break;
    case PEAK_NONE:
    case PEAK_LATE:
    case RANDOM_NUM_PEAKS: break;
    case PEAK_2:
    case PEAK_4:
    case PEAK_16:
    case PEAK_64: scale_row(&p->in.q, item->block_q, row, h, factors[p->peak]); break;
    }
}

static void shape_keys(problem *p, const ref_item *item)
{
    const double first = uniform(p, 12, 25);
    const int64_t late = between(p, item->n_k / 2, item->n_k - 1);
    if (p->peak == PEAK_FIRST || p->peak == PEAK_SECOND) raise_key(p, item, 0, first);
    if (p->peak == PEAK_GROWN) raise_key(p, item, late, uniform(p, 4, 30));
    if (p->peak == PEAK_IMMENSE) raise_key(p, item, late, uniform(p, 80, 180));
    if (p->peak == PEAK_SECOND) raise_key(p, item, late, first + uniform(p, 0.1, 4));
    if (p->peak != PEAK_LATE) return;
    for (int64_t j = item->n_k / 2; j < item->n_k; j++)
        for (int64_t h = 0; h < p->heads_kv; h++) {
            int64_t block, row;
            if (p->hide_unseen && !p->seen[(item->b * p->heads_kv + h) * p->longest_k + j])
                continue;
            ref_key_place(&p->in, item, j, &block, &row);
            scale_row(&p->in.k, block, row, h, 8);
        }
}

/* Gives the scores the properties of p->peak. */
static void shape_scores(problem *p, const ref_item *item)
{
    if (item->n_k == 0) return;
    shape_keys(p, item);
    for (int64_t i = 0; i < item->n_q; i++)
        for (int64_t h = 0; h < p->heads_q; h++) shape_query(p, item, h, i);
}

static void fill_inputs(problem *p)
{
    p->hide_unseen = !once_in(p, 4);
    p->amplitude = once_in(p, 4) ? 3 : 1;
    if (p->checks_exactness) p->amplitude = 1;
    if (p->shows_dropout) p->amplitude = 0.5; /* no weight is so small that it rounds to 0 */
    p->first_shown = p->n_k > p->d_v ? between(p, 0, p->n_k - p->d_v) : 0;
    find_seen_keys(p);
    for (int64_t b = 0; b < p->batch; b++) {
        ref_item item = ref_item_of(&p->in, b);
        fill_keys(p, &item);
        fill_queries(p, &item);
        if (p->in.options.bias) fill_bias(p, &item);
        if (p->checks_exactness) shape_scores(p, &item);
    }
}

/* ------------------------------------------------------------------------------------------------
 * The calls
 * ---------------------------------------------------------------------------------------------- */

static bool succeeded(random_result *result, const char *call, fa_status status)
{
    if (status == FA_OK) return true;
    result->status = status;
    ref_fail(&result->report, "%s: %s: %s", call, fa_status_name(status), fa_last_error());
    return false;
}

fa_status random_status_of_runs(bool clean, bool same, char *message, size_t size)
{
    if (clean && same) return FA_OK;
    snprintf(message, size, "%s",
             clean ? "a second run left other bits" : "memory beside the workspace was written");
    return (fa_status)RANDOM_WRONG;
}

fa_status random_call_run(const random_call *c)
{
    switch (c->pass) {
    case RANDOM_DECODE: return fa_decode(&c->q, &c->k, &c->v, &c->out, c->lse, &c->options);
    case RANDOM_BACKWARD:
        return fa_backward(&c->q, &c->k, &c->v, &c->out, c->lse, &c->gradients, &c->options);
    case RANDOM_WEIGHTS:
        return fa_weights(&c->q, &c->k, c->rows, c->num_rows, &c->weights, &c->options);
    case RANDOM_COMBINE:
        return fa_combine(c->parts, c->part_lse, c->num_parts, &c->out, c->lse, &c->options);
    case RANDOM_FORWARD:
    case RANDOM_NUM_PASSES: break;
    }
    return fa_forward(&c->q, &c->k, &c->v, &c->out, c->lse, &c->options);
}

/* Made by the library, or by settings->attend instead. */
static bool attend(const random_call *call, const random_settings *settings, random_result *result)
{
    char name[16];
    snprintf(name, sizeof name, "fa_%s", random_pass_name(call->pass));
    if (!settings->attend) return succeeded(result, name, random_call_run(call));
    char message[300] = "";
    result->status = settings->attend(settings->context, call, message, sizeof message);
    if (result->status == FA_OK) return true;
    if (result->status == (fa_status)RANDOM_WRONG) {
        result->status = FA_OK;
        ref_fail(&result->report, "%s: %s", name, message);
        return false;
    }
    ref_fail(&result->report, "%s: %s: %s", name, fa_status_name(result->status), message);
    return false;
}

static random_call whole_call(problem *p)
{
    return (random_call){.pass = p->pass == RANDOM_BACKWARD ? RANDOM_FORWARD : p->pass,
                         .decode = p->pass == RANDOM_DECODE,
                         .run = p->run,
                         .buffers = &p->buffers,
                         .q = p->in.q,
                         .k = p->in.k,
                         .v = p->in.v,
                         .out = p->out,
                         .lse = p->lse,
                         .options = p->in.options};
}

/* Selects index b of the batch. */
static void take_index(fa_tensor *t, int64_t b)
{
    t->data = (char *)t->data + b * t->stride[0] * (int64_t)fa_dtype_size(t->dtype);
    t->shape[0] = 1;
}

/* The offset that gives a batch of only this item the item's dropout bits. */
static void move_dropout(fa_options *o, int64_t heads_before)
{
    if (o->dropout_state) {
        o->dropout_seed = o->dropout_state[0];
        o->dropout_offset = o->dropout_state[1];
        o->dropout_state = NULL;
    }
    if (o->dropout_p > 0) o->dropout_offset += (uint64_t)heads_before << 32;
}

/* The call for one batch item in the same memory. bias, mask: room for their views. */
static random_call call_alone(problem *p, int64_t b, fa_tensor *bias, fa_tensor *mask)
{
    random_call c = whole_call(p);
    fa_options *o = &c.options;
    if (o->num_sequences) o->num_sequences = 1;
    if (o->cu_seqlens_q) {
        o->cu_seqlens_q += b;
    } else {
        if (c.lse) c.lse += b * p->heads_q * c.q.shape[1];
        take_index(&c.q, b);
        take_index(&c.out, b);
    }
    if (o->block_table) {
        o->block_table += b * o->block_table_stride;
    } else if (o->cu_seqlens_k) {
        o->cu_seqlens_k += b;
    } else {
        take_index(&c.k, b);
        take_index(&c.v, b);
    }
    if (o->seqlens_q) o->seqlens_q += b;
    if (o->seqlens_k) o->seqlens_k += b;
    if (o->alibi_slopes) o->alibi_slopes += b * o->alibi_batch_stride;
    if (o->q_descale) o->q_descale += b * p->heads_kv;
    if (o->k_descale) o->k_descale += b * p->heads_kv;
    if (o->v_descale) o->v_descale += b * p->heads_kv;
    if (o->bias) *bias = *o->bias, o->bias = bias;
    if (o->bias && bias->shape[0] > 1) take_index(bias, b);
    if (o->mask) *mask = *o->mask, o->mask = mask;
    if (o->mask && mask->shape[0] > 1) take_index(mask, b);
    move_dropout(o, b * p->heads_q);
    return c;
}

/* One item's rows of out, each followed by its log-sum-exp, as numbers. */
static double *copy_item(const problem *p, const ref_item *item)
{
    const int64_t width = p->d_v + 1;
    double *copy = calloc((size_t)(item->n_q * p->heads_q * width) + 1, sizeof *copy), *x = copy;
    if (!copy) abort();
    for (int64_t i = 0; i < item->n_q; i++)
        for (int64_t h = 0; h < p->heads_q; h++, x += width) {
            const int64_t row = item->start_q + i, rows = p->in.q.shape[1];
            for (int64_t c = 0; c < p->d_v; c++) x[c] = ref_load(&p->out, item->block_q, row, h, c);
            if (p->lse) x[p->d_v] = (double)p->lse[(item->block_q * p->heads_q + h) * rows + row];
        }
    return copy;
}

/* With FA_BATCH_INVARIANT, an item alone has the same bits as in the batch. */
static void check_invariance(problem *p, const random_settings *settings, random_result *result)
{
    if (!(p->in.options.flags & FA_BATCH_INVARIANT) || p->batch < 2 || !result->report.ok) return;
    /* call_alone does not select an item of the scales. */
    if (p->in.options.k_scale || p->in.options.v_scale) return;
    const int64_t b = (int64_t)(p->number % (uint64_t)p->batch);
    const ref_item item = ref_item_of(&p->in, b);
    const size_t bytes = (size_t)(item.n_q * p->heads_q * (p->d_v + 1)) * sizeof(double);
    fa_tensor bias, mask;
    const random_call call = call_alone(p, b, &bias, &mask);
    double *among_others = copy_item(p, &item);
    if (attend(&call, settings, result)) {
        double *alone = copy_item(p, &item);
        if (memcmp(among_others, alone, bytes) != 0)
            ref_fail(&result->report, "batch item %lld has other bits alone than among others",
                     (long long)b);
        free(alone);
    }
    free(among_others);
}

/* The allowed distance, relative to that of weights rounded at each row's maximum. 1 would be
 * ideal, but the largest errors of one random problem vary more than two norms. Rounding the
 * largest weight at any other base increases it 1.25 to 2 times. Kernels that do not look for
 * maxima in flat rows may do so if one key grows beyond the others, but only by few powers of two:
 * for those problems they may be a little worse. */
static ref_distance allowed_distance(const problem *p)
{
    const bool little = p->peak == PEAK_GROWN || p->peak == PEAK_SECOND || p->peak == PEAK_FEW;
    return little ? (ref_distance){1.35, 2.1} : (ref_distance){1.10, 1.35};
}

static bool attend_whole(problem *p, const random_settings *settings, random_result *result)
{
    const random_call call = whole_call(p);
    return attend(&call, settings, result);
}

static void check_forward(problem *p, const random_settings *settings, random_result *result)
{
    if (!attend_whole(p, settings, result)) return;
    ref_array out, lse;
    ref_forward(&p->in, &out, &lse);
    ref_check_tensor(&result->report, "out", &p->out, &out);
    if (p->lse) ref_check_floats(&result->report, "lse", p->lse, &lse);
    if (p->checks_exactness && p->in.q.dtype != FA_FLOAT32) {
        ref_array rounded;
        ref_forward_rounded(&p->in, p->out.dtype, &rounded);
        ref_check_exactness(&result->report, "out", &p->out, &out, &rounded, allowed_distance(p));
        ref_array_free(&rounded);
    }
    ref_array_free(&out);
    ref_array_free(&lse);
}

/* Sets what forward wrote for rows without a sequence to NaN again: backward may not read it. */
static void poison_unused_rows(problem *p)
{
    int64_t blocks = p->in.q.shape[0], rows = p->in.q.shape[1];
    bool *used = calloc((size_t)(blocks * rows) + 1, sizeof *used);
    if (!used) abort();
    for (int64_t b = 0; b < p->batch; b++) {
        ref_item item = ref_item_of(&p->in, b);
        for (int64_t i = 0; i < item.n_q; i++) used[item.block_q * rows + item.start_q + i] = true;
    }
    for (int64_t n = 0; n < blocks * rows; n++)
        for (int64_t h = 0; h < p->heads_q && !used[n]; h++) {
            p->lse[(n / rows * p->heads_q + h) * rows + n % rows] = NAN;
            for (int64_t c = 0; c < p->d_v; c++) ref_store(&p->out, n / rows, n % rows, h, c, NAN);
        }
    free(used);
}

/* Copies rows of a tensor to `to`, as numbers; returns the address after them. */
static double *copy_rows(double *to, const fa_tensor *t, int64_t block, int64_t start, int64_t n)
{
    for (int64_t i = 0; i < n && t->data; i++)
        for (int64_t h = 0; h < t->shape[2]; h++)
            for (int64_t c = 0; c < t->shape[3]; c++) *to++ = ref_load(t, block, start + i, h, c);
    return to;
}

/* One item's gradients of queries, keys and values. */
static double *copy_gradients(const problem *p, const ref_item *item, size_t *bytes)
{
    const int64_t queries = item->n_q * p->heads_q * p->d,
                  keys = item->n_k * p->heads_kv * (p->d + p->d_v);
    double *copy = calloc((size_t)(queries + keys) + 1, sizeof *copy), *end = copy;
    if (!copy) abort();
    end = copy_rows(end, &p->dq, item->block_q, item->start_q, item->n_q);
    end = copy_rows(end, &p->dk, item->block_k, item->start_k, item->n_k);
    end = copy_rows(end, &p->dv, item->block_k, item->start_k, item->n_k);
    *bytes = (size_t)(end - copy) * sizeof *copy;
    return copy;
}

/* The same call of backward for one batch item. */
static random_call backward_alone(problem *p, int64_t b, const random_call *whole, fa_tensor *bias,
                                  fa_tensor *mask)
{
    random_call c = call_alone(p, b, bias, mask);
    fa_gradients *g = &c.gradients;
    c.pass = RANDOM_BACKWARD;
    *g = whole->gradients;
    g->dbias.data = NULL;
    g->dsinks = NULL;
    if (!c.options.cu_seqlens_q) {
        if (g->dlse) g->dlse += b * p->heads_q * p->in.q.shape[1];
        take_index(&g->dout, b);
        if (g->dq.data) take_index(&g->dq, b);
    }
    if (!c.options.cu_seqlens_k) {
        if (g->dk.data) take_index(&g->dk, b);
        if (g->dv.data) take_index(&g->dv, b);
    }
    return c;
}

/* With FA_BATCH_INVARIANT, an item alone has the same gradients, except for those that are sums
 * over items. */
static void check_gradient_invariance(problem *p, const random_call *whole,
                                      const random_settings *settings, random_result *result)
{
    const fa_options *o = &p->in.options;
    if (!(o->flags & FA_BATCH_INVARIANT) || p->batch < 2 || o->block_table || !result->report.ok)
        return;
    const int64_t b = (int64_t)(p->number % (uint64_t)p->batch);
    const ref_item item = ref_item_of(&p->in, b);
    fa_tensor bias, mask;
    size_t bytes;
    const random_call call = backward_alone(p, b, whole, &bias, &mask);
    double *among_others = copy_gradients(p, &item, &bytes);
    if (attend(&call, settings, result)) {
        double *alone = copy_gradients(p, &item, &bytes);
        if (memcmp(among_others, alone, bytes) != 0)
            ref_fail(&result->report, "batch item %lld has other gradients alone than among others",
                     (long long)b);
        free(alone);
    }
    free(among_others);
}

/* The first run computes the reference, with which the later runs are compared, too. */
static void check_backward_once(problem *p, const fa_gradients *gradients, ref_gradients *want,
                                const random_settings *settings, random_result *result)
{
    random_call call = whole_call(p);
    call.pass = RANDOM_BACKWARD;
    call.gradients = *gradients;
    if (!attend(&call, settings, result)) return;
    if (p->run == 0)
        ref_backward(&p->in, &p->dout, p->dlse, p->dbias.data ? p->dbias.shape : NULL, want);
    if (p->dq.data) ref_check_tensor(&result->report, "dq", &p->dq, &want->dq);
    if (p->dk.data) ref_check_tensor(&result->report, "dk", &p->dk, &want->dk);
    if (p->dv.data) ref_check_tensor(&result->report, "dv", &p->dv, &want->dv);
    if (p->dbias.data) ref_check_tensor(&result->report, "dbias", &p->dbias, &want->dbias);
    if (p->dsinks) ref_check_floats(&result->report, "dsinks", p->dsinks, &want->dsinks);
    check_gradient_invariance(p, &call, settings, result);
}

static fa_gradients gradients_of(const problem *p)
{
    fa_gradients g = {0};
    g.size = sizeof g;
    g.dout = p->dout;
    g.dlse = p->dlse;
    g.dq = p->dq;
    g.dk = p->dk;
    g.dv = p->dv;
    g.dbias = p->dbias;
    g.dsinks = p->dsinks;
    return g;
}

static void check_backward(problem *p, const random_settings *settings, random_result *result)
{
    const fa_gradients g = gradients_of(p);
    poison_unused_rows(p);
    ref_gradients want = {0};
    char *const before = ref_buffers_copy(&p->buffers);
    const int runs = settings->runs ? settings->runs : 1;
    for (p->run = 0; p->run < runs && result->report.ok; p->run++) {
        if (p->run) ref_buffers_put(&p->buffers, before);
        check_backward_once(p, &g, &want, settings, result);
        ref_buffers_check(&p->buffers, &result->report);
    }
    free(before);
    ref_gradients_free(&want);
}

static random_call weights_call(problem *p)
{
    random_call call = whole_call(p);
    call.rows = p->rows;
    call.num_rows = p->num_rows;
    call.weights = p->weights;
    return call;
}

static void check_weights(problem *p, const random_settings *settings, random_result *result)
{
    const random_call call = weights_call(p);
    if (!attend(&call, settings, result)) return;
    ref_array want;
    ref_weights(&p->in, p->rows, p->num_rows, p->weights.shape[3], &want);
    ref_check_tensor(&result->report, "weights", &p->weights, &want);
    ref_array_free(&want);
}

static void check_combine(problem *p, const random_settings *settings, random_result *result)
{
    const float *part_lse[MAX_PARTS];
    for (int64_t n = 0; n < p->num_parts; n++) part_lse[n] = p->part_lse[n];
    random_call call = whole_call(p);
    call.parts = p->parts;
    call.part_lse = part_lse;
    call.num_parts = p->num_parts;
    if (!attend(&call, settings, result)) return;
    ref_array out, lse;
    ref_combine(p->parts, part_lse, p->num_parts, p->out.shape, &out, &lse);
    ref_check_tensor(&result->report, "out", &p->out, &out);
    if (p->lse) ref_check_floats(&result->report, "lse", p->lse, &lse);
    ref_array_free(&out);
    ref_array_free(&lse);
}

/* ------------------------------------------------------------------------------------------------
 * Putting a problem together
 * ---------------------------------------------------------------------------------------------- */

static void make_gradients(problem *p)
{
    const int64_t *q = p->in.q.shape, *k = p->in.k.shape;
    set_shape(&p->dout, q[0], q[1], p->heads_q, p->d_v);
    set_shape(&p->dq, q[0], q[1], p->heads_q, p->d);
    set_shape(&p->dk, k[0], k[1], p->heads_kv, p->d);
    set_shape(&p->dv, k[0], k[1], p->heads_kv, p->d_v);
    make_tensor(p, "dout", &p->dout, true, false);
    bool all = !once_in(p, 4);
    if (all || once_in(p, 2)) make_tensor(p, "dq", &p->dq, false, false);
    if (all || once_in(p, 2)) make_tensor(p, "dk", &p->dk, false, false);
    if (all || once_in(p, 2)) make_tensor(p, "dv", &p->dv, false, false);
    if (once_in(p, 3)) {
        p->dlse = make_floats(p, "dlse", q[0] * p->heads_q * q[1]);
        say(p, " dlse");
    }
    const bool like_bias = p->about_bias && !once_in(p, 4);
    if (p->in.options.bias && (p->about_bias || !once_in(p, 4))) {
        draw_score_shape(p, &p->dbias);
        if (like_bias) memcpy(p->dbias.shape, p->bias.shape, sizeof p->bias.shape);
        make_tensor(p, "dbias", &p->dbias, false, true);
    }
    if (p->in.options.sinks && !once_in(p, 4))
        p->dsinks = make_output_floats(p, "dsinks", p->heads_q);
}

static void make_weights(problem *p)
{
    set_score_shape(p, &p->weights);
    p->num_rows = p->weights.shape[2];
    if (once_in(p, 2) && p->in.q.shape[1] > 0) {
        p->num_rows = between(p, 0, 9);
        p->rows = ref_buffers_new(&p->buffers, "rows", (size_t)p->num_rows * 8, 8);
        for (int64_t n = 0; n < p->num_rows; n++) p->rows[n] = between(p, 0, p->in.q.shape[1] - 1);
    }
    p->weights.shape[2] = p->num_rows;
    make_tensor(p, "weights", &p->weights, false, false);
}

/* The values are the keys' first columns. */
static void make_latent_values(problem *p)
{
    p->in.v = p->in.k;
    p->in.v.shape[3] = p->d_v;
    say(p, " v=k(%lld)", (long long)p->d_v);
}

/* Scales for the tensor, for heads, for tokens, or for any combination of these. */
static void make_key_scale(problem *p, const char *name, fa_tensor *scale, const fa_tensor *t,
                           const fa_tensor **option)
{
    if (once_in(p, 8)) return;
    scale->dtype = FA_FLOAT32;
    for (int axis = 0; axis < 3; axis++) scale->shape[axis] = once_in(p, 2) ? 1 : t->shape[axis];
    scale->shape[3] = 1;
    make_tensor(p, name, scale, true, true);
    *option = scale;
}

static void make_attention(problem *p, const random_settings *settings)
{
    int64_t rows_q, blocks_q, rows_k, blocks_k;
    draw_dtypes(p, settings);
    draw_lengths(p, settings, &rows_q, &blocks_q, &rows_k, &blocks_k);
    set_shape(&p->in.q, blocks_q, rows_q, p->heads_q, p->d);
    set_shape(&p->in.k, blocks_k, rows_k, p->heads_kv, p->d);
    set_shape(&p->in.v, blocks_k, rows_k, p->heads_kv, p->d_v);
    draw_options(p, settings);
    make_tensor(p, "q", &p->in.q, true, false);
    make_tensor(p, "k", &p->in.k, true, false);
    if (p->pass == RANDOM_WEIGHTS) {
        make_weights(p);
    } else {
        if (settings->focus == RANDOM_LATENT && !once_in(p, 4)) make_latent_values(p);
        else make_tensor(p, "v", &p->in.v, true, false);
        set_shape(&p->out, blocks_q, rows_q, p->heads_q, p->d_v);
        make_tensor(p, "out", &p->out, false, false);
        if (p->pass == RANDOM_BACKWARD || (!once_in(p, 4) && !has_capped_peaks(p)))
            p->lse = make_output_floats(p, "lse", blocks_q * p->heads_q * rows_q);
    }
    if (p->pass == RANDOM_BACKWARD) make_gradients(p);
    if (settings->focus == RANDOM_QUANTIZED) {
        make_key_scale(p, "k_scale", &p->k_scale, &p->in.k, &p->in.options.k_scale);
        if (p->in.v.data)
            make_key_scale(p, "v_scale", &p->v_scale, &p->in.v, &p->in.options.v_scale);
    }
    p->in.rounding = ref_rounding_for(&p->in, p->out.dtype, p->lse != NULL);
    p->in.rounding.pair_shared = p->dbias.data && p->dbias.dtype == p->in.q.dtype;
}

static void make_parts(problem *p, const random_settings *settings)
{
    fa_dtype common = settings->one_dtype ? settings->dtype : draw_dtype(p);
    int64_t rows = p->batch * p->heads_q * p->n_q;
    draw_options(p, settings);
    p->in.q.dtype = common;
    p->num_parts = between(p, 0, MAX_PARTS);
    p->out.dtype = settings->one_dtype || once_in(p, 2) ? common : draw_dtype(p);
    set_shape(&p->out, p->batch, p->n_q, p->heads_q, p->d_v);
    make_tensor(p, "out", &p->out, false, false);
    if (!once_in(p, 4)) p->lse = make_output_floats(p, "lse", rows);
    for (int64_t n = 0; n < p->num_parts; n++) {
        fa_tensor *t = &p->parts[n];
        *t = p->out;
        t->dtype = !settings->one_dtype && once_in(p, 4) ? draw_dtype(p) : common;
        make_tensor(p, "part", t, true, false);
        p->part_lse[n] = make_random_floats(p, "part_lse", rows, -20, 20);
        for (int64_t b = 0; b < p->batch; b++)
            for (int64_t h = 0; h < p->heads_q; h++)
                for (int64_t i = 0; i < p->n_q; i++) {
                    float *lse = &p->part_lse[n][(b * p->heads_q + h) * p->n_q + i];
                    if (once_in(p, 4)) *lse = -INFINITY; /* its values stay NaN */
                    else fill_row(p, t, b, i, h, 1);
                }
    }
}

static void free_problem(problem *p)
{
    ref_buffers_free(&p->buffers);
    free(p->seen);
    free(p->length_q);
    free(p->length_k);
    free(p);
}

/* The inputs of backward include the results of forward. */
static void run_checks(problem *p, const random_settings *settings, random_result *result)
{
    ref_buffers_freeze(&p->buffers);
    switch (p->pass) {
    case RANDOM_COMBINE: check_combine(p, settings, result); break;
    case RANDOM_WEIGHTS: check_weights(p, settings, result); break;
    case RANDOM_FORWARD:
    case RANDOM_DECODE:
        check_forward(p, settings, result);
        check_invariance(p, settings, result);
        break;
    case RANDOM_BACKWARD:
    case RANDOM_NUM_PASSES:
        if (settings->backward_alone) (void)attend_whole(p, settings, result);
        else check_forward(p, settings, result);
        if (result->report.ok) check_backward(p, settings, result);
    }
    ref_buffers_check(&p->buffers, &result->report);
}

/* Whether settings->wants accepts the call. */
static bool is_wanted(problem *p, const random_settings *settings)
{
    if (!settings->wants) return true;
    random_call call = p->pass == RANDOM_WEIGHTS ? weights_call(p) : whole_call(p);
    call.pass = p->pass;
    if (p->pass == RANDOM_BACKWARD) call.gradients = gradients_of(p);
    return settings->wants(settings->context, &call);
}

static void say_how_to_reproduce(uint64_t number, const random_settings *settings,
                                 random_result *result)
{
    const char *isa = getenv("FA_CPU_ISA");
    static const char *const dtypes[] = {"f32", "f16", "bf16"};
    static const char *const precisions[] = {"", " --precision tf32", " --precision ieee"};
    char threads[32] = "", focus[32] = "", pass[24] = "", dtype[16] = "";
    if (settings->threads)
        snprintf(threads, sizeof threads, " --threads %d", (int)settings->threads);
    if (settings->focus_name) snprintf(focus, sizeof focus, " --class %s", settings->focus_name);
    if (settings->one_pass)
        snprintf(pass, sizeof pass, " --pass %s", random_pass_name(settings->pass));
    if (settings->one_dtype) snprintf(dtype, sizeof dtype, " --dtype %s", dtypes[settings->dtype]);
    snprintf(result->reproduce, sizeof result->reproduce,
             "%s%.16s%sflashattn verify%s%s%s%s --case %" PRIu64 "%s%s", isa ? "FA_CPU_ISA=" : "",
             isa ? isa : "", isa ? " " : "", focus, pass, dtype, precisions[settings->precision],
             number, threads,
             settings->device == FA_DEVICE_CUDA ? " --device cuda"
             : settings->tiles                  ? " --tiles"
                                                : "");
}

static void say_peak(problem *p)
{
    static const char *const names[RANDOM_NUM_PEAKS] = {
        [PEAK_4] = "4",         [PEAK_16] = "16",         [PEAK_64] = "64",
        [PEAK_SPIKE] = "spike", [PEAK_2] = "2",           [PEAK_NONE] = "none",
        [PEAK_LATE] = "late",   [PEAK_GROWN] = "grown",   [PEAK_IMMENSE] = "immense",
        [PEAK_FIRST] = "first", [PEAK_SECOND] = "second", [PEAK_EQUAL] = "equal",
        [PEAK_FEW] = "few"};
    say(p, " peak=%s", names[p->peak]);
}

void random_problem_run(uint64_t number, const random_settings *settings, random_result *result)
{
    problem *p = calloc(1, sizeof *p);
    if (!p) abort();
    memset(result, 0, sizeof *result);
    result->report.ok = true;
    p->random.state = number;
    p->number = number;
    p->plain = settings->tiles && settings->focus != RANDOM_STRIDES;
    p->strided = settings->focus == RANDOM_STRIDES;
    p->shows_dropout = settings->focus == RANDOM_DROPOUT;
    p->about_bias = settings->focus == RANDOM_BIAS;
    p->text = result->description;
    p->text_size = sizeof result->description;

    draw_sizes(p, settings);
    say(p, "%s batch=%lld heads=%lld/%lld n=%lldx%lld d=%lld d_v=%lld", random_pass_name(p->pass),
        (long long)p->batch, (long long)p->heads_q, (long long)p->heads_kv, (long long)p->n_q,
        (long long)p->n_k, (long long)p->d, (long long)p->d_v);
    if (p->checks_exactness) say_peak(p);
    if (p->pass == RANDOM_COMBINE) make_parts(p, settings);
    else make_attention(p, settings);
    result->pass = p->pass;
    result->dtype = p->in.q.dtype;
    if (is_wanted(p, settings)) {
        if (p->pass != RANDOM_COMBINE) fill_inputs(p);
        run_checks(p, settings, result);
    } else {
        result->status = FA_ERROR_UNSUPPORTED;
        ref_fail(&result->report, "not wanted");
    }
    say_how_to_reproduce(number, settings, result);
    free_problem(p);
}
