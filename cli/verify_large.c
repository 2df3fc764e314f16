/*
 * flashattn verify --large: problems that 32-bit numbers cannot count. Tensors of more than 2^31
 * elements; small ones whose rows are farther apart than that; a million keys. The reference cannot
 * compute all of them, so some rows are chosen; the rest of the output is searched for NaN, its
 * initial value.
 *
 * Every buffer on the GPU holds a block of random numbers, repeated. Its length is prime, so that
 * an offset that is wrong by a power of two gives different numbers, and any element is known
 * without a copy of the buffer.
 */
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "args.h"
#include "commands.h"
#include "output.h"
#include "cuda/driver.h"
#include "device.h"
#include "flashattn.h"
#include "random.h"
#include "reference.h"
#include "scalar.h"
#include "verify_large.h"

enum { BLOCK = 16777213, SAMPLES = 16, THREADS = 16, DIM_MAX = 128, BUFFERS = 5 };

/* ---- Buffers --------------------------------------------------------------------------------- */

static uint16_t *block; /* bfloat16 */
static double *numbers; /* the same numbers as doubles */

static bool make_block(void)
{
    ref_random random = {2026};
    fa_tensor t = {0};
    block = malloc(BLOCK * sizeof *block);
    numbers = malloc(BLOCK * sizeof *numbers);
    if (!block || !numbers) return cli_error("out of memory"), false;
    t.data = block;
    t.dtype = FA_BFLOAT16;
    t.stride[0] = 1;
    for (int64_t i = 0; i < BLOCK; i++) {
        ref_store(&t, i, 0, 0, 0, ref_random_normal(&random));
        numbers[i] = ref_load(&t, i, 0, 0, 0);
    }
    return true;
}

/* Elements of 2 bytes on the GPU; element i is number i + phase of the repeated block. */
typedef struct buffer {
    char *data;
    int64_t elements, phase;
} buffer;

static bool fill(const buffer *b)
{
    for (int64_t i = 0; i < b->elements;) {
        const int64_t from = (i + b->phase) % BLOCK;
        const int64_t rest = b->elements - i, n = BLOCK - from < rest ? BLOCK - from : rest;
        if (!device_put(b->data + 2 * i, block + from, (size_t)n * 2)) return false;
        i += n;
    }
    return true;
}

/* ---- One problem ----------------------------------------------------------------------------- */

typedef struct large {
    const char *name;
    /* Of q, k, v, out, bias; tensors that share memory use the first of their buffers. */
    buffer buffers[BUFFERS];
    fa_tensor q, k, v, out, bias;
    int64_t lse_count;
    float *lse;
    bool out_shared;                          /* with inputs: it does not begin as NaN */
    fa_options options;                       /* for the library */
    int32_t *cu_q, *cu_k, *lengths_k, *table; /* the same on the host; or NULL */
    int32_t *device_cu_q, *device_cu_k, *device_lengths_k, *device_table;
    int64_t table_count;
    ref_inputs reference; /* tensors without data, options with the host's arrays */
} large;

static int64_t count_of(const fa_tensor *t)
{
    return t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3];
}

static bool new_buffer(large *p, int which, fa_tensor *t)
{
    buffer *b = &p->buffers[which];
    b->elements = count_of(t);
    b->phase = 1000003 * (int64_t)which;
    b->data = device_new((size_t)b->elements * 2);
    t->data = b->data;
    return b->data != NULL;
}

static bool poison(void *memory, size_t bytes)
{
    fa_cuda_fault fault;
    if (fa_cuda_fill(memory, 0xff, bytes, &fault)) return true;
    cli_error("%s failed: %s (%s)", fault.call, fault.name, fault.text);
    return false;
}

/* Allocates memory for every tensor that has none. */
static bool allocate(large *p)
{
    fa_tensor *t[BUFFERS] = {&p->q, &p->k, &p->v, &p->out, &p->bias};
    p->lse_count = p->q.shape[0] * p->q.shape[1] * p->q.shape[2];
    p->lse = device_new((size_t)p->lse_count * sizeof(float));
    if (!p->lse || !poison(p->lse, (size_t)p->lse_count * sizeof(float))) return false;
    for (int i = 0; i < BUFFERS; i++) {
        if (t[i]->data || t[i]->shape[0] == 0) continue;
        if (!new_buffer(p, i, t[i])) return false;
        if (i == 3 ? !poison(t[i]->data, (size_t)count_of(t[i]) * 2) : !fill(&p->buffers[i]))
            return false;
    }
    return true;
}

