/*
 * FA_CHECK=1 on a real GPU (skipped without one): wrong lengths, cumulative lengths, pages and rows
 * are found in every pass, before anything is computed; in a captured graph, by the next call.
 */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "cuda/driver.h"
#include "cuda/images.h"
#include "flashattn.h"

enum { B = 3, N = 8, H = 2, D = 64, PAGES = 5, PAGE = 16, TABLE = 2, COUNT = PAGES * PAGE * H * D };

static fa_cuda_fault fault;

static void must(bool fine)
{
    if (fine) return;
    fprintf(stderr, "%s failed: %s (%s)\n", fault.call, fault.name, fault.text);
    exit(1);
}

static void *on_device(const void *data, size_t bytes)
{
    void *memory = NULL;
    must(fa_cuda_allocate(&memory, bytes, &fault) && fa_cuda_copy_in(memory, data, bytes, &fault));
    return memory;
}

static void put(const void *to, const void *from, size_t bytes)
{
    must(fa_cuda_copy_in((void *)to, from, bytes, &fault));
}

typedef struct setup {
    fa_tensor q, k, v, out, pages_k, pages_v;
    float *lse;
    int32_t *lengths, *cu, *table;
    int64_t *rows;
    fa_gradients g;
    void *stream, *workspace, *weights;
} setup;

static setup s;
static float zeros[COUNT];
static float
    room[1 << 16]; /* the workspace of any of the calls: kernels round sequences up to tiles */
static const int32_t good_lengths[B] = {3, 8, 0}, good_cu[B + 1] = {0, 3, 8, 24};
static const int32_t good_table[B * TABLE] = {4, 0, 1, 2, -9, -9};
static const int64_t good_rows[2] = {0, 7};

static void make(void)
{
    const size_t bytes = sizeof zeros;
    s.q = fa_bshd(on_device(zeros, bytes), FA_FLOAT16, B, N, H, D);
    s.k = fa_bshd(on_device(zeros, bytes), FA_FLOAT16, B, N, H, D);
    s.v = fa_bshd(on_device(zeros, bytes), FA_FLOAT16, B, N, H, D);
    s.out = fa_bshd(on_device(zeros, bytes), FA_FLOAT16, B, N, H, D);
    s.pages_k = fa_bshd(on_device(zeros, bytes), FA_FLOAT16, PAGES, PAGE, H, D);
    s.pages_v = fa_bshd(on_device(zeros, bytes), FA_FLOAT16, PAGES, PAGE, H, D);
    s.lse = on_device(zeros, bytes);
    s.lengths = on_device(good_lengths, sizeof good_lengths);
    s.cu = on_device(good_cu, sizeof good_cu);
    s.table = on_device(good_table, sizeof good_table);
    s.rows = on_device(good_rows, sizeof good_rows);
    s.workspace = on_device(room, sizeof room);
    s.weights = on_device(zeros, bytes);
    s.g = (fa_gradients){.size = sizeof s.g, .dout = s.q};
    s.g.dq = fa_bshd(on_device(zeros, bytes), FA_FLOAT16, B, N, H, D);
    must(fa_cuda_stream_new(&s.stream, &fault));
}

static fa_options options(void)
{
    fa_options o = FA_OPTIONS_INIT;
    o.device = FA_DEVICE_CUDA;
    o.stream = s.stream;
    o.workspace = s.workspace;
    o.workspace_size = sizeof room;
    return o;
}

static fa_status padded_forward(void)
{
    fa_options o = options();
    o.seqlens_k = s.lengths;
    return fa_forward(&s.q, &s.k, &s.v, &s.out, s.lse, &o);
}

static fa_status paged_decode(void)
{
    fa_options o = options();
    o.seqlens_k = s.lengths;
    o.block_table = s.table;
    o.block_table_stride = TABLE;
    return fa_decode(&s.q, &s.pages_k, &s.pages_v, &s.out, s.lse, &o);
}

static fa_status packed_forward(void)
{
    fa_options o = options();
    o.cu_seqlens_q = o.cu_seqlens_k = s.cu;
    o.num_sequences = B;
    fa_tensor q = s.q, k = s.k, v = s.v, out = s.out;
    q.shape[0] = k.shape[0] = v.shape[0] = out.shape[0] = 1;
    q.shape[1] = k.shape[1] = v.shape[1] = out.shape[1] = B * N;
    return fa_forward(&q, &k, &v, &out, s.lse, &o);
}

static fa_status padded_backward(void)
{
    fa_options o = options();
    o.seqlens_q = s.lengths;
    return fa_backward(&s.q, &s.k, &s.v, &s.out, s.lse, &s.g, &o);
}

static fa_status some_weights(void)
{
    fa_options o = options();
    const fa_tensor w = {s.weights, FA_FLOAT32, {B, H, 2, N}, {H * 2 * N, 2 * N, N, 1}};
    return fa_weights(&s.q, &s.k, s.rows, 2, &w, &o);
}

/* out is unchanged if the call did nothing. */
static const uint16_t mark = 0x7e2a; /* a NaN */

static void mark_out(void)
{
    must(fa_cuda_stream_wait(s.stream, &fault)); /* the previous call may still write */
    static uint16_t marks[B * N * H * D];
    for (int i = 0; i < B * N * H * D; i++) marks[i] = mark;
    put(s.out.data, marks, sizeof marks);
}

static bool is_marked(void)
{
    static uint16_t values[B * N * H * D];
    must(fa_cuda_stream_wait(s.stream, &fault) &&
         fa_cuda_copy_out(values, s.out.data, sizeof values, &fault));
    for (int i = 0; i < B * N * H * D; i++)
        if (values[i] != mark) return false;
    return true;
}

