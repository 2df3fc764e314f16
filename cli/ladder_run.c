/*
 * `flashattn ladder run`: compares every rung with float64 on the host.
 *
 * q, k, v and out are in one block of memory, each between bands of 0xff bytes, which are NaN in
 * every type. So a read outside of an array, or after a row's d elements, makes a result NaN, and a
 * write outside of out is detected.
 */
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "output.h"
#include "convert.h"
#include "measure.h"
#include "random.h"
#include "ladder_run.h"
#include "ladder_rungs.h"

enum { BAND = 4096, ARRAYS = 4, Q = 0, K, V, OUT };

typedef struct verify_case {
    int64_t heads, n, d;
    bool causal, small_scratch;
    double scale, loud; /* loud: a factor of q, for large logits */
    uint64_t seed;
} verify_case;

/* ---- tolerance ------------------------------------------------------------------------------- */

/*
 * |error| <= ABSOLUTE + RELATIVE |expected| + roundings * unit * sum_j p_ij |v_j|
 *
 * The first two terms come from the original project. They are too small for products rounded to
 * tf32: with standard normal inputs, the rounding of q, k, p and v alone causes larger errors in
 * some 0.3% of the elements, those near 0. So each rounding may cause an error of its unit,
 * relative to the sum of the element's terms. Errors of logits grow with the logits, and so does
 * the third term (verify_result.loudness).
 */
#define ABSOLUTE 1e-4
#define RELATIVE 1e-2

typedef struct tolerance {
    double unit, roundings;
    double output; /* the unit of the result's own type */
    double whole;  /* relative error of all of out, in the L2 norm */
} tolerance;

static tolerance tolerance_of(const ladder_rung *rung, fa_dtype dtype)
{
    if (rung->types == LADDER_FLOAT32) return (tolerance){0, 0, 0, 1e-5};
    if (rung->types == LADDER_TF32) return (tolerance){0x1p-11, 4, 0, 2e-3};
    if (dtype == FA_BFLOAT16) return (tolerance){0x1p-8, 1, 0x1p-8, 1e-2};
    return (tolerance){0x1p-11, 1, 0x1p-11, 2e-3};
}

/* ---- cases ----------------------------------------------------------------------------------- */

/* The cases of the original project: batch, heads, n, d. */
static const int ORIGINAL[][4] = {{1, 1, 50, 32}, {1, 1, 100, 32}, {1, 1, 64, 50},
                                  {1, 1, 64, 69}, {5, 12, 53, 69}, {1, 1, 30, 128}};
enum { NUM_ORIGINAL = 2 * CLI_COUNT(ORIGINAL) };

static verify_case original_case(int index)
{
    const int *o = ORIGINAL[index / 2];
    return (verify_case){.heads = o[0] * o[1],
                         .n = o[2],
                         .d = o[3],
                         .causal = index % 2,
                         .scale = 1 / sqrt(o[3]),
                         .loud = 1,
                         .seed = (uint64_t)index + 1};
}

/* Mostly short, and often at the edge of a tile. */
static int64_t random_length(ref_random *r)
{
    static const int64_t tiles[] = {8, 16, 64, 128};
    switch (ref_random_between(r, 0, 3)) {
    case 0: return ref_random_between(r, 1, 40);
    case 1: return ref_random_between(r, 1, 300);
    case 2: return ref_random_between(r, 1, 700);
    default: break;
    }
    int64_t tile = tiles[ref_random_between(r, 0, 3)];
    int64_t n = tile * ref_random_between(r, 1, 640 / tile) + ref_random_between(r, -1, 1);
    return n < 1 ? 1 : n;
}

static int64_t random_head_dim(ref_random *r)
{
    static const int64_t usual[] = {32, 64, 80, 96, 128, 127, 65, 256};
    if (ref_random_once_in(r, 3)) return usual[ref_random_between(r, 0, 7)];
    return ref_random_between(r, 1, ref_random_once_in(r, 6) ? 256 : 128);
}

static verify_case random_case(ref_random *r)
{
    verify_case c = {.n = random_length(r), .d = random_head_dim(r), .loud = 1};
    c.heads = ref_random_between(r, 1, 12);
    c.causal = ref_random_once_in(r, 2);
    c.small_scratch = ref_random_once_in(r, 2);
    c.scale = 1 / sqrt((double)c.d);
    if (ref_random_once_in(r, 4)) c.scale = 0.02 + 0.3 * ref_random_unit(r);
    if (ref_random_once_in(r, 8)) c.loud = 8;
    c.scale = (double)(float)c.scale;
    c.seed = ref_random_bits(r);
    /* The host's part takes less than a second. */
    while (c.heads > 1 && (double)c.heads * (double)(c.n * c.n) * (double)c.d > 2e8) c.heads /= 2;
    return c;
}

