/*
 * What the API reports if CUDA is requested but not possible, and where it expects pointers: with a
 * driver that needs no GPU (fake_cuda.c), and without any. The driver is opened once in a process,
 * so each scenario runs in its own process.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "cuda/driver.h"
#include "cuda/images.h"
#include "fake_cuda.h"
#include "flashattn.h"

enum { BATCH = 2, ROWS = 5, HEADS = 4, DIM = 8, COUNT = BATCH * ROWS * HEADS * DIM };

/* Tensors in memory of the fake driver, and the same on the host. */
typedef struct setup {
    fa_tensor q, k, v, out;
    float *lse;
    fa_options o;
} setup;

static float host[4][COUNT];

static setup on_host(void)
{
    setup s = {.o = {.size = sizeof(fa_options), .device = FA_DEVICE_CUDA}};
    fa_tensor *t[] = {&s.q, &s.k, &s.v, &s.out};
    for (int i = 0; i < 4; i++) *t[i] = fa_bshd(host[i], FA_FLOAT32, BATCH, ROWS, HEADS, DIM);
    return s;
}

static void *allocate(size_t bytes)
{
    fa_cuda_fault fault;
    void *memory = NULL;
    bool fine = fa_cuda_allocate(&memory, bytes, &fault);
    CHECK(fine, "allocate: %s", fault.name);
    return memory;
}

static setup on_device(void)
{
    setup s = on_host();
    fa_tensor *t[] = {&s.q, &s.k, &s.v, &s.out};
    for (int i = 0; i < 4; i++) t[i]->data = allocate(sizeof host[i]);
    s.lse = allocate(BATCH * HEADS * ROWS * sizeof(float));
    return s;
}

static fa_status forward(const setup *s)
{
    return fa_forward(&s->q, &s->k, &s->v, &s->out, s->lse, &s->o);
}

static fa_status decode(const setup *s)
{
    return fa_decode(&s->q, &s->k, &s->v, &s->out, s->lse, &s->o);
}

static fa_status supported(const setup *s)
{
    return fa_supported(FA_PASS_FORWARD, &s->q, &s->k, &s->v, &s->out, &s->o);
}

static fa_status weights(const setup *s, void *to)
{
    const fa_tensor w = fa_bshd(to, FA_FLOAT32, BATCH, HEADS, ROWS, ROWS);
    return fa_weights(&s->q, &s->k, NULL, ROWS, &w, &s->o);
}

static fa_status combine(const setup *s)
{
    const float *lse[] = {s->lse};
    return fa_combine(&s->q, lse, 1, &s->out, NULL, &s->o);
}

static void expect(int line, fa_status got, fa_status wanted, const char *a, const char *b)
{
    const char *said = fa_last_error();
    bool holds = got == wanted && strstr(said, a) && strstr(said, b);
    test_check(holds, __FILE__, line, "%s \"%s\"; expected %s with \"%s\" and \"%s\"",
               fa_status_name(got), said, fa_status_name(wanted), a, b);
}
#define EXPECT(call, status, a, b) expect(__LINE__, (call), (status), (a), (b))

static void use(int device)
{
    fa_cuda_fault fault;
    bool fine = fa_cuda_use_device(device, &fault);
    CHECK(fine, "use device %d: %s %s", device, fault.call, fault.name);
}

/* ---- scenarios ------------------------------------------------------------------------------- */

static void expect_no_cuda(const char *why)
{
    setup s = on_host();
    fa_cuda_info info;
    EXPECT(forward(&s), FA_ERROR_DEVICE, "options.device is FA_DEVICE_CUDA, but", why);
    EXPECT(decode(&s), FA_ERROR_DEVICE, "options.device is FA_DEVICE_CUDA, but", why);
    EXPECT(supported(&s), FA_ERROR_DEVICE, "options.device is FA_DEVICE_CUDA, but", why);
    EXPECT(combine(&s), FA_ERROR_DEVICE, "options.device is FA_DEVICE_CUDA, but", why);
    CHECK(fa_get_cuda_info(&info) == FA_OK && info.device_count == 0, "%d devices",
          (int)info.device_count);
    CHECK(strstr(info.detail, why), "detail: %s", info.detail);
    s.o.device = FA_DEVICE_AUTO;
    CHECK(forward(&s) == FA_OK, "auto without CUDA: %s", fa_last_error());
    CHECK(supported(&s) == FA_OK, "auto without CUDA: %s", fa_last_error());
}

static void test_no_driver(void)
{
    setenv("FA_CUDA_DRIVER", "/no/such/libcuda.so", 1);
    expect_no_cuda("no usable CUDA driver: dlopen: no driver");
}

static void test_old_driver(void)
{
    setenv("FAKE_CUDA_VERSION", "11080", 1);
    expect_no_cuda("no usable CUDA driver: cuDriverGetVersion");
}

static void test_no_device(void)
{
    setenv("FAKE_CUDA_DEVICES", "0", 1);
    expect_no_cuda("the CUDA driver reports no device");
}