static void check_call(fa_status (*call)(void), const void *array, const void *good, size_t bytes,
                       int at, int64_t wrong, size_t size, const char *says)
{
    char spoilt[64];
    mark_out();
    CHECK(call() == FA_OK, "all is right: %s", fa_last_error());
    memcpy(spoilt, good, bytes);
    const int32_t narrow = (int32_t)wrong;
    if (size == 8) memcpy(spoilt + 8 * at, &wrong, 8);
    else memcpy(spoilt + 4 * at, &narrow, 4);
    put(array, spoilt, bytes);
    mark_out();
    const fa_status status = call();
    CHECK(status == FA_ERROR_ARGUMENT && strstr(fa_last_error(), says) &&
              strstr(fa_last_error(), "FA_CHECK found it on CUDA device 0"),
          "%s, \"%s\"; expected \"%s\"", fa_status_name(status), fa_last_error(), says);
    CHECK(is_marked(), "%s: the call went on all the same", says);
    put(array, good, bytes);
    CHECK(call() == FA_OK, "all is right again: %s", fa_last_error());
}

static void check_passes(void)
{
    const size_t four = sizeof good_lengths;
    check_call(padded_forward, s.lengths, good_lengths, four, 1, 9, 4,
               "options.seqlens_k[1] is 9: expected 0 to 8");
    check_call(padded_forward, s.lengths, good_lengths, four, 2, -1, 4,
               "options.seqlens_k[2] is -1: expected 0 to 8");
    check_call(padded_backward, s.lengths, good_lengths, four, 0, 100, 4,
               "options.seqlens_q[0] is 100: expected 0 to 8");
    check_call(paged_decode, s.lengths, good_lengths, four, 0, 33, 4,
               "options.seqlens_k[0] is 33: expected 0 to 32");
    check_call(paged_decode, s.table, good_table, sizeof good_table, 2, 5, 4,
               "options.block_table[2] (batch item 1, entry 0) is 5: expected 0 <= page < 5");
    check_call(paged_decode, s.table, good_table, sizeof good_table, 0, -1, 4,
               "options.block_table[0] (batch item 0, entry 0) is -1: expected 0 <= page < 5");
    check_call(packed_forward, s.cu, good_cu, sizeof good_cu, 2, 2, 4,
               "options.cu_seqlens_q[2] is 2: expected >= 3, the entry before it");
    check_call(packed_forward, s.cu, good_cu, sizeof good_cu, 3, 25, 4,
               "options.cu_seqlens_q[3] is 25: expected <= 24 (q.shape[1])");
    check_call(packed_forward, s.cu, good_cu, sizeof good_cu, 0, -2, 4,
               "options.cu_seqlens_q[0] is -2: expected >= 0");
    check_call(some_weights, s.rows, good_rows, sizeof good_rows, 1, 8, 8,
               "rows[1] is 8: expected 0 <= row < 8 (q.shape[1])");
}

/* The driver's functions for graphs, which the library does not use. */
static bool capture(fa_status (*call)(void), fa_status *status, void **exec)
{
    int (*begin)(void *, int), (*end)(void *, void **);
    int (*instantiate)(void **, void *, unsigned long long);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *graph = NULL;
    if (!driver) return false;
    void *symbols[3] = {dlsym(driver, "cuStreamBeginCapture_v2"),
                        dlsym(driver, "cuStreamEndCapture"),
                        dlsym(driver, "cuGraphInstantiateWithFlags")};
    if (!symbols[0] || !symbols[1] || !symbols[2]) return false;
    memcpy(&begin, &symbols[0], sizeof begin);
    memcpy(&end, &symbols[1], sizeof end);
    memcpy(&instantiate, &symbols[2], sizeof instantiate);
    if (begin(s.stream, 0) != 0) return false; /* global: the strictest mode */
    *status = call();
    return end(s.stream, &graph) == 0 && instantiate(exec, graph, 0) == 0;
}

static bool replay(void *exec)
{
    int (*launch)(void *, void *);
    void *symbol = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuGraphLaunch");
    if (!symbol) return false;
    memcpy(&launch, &symbol, sizeof launch);
    return launch(exec, s.stream) == 0 && fa_cuda_stream_wait(s.stream, &fault);
}

static void check_graph(void)
{
    const int32_t wrong[B] = {3, 8, 77};
    fa_status status = FA_ERROR_DEVICE;
    void *exec = NULL;
    CHECK(capture(paged_decode, &status, &exec) && status == FA_OK, "capture: %s", fa_last_error());
    CHECK(replay(exec) && padded_forward() == FA_OK, "a replay without faults: %s",
          fa_last_error());
    put(s.lengths, wrong, sizeof wrong);
    CHECK(replay(exec), "a replay with a wrong length");
    put(s.lengths, good_lengths, sizeof good_lengths);
    status = padded_forward();
    CHECK(status == FA_ERROR_ARGUMENT &&
              strstr(fa_last_error(), "options.seqlens_k[2] is 77: expected 0 to 32") &&
              strstr(fa_last_error(), "in an earlier call, which a graph replayed"),
          "%s, \"%s\"", fa_status_name(status), fa_last_error());
    CHECK(padded_forward() == FA_OK, "it is said once: %s", fa_last_error());
}

int main(void)
{
    setenv("FA_CHECK", "1", 1);
    if (fa_cuda_device_count() == 0 || !fa_cuda_architectures[0]) {
        printf("skipped: no CUDA device, or no kernels in this build\n");
        return TEST_SKIPPED;
    }
    must(fa_cuda_use_device(0, &fault));
    make();
    check_graph(); /* first: so the kernel is loaded and memory is allocated during the capture */
    check_passes();
    return test_end();
}