static bool put_array(int32_t *host, int64_t count, int32_t **device)
{
    if (!host) return true;
    *device = device_new((size_t)count * sizeof *host);
    return *device && device_put(*device, host, (size_t)count * sizeof *host);
}

static bool put_arrays(large *p)
{
    const int64_t batch = p->options.num_sequences ? p->options.num_sequences : p->q.shape[0];
    if (!put_array(p->cu_q, batch + 1, &p->device_cu_q) ||
        !put_array(p->cu_k, batch + 1, &p->device_cu_k) ||
        !put_array(p->lengths_k, batch, &p->device_lengths_k) ||
        !put_array(p->table, p->table_count, &p->device_table))
        return false;
    p->reference.options = p->options;
    p->reference.options.cu_seqlens_q = p->cu_q, p->options.cu_seqlens_q = p->device_cu_q;
    p->reference.options.cu_seqlens_k = p->cu_k, p->options.cu_seqlens_k = p->device_cu_k;
    p->reference.options.seqlens_k = p->lengths_k, p->options.seqlens_k = p->device_lengths_k;
    p->reference.options.block_table = p->table, p->options.block_table = p->device_table;
    if (p->bias.shape[0]) p->options.bias = &p->bias;
    p->reference.q = p->q, p->reference.k = p->k, p->reference.v = p->v;
    p->reference.rounding = ref_rounding_for(&p->reference, p->out.dtype, true);
    return true;
}

static void free_large(large *p)
{
    for (int i = 0; i < BUFFERS; i++) device_delete(p->buffers[i].data);
    device_delete(p->lse);
    device_delete(p->device_cu_q);
    device_delete(p->device_cu_k);
    device_delete(p->device_lengths_k);
    device_delete(p->device_table);
    free(p->cu_q);
    free(p->cu_k);
    free(p->lengths_k);
    free(p->table);
}

/* ---- Rows by the definition ------------------------------------------------------------------ */

/* The number of element 0 of a tensor's row in the repeated block. */
static int64_t row_number(const large *p, const fa_tensor *t, int64_t a, int64_t row, int64_t head)
{
    const buffer *b = p->buffers;
    while (!b->data || (char *)t->data < b->data || (char *)t->data >= b->data + 2 * b->elements)
        b++;
    const int64_t first = ((char *)t->data - b->data) / 2;
    return b->phase + first + a * t->stride[0] + row * t->stride[1] + head * t->stride[2];
}

static void load_numbers(int64_t number, int64_t count, double *row)
{
    for (int64_t c = 0; c < count; c++) row[c] = numbers[(number + c) % BLOCK];
}

/* The expected values of a chosen row. */
typedef struct expected {
    ref_column columns[DIM_MAX];
    double lse, logit_error;
} expected;

static double bias_of(const large *p, const ref_item *item, int64_t h, int64_t i, int64_t j)
{
    if (!p->bias.shape[0]) return 0;
    return numbers[(row_number(p, &p->bias, item->b, h, i) + j) % BLOCK];
}

/* Online in float64: rescaled whenever the largest logit grows. */
static void compute_row(const large *p, const ref_item *item, int64_t h, int64_t i, expected *e)
{
    const int64_t d = p->q.shape[3], group = p->q.shape[2] / p->k.shape[2];
    const double scale = 1 / sqrt((double)d);
    double q[DIM_MAX], k[DIM_MAX], v[DIM_MAX], sum = 0, top = -INFINITY, largest = 0;
    *e = (expected){.lse = -INFINITY};
    load_numbers(row_number(p, &p->q, item->block_q, item->start_q + i, h), d, q);
    for (int64_t j = 0; j < item->n_k; j++) {
        int64_t slab, row;
        double dot = 0, size = 0;
        if (!ref_may_see(&p->reference, item, h, i, j)) continue;
        ref_key_place(&p->reference, item, j, &slab, &row);
        load_numbers(row_number(p, &p->k, slab, row, h / group), d, k);
        load_numbers(row_number(p, &p->v, slab, row, h / group), d, v);
        for (int64_t c = 0; c < d; c++) dot += q[c] * k[c], size += fabs(q[c] * k[c]);
        const double x = scale * dot + bias_of(p, item, h, i, j);
        if (scale * size > largest) largest = scale * size;
        if (x > top) {
            const double shrink = exp(top - x);
            for (int64_t c = 0; c < d; c++) ref_column_scale(&e->columns[c], shrink);
            sum *= shrink;
            top = x;
        }
        const double weight = exp(x - top);
        sum += weight;
        for (int64_t c = 0; c < d; c++) ref_column_add(&e->columns[c], weight, v[c]);
    }
    if (sum == 0) return;
    e->lse = top + log(sum);
    e->logit_error = p->reference.rounding.sum * (largest + 2);
    for (int64_t c = 0; c < d; c++) ref_column_scale(&e->columns[c], 1 / sum);
}