static void test_no_context(void)
{
    setup s = on_host();
    EXPECT(forward(&s), FA_ERROR_DEVICE, "no CUDA context is current in this thread",
           "cudaSetDevice");
}

/* Gradients' memory is checked too, and the workspace that delta needs on FMA units. */
static void test_workspace(void)
{
    use(0);
    setup s = on_device();
    s.o.precision = FA_PRECISION_IEEE;
    size_t bytes = 0;
    char missing[64];
    fa_gradients g = {.size = sizeof g, .dout = s.out, .dq = s.q};
    g.dout.data = s.v.data;
    g.dq.data = host[0];
#define BACKWARD() fa_backward(&s.q, &s.k, &s.v, &s.out, s.lse, &g, &s.o)
    EXPECT(BACKWARD(), FA_ERROR_ARGUMENT, "gradients.dq.data at 0x", "copy it there first");
    g.dq.data = allocate(sizeof host[0]);
    EXPECT(BACKWARD(), FA_ERROR_WORKSPACE, "options.workspace_size is 0: expected at least ",
           "as fa_workspace_size says");
    snprintf(missing, sizeof missing, "expected at least %zu bytes",
             sizeof(float) * BATCH * HEADS * ROWS);
    CHECK(strstr(fa_last_error(), missing), "%s", fa_last_error());
    if (fa_cuda_architectures[0]) {
        fa_status status =
            fa_workspace_size(FA_PASS_BACKWARD, &s.q, &s.k, &s.v, &s.out, &s.o, &bytes);
        CHECK(status == FA_OK && bytes == sizeof(float) * BATCH * HEADS * ROWS, "%zu bytes: %s",
              bytes, fa_last_error());
    }
    s.o.workspace = (char *)allocate(4096) + 8;
    s.o.workspace_size = 4000;
    EXPECT(BACKWARD(), FA_ERROR_ARGUMENT, "options.workspace is 0x", "aligned to 256 bytes");
    static _Alignas(256) char here[4096];
    s.o.workspace = here;
    EXPECT(BACKWARD(), FA_ERROR_ARGUMENT, "options.workspace at 0x", "copy it there first");
#undef BACKWARD
    EXPECT(weights(&s, here), FA_ERROR_ARGUMENT, "weights.data at 0x", "copy it there first");
}

/* The environment's families are read once, so each has its own process. */
static void test_unknown_family(void)
{
    setenv("FA_CUDA_KERNEL", "sm81", 1);
    use(0);
    setup s = on_device();
    EXPECT(
        forward(&s), FA_ERROR_DEVICE, "FA_CUDA_KERNEL is \"sm81\"; expected one of the families",
        "sm90 sm80_split sm80 sm75 tf32_rounded tf32_split tf32_sm90 f16x3_split f16x3_sm90 tf32 tf32x3 simt");
    setenv("FA_CUDA_KERNEL", "simt", 1);
    EXPECT(
        supported(&s), FA_ERROR_DEVICE, "FA_CUDA_KERNEL is \"sm81\"",
        "sm90 sm80_split sm80 sm75 tf32_rounded tf32_split tf32_sm90 f16x3_split f16x3_sm90 tf32 tf32x3 simt");
}

static void test_asked_family(void)
{
    setenv("FA_CUDA_KERNEL", "sm80", 1);
    use(0);
    setup s = on_device();
    EXPECT(forward(&s), FA_ERROR_UNSUPPORTED, "q.dtype is float32",
           "FA_CUDA_KERNEL asks for sm80 alone");
}

/* Backward has its own variable. */
static void test_asked_backward_family(void)
{
    setenv("FA_CUDA_BACKWARD_KERNEL", "sm80", 1);
    use(0);
    setup s = on_device();
    EXPECT(fa_supported(FA_PASS_BACKWARD, &s.q, &s.k, &s.v, &s.out, &s.o), FA_ERROR_UNSUPPORTED,
           "q.dtype is float32", "FA_CUDA_BACKWARD_KERNEL asks for sm80 alone");
}

static void test_unknown_backward_family(void)
{
    setenv("FA_CUDA_BACKWARD_KERNEL", "sm75", 1);
    use(0);
    setup s = on_device();
    EXPECT(fa_supported(FA_PASS_BACKWARD, &s.q, &s.k, &s.v, &s.out, &s.o), FA_ERROR_DEVICE,
           "FA_CUDA_BACKWARD_KERNEL is \"sm75\"",
           "sm90_persistent sm90 sm80 tf32_in_place tf32 tf32x3_corrected tf32x3 simt");
}

/* Arguments are checked before the device. */
static void test_arguments(void)
{
    use(0);
    setup s = on_device();
    s.k.shape[3] = 7;
    EXPECT(forward(&s), FA_ERROR_ARGUMENT, "k.shape[3] is 7", "expected 8");
}