/* ---- host memory: inputs, expectations ------------------------------------------------------- */

typedef struct host_data {
    fa_dtype dtype;
    int64_t heads, n, d, pitch, array_bytes, bytes; /* bytes: of everything, bands included */
    /* Sent to the device, and received from it. */
    unsigned char *sent, *received;
    double *rows[3];           /* q, k, v as numbers: (heads, n, d) */
    double *expected, *spread; /* out; sum_j p_ij |v_jc|, both (heads, n, d) */
    double *loudness;          /* for each row of out */
} host_data;

static int64_t array_start(const host_data *h, int array)
{
    return BAND + array * (h->array_bytes + BAND);
}

static int64_t element_bytes(fa_dtype dtype) { return dtype == FA_FLOAT32 ? 4 : 2; }

static double element(const host_data *h, const unsigned char *memory, int array, int64_t row,
                      int64_t column)
{
    const unsigned char *p =
        memory + array_start(h, array) + (row * h->pitch + column) * element_bytes(h->dtype);
    float x;
    uint16_t bits;
    if (h->dtype == FA_FLOAT32) {
        memcpy(&x, p, sizeof x);
        return (double)x;
    }
    memcpy(&bits, p, sizeof bits);
    return (double)(h->dtype == FA_BFLOAT16 ? fa_bfloat_to_float(bits) : fa_half_to_float(bits));
}

static void set_element(host_data *h, int array, int64_t row, int64_t column, double value)
{
    unsigned char *p =
        h->sent + array_start(h, array) + (row * h->pitch + column) * element_bytes(h->dtype);
    float x = (float)value;
    if (h->dtype == FA_FLOAT32) {
        memcpy(p, &x, sizeof x);
        return;
    }
    uint16_t bits = h->dtype == FA_BFLOAT16 ? fa_float_to_bfloat(x) : fa_float_to_half(x);
    memcpy(p, &bits, sizeof bits);
}

static void free_host(host_data *h)
{
    for (int i = 0; i < 3; i++) free(h->rows[i]);
    free(h->sent);
    free(h->received);
    free(h->expected);
    free(h->spread);
    free(h->loudness);
}

static bool allocate_host(host_data *h, const verify_case *c, fa_dtype dtype)
{
    *h = (host_data){.dtype = dtype, .heads = c->heads, .n = c->n, .d = c->d};
    h->pitch = ladder_pitch(dtype, c->d);
    /* In some cases, rows are further apart than they must be. */
    if (c->seed % 3 == 0) h->pitch += 2 * 16 / element_bytes(dtype);
    int64_t rows = c->heads * c->n;
    size_t doubles = (size_t)(rows * c->d) * sizeof(double);
    h->array_bytes = (rows * h->pitch * element_bytes(dtype) + 255) / 256 * 256;
    h->bytes = array_start(h, ARRAYS);
    h->sent = malloc((size_t)h->bytes);
    h->received = malloc((size_t)h->bytes);
    h->expected = malloc(doubles);
    h->spread = malloc(doubles);
    h->loudness = malloc((size_t)rows * sizeof(double));
    bool fine = h->sent && h->received && h->expected && h->spread && h->loudness;
    for (int i = 0; i < 3; i++) fine = (h->rows[i] = malloc(doubles)) && fine;
    if (!fine) cli_error("out of memory");
    return fine;
}

static void fill_inputs(host_data *h, const verify_case *c)
{
    ref_random r = {c->seed};
    memset(h->sent, 0xff, (size_t)h->bytes);
    for (int array = Q; array <= V; array++)
        for (int64_t row = 0; row < h->heads * h->n; row++)
            for (int64_t i = 0; i < h->d; i++) {
                double x = ref_random_normal(&r) * (array == Q ? c->loud : 1);
                set_element(h, array, row, i, x);
                h->rows[array][row * h->d + i] = element(h, h->sent, array, row, i);
            }
}

/* Scores of one query; returns the largest. loudness: the largest of scale * |products| in the L2
 * norm, about 1 for usual inputs. It measures how much a logit changes when each product changes by
 * one unit. */
static double make_scores(const host_data *h, const verify_case *c, const double *q,
                          const double *k, int64_t keys, double *scores, double *loudness)
{
    double max = -INFINITY;
    *loudness = 1;
    for (int64_t j = 0; j < keys; j++) {
        double sum = 0, squares = 0;
        for (int64_t i = 0; i < h->d; i++) {
            double product = q[i] * k[j * h->d + i];
            sum += product;
            squares += product * product;
        }
        scores[j] = c->scale * sum;
        max = fmax(max, scores[j]);
        *loudness = fmax(*loudness, c->scale * sqrt(squares));
    }
    return max;
}