/* ---- Comparing ------------------------------------------------------------------------------- */

typedef struct sample {
    int64_t b, h, i;
    expected want;
} sample;

typedef struct sampling {
    const large *p;
    sample list[SAMPLES];
    atomic_int next;
} sampling;

/* Chooses the corners of batch, heads and queries, then random rows. */
static void pick(sampling *s, uint64_t seed)
{
    ref_random random = {seed};
    const int64_t batch = ref_batch(&s->p->reference), heads = s->p->q.shape[2];
    for (int n = 0; n < SAMPLES; n++) {
        sample *x = &s->list[n];
        const bool corner = n < 6;
        x->b = corner ? (n & 1 ? batch - 1 : 0) : ref_random_between(&random, 0, batch - 1);
        x->h = corner ? (n & 2 ? heads - 1 : 0) : ref_random_between(&random, 0, heads - 1);
        const ref_item item = ref_item_of(&s->p->reference, x->b);
        x->i = corner && (n & 4) == 0 ? item.n_q - 1 : ref_random_between(&random, 0, item.n_q - 1);
    }
}

static void *compute_samples(void *argument)
{
    sampling *s = argument;
    for (;;) {
        const int n = atomic_fetch_add(&s->next, 1);
        if (n >= SAMPLES) return NULL;
        sample *x = &s->list[n];
        const ref_item item = ref_item_of(&s->p->reference, x->b);
        compute_row(s->p, &item, x->h, x->i, &x->want);
    }
}

static void compute_all(sampling *s)
{
    pthread_t threads[THREADS];
    int running = 0;
    while (running < THREADS - 1 &&
           pthread_create(&threads[running], NULL, compute_samples, s) == 0)
        running++;
    compute_samples(s);
    for (int i = 0; i < running; i++) (void)pthread_join(threads[i], NULL);
}

/* Writes an error message, or nothing if everything is correct. */
static bool check_sample(const large *p, const sample *x, char *wrong, size_t size)
{
    uint16_t got[DIM_MAX];
    float lse;
    const int64_t d = p->q.shape[3];
    const ref_item item = ref_item_of(&p->reference, x->b);
    const int64_t row = item.start_q + x->i;
    const int64_t lse_at = (item.block_q * p->q.shape[2] + x->h) * p->q.shape[1] + row;
    const int64_t *stride = p->out.stride;
    const int64_t at = item.block_q * stride[0] + row * stride[1] + x->h * stride[2];
    if (!device_get(got, (char *)p->out.data + 2 * at, (size_t)d * 2) ||
        !device_get(&lse, p->lse + lse_at, sizeof lse))
        return false;
    const double lse_error = x->want.logit_error + 1e-6 * fabs(x->want.lse);
    if (!(fabs((double)lse - x->want.lse) <= lse_error) && (double)lse != x->want.lse)
        snprintf(wrong, size,
                 "lse of item %" PRId64 ", head %" PRId64 ", query %" PRId64
                 " is %.9g, expected %.9g",
                 x->b, x->h, x->i, (double)lse, x->want.lse);
    for (int64_t c = 0; c < d && !wrong[0]; c++) {
        const double value = ref_decode_small(got[c], 8, 7, 1);
        const ref_rounding *rounding = &p->reference.rounding;
        const ref_column *want = &x->want.columns[c];
        const double relative = 2 * rounding->sum + 2 * x->want.logit_error + lse_error;
        const double error = want->magnitude * relative + ref_weights_error(rounding, want);
        const double allowed = ref_allowance(p->out.dtype, want->out, error);
        if (!(fabs(value - want->out) <= allowed))
            snprintf(wrong, size,
                     "out of item %" PRId64 ", head %" PRId64 ", query %" PRId64 ", column %" PRId64
                     " is %.9g, expected %.9g +- %.2g",
                     x->b, x->h, x->i, c, value, want->out, allowed);
    }
    return true;
}

/* Looks for two bytes that have not been written: all their bits are still 1, the initial value. */
static bool find_poison(const char *data, int64_t bytes, char *wrong, size_t size)
{
    const int64_t largest = (int64_t)1 << 26;
    unsigned char *part = malloc((size_t)largest);
    bool fine = part != NULL;
    for (int64_t at = 0; fine && at < bytes && !wrong[0]; at += largest) {
        const int64_t n = bytes - at < largest ? bytes - at : largest;
        fine = device_get(part, data + at, (size_t)n);
        for (int64_t i = 0; fine && i + 1 < n; i += 2)
            if (part[i] == 0xff && part[i + 1] == 0xff) {
                snprintf(wrong, size, "nothing was written at byte %" PRId64, at + i);
                break;
            }
    }
    free(part);
    return fine;
}