static void test_host_pointers(void)
{
    use(0);
    const setup right = on_device();
    setup s = right;
    s.q.data = host[0];
    EXPECT(forward(&s), FA_ERROR_ARGUMENT, "q.data at 0x",
           "lies in host memory: expected memory of "
           "CUDA device 0");
    s = right;
    s.out.data = host[3];
    EXPECT(decode(&s), FA_ERROR_ARGUMENT, "out.data at 0x", "copy it there first");
    s = right;
    s.lse = host[1];
    EXPECT(forward(&s), FA_ERROR_ARGUMENT, "lse at 0x", "lies in host memory");
    s = right;
    s.o.sinks = host[1];
    EXPECT(forward(&s), FA_ERROR_ARGUMENT, "options.sinks at 0x", "lies in host memory");
    s = right;
    s.o.seqlens_k = (const int32_t *)(const void *)host[1];
    EXPECT(forward(&s), FA_ERROR_ARGUMENT, "options.seqlens_k at 0x", "lies in host memory");
    s = right;
    fa_tensor bias = fa_bshd(host[1], FA_FLOAT32, 1, 1, 1, 1);
    s.o.bias = &bias;
    EXPECT(forward(&s), FA_ERROR_ARGUMENT, "options.bias at 0x", "lies in host memory");
}

static void test_other_device(void)
{
    setenv("FAKE_CUDA_DEVICES", "2", 1);
    use(1);
    void *elsewhere = allocate(sizeof host[0]);
    use(0);
    setup s = on_device();
    s.v.data = elsewhere;
    EXPECT(forward(&s), FA_ERROR_ARGUMENT, "v.data at 0x",
           "is on CUDA device 1: expected device 0, that of the current context");
}

/* auto chooses the device of q, and then all others must be there. */
static void test_auto(void)
{
    use(0);
    setup s = on_device();
    s.o.device = FA_DEVICE_AUTO;
    s.k.data = host[1];
    EXPECT(forward(&s), FA_ERROR_ARGUMENT, "k.data at 0x", "lies in host memory");
    s = on_host();
    s.o.device = FA_DEVICE_AUTO;
    CHECK(forward(&s) == FA_OK, "auto on the host: %s", fa_last_error());
    const setup device = on_device();
    s.k.data = device.k.data;
    EXPECT(forward(&s), FA_ERROR_ARGUMENT, "k.data at 0x",
           "is on CUDA device 0: expected host memory");
    s.k.data = host[1];
    s.o.device = FA_DEVICE_CPU;
    s.lse = device.lse;
    EXPECT(forward(&s), FA_ERROR_ARGUMENT, "lse at 0x", "expected host memory");
}

static fa_status combine_locations(fa_tensor part, const float *part_lse, fa_tensor out, float *lse,
                                   fa_device device)
{
    const fa_tensor parts[] = {part, part};
    const float *part_lses[] = {part_lse, part_lse};
    const fa_options o = {.size = sizeof o, .device = device};
    return fa_combine(parts, part_lses, 2, &out, lse, &o);
}

/* fa_combine runs on the device of out, and then all others must be there. */
static void test_combine_places(void)
{
    use(0);
    static float host_lse[2][BATCH * HEADS * ROWS];
    const setup d = on_device(), h = on_host();
    const fa_device cpu = FA_DEVICE_CPU, cuda = FA_DEVICE_CUDA, any = FA_DEVICE_AUTO;
    const char *on_cuda = "is on CUDA device 0: expected host memory";
    const char *on_cpu = "lies in host memory: expected memory of CUDA device 0";
    float *l = host_lse[0], *m = host_lse[1];
    CHECK(combine_locations(h.q, l, h.out, m, any) == FA_OK, "all on the host: %s",
          fa_last_error());
    EXPECT(combine_locations(d.q, l, h.out, m, any), FA_ERROR_ARGUMENT, "parts[0].data at 0x",
           on_cuda);
    EXPECT(combine_locations(h.q, d.lse, h.out, m, any), FA_ERROR_ARGUMENT, "part_lse[0] at 0x",
           on_cuda);
    EXPECT(combine_locations(h.q, l, h.out, d.lse, any), FA_ERROR_ARGUMENT, "lse at 0x", on_cuda);
    EXPECT(combine_locations(h.q, l, d.out, m, cpu), FA_ERROR_ARGUMENT, "out.data at 0x", on_cuda);
    EXPECT(combine_locations(h.q, d.lse, d.out, NULL, any), FA_ERROR_ARGUMENT,
           "parts[0].data at 0x", on_cpu);
    EXPECT(combine_locations(d.q, l, d.out, NULL, any), FA_ERROR_ARGUMENT, "part_lse[0] at 0x",
           on_cpu);
    EXPECT(combine_locations(d.q, d.lse, d.out, l, any), FA_ERROR_ARGUMENT, "lse at 0x", on_cpu);
    EXPECT(combine_locations(d.q, d.lse, h.out, NULL, cuda), FA_ERROR_ARGUMENT, "out.data at 0x",
           on_cpu);
}

/* The second part is checked like the first, and the arrays of parts are on the host for any
 * device. */