static void expect_row(host_data *h, const verify_case *c, int64_t head, int64_t i, double *scores)
{
    const int64_t d = h->d, row = head * h->n + i, keys = c->causal ? i + 1 : h->n;
    const double *k = h->rows[K] + head * h->n * d, *v = h->rows[V] + head * h->n * d;
    double *out = h->expected + row * d, *spread = h->spread + row * d, total = 0;
    double max = make_scores(h, c, h->rows[Q] + row * d, k, keys, scores, &h->loudness[row]);
    for (int64_t x = 0; x < d; x++) out[x] = spread[x] = 0;
    for (int64_t j = 0; j < keys; j++) {
        double weight = exp(scores[j] - max);
        total += weight;
        for (int64_t x = 0; x < d; x++) {
            out[x] += weight * v[j * d + x];
            spread[x] += weight * fabs(v[j * d + x]);
        }
    }
    for (int64_t x = 0; x < d; x++) {
        out[x] /= total;
        spread[x] /= total;
    }
}

static bool make_expectations(host_data *h, const verify_case *c)
{
    double *scores = malloc((size_t)h->n * sizeof *scores);
    if (!scores) return rungs_say("out of memory");
    for (int64_t head = 0; head < h->heads; head++)
        for (int64_t i = 0; i < h->n; i++) expect_row(h, c, head, i, scores);
    free(scores);
    return true;
}

/* ---- results --------------------------------------------------------------------------------- */

/* The results of a rung so far. */
typedef struct rung_tally {
    int passed, failed, refused;
    double ratio, whole; /* the worst: error / tolerance, relative error of all of out */
    char refusal[LADDER_ERROR];
} rung_tally;

typedef struct failure {
    char text[LADDER_ERROR];
} failure;

static bool fails(failure *f, const char *format, ...) CLI_PRINTF(2, 3);
static bool fails(failure *f, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(f->text, sizeof f->text, format, arguments);
    va_end(arguments);
    return false;
}

/* Inputs and bands must be unchanged. */
static bool check_untouched(const host_data *h, failure *f)
{
    int64_t out = array_start(h, OUT),
            behind = h->heads * h->n * h->pitch * element_bytes(h->dtype);
    for (int64_t i = 0; i < h->bytes; i++) {
        if (i == out) i += behind;
        if (h->received[i] != h->sent[i])
            return fails(
                f, "byte %" PRId64 " was overwritten, %" PRId64 " bytes from the start of out", i,
                i - out);
    }
    return true;
}

static bool check_elements(const host_data *h, const tolerance *t, rung_tally *tally, failure *f)
{
    double error2 = 0, expected2 = 0, loudest = 1;
    for (int64_t row = 0; row < h->heads * h->n; row++) {
        double unit = t->unit * t->roundings * h->loudness[row];
        loudest = fmax(loudest, h->loudness[row]);
        for (int64_t i = 0; i < h->d; i++) {
            double expected = h->expected[row * h->d + i],
                   got = element(h, h->received, OUT, row, i);
            double error = fabs(got - expected);
            double allowed = ABSOLUTE + (RELATIVE + t->output) * fabs(expected) +
                             unit * h->spread[row * h->d + i];
            if (!(error <= allowed))
                return fails(f,
                             "head %" PRId64 ", row %" PRId64 ", column %" PRId64
                             ": %.7g; expected %.7g within %.2g",
                             row / h->n, row % h->n, i, got, expected, allowed);
            tally->ratio = fmax(tally->ratio, error / allowed);
            error2 += error * error;
            expected2 += expected * expected;
        }
    }
    double whole = sqrt(error2 / expected2) / loudest;
    if (!(whole <= t->whole))
        return fails(f, "the whole of out is off by %.3g; expected %.3g", whole, t->whole);
    tally->whole = fmax(tally->whole, whole);
    return true;
}

/* ---- the device ------------------------------------------------------------------------------ */

/* Device memory, which grows as cases need it. */
typedef struct device_memory {
    char *data;
    size_t size;
} device_memory;

static bool reserve(device_memory *m, size_t bytes)
{
    fa_cuda_fault fault;
    if (m->size >= bytes) return true;
    fa_cuda_free(m->data);
    *m = (device_memory){NULL, 0};
    void *data;
    if (!fa_cuda_allocate(&data, bytes, &fault)) return rungs_say_fault("device memory", &fault);
    *m = (device_memory){data, bytes};
    return true;
}