static bool compare(const large *p, char *wrong, size_t size)
{
    static sampling s;
    memset(&s, 0, sizeof s);
    s.p = p;
    pick(&s, 7);
    compute_all(&s);
    for (int n = 0; n < SAMPLES && !wrong[0]; n++)
        if (!check_sample(p, &s.list[n], wrong, size)) return false;
    if (!p->out_shared && !wrong[0])
        return find_poison(p->out.data, count_of(&p->out) * 2, wrong, size);
    return true;
}

/* ---- The problems ---------------------------------------------------------------------------- */

static void set_shapes(large *p, int64_t batch, int64_t n_q, int64_t n_k, int64_t heads_q,
                       int64_t heads_kv, int64_t d)
{
    p->q = p->out = fa_bshd(NULL, FA_BFLOAT16, batch, n_q, heads_q, d);
    p->k = p->v = fa_bshd(NULL, FA_BFLOAT16, batch, n_k, heads_kv, d);
}

/* Rows (axis 1) or slabs of each item and head are farther apart than 2^31 elements in total; the
 * four tensors share one buffer, each between the rows of the others. */
static bool make_strided(large *p, int64_t row, int64_t head, int64_t item)
{
    fa_tensor *t[] = {&p->q, &p->k, &p->v, &p->out};
    const int64_t *shape = p->q.shape;
    const int64_t apart = row < head ? shape[1] * shape[3] : shape[3];
    buffer *b = &p->buffers[0];
    b->elements = (shape[0] - 1) * item + (shape[2] - 1) * head + (shape[1] - 1) * row + 4 * apart;
    b->data = device_new((size_t)b->elements * 2);
    p->out_shared = true;
    if (!b->data || !fill(b)) return false;
    for (int i = 0; i < 4; i++) {
        const int64_t stride[4] = {item, row, head, 1};
        memcpy(t[i]->stride, stride, sizeof stride);
        t[i]->data = b->data + 2 * i * apart;
    }
    return true;
}

static const int64_t two_31 = (int64_t)1 << 31;

static bool make_slabs(large *p)
{
    set_shapes(p, 2, 336, 336, 2, 2, 64);
    return make_strided(p, 64, two_31 + 64 * 336, 2 * two_31 + 128 * 336);
}

static bool make_rows(large *p)
{
    set_shapes(p, 1, 300, 300, 1, 1, 128);
    return make_strided(p, two_31 / 256 + 8, 512, 1024);
}

static bool make_queries(large *p)
{
    set_shapes(p, 1, 262144 + 5, 300, 128, 1, 64);
    return true;
}

static bool make_keys(large *p)
{
    set_shapes(p, 1, 33, two_31 / 64 + 77, 1, 1, 64);
    p->options.flags |= FA_CAUSAL;
    return true;
}

static bool make_long(large *p)
{
    set_shapes(p, 1, 1048576 + 3, 1048576 + 3, 1, 1, 64);
    p->options.flags |= FA_CAUSAL;
    return true;
}

static bool make_window(large *p)
{
    set_shapes(p, 1, 1048576 + 3, 1048576 + 3, 16, 1, 128);
    p->options.flags |= FA_WINDOW;
    p->options.window_left = 1000;
    p->options.window_right = 10;
    return true;
}

static bool make_bias(large *p)
{
    const int64_t n = 33000;
    set_shapes(p, 1, n, n, 2, 1, 64);
    p->bias = (fa_tensor){NULL, FA_BFLOAT16, {1, 2, n, n}, {2 * n * n, n * n, n, 1}};
    return true;
}

static int32_t *new_array(int64_t count)
{
    int32_t *array = calloc((size_t)count, sizeof *array);
    if (!array) cli_error("out of memory");
    return array;
}

static bool make_packed(large *p)
{
    enum { SEQUENCES = 128 };
    ref_random random = {3};
    p->cu_q = new_array(SEQUENCES + 1);
    p->cu_k = new_array(SEQUENCES + 1);
    if (!p->cu_q || !p->cu_k) return false;
    for (int b = 0; b < SEQUENCES; b++)
        p->cu_q[b + 1] = p->cu_q[b] + 4000 + (int32_t)ref_random_between(&random, 0, 200);
    memcpy(p->cu_k, p->cu_q, (SEQUENCES + 1) * sizeof *p->cu_k);
    set_shapes(p, 1, p->cu_q[SEQUENCES] + 9, p->cu_q[SEQUENCES] + 9, 64, 8, 64);
    p->options.num_sequences = SEQUENCES;
    p->options.flags |= FA_CAUSAL;
    return true;
}