static void test_combine_arrays(void)
{
    use(0);
    static float host_lse[BATCH * HEADS * ROWS];
    const setup d = on_device(), h = on_host();
    const fa_tensor parts[] = {h.q, d.q};
    const float *lse[] = {host_lse, d.lse};
    const fa_options o = {.size = sizeof o};
    EXPECT(fa_combine(parts, lse, 2, &h.out, NULL, &o), FA_ERROR_ARGUMENT, "parts[1].data at 0x",
           "is on CUDA device 0");
    const fa_tensor on_the_host[] = {h.q, h.k};
    EXPECT(fa_combine(on_the_host, lse, 2, &h.out, NULL, &o), FA_ERROR_ARGUMENT,
           "part_lse[1] at 0x", "is on CUDA device 0");
    const void *device_array = d.v.data;
    EXPECT(fa_combine(device_array, lse, 2, &h.out, NULL, &o), FA_ERROR_ARGUMENT, "parts at 0x",
           "expected an array in host memory");
    EXPECT(fa_combine(on_the_host, device_array, 2, &h.out, NULL, &o), FA_ERROR_ARGUMENT,
           "part_lse at 0x", "expected an array in host memory");
    const fa_options strided = {.size = sizeof o, .part_lse_stride = device_array};
    EXPECT(fa_combine(on_the_host, lse, 1, &h.out, NULL, &strided), FA_ERROR_ARGUMENT,
           "options.part_lse_stride at 0x", "expected an array in host memory");
    fa_tensor empty = h.out, part = d.q;
    empty.shape[1] = part.shape[1] = 0;
    CHECK(fa_combine(&part, &lse[1], 1, &empty, NULL, &o) == FA_OK, "nothing to merge: %s",
          fa_last_error());
}

/* fa_append runs on the device of k_cache. */
static void test_append_places(void)
{
    use(0);
    static int32_t host_lengths[BATCH];
    const setup d = on_device(), h = on_host();
    const char *on_cuda = "is on CUDA device 0: expected host memory";
    const char *on_cpu = "lies in host memory: expected memory of CUDA device 0";
    fa_append_options o = {.size = sizeof o};
    o.lengths = d.lse ? (const int32_t *)(const void *)d.lse : NULL;
    EXPECT(fa_append(&h.q, NULL, &h.k, NULL, &o), FA_ERROR_ARGUMENT, "options.lengths at 0x",
           on_cuda);
    o.lengths = host_lengths;
    EXPECT(fa_append(&d.q, NULL, &h.k, NULL, &o), FA_ERROR_ARGUMENT, "k_new.data at 0x", on_cuda);
    EXPECT(fa_append(&h.q, &d.v, &h.k, &h.v, &o), FA_ERROR_ARGUMENT, "v_new.data at 0x", on_cuda);
    EXPECT(fa_append(&d.q, NULL, &d.k, NULL, &o), FA_ERROR_ARGUMENT, "options.lengths at 0x",
           on_cpu);
    o.lengths = NULL;
    EXPECT(fa_append(&h.q, NULL, &d.k, NULL, &o), FA_ERROR_ARGUMENT, "k_new.data at 0x", on_cpu);
    o.device = FA_DEVICE_CUDA;
    EXPECT(fa_append(&h.q, NULL, &h.k, NULL, &o), FA_ERROR_ARGUMENT, "k_new.data at 0x", on_cpu);
    o.device = FA_DEVICE_CPU;
    EXPECT(fa_append(&h.q, NULL, &d.k, NULL, &o), FA_ERROR_ARGUMENT, "k_cache.data at 0x", on_cuda);
}

static fake_cuda_record *find_record(void)
{
    void *library = dlopen(FAKE_CUDA_PATH, RTLD_NOW);
    fake_cuda_record *record = library ? dlsym(library, "fake_cuda") : NULL;
    if (!record) abort();
    return record;
}

/* The driver is asked about each pointer once, also if q's has chosen the device. */
static void test_dry_runs(void)
{
    use(0);
    const fake_cuda_record *record = find_record();
    setup s = on_device();
    for (int i = 0; i < 2; i++) {
        const int before = record->pointers_asked;
        s.o.device = i ? FA_DEVICE_AUTO : FA_DEVICE_CUDA;
        (void)forward(&s); /* fails later in a build without kernels */
        CHECK(record->pointers_asked - before == 5, "asked about %d pointers of 5",
              record->pointers_asked - before);
    }
    const int before = record->pointers_asked;
    s.k.data = s.q.data; /* the same allocation */
    (void)forward(&s);
    CHECK(record->pointers_asked - before == 4, "asked about %d pointers of 4",
          record->pointers_asked - before);
}

/* Without a launch, no pointer is checked. */
static void test_empty(void)
{
    use(0);
    setup s = on_host();
    s.q.shape[0] = s.k.shape[0] = s.v.shape[0] = s.out.shape[0] = 0;
    CHECK(forward(&s) == FA_OK, "an empty problem: %s", fa_last_error());
}

