/*
 * Peak rates. Each thread runs a loop of independent instructions on registers, enough of them to
 * hide the latency on any core (4 to 5 cycles, 2 a cycle); and a loop that reads memory.
 */
#include "peak.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/amx.h"
#include "output.h"
#include "measure.h"
#ifdef FA_HAVE_CUDA
#include "ladder_ceiling.h"
#include "ladder_rungs.h"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { CHAINS = 12, STEPS = 1 << 18, ROUNDS = 5 };

/* Results are stored here, so that no loop can be optimized away. */
static _Thread_local volatile float sink;

/* ---- multiply-add ---------------------------------------------------------------------------- */

/* A loop does STEPS steps of CHAINS instructions, each of `operations` operations. */
typedef struct loop {
    void (*run)(void);
    double operations;
    const char *isa;
} loop;

/* The chains converge to a finite value: x = 0.5 x + 1. */
static void fma_portable(void)
{
    enum { LANES = 4 * CHAINS };
    float x[LANES];
    volatile float factor = 0.5f, term = 1.0f;
    float f = factor, t = term;
    for (int i = 0; i < LANES; i++) x[i] = (float)i;
    for (int s = 0; s < STEPS; s++)
        for (int i = 0; i < LANES; i++) {
#ifdef __FP_FAST_FMAF
            x[i] = __builtin_fmaf(x[i], f, t);
#else
            x[i] = x[i] * f + t;
#endif
        }
    for (int i = 0; i < LANES; i++) sink = x[i];
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static void fma_avx2(void)
{
    __m256 x[CHAINS], f = _mm256_set1_ps(0.5f), t = _mm256_set1_ps(1.0f);
    for (int i = 0; i < CHAINS; i++) x[i] = _mm256_set1_ps((float)i);
    for (int s = 0; s < STEPS; s++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) x[i] = _mm256_fmadd_ps(x[i], f, t);
    }
    for (int i = 0; i < CHAINS; i++) sink = _mm256_cvtss_f32(x[i]);
}

__attribute__((target("avx512f"))) static void fma_avx512(void)
{
    __m512 x[CHAINS], f = _mm512_set1_ps(0.5f), t = _mm512_set1_ps(1.0f);
    for (int i = 0; i < CHAINS; i++) x[i] = _mm512_set1_ps((float)i);
    for (int s = 0; s < STEPS; s++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) x[i] = _mm512_fmadd_ps(x[i], f, t);
    }
    for (int i = 0; i < CHAINS; i++) sink = _mm512_cvtss_f32(x[i]);
}

/* Adds 2 products to each of 16 lanes. */
__attribute__((target("avx512f,avx512bf16"))) static void dot_avx512(void)
{
    __m512 x[CHAINS], one = _mm512_set1_ps(1.0f);
    for (int i = 0; i < CHAINS; i++) x[i] = _mm512_set1_ps((float)i);
    __m512bh a = _mm512_cvtne2ps_pbh(one, one);
    for (int s = 0; s < STEPS; s++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) x[i] = _mm512_dpbf16_ps(x[i], a, a);
    }
    for (int i = 0; i < CHAINS; i++) sink = _mm512_cvtss_f32(x[i]);
}
#endif

#ifdef FA_HAVE_AMX
/* 16 x 16 sums of 32 products each; six tiles of sums hide the latency. */
__attribute__((target("amx-tile,amx-bf16"))) static void dot_amx(void)
{
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&shapes);
    for (int s = 0; s < STEPS * CHAINS; s += 6) {
        _tile_dpbf16ps(0, 6, 7);
        _tile_dpbf16ps(1, 6, 7);
        _tile_dpbf16ps(2, 6, 7);
        _tile_dpbf16ps(3, 6, 7);
        _tile_dpbf16ps(4, 6, 7);
        _tile_dpbf16ps(5, 6, 7);
    }
    _tile_release();
}
#endif

static loop widest_fma(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return (loop){fma_avx512, 32, "avx512"};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return (loop){fma_avx2, 16, "avx2"};
#endif
    return (loop){fma_portable, 8, "portable"};
}

static loop widest_dot(void)
{
#ifdef FA_HAVE_AMX
    if (fa_amx_request()) return (loop){dot_amx, 16 * 16 * 64, "amx"};
#endif
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16"))
        return (loop){dot_avx512, 64, "avx512_bf16"};
#endif
    return (loop){NULL, 0, NULL};
}

