/*
 * What the API says when CUDA is asked for and cannot do it, and where it looks for pointers:
 * against a driver that needs no GPU (fake_cuda.c), and against none. The driver is opened once in
 * a process, so each scenario runs in a process of its own.
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

/* Tensors in memory that the fake driver calls its own, and the same on the host. */
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

static fa_status backward(const setup *s)
{
    fa_gradients g = {.size = sizeof g, .dout = s->out, .dq = s->q};
    g.dout.data = s->v.data;
    g.dq.data = NULL;
    return fa_backward(&s->q, &s->k, &s->v, &s->out, s->lse, &g, &s->o);
}

static fa_status weights(const setup *s)
{
    fa_tensor w = fa_bshd(s->out.data, FA_FLOAT32, BATCH, HEADS, ROWS, ROWS);
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

static void test_passes(void)
{
    use(0);
    setup s = on_device();
    EXPECT(backward(&s), FA_ERROR_UNSUPPORTED, "fa_backward is not there yet on CUDA", "CPU");
    EXPECT(weights(&s), FA_ERROR_UNSUPPORTED, "fa_weights is not there yet on CUDA", "CPU");
    EXPECT(combine(&s), FA_ERROR_UNSUPPORTED, "fa_combine is not there yet on CUDA", "CPU");
}

/* Arguments are checked before the device is looked at. */
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
           "lies on CUDA device 1: expected device 0, that of the current context");
}

/* auto goes where q lies, and then all the others must. */
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
           "lies on CUDA device 0: expected host memory");
    s.k.data = host[1];
    s.o.device = FA_DEVICE_CPU;
    s.lse = device.lse;
    EXPECT(forward(&s), FA_ERROR_ARGUMENT, "lse at 0x", "expected host memory");
}

/* No launch, no pointer is looked at. */
static void test_empty(void)
{
    use(0);
    setup s = on_host();
    s.q.shape[0] = s.k.shape[0] = s.v.shape[0] = s.out.shape[0] = 0;
    CHECK(forward(&s) == FA_OK, "an empty problem: %s", fa_last_error());
}

/* A build without kernels says how to get them. */
static void test_no_kernels(void)
{
    setup s = on_host();
    EXPECT(supported(&s), FA_ERROR_UNSUPPORTED, "this build has no CUDA kernels", "make CUDA=all");
    use(0);
    s = on_device();
    EXPECT(forward(&s), FA_ERROR_UNSUPPORTED, "this build has no CUDA kernels", "make CUDA=all");
}

/* With kernels the fake driver takes a launch as planned; a driver's failure is handed on. */
static void test_launch(void)
{
    char text[256];
    use(0);
    setup s = on_device();
    void *library = dlopen(FAKE_CUDA_PATH, RTLD_NOW);
    fake_cuda_record *record = library ? dlsym(library, "fake_cuda") : NULL;
    if (!record) abort();
    int stream;
    s.o.stream = &stream;
    CHECK(forward(&s) == FA_OK, "forward: %s", fa_last_error());
    CHECK(record->launches == 1 && strcmp(record->last.name, "forward_simt") == 0,
          "%d launches, %s", record->launches, record->last.name);
    CHECK(record->last.grid[0] == BATCH * HEADS && record->last.block[0] == 128, "grid %u",
          record->last.grid[0]);
    CHECK(record->last.stream == &stream && record->synchronizations == 0, "stream");
    CHECK(decode(&s) == FA_OK && record->launches == 2, "decode: %s", fa_last_error());
    fa_status status =
        fa_describe(FA_PASS_DECODE, &s.q, &s.k, &s.v, &s.out, &s.o, text, sizeof text);
    CHECK(status == FA_OK && strstr(text, "cuda decode forward_simt_d64: "), "%s", text);
    setenv("FAKE_CUDA_FAIL", "cuLaunchKernelEx=100", 1);
    EXPECT(forward(&s), FA_ERROR_DEVICE, "cuLaunchKernelEx failed on CUDA device 0: ",
           "CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)");
    setenv("FAKE_CUDA_FAIL", "cuLaunchKernelEx=2", 1);
    EXPECT(forward(&s), FA_ERROR_MEMORY, "cuLaunchKernelEx failed", "out of memory");
}

/* Kernels of another architecture only. */
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

/* ---- in processes of their own --------------------------------------------------------------- */

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
    void (*const scenarios[])(void) = {test_no_driver,     test_old_driver,   test_no_device,
                                       test_no_context,    test_passes,       test_arguments,
                                       test_host_pointers, test_other_device, test_auto,
                                       test_empty,         test_info};
    int failures = 0;
    setenv("FA_CUDA_DRIVER", FAKE_CUDA_PATH, 1);
    for (size_t i = 0; i < sizeof scenarios / sizeof scenarios[0]; i++)
        failures += run_alone(scenarios[i]) != 0;
    if (fa_cuda_architectures[0]) {
        failures += run_alone(test_launch) != 0;
        failures += run_alone(test_other_architecture) != 0;
    } else {
        failures += run_alone(test_no_kernels) != 0;
    }
    printf("%d scenarios failed\n", failures);
    return failures != 0;
}