/* The error of a build without kernels tells how to get them. */
static void test_no_kernels(void)
{
    setup s = on_host();
    EXPECT(supported(&s), FA_ERROR_UNSUPPORTED, "this build has no CUDA kernels", "make CUDA=all");
    use(0);
    s = on_device();
    EXPECT(forward(&s), FA_ERROR_UNSUPPORTED, "this build has no CUDA kernels", "make CUDA=all");
}

/* With kernels, the fake driver accepts a launch as planned; a driver's failure is passed on. */
static void test_launch(void)
{
    char text[256];
    use(0);
    setup s = on_device();
    fake_cuda_record *record = find_record();
    int stream;
    s.o.stream = &stream;
    s.o.precision = FA_PRECISION_IEEE;
    CHECK(forward(&s) == FA_OK, "forward: %s", fa_last_error());
    CHECK(record->launches == 1 && strcmp(record->last.name, "forward_simt") == 0,
          "%d launches, %s", record->launches, record->last.name);
    CHECK(record->last.grid[0] == BATCH * HEADS && record->last.block[0] == 128, "grid %u",
          record->last.grid[0]);
    CHECK(record->last.stream == &stream && record->synchronizations == 0, "stream");
    CHECK(decode(&s) == FA_OK && record->launches == 2, "decode: %s", fa_last_error());
    CHECK(weights(&s, allocate(sizeof(float) * BATCH * HEADS * ROWS * ROWS)) == FA_OK &&
              record->launches == 3 && strcmp(record->last.name, "weights_simt") == 0,
          "weights: %s", fa_last_error());
    fa_status status =
        fa_describe(FA_PASS_DECODE, &s.q, &s.k, &s.v, &s.out, &s.o, text, sizeof text);
    CHECK(status == FA_OK && strstr(text, "cuda decode forward_simt_d64: "), "%s", text);
    s.o.precision = FA_PRECISION_FLOAT32;
    CHECK(combine(&s) == FA_OK && record->launches == 4 &&
              strcmp(record->last.name, "combine") == 0,
          "combine: %s", fa_last_error());
    setenv("FAKE_CUDA_FAIL", "cuLaunchKernelEx=100", 1);
    EXPECT(forward(&s), FA_ERROR_DEVICE, "cuLaunchKernelEx failed on CUDA device 0: ",
           "CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)");
    setenv("FAKE_CUDA_FAIL", "cuLaunchKernelEx=2", 1);
    EXPECT(forward(&s), FA_ERROR_MEMORY, "cuLaunchKernelEx failed", "out of memory");
}

/* Device memory, aligned as a workspace is. */
static char *allocate_aligned(size_t bytes)
{
    char *memory = allocate(bytes + 256);
    return memory + (256 - (uintptr_t)memory % 256) % 256;
}

/* A decode call with its workspace, and without a byte of it. */
static void expect_decode(setup *s, const char *function, const char *kernel)
{
    const fake_cuda_record *record = find_record();
    char text[256];
    size_t bytes = 0;
    fa_status status =
        fa_workspace_size(FA_PASS_DECODE, &s->q, &s->k, &s->v, &s->out, &s->o, &bytes);
    CHECK(status == FA_OK && bytes > 1, "%s: a workspace of %zu bytes", kernel, bytes);
    s->o.workspace = allocate_aligned(bytes);
    s->o.workspace_size = bytes - 1;
    const int before = record->launches;
    char needed[64];
    snprintf(needed, sizeof needed, "expected at least %zu bytes", bytes);
    EXPECT(decode(s), FA_ERROR_WORKSPACE, "options.workspace_size is ", needed);
    CHECK(record->launches == before, "%s: launched without its workspace", kernel);
    s->o.workspace_size = bytes;
    CHECK(decode(s) == FA_OK && record->launches == before + 1 &&
              strcmp(record->last.name, function) == 0,
          "%s: %s, %d launches", kernel, fa_last_error(), record->launches - before);
    status = fa_describe(FA_PASS_DECODE, &s->q, &s->k, &s->v, &s->out, &s->o, text, sizeof text);
    CHECK(status == FA_OK && strstr(text, kernel), "%s", text);
}