/* ---- reading --------------------------------------------------------------------------------- */

typedef void read_function(const char *bytes, size_t size);

/* size is a multiple of 512. */
static void read_portable(const char *bytes, size_t size)
{
    uint64_t sum[8] = {0};
    for (size_t i = 0; i < size; i += 64) {
        uint64_t words[8];
        memcpy(words, bytes + i, sizeof words);
        for (int w = 0; w < 8; w++) sum[w] += words[w];
    }
    for (int w = 0; w < 8; w++) sink = (float)sum[w];
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void read_avx2(const char *bytes, size_t size)
{
    __m256i sum[8];
    for (int i = 0; i < 8; i++) sum[i] = _mm256_setzero_si256();
    for (size_t at = 0; at < size; at += 256) {
#pragma GCC unroll 8
        for (size_t i = 0; i < 8; i++)
            sum[i] =
                _mm256_xor_si256(sum[i], _mm256_load_si256((const void *)(bytes + at + 32 * i)));
    }
    for (int i = 0; i < 8; i++) sink = _mm256_cvtss_f32(_mm256_castsi256_ps(sum[i]));
}

__attribute__((target("avx512f"))) static void read_avx512(const char *bytes, size_t size)
{
    __m512i sum[8];
    for (int i = 0; i < 8; i++) sum[i] = _mm512_setzero_si512();
    for (size_t at = 0; at < size; at += 512) {
#pragma GCC unroll 8
        for (size_t i = 0; i < 8; i++)
            sum[i] = _mm512_xor_si512(sum[i], _mm512_load_si512(bytes + at + 64 * i));
    }
    for (int i = 0; i < 8; i++) sink = _mm512_cvtss_f32(_mm512_castsi512_ps(sum[i]));
}
#endif

static read_function *widest_read(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return read_avx512;
    if (__builtin_cpu_supports("avx2")) return read_avx2;
#endif
    return read_portable;
}

/* ---- threads --------------------------------------------------------------------------------- */

/* Threads wait at the gate until their number is known; then they wait for each other before and
 * after each round, so that all of them work at the same time. */
typedef struct crew {
    pthread_mutex_t gate;
    pthread_barrier_t barrier;
    int threads;
    loop compute; /* run NULL: the threads read memory */
    size_t bytes; /* each thread reads this many, a multiple of 4096 */
    atomic_bool out_of_memory;
    double best; /* seconds of the fastest round */
} crew;

typedef struct worker {
    crew *crew;
    int index;
    pthread_t thread;
} worker;

static void work_once(const crew *c, const char *memory)
{
    if (c->compute.run) c->compute.run();
    else if (memory) widest_read()(memory, c->bytes);
}

/* Each thread writes its own memory first, so that it is near the core that reads it. */
static void work(const worker *w)
{
    crew *c = w->crew;
    char *memory = c->compute.run ? NULL : aligned_alloc(4096, c->bytes);
    if (memory) memset(memory, 1 + w->index % 100, c->bytes);
    if (!memory && !c->compute.run) c->out_of_memory = true;
    pthread_barrier_wait(&c->barrier);
    bool idle = c->out_of_memory;
    for (int round = 0; round < ROUNDS; round++) {
        pthread_barrier_wait(&c->barrier);
        double begin = cli_seconds();
        if (!idle) work_once(c, memory);
        pthread_barrier_wait(&c->barrier);
        double seconds = cli_seconds() - begin;
        if (w->index == 0 && (round == 0 || seconds < c->best)) c->best = seconds;
    }
    free(memory);
}

static void *enter(void *argument)
{
    worker *w = argument;
    pthread_mutex_lock(&w->crew->gate);
    pthread_mutex_unlock(&w->crew->gate);
    work(w);
    return NULL;
}

/* Starts as many threads as the system allows, including this one, and lets them work. */
static void run_crew(crew *c, worker *workers)
{
    int wanted = c->threads;
    pthread_mutex_lock(&c->gate);
    for (c->threads = 1; c->threads < wanted; c->threads++)
        if (pthread_create(&workers[c->threads].thread, NULL, enter, &workers[c->threads]) != 0)
            break;
    pthread_barrier_init(&c->barrier, NULL, (unsigned)c->threads);
    pthread_mutex_unlock(&c->gate);
    work(&workers[0]);
    for (int i = 1; i < c->threads; i++) pthread_join(workers[i].thread, NULL);
    pthread_barrier_destroy(&c->barrier);
}

/* The units that all threads together do in a second; 0 if there is not enough memory. */
static double measure_crew(int threads, loop compute, size_t bytes, double units)
{
    crew c = {
        .gate = PTHREAD_MUTEX_INITIALIZER, .threads = threads, .compute = compute, .bytes = bytes};
    worker *workers = calloc((size_t)threads, sizeof *workers);
    if (!workers) return 0;
    for (int i = 0; i < threads; i++) workers[i] = (worker){.crew = &c, .index = i};
    run_crew(&c, workers);
    free(workers);
    return c.out_of_memory || !(c.best > 0) ? 0 : (double)c.threads * units / c.best;
}

static double measure_compute(loop compute, int threads)
{
    if (!compute.run) return 0;
    return measure_crew(threads, compute, 0, (double)CHAINS * STEPS * compute.operations);
}

static double measure_read(int threads)
{
    size_t pages = (size_t)(measure_beyond_caches() / threads / 4096) + 1;
    size_t bytes = 4096 * pages;
    return measure_crew(threads, (loop){NULL, 0, NULL}, bytes, (double)bytes);
}

peak_rates peak_measure(int threads, bool bandwidth)
{
    loop fma = widest_fma();
    return (peak_rates){.fma_float32 = measure_compute(fma, threads),
                        .dot_bfloat16 = measure_compute(widest_dot(), threads),
                        .read = bandwidth ? measure_read(threads) : 0,
                        .fma_isa = fma.isa};
}

/* ---- a device -------------------------------------------------------------------------------- */

static void measure_cpu(int threads, peak_table *table)
{
    fa_cpu_info info = {0};
    if (threads == 0 && fa_get_cpu_info(&info) == FA_OK) threads = info.threads;
    const peak_rates rates = peak_measure(threads > 0 ? threads : 1, false);
    const peak_rate fma = {rates.fma_float32, "float32 multiply-adds"};
    *table = (peak_table){fma, fma, fma};
    if (rates.dot_bfloat16 > 0)
        table->bfloat16 = (peak_rate){rates.dot_bfloat16, "bfloat16 dot products"};
}

#ifdef FA_HAVE_CUDA
/* Products with float32's errors: of float32 numbers, or of three products of their parts on tensor
 * cores. */
static peak_rate float32_peak(const rungs_ceiling *c)
{
    const peak_rate rates[] = {
        {c->ffma, "float32 multiply-adds (FFMA)"},
        {c->mma_tf32 / 3, "three products of the tensor cores in tf32 for each (mma.sync)"},
        {c->wgmma_bf16 / 3, "three products of the tensor cores in 16 bits for each (wgmma)"}};
    peak_rate best = rates[0];
    for (size_t i = 1; i < sizeof rates / sizeof rates[0]; i++)
        if (rates[i].rate > best.rate) best = rates[i];
    return best;
}

/* The tensor cores have one rate for float16 and bfloat16. */
static bool measure_gpu(peak_table *table)
{
    fa_cuda_device device;
    rungs_ceiling c;
    if (!rungs_open_device(&device)) return false;
    if (device.major < 8) return true;
    if (!rungs_measure_rates(&device, &c)) return false;
    table->float32 = float32_peak(&c);
    table->bfloat16 =
        c.wgmma_bf16 > c.mma_bf16
            ? (peak_rate){c.wgmma_bf16, "the tensor cores' bfloat16 products (wgmma)"}
            : (peak_rate){c.mma_bf16, "the tensor cores' bfloat16 products (mma.sync)"};
    table->float16 = table->bfloat16;
    return true;
}
#else
static bool measure_gpu(peak_table *table)
{
    (void)table;
    return true;
}
#endif

bool peak_measure_device(fa_device device, int threads, peak_table *table)
{
    *table = (peak_table){{0, NULL}, {0, NULL}, {0, NULL}};
    if (device == FA_DEVICE_CUDA) return measure_gpu(table);
    measure_cpu(threads, table);
    return true;
}

peak_rate peak_for(const peak_table *table, fa_dtype dtype)
{
    if (dtype == FA_FLOAT16) return table->float16;
    return dtype == FA_BFLOAT16 ? table->bfloat16 : table->float32;
}
