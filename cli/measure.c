/* Random problems, their counts, and timing. */
#include "measure.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "args.h"
#include "output.h"
#include "convert.h"
#include "device.h"

/* ---- counts ---------------------------------------------------------------------------------- */

double measure_visible_pairs(const measure_case *c)
{
    double pairs = 0;
    for (int64_t i = 0; i < c->n_q; i++) {
        int64_t center = i + c->n_k - c->n_q, first = 0, last = c->n_k - 1;
        if (c->causal && center < last) last = center;
        if (c->window_right >= 0 && c->window_right < c->n_k && center + c->window_right < last)
            last = center + c->window_right;
        if (c->window_left >= 0 && c->window_left < center) first = center - c->window_left;
        if (last >= first) pairs += (double)(last - first + 1);
    }
    return pairs;
}

double measure_flops(const measure_case *c)
{
    double forward = 2.0 * (double)c->batch * (double)c->heads * measure_visible_pairs(c) *
                     (double)(c->d + c->d_v);
    return c->pass == FA_PASS_BACKWARD ? 2.5 * forward : forward;
}

double measure_kv_bytes(const measure_case *c)
{
    return (double)c->batch * (double)c->heads_kv * (double)c->n_k * (double)(c->d + c->d_v) *
           (double)fa_dtype_size(c->dtype);
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

measure_times measure_summary(double *samples, int count)
{
    qsort(samples, (size_t)count, sizeof *samples, compare_doubles);
    double middle = 0.5 * (samples[(count - 1) / 2] + samples[count / 2]);
    return (measure_times){middle, samples[0], samples[count - 1]};
}

/* Four times the last-level cache, and at least 256 MiB. */
double measure_beyond_caches(void)
{
    double cache = 0, min = 268435456.0;
#ifdef _SC_LEVEL3_CACHE_SIZE
    cache = (double)sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    return 4 * cache > min ? 4 * cache : min;
}

/* ---- random inputs --------------------------------------------------------------------------- */

/* SplitMix64: a counter through a mixing function (Steele, Lea, Flood, OOPSLA 2014). */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static void store(void *data, fa_dtype dtype, int64_t i, float x)
{
    if (dtype == FA_FLOAT32) ((float *)data)[i] = x;
    else if (dtype == FA_FLOAT16) ((uint16_t *)data)[i] = fa_float_to_half(x);
    else ((uint16_t *)data)[i] = fa_float_to_bfloat(x);
}

/* Box and Muller: two normal numbers from two uniform ones, the first in (0, 1]. */
void measure_fill_normal(void *data, fa_dtype dtype, int64_t count, uint64_t seed)
{
    for (int64_t i = 0; i < count; i += 2) {
        uint64_t bits = next_random(&seed);
        float u = ((float)(bits >> 40) + 1.0f) * 0x1p-24f;
        float angle = (float)(bits & 0xffffffu) * (6.2831853f * 0x1p-24f);
        float radius = sqrtf(-2.0f * logf(u));
        store(data, dtype, i, radius * cosf(angle));
        if (i + 1 < count) store(data, dtype, i + 1, radius * sinf(angle));
    }
}

/* ---- the problem ----------------------------------------------------------------------------- */

enum { MAX_COPIES = 256 };

/* copies > 1 only for decode: tensors that are read once each, in turn. */
typedef struct measured {
    const measure_case *c;
    cli_tensor q, out, dout, dq, dk, dv;
    cli_tensor k[MAX_COPIES], v[MAX_COPIES];
    int copies;
    float *lse;
    device_clock clock; /* CUDA only */
    void *workspace;    /* CUDA only */
    fa_options options;
} measured;

static fa_options make_options(const measure_case *c)
{
    bool window = c->window_left >= 0 || c->window_right >= 0;
    return (fa_options){.size = sizeof(fa_options),
                        .flags = (c->causal ? FA_CAUSAL : 0u) | (window ? FA_WINDOW : 0u) |
                                 (c->deterministic ? FA_DETERMINISTIC : 0u),
                        .device = c->device,
                        .window_left = window ? c->window_left : 0,
                        .window_right = window ? c->window_right : 0,
                        .threads = c->threads,
                        .precision = c->precision};
}

static bool on_cuda(const measure_case *c) { return c->device == FA_DEVICE_CUDA; }

enum { POOL = 1 << 22 };

/* Fills device memory from a pool of numbers, which is repeated if the memory is longer. */
static bool fill_device(void *to, fa_dtype dtype, int64_t count, uint64_t seed)
{
    const int64_t pool = count < POOL ? count : POOL, size = (int64_t)fa_dtype_size(dtype);
    char *numbers = malloc((size_t)(pool * size) + 1);
    bool fine = numbers != NULL;
    if (!fine) cli_error("out of memory for %" PRId64 " numbers", pool);
    else measure_fill_normal(numbers, dtype, pool, seed);
    for (int64_t i = 0; fine && i < count; i += pool) {
        int64_t n = count - i < pool ? count - i : pool;
        fine = device_put((char *)to + i * size, numbers, (size_t)(n * size));
    }
    free(numbers);
    return fine;
}

static bool new_on_device(cli_tensor *t, const measure_case *c, int64_t sequence, int64_t heads,
                          int64_t dim, uint64_t seed)
{
    const int64_t count = c->batch * sequence * heads * dim;
    t->axes = 4;
    t->layout = c->layout;
    t->view =
        (c->layout == CLI_BHSD ? fa_bhsd : fa_bshd)(NULL, c->dtype, c->batch, sequence, heads, dim);
    t->view.data = device_new((size_t)count * fa_dtype_size(c->dtype));
    return t->view.data && fill_device(t->view.data, c->dtype, count, seed);
}

static bool new_random(cli_tensor *t, const measure_case *c, int64_t sequence, int64_t heads,
                       int64_t dim, uint64_t seed)
{
    if (on_cuda(c)) return new_on_device(t, c, sequence, heads, dim, seed);
    if (!cli_tensor_new(t, 4, c->layout, c->dtype, c->batch, sequence, heads, dim)) return false;
    measure_fill_normal(t->view.data, c->dtype, c->batch * sequence * heads * dim, seed);
    return true;
}

static void free_random(cli_tensor *t, const measure_case *c)
{
    if (!on_cuda(c)) {
        cli_tensor_free(t);
        return;
    }
    device_delete(t->view.data);
    t->view.data = NULL;
}

/* Four times the last-level cache, and at least 256 MiB. */
static double beyond_caches(const measure_case *c)
{
    return on_cuda(c) ? fmax(4 * device_cache_bytes(), 268435456.0) : measure_beyond_caches();
}

static int count_copies(const measure_case *c)
{
    double bytes = measure_kv_bytes(c);
    if (c->pass != FA_PASS_DECODE || bytes <= 0) return 1;
    double copies = ceil(beyond_caches(c) / bytes);
    return copies > MAX_COPIES ? MAX_COPIES : (int)copies;
}

static bool new_backward(measured *m)
{
    const measure_case *c = m->c;
    return new_random(&m->dout, c, c->n_q, c->heads, c->d_v, 4) &&
           new_random(&m->dq, c, c->n_q, c->heads, c->d, 5) &&
           new_random(&m->dk, c, c->n_k, c->heads_kv, c->d, 6) &&
           new_random(&m->dv, c, c->n_k, c->heads_kv, c->d_v, 7);
}

static bool library_fine(fa_status status)
{
    if (status != FA_OK) cli_error("%s (%s)", fa_last_error(), fa_status_name(status));
    return status == FA_OK;
}

/* Device memory for the workspace that the library needs. */
static bool new_workspace(measured *m)
{
    size_t bytes = 0;
    if (!library_fine(fa_workspace_size(m->c->pass, &m->q.view, &m->k[0].view, &m->v[0].view,
                                        &m->out.view, &m->options, &bytes)))
        return false;
    if (bytes == 0) return true;
    m->workspace = m->options.workspace = device_new(bytes);
    m->options.workspace_size = bytes;
    return m->workspace != NULL;
}

static bool new_measured(measured *m, const measure_case *c)
{
    m->c = c;
    m->copies = count_copies(c);
    m->options = make_options(c);
    if (!new_random(&m->q, c, c->n_q, c->heads, c->d, 1) ||
        !new_random(&m->out, c, c->n_q, c->heads, c->d_v, 2))
        return false;
    for (int i = 0; i < m->copies; i++)
        if (!new_random(&m->k[i], c, c->n_k, c->heads_kv, c->d, 100 + 2 * (uint64_t)i) ||
            !new_random(&m->v[i], c, c->n_k, c->heads_kv, c->d_v, 101 + 2 * (uint64_t)i))
            return false;
    int64_t rows = c->batch * c->heads * c->n_q;
    const size_t bytes = rows ? (size_t)rows * sizeof *m->lse : 1;
    m->lse = on_cuda(c) ? device_new(bytes) : malloc(bytes);
    if (!m->lse) cli_error("out of memory for the log-sum-exps");
    if (on_cuda(c) && (!device_clock_new(&m->clock) || !new_workspace(m))) return false;
    return m->lse && (c->pass != FA_PASS_BACKWARD || new_backward(m));
}

static void free_measured(measured *m)
{
    cli_tensor *tensors[] = {&m->q, &m->out, &m->dout, &m->dq, &m->dk, &m->dv};
    for (int i = 0; i < CLI_COUNT(tensors); i++) free_random(tensors[i], m->c);
    for (int i = 0; i < m->copies; i++) {
        free_random(&m->k[i], m->c);
        free_random(&m->v[i], m->c);
    }
    if (on_cuda(m->c)) {
        device_delete(m->lse);
        device_delete(m->workspace);
        device_clock_free(&m->clock);
    } else {
        free(m->lse);
    }
    free(m);
}

/* ---- timing ---------------------------------------------------------------------------------- */

static fa_status call(measured *m, fa_pass pass, int number)
{
    const fa_tensor *k = &m->k[number % m->copies].view, *v = &m->v[number % m->copies].view;
    if (pass == FA_PASS_DECODE)
        return fa_decode(&m->q.view, k, v, &m->out.view, m->lse, &m->options);
    if (pass == FA_PASS_FORWARD)
        return fa_forward(&m->q.view, k, v, &m->out.view, m->lse, &m->options);
    fa_gradients g = {.size = sizeof g,
                      .dout = m->dout.view,
                      .dq = m->dq.view,
                      .dk = m->dk.view,
                      .dv = m->dv.view};
    return fa_backward(&m->q.view, k, v, &m->out.view, m->lse, &g, &m->options);
}

/* Warm-up: one call, and more until 50 ms have passed, so that threads are awake and clock rates
 * are high. */
static bool warm_up(measured *m)
{
    double begin = cli_seconds();
    int number = 0;
    if (m->c->pass == FA_PASS_BACKWARD && !library_fine(call(m, FA_PASS_FORWARD, 0))) return false;
    do {
        if (!library_fine(call(m, m->c->pass, number++))) return false;
        if (on_cuda(m->c) && !device_wait()) return false;
    } while (cli_seconds() - begin < 0.05);
    return true;
}

/* One call, timed by the device that computes. */
static bool time_call(measured *m, int number, double *seconds)
{
    if (on_cuda(m->c))
        return device_clock_begin(&m->clock) && library_fine(call(m, m->c->pass, number)) &&
               device_clock_end(&m->clock, seconds);
    double begin = cli_seconds();
    if (!library_fine(call(m, m->c->pass, number))) return false;
    *seconds = cli_seconds() - begin;
    return true;
}

static bool time_calls(measured *m, double *samples)
{
    for (int i = 0; i < m->c->repeat; i++)
        if (!time_call(m, i, &samples[i])) return false;
    return true;
}

/* Checks whether the case is supported, with shapes only, before memory is filled. */
static bool check_case(const measure_case *c, char *kernel, size_t size)
{
    fa_tensor q = fa_bshd(NULL, c->dtype, c->batch, c->n_q, c->heads, c->d);
    fa_tensor k = fa_bshd(NULL, c->dtype, c->batch, c->n_k, c->heads_kv, c->d);
    fa_tensor v = fa_bshd(NULL, c->dtype, c->batch, c->n_k, c->heads_kv, c->d_v);
    fa_tensor out = fa_bshd(NULL, c->dtype, c->batch, c->n_q, c->heads, c->d_v);
    fa_options o = make_options(c);
    return library_fine(fa_supported(c->pass, &q, &k, &v, &out, &o)) &&
           library_fine(fa_describe(c->pass, &q, &k, &v, &out, &o, kernel, size));
}

bool measure_run(const measure_case *c, measure_times *times, char *kernel, size_t kernel_size)
{
    if (!check_case(c, kernel, kernel_size)) return false;
    measured *m = calloc(1, sizeof *m);
    double *samples = malloc((size_t)c->repeat * sizeof *samples);
    bool fine = m && samples;
    if (!fine) cli_error("out of memory");
    fine = fine && new_measured(m, c) && warm_up(m) && time_calls(m, samples);
    if (fine) *times = measure_summary(samples, c->repeat);
    if (m) free_measured(m);
    free(samples);
    return fine;
}