static bool make_pages(large *p)
{
    enum { BATCH = 8, PAGE = 256, ENTRIES = 40 };
    ref_random random = {4};
    const int64_t pages = two_31 / (PAGE * 64) + 100;
    p->lengths_k = new_array(BATCH);
    p->table_count = BATCH * ENTRIES;
    p->table = new_array(p->table_count);
    if (!p->lengths_k || !p->table) return false;
    set_shapes(p, BATCH, 17, PAGE, 4, 1, 64);
    p->k = p->v = fa_bshd(NULL, FA_BFLOAT16, pages, PAGE, 1, 64);
    for (int b = 0; b < BATCH; b++)
        p->lengths_k[b] = (int32_t)ref_random_between(&random, 1, ENTRIES * PAGE);
    for (int n = 0; n < BATCH * ENTRIES; n++)
        p->table[n] = (int32_t)(n % 3 ? ref_random_between(&random, 0, pages - 1) : pages - 1 - n);
    p->options.block_table_stride = ENTRIES;
    return true;
}

static const struct {
    const char *name;
    bool (*make)(large *p);
    const char *about;
} problems[] = {
    {"slabs", make_slabs, "items and heads 2^31 elements apart"},
    {"rows", make_rows, "rows 2^23 elements apart"},
    {"queries", make_queries, "q and out of 2^31 elements"},
    {"keys", make_keys, "k and v of 2^31 elements, 33 million keys"},
    {"long", make_long, "a million queries and keys, causal"},
    {"window", make_window, "the same with a window and 2^31 elements"},
    {"bias", make_bias, "a bias of 2^31 elements"},
    {"packed", make_packed, "128 sequences, 2^31 elements"},
    {"pages", make_pages, "a paged cache of 2^31 elements"},
};

/* ---- Running them ---------------------------------------------------------------------------- */

static void report(const char *name, const char *about, double gpu, double all, const char *wrong,
                   bool json_wanted)
{
    if (!json_wanted) {
        printf("%-8s %8.3f s on the GPU, %6.1f s in all   %s\n", name, gpu, all, about);
        return;
    }
    cli_json json = {stdout, false};
    cli_json_open(&json, NULL, '{');
    cli_json_bool(&json, "ok", !wrong[0]);
    cli_json_text(&json, "large", name);
    cli_json_real(&json, "gpu_seconds", gpu);
    cli_json_real(&json, "seconds", all);
    if (wrong[0]) cli_json_text(&json, "wrong", wrong);
    cli_json_close(&json, '}');
    cli_json_end_line(&json);
}

/* False: it could not be computed, and an error message has been printed. */
static bool attend(large *p, double *seconds)
{
    if (!allocate(p) || !put_arrays(p) || !device_wait()) return false;
    const double start = cli_seconds();
    if (fa_forward(&p->q, &p->k, &p->v, &p->out, p->lse, &p->options) != FA_OK) {
        cli_error("%s: %s", p->name, fa_last_error());
        return false;
    }
    const bool fine = device_wait();
    *seconds = cli_seconds() - start;
    return fine;
}

static int run_one(int index, bool json)
{
    char wrong[256] = "";
    double gpu = 0;
    const double start = cli_seconds();
    large p = {.name = problems[index].name,
               .options = {.size = sizeof p.options, .device = FA_DEVICE_CUDA}};
    cli_progress("%s", p.name);
    const bool fine =
        problems[index].make(&p) && attend(&p, &gpu) && compare(&p, wrong, sizeof wrong);
    free_large(&p);
    cli_progress_clear();
    if (!fine) return CLI_BAD;
    report(p.name, problems[index].about, gpu, cli_seconds() - start, wrong, json);
    if (wrong[0]) cli_error("wrong result in the large problem \"%s\": %s", p.name, wrong);
    fflush(stdout);
    return wrong[0] ? CLI_WRONG : CLI_FINE;
}

int verify_large(bool json)
{
    int code = make_block() ? CLI_FINE : CLI_BAD;
    for (int i = 0; i < CLI_COUNT(problems) && code == CLI_FINE; i++) code = run_one(i, json);
    free(block);
    free(numbers);
    return code;
}