/* Caches of 8 bits, and values that are the first columns of the keys. */
static void test_caches(void)
{
    enum { KEYS = 1024, SEQUENCES = 2 };
    use(0);
    setup s = on_device();
    s.lse = NULL;
    char *memory = allocate_aligned(8 << 20);
    const fa_tensor scale = fa_bshd(memory, FA_FLOAT32, SEQUENCES, KEYS, 4, 1);
    const fa_dtype types[] = {FA_FLOAT8_E4M3, FA_INT8};
    const char *const kernels[] = {"decode_sm90_d128_e4m3", "decode_sm90_d128_int8"};
    s.q = fa_bshd(memory, FA_BFLOAT16, SEQUENCES, 1, 16, 128);
    s.out = fa_bshd(memory + (1 << 20), FA_BFLOAT16, SEQUENCES, 1, 16, 128);
    for (int i = 0; i < 2; i++) {
        s.k = fa_bshd(memory + (2 << 20), types[i], SEQUENCES, KEYS, 4, 128);
        s.v = fa_bshd(memory + (4 << 20), types[i], SEQUENCES, KEYS, 4, 128);
        s.o.k_scale = s.o.v_scale = NULL; /* they count as 1 */
        expect_decode(&s, "decode_sm90", kernels[i]);
        s.o.k_scale = s.o.v_scale = &scale;
        expect_decode(&s, "decode_sm90", kernels[i]);
        const fa_tensor elsewhere = fa_bshd(host[0], FA_FLOAT32, 1, 1, 4, 1);
        s.o.v_scale = &elsewhere;
        EXPECT(decode(&s), FA_ERROR_ARGUMENT, "options.v_scale at 0x", "lies in host memory");
    }
    s.o.k_scale = s.o.v_scale = NULL;
    s.q = fa_bshd(memory, FA_BFLOAT16, SEQUENCES, 1, 16, 576);
    s.out = fa_bshd(memory + (1 << 20), FA_BFLOAT16, SEQUENCES, 1, 16, 512);
    s.k = s.v = fa_bshd(memory + (2 << 20), FA_BFLOAT16, SEQUENCES, KEYS, 1, 576);
    s.v.shape[3] = 512;
    expect_decode(&s, "decode_sm80", "decode_sm80_latent_bf16");
    s.v.data = memory + (2 << 20) + 16;
    CHECK(decode(&s) == FA_OK && strcmp(find_record()->last.name, "forward_simt") == 0,
          "values that begin with another column: %s", fa_last_error());
    s.v.shape[3] = 576;
    EXPECT(decode(&s), FA_ERROR_ARGUMENT, "v.shape[3] is 576", "expected a head dim from 1 to 512");
}

/* A decode step over pages is two launches: fa_append, which also writes the lengths and the rows of the table
 * for the attention that follows. */
static void test_decode_step(void)
{
    enum { SEQUENCES = 4, PAGES = 1024, ENTRIES = 64, TABLE_ROWS = 9, GROUP = 4 };
    use(0);
    char *memory = allocate_aligned(64 << 20);
    int32_t *arrays = (int32_t *)(void *)memory;
    const fake_cuda_record *record = find_record();
    setup s = {.o = {.size = sizeof s.o, .device = FA_DEVICE_CUDA}};
    s.q = fa_bshd(memory + (1 << 20), FA_BFLOAT16, SEQUENCES, 1, GROUP * HEADS, 128);
    s.out = fa_bshd(memory + (2 << 20), FA_BFLOAT16, SEQUENCES, 1, GROUP * HEADS, 128);
    const fa_tensor new = fa_bshd(memory + (3 << 20), FA_BFLOAT16, SEQUENCES, 1, HEADS, 128);
    const fa_append_options append = {.size = sizeof append,
                                      .device = FA_DEVICE_CUDA,
                                      .lengths = arrays,
                                      .cache_index = arrays + 16,
                                      .block_table = arrays + 1024,
                                      .block_table_stride = ENTRIES,
                                      .block_table_rows = TABLE_ROWS,
                                      .lengths_after = arrays + 32,
                                      .block_table_after = arrays + 4096};
    s.o.seqlens_k = append.lengths_after;
    s.o.block_table = append.block_table_after;
    s.o.block_table_stride = ENTRIES;
    s.o.workspace = memory + (48 << 20);
    s.o.workspace_size = 16 << 20;
    for (int page = 1; page <= 16; page *= 4) {
        const int before = record->launches;
        s.k = fa_bshd(memory + (4 << 20), FA_BFLOAT16, PAGES, page, HEADS, 128);
        s.v = fa_bshd(memory + (24 << 20), FA_BFLOAT16, PAGES, page, HEADS, 128);
        CHECK(fa_append(&new, &new, &s.k, &s.v, &append) == FA_OK &&
                  strcmp(record->last.name, "append_simt") == 0,
              "pages of %d: %s", page, fa_last_error());
        CHECK(decode(&s) == FA_OK && record->launches == before + 2, "pages of %d: %s, %d launches",
              page, fa_last_error(), record->launches - before);
    }
}

/* The same with padding in front of the keys, which attention does not see: over pages by a table of rows, over a
 * contiguous cache as packed sequences; also without new keys. */