typedef struct workbench {
    fa_cuda_device device;
    device_memory arrays, scratch;
} workbench;

static ladder_problem device_problem(const workbench *w, const host_data *h, const verify_case *c)
{
    char *base = w->arrays.data;
    return (ladder_problem){.q = base + array_start(h, Q),
                            .k = base + array_start(h, K),
                            .v = base + array_start(h, V),
                            .out = base + array_start(h, OUT),
                            .heads = c->heads,
                            .n = c->n,
                            .d = c->d,
                            .pitch = h->pitch,
                            .scale = (float)c->scale,
                            .causal = c->causal};
}

/* Scratch memory for all heads, or for a few of them: then the rung must run in parts. */
static bool give_scratch(workbench *w, const verify_case *c, ladder_problem *p)
{
    fa_cuda_fault fault;
    int64_t heads = c->small_scratch ? (c->heads + 2) / 3 : c->heads;
    size_t bytes = (size_t)(heads * c->n * c->n) * sizeof(float);
    if (!reserve(&w->scratch, bytes)) return false;
    p->scratch = (float *)(void *)w->scratch.data;
    p->scratch_bytes = bytes;
    return fa_cuda_fill(p->scratch, 0xff, bytes, &fault) || rungs_say_fault("scratch", &fault);
}

typedef enum outcome { PASSED, FAILED, REFUSED, BROKEN } outcome; /* BROKEN: the device is lost */

static outcome run_kernel(workbench *w, host_data *h, const verify_case *c, const ladder_kernel *k,
                          failure *f)
{
    fa_cuda_fault fault;
    ladder_plan plan;
    ladder_problem p = device_problem(w, h, c);
    if (k->about.needs_scores && !give_scratch(w, c, &p)) return BROKEN;
    /* Only for head dims that no rung supports. */
    if (!ladder_make_plan(k, &p, &w->device, &plan, f->text)) return c->d > 128 ? REFUSED : FAILED;
    if (!fa_cuda_copy_in(w->arrays.data, h->sent, (size_t)h->bytes, &fault))
        return rungs_say_fault("copying inputs", &fault), BROKEN;
    if (!ladder_run(k, &p, f->text)) return FAILED;
    if (!fa_cuda_synchronize(&fault) ||
        !fa_cuda_copy_out(h->received, w->arrays.data, (size_t)h->bytes, &fault))
        return ladder_fault(f->text, "while the kernel ran", &fault), BROKEN;
    return PASSED;
}

static outcome run_rung(workbench *w, host_data *h, const verify_case *c, const ladder_rung *rung,
                        rung_tally *tally, failure *f)
{
    ladder_kernel k;
    tolerance t = tolerance_of(rung, h->dtype);
    if (!ladder_load(rung, h->dtype, c->d, &k, f->text)) return FAILED;
    outcome o = run_kernel(w, h, c, &k, f);
    if (o != PASSED) return o;
    return check_elements(h, &t, tally, f) && check_untouched(h, f) ? PASSED : FAILED;
}

static const char *dtype_name(fa_dtype dtype)
{
    return dtype == FA_FLOAT32 ? "f32" : dtype == FA_BFLOAT16 ? "bf16" : "f16";
}

/* False: the device is lost, so nothing more can be run. */
static bool tally_rung(workbench *w, host_data *h, const verify_case *c, const ladder_rung *rung,
                       rung_tally *tally)
{
    failure f = {""};
    outcome o = run_rung(w, h, c, rung, tally, &f);
    tally->passed += o == PASSED;
    tally->refused += o == REFUSED;
    tally->failed += o == FAILED || o == BROKEN;
    if (o == REFUSED) memcpy(tally->refusal, f.text, sizeof tally->refusal);
    if ((o == FAILED && tally->failed <= 3) || (o == BROKEN && f.text[0]))
        cli_error("%s, %s, %" PRId64 " heads, n %" PRId64 ", d %" PRId64 ", pitch %" PRId64
                  "%s, scale %g%s, seed %" PRIu64 ": %s",
                  rung->name, dtype_name(h->dtype), c->heads, c->n, c->d, h->pitch,
                  c->causal ? ", causal" : "", c->scale, c->loud > 1 ? ", large logits" : "",
                  c->seed, f.text);
    return o != BROKEN;
}

/* ---- all cases ------------------------------------------------------------------------------- */

/* One case in one type, for all rungs that support it. The expected result is computed once. */
static bool run_case(workbench *w, const verify_case *c, fa_dtype dtype, const rungs_chosen *chosen,
                     rung_tally *tallies)
{
    host_data h;
    bool wanted = false;
    for (int i = 0; i < chosen->count; i++)
        wanted |=
            ladder_takes(chosen->rungs[i], dtype) && rungs_run_here(chosen->rungs[i], &w->device);
    if (!wanted) return true;
    bool fine = allocate_host(&h, c, dtype) && reserve(&w->arrays, (size_t)h.bytes);
    if (fine) fill_inputs(&h, c);
    fine = fine && make_expectations(&h, c);
    for (int i = 0; fine && i < chosen->count; i++) {
        const ladder_rung *r = chosen->rungs[i];
        if (ladder_takes(r, dtype) && rungs_run_here(r, &w->device) && c->d <= r->largest_d)
            fine = tally_rung(w, &h, c, r, &tallies[i]);
    }
    free_host(&h);
    return fine;
}

static bool run_cases(workbench *w, int64_t cases, uint64_t seed, const rungs_chosen *chosen,
                      rung_tally *tallies)
{
    static const fa_dtype dtypes[] = {FA_FLOAT32, FA_BFLOAT16, FA_FLOAT16};
    ref_random r = {seed};
    for (int64_t i = 0; i < NUM_ORIGINAL + cases; i++) {
        verify_case c = i < NUM_ORIGINAL ? original_case((int)i) : random_case(&r);
        cli_progress("case %" PRId64 " of %" PRId64, i + 1, NUM_ORIGINAL + cases);
        for (int j = 0; j < CLI_COUNT(dtypes); j++)
            if (!run_case(w, &c, dtypes[j], chosen, tallies)) return false;
    }
    cli_progress_clear();
    return true;
}

/* Returns whether the rung is correct. */
static bool print_tally(const ladder_rung *rung, const fa_cuda_device *device, const rung_tally *t)
{
    if (!rungs_run_here(rung, device)) {
        printf("%02d  %-26s skipped: not for compute capability %d.%d\n", rung->number, rung->name,
               device->major, device->minor);
        return true;
    }
    printf("%02d  %-26s %4d passed %4d failed   worst error %.3f of the tolerance, relative error "
           "%.2e\n",
           rung->number, rung->name, t->passed, t->failed, t->ratio, t->whole);
    if (t->refused) printf("    refused %d: %s\n", t->refused, t->refusal);
    return t->failed == 0 && t->passed > 0;
}

#define ABOUT                                                                                      \
    "Compares the rungs (default: all) with float64 on the host: the original project's cases "    \
    "and\n"                                                                                        \
    "random ones (n from 1 to 700, d from 1 to 128 and sometimes up to 256), full and causal, "    \
    "on\n"                                                                                         \
    "standard normal inputs. The memory around all arrays and between rows is filled with NaN."

#define NOTES                                                                                      \
    "An element may be off by 1e-4 + 1e-2 |expected|, and by the rounding of 16-bit and tf32\n"    \
    "operands. The L2 norm of the error, for usual logits, may be 1e-5 (float32), 2e-3 (tf32,\n"   \
    "f16) or 1e-2 (bf16) of the norm of out."

int rungs_verify(int argc, char **argv)
{
    int64_t cases = 200;
    uint64_t seed = 1;
    const cli_option options[] = {
        {.name = "--cases",
         .kind = CLI_INTEGER,
         .value = &cases,
         .meta = "N",
         .min = 0,
         .max = 1000000,
         .help = "number of random cases (default: 200)"},
        {.name = "--seed",
         .kind = CLI_SEED,
         .value = &seed,
         .meta = "N",
         .help = "seed of the random cases (default: 1)"},
    };
    const cli_command command = {.name = "ladder run",
                                 .usage = "[NAME...] [OPTIONS]",
                                 .about = ABOUT,
                                 .options = options,
                                 .num_options = CLI_COUNT(options),
                                 .notes = NOTES};
    rungs_chosen chosen;
    workbench w = {0};
    rung_tally tallies[RUNGS_MAX] = {{0}};
    if (!rungs_choose(&argc, argv, &chosen)) return CLI_BAD;
    int code = cli_parse(&command, argc, argv);
    if (code != CLI_CONTINUE) return code;
    if (!rungs_open_device(&w.device)) return CLI_BAD;
    bool right = run_cases(&w, cases, seed, &chosen, tallies);
    for (int i = 0; i < chosen.count; i++)
        right &= print_tally(chosen.rungs[i], &w.device, &tallies[i]);
    fa_cuda_free(w.arrays.data);
    fa_cuda_free(w.scratch.data);
    return right ? CLI_FINE : CLI_WRONG;
}