static void test_padded_decode_step(void)
{
    enum { SEQUENCES = 4, BLOCKS = 64, BLOCK = 16, ENTRIES = 8, GROUP = 4 };
    use(0);
    char *memory = allocate_aligned(64 << 20);
    int32_t *arrays = (int32_t *)(void *)memory;
    const fake_cuda_record *record = find_record();
    for (int i = 0; i < 4; i++) {
        const bool paged = i & 1;
        const int before = record->launches;
        const int64_t blocks = paged ? BLOCKS : SEQUENCES, rows = blocks * BLOCK;
        const fa_tensor new =
            fa_bshd(i < 2 ? memory + (3 << 20) : NULL, FA_BFLOAT16, SEQUENCES, i < 2, HEADS, 128);
        const fa_tensor k = fa_bshd(memory + (4 << 20), FA_BFLOAT16, blocks, BLOCK, HEADS, 128);
        const fa_tensor v = fa_bshd(memory + (24 << 20), FA_BFLOAT16, blocks, BLOCK, HEADS, 128);
        fa_append_options append = {.size = sizeof append,
                                    .device = FA_DEVICE_CUDA,
                                    .flags = FA_LENGTHS_WITH_PADDING,
                                    .lengths = arrays,
                                    .left_padding = arrays + 16,
                                    .lengths_after = arrays + 32};
        setup s = {.o = {.size = sizeof s.o,
                         .device = FA_DEVICE_CUDA,
                         .seqlens_k = append.lengths_after,
                         .workspace = memory + (48 << 20),
                         .workspace_size = 16 << 20}};
        s.q = fa_bshd(memory + (1 << 20), FA_BFLOAT16, SEQUENCES, 1, GROUP * HEADS, 128);
        s.out = fa_bshd(memory + (2 << 20), FA_BFLOAT16, SEQUENCES, 1, GROUP * HEADS, 128);
        s.k = fa_bshd(k.data, k.dtype, paged ? rows : 1, paged ? 1 : rows, HEADS, 128);
        s.v = fa_bshd(v.data, v.dtype, paged ? rows : 1, paged ? 1 : rows, HEADS, 128);
        if (paged) {
            append.block_table = arrays + 1024;
            append.block_table_stride = ENTRIES;
            s.o.block_table = append.row_table_after = arrays + 4096;
            s.o.block_table_stride = ENTRIES * BLOCK;
        } else {
            s.o.cu_seqlens_k = append.cu_seqlens_after = arrays + 48;
            s.o.num_sequences = SEQUENCES;
        }
        CHECK(fa_append(&new, &new, &k, &v, &append) == FA_OK &&
                  strcmp(record->last.name, "append_simt") == 0,
              "case %d: %s", i, fa_last_error());
        CHECK(decode(&s) == FA_OK && record->launches == before + 2, "case %d: %s, %d launches", i,
              fa_last_error(), record->launches - before);
    }
}

/* A call that would split its keys runs without a workspace, unless it insists on one, or it is fa_decode with a kernel of its
 * own (needed). */
static void expect_less_workspace(fa_pass pass, int64_t queries, bool needed)
{
    enum { N = 4096, D = 64 };
    use(0);
    fa_status (*const call)(const fa_tensor *, const fa_tensor *, const fa_tensor *,
                            const fa_tensor *, float *, const fa_options *) =
        pass == FA_PASS_DECODE ? fa_decode : fa_forward;
    fa_tensor t[4];
    size_t bytes = 0;
    fa_options o = {.size = sizeof o, .device = FA_DEVICE_CUDA};
    for (int i = 0; i < 4; i++)
        t[i] = fa_bshd(allocate(N * D * 2), FA_BFLOAT16, 1, i == 1 || i == 2 ? N : queries, 1, D);
    CHECK(fa_workspace_size(pass, &t[0], &t[1], &t[2], &t[3], &o, &bytes) == FA_OK && bytes > 0,
          "%zu bytes: %s", bytes, fa_last_error());
    if (!needed) CHECK(call(&t[0], &t[1], &t[2], &t[3], NULL, &o) == FA_OK, "%s", fa_last_error());
    for (int i = needed ? 0 : 1; i < 2; i++) {
        o.flags = i ? FA_FULL_WORKSPACE : 0;
        EXPECT(call(&t[0], &t[1], &t[2], &t[3], NULL, &o), FA_ERROR_WORKSPACE,
               "options.workspace_size is 0: expected at least ", "as fa_workspace_size says");
    }
    o.workspace = allocate_aligned(bytes);
    o.workspace_size = bytes;
    CHECK(call(&t[0], &t[1], &t[2], &t[3], NULL, &o) == FA_OK, "%s", fa_last_error());
}

static void test_full_workspace(void)
{
    expect_less_workspace(FA_PASS_FORWARD, 4096, false);
    expect_less_workspace(FA_PASS_FORWARD, 60, false); /* decode_sm90 */
    expect_less_workspace(FA_PASS_FORWARD, 20, false);
    expect_less_workspace(FA_PASS_DECODE, 4096, false); /* forward_sm90_split */
    expect_less_workspace(FA_PASS_DECODE, 60, true);
}

/* The driver is told that the rounding of dq may overlap the previous kernel. */
static void test_overlapping_launch(void)
{
    enum { N = 160, D = 192 };
    use(0);
    char *memory = allocate_aligned(8 << 20);
    fa_tensor t[8];
    for (int i = 0; i < 8; i++) t[i] = fa_bshd(memory + (i << 17), FA_BFLOAT16, 1, N, 2, D);
    float *lse = (float *)(void *)(memory + (1 << 20));
    const fa_gradients g = {.size = sizeof g, .dout = t[4], .dq = t[5], .dk = t[6], .dv = t[7]};
    fa_options o = {.size = sizeof o, .device = FA_DEVICE_CUDA, .workspace = memory + (2 << 20)};
    o.workspace_size = 4 << 20;
    o.flags = FA_WINDOW; /* else fewer launches would do everything, as at head dims to 128 */
    o.window_left = o.window_right = 100;
    const fake_cuda_record *record = find_record();
    const fa_status status = fa_backward(&t[0], &t[1], &t[2], &t[3], lse, &g, &o);
    CHECK(status == FA_OK && record->launches == 3, "%s, %d launches", fa_last_error(),
          record->launches);
    CHECK(strcmp(record->last.name, "backward_sm90_finish") == 0 && record->last.overlaps == 1,
          "%s, overlaps %d", record->last.name, record->last.overlaps);
}

/* FA_CHECK: nothing is computed if the check finds something; a graph's report comes with the next
 * call. */
static void test_checked_lengths(void)
{
    setenv("FA_CHECK", "1", 1);
    use(0);
    setup s = on_device();
    fake_cuda_record *record = find_record();
    CHECK(forward(&s) == FA_OK && record->launches == 1 && record->waits == 0,
          "nothing to look at: %s", fa_last_error());
    s.o.seqlens_k = allocate(BATCH * sizeof(int32_t));
    CHECK(forward(&s) == FA_OK && record->launches == 3 && record->waits == 1, "fine: %s",
          fa_last_error());
    record->finds = (fa_check_report){FA_CHECK_LENGTH, 1, 1, 900, 0, ROWS, 0};
    EXPECT(forward(&s), FA_ERROR_ARGUMENT, "options.seqlens_k[1] is 900: expected 0 to 5; ",
           "FA_CHECK found it on CUDA device 0");
    EXPECT(weights(&s, allocate(sizeof(float) * BATCH * HEADS * ROWS * ROWS)), FA_ERROR_ARGUMENT,
           "options.seqlens_k[1] is 900", "FA_CHECK found it");
    CHECK(record->launches == 5 && strcmp(record->last.name, "check_simt") == 0, "%d launches, %s",
          record->launches, record->last.name);
    record->capturing = 1;
    CHECK(forward(&s) == FA_OK && record->launches == 7, "captured: %s", fa_last_error());
    record->capturing = 0;
    *record->reported = record->finds;
    record->finds = (fa_check_report){0};
    setup parts = s;
    parts.o.seqlens_k = NULL;
    EXPECT(combine(&parts), FA_ERROR_ARGUMENT, "options.seqlens_k[1] is 900",
           "in an earlier call, which a graph replayed");
    CHECK(record->launches == 7, "the call did something");
    CHECK(forward(&s) == FA_OK && record->launches == 9, "afterwards: %s", fa_last_error());
}

/* Only kernels of another architecture. */
static void test_other_architecture(void)
{
    use(0);
    setup s = on_device();
    setenv("FAKE_CUDA_FAIL", "cuLibraryLoadData=209", 1);
    EXPECT(forward(&s), FA_ERROR_UNSUPPORTED,
           "has architecture 9.0, and this build's kernels are for", "make CUDA=all");
}

static void test_info(void)
{
    fa_cuda_info info;
    CHECK(fa_get_cuda_info(&info) == FA_OK, "info");
    CHECK(info.device_count == 1 && info.driver_version == 13000, "%d devices, driver %d",
          (int)info.device_count, (int)info.driver_version);
    CHECK(strstr(info.detail, "H200") && strstr(info.detail, "(9.0), 141 GiB, 132 SMs"), "%s",
          info.detail);
}

/* ---- in separate processes ------------------------------------------------------------------- */

static int run_alone(void (*scenario)(void))
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        scenario();
        exit(test_end());
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) abort();
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

int main(void)
{
    void (*const scenarios[])(void) = {test_no_driver,
                                       test_old_driver,
                                       test_no_device,
                                       test_no_context,
                                       test_workspace,
                                       test_arguments,
                                       test_host_pointers,
                                       test_other_device,
                                       test_auto,
                                       test_empty,
                                       test_info,
                                       test_combine_places,
                                       test_combine_arrays,
                                       test_append_places,
                                       test_dry_runs,
                                       test_unknown_family,
                                       test_asked_family,
                                       test_asked_backward_family,
                                       test_unknown_backward_family};
    int failures = 0;
    setenv("FA_CUDA_DRIVER", FAKE_CUDA_PATH, 1);
    for (size_t i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++)
        failures += run_alone(scenarios[i]) != 0;
    if (fa_cuda_architectures[0]) {
        failures += run_alone(test_launch) != 0;
        if (strstr(fa_cuda_architectures, "90a")) { /* the fake device's */
            failures += run_alone(test_caches) != 0;
            failures += run_alone(test_decode_step) != 0;
            failures += run_alone(test_padded_decode_step) != 0;
            failures += run_alone(test_overlapping_launch) != 0;
            failures += run_alone(test_full_workspace) != 0;
        }
        failures += run_alone(test_checked_lengths) != 0;
        failures += run_alone(test_other_architecture) != 0;
    } else {
        failures += run_alone(test_no_kernels) != 0;
    }
    printf("%d scenarios failed\n", failures);
    return failures != 0;
}
