/*
 * The CUDA driver layer with a driver that needs no GPU (fake_cuda.c): opening, every way in which
 * that fails, what is remembered, the arguments of a launch, first use by many threads at once. The
 * driver is opened once in a process, so each scenario runs in its own process.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "cuda/counters.h"
#include "cuda/checks.h"
#include "cuda/cuda_abi.h"
#include "cuda/driver.h"
#include "cuda/family.h"
#include "cuda/images.h"
#include "cuda/plan_decode.h"
#include "fake_cuda.h"
#include "gpus.h"

static fake_cuda_record *record; /* of the open fake driver */

static void find_record(void)
{
    void *library = dlopen(getenv("FA_CUDA_DRIVER"), RTLD_NOW);
    record = library ? dlsym(library, "fake_cuda") : NULL;
    if (!record) abort();
}

static bool open_fake(void)
{
    fa_cuda_fault fault = {0};
    bool fine = fa_cuda_open(&fault);
    CHECK(fine, "open: %s %s %s", fault.call, fault.name, fault.text);
    find_record();
    return fine;
}

static bool use_fake(int device)
{
    fa_cuda_fault fault;
    return open_fake() && fa_cuda_use_device(device, &fault);
}

/* ---- opening --------------------------------------------------------------------------------- */

static void check_closed(const char *call, int code, const char *name, const char *text)
{
    for (int i = 0; i < 2; i++) { /* the second time from memory */
        fa_cuda_fault fault = {0};
        CHECK(!fa_cuda_open(&fault), "the driver opens");
        CHECK(fault.call && strcmp(fault.call, call) == 0, "call: %s", fault.call);
        CHECK(code == fault.code, "code %d", fault.code);
        CHECK(strcmp(fault.name, name) == 0, "name: %s", fault.name);
        CHECK(strstr(fault.text, text) != NULL, "text: %s", fault.text);
    }
    fa_cuda_device device;
    fa_cuda_fault fault;
    int ordinal, variable;
    void *pointer;
    fa_cuda_image image = {.name = "x", .data = (const unsigned char *)"x"};
    CHECK(fa_cuda_device_count() == 0, "devices without a driver");
    CHECK(!fa_cuda_get_device(0, &device, &fault), "a device without a driver");
    CHECK(!fa_cuda_current_device(&ordinal, &fault) && ordinal == -1, "a current device");
    CHECK(fa_cuda_device_of(&ordinal) == -1, "memory on a device");
    CHECK(!fa_cuda_use_device(0, &fault), "a device can be used");
    CHECK(!fa_cuda_allocate(&pointer, 4, &fault) && !pointer, "memory can be allocated");
    CHECK(!fa_cuda_find_kernel(&image, "first", &pointer, &fault) && !pointer, "a kernel is found");
    CHECK(!fa_cuda_read_variable(&image, "variable", &variable, 4, &fault), "a variable is read");
    CHECK(!fa_cuda_event_new(&pointer, &fault), "an event is made");
    CHECK(!fa_cuda_synchronize(&fault), "synchronizes");
    fa_cuda_free(NULL);
    fa_cuda_event_free(NULL);
}

static void test_no_driver(void)
{
    setenv("FA_CUDA_DRIVER", "/no/such/libcuda.so", 1);
    check_closed("dlopen", 0, "no driver", "/no/such/libcuda.so");
    CHECK(fa_cuda_driver_version() == 0, "version %d", fa_cuda_driver_version());
}

static void test_no_library(void) /* a file that is no library */
{
    setenv("FA_CUDA_DRIVER", "/etc/passwd", 1);
    check_closed("dlopen", 0, "no driver", "/etc/passwd");
}

static void test_foreign_library(void) /* a library that is no driver */
{
    setenv("FA_CUDA_DRIVER", "libc.so.6", 1);
    check_closed("dlsym", 0, "missing function", "cuDriverGetVersion");
}

static void test_old_version(void)
{
    setenv("FAKE_CUDA_VERSION", "11080", 1);
    check_closed("cuDriverGetVersion", 11080, "driver too old", "CUDA 11.8; CUDA 12.0 or newer");
    CHECK(fa_cuda_driver_version() == 11080, "version %d", fa_cuda_driver_version());
}

static void test_missing_function(void)
{
    setenv("FA_CUDA_DRIVER", FAKE_CUDA_OLD_PATH, 1);
    check_closed("dlsym", 0, "missing function", "cuLibraryLoadData");
    CHECK(fa_cuda_driver_version() == 13000, "version %d", fa_cuda_driver_version());
}

static void test_no_gpu(void)
{
    setenv("FAKE_CUDA_FAIL", "cuInit=100", 1);
    check_closed("cuInit", 100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected");
    find_record();
    CHECK(record->inits == 1, "cuInit called %d times", record->inits);
}

static void test_unknown_code(void)
{
    setenv("FAKE_CUDA_FAIL", "cuInit=12345", 1);
    check_closed("cuInit", 12345, "unknown error", "no text");
}

static void test_version_fails(void)
{
    setenv("FAKE_CUDA_FAIL", "cuDriverGetVersion=100", 1);
    check_closed("cuDriverGetVersion", 100, "CUDA_ERROR_NO_DEVICE", "detected");
}

static void test_no_fault_wanted(void)
{
    setenv("FAKE_CUDA_FAIL", "cuInit=100", 1);
    CHECK(!fa_cuda_open(NULL), "the driver opens");
}

/* ---- devices --------------------------------------------------------------------------------- */

static void test_devices(void)
{
    setenv("FAKE_CUDA_DEVICES", "2", 1);
    fa_cuda_device device = {0};
    fa_cuda_fault fault = {0};
    if (!open_fake()) return;
    CHECK(fa_cuda_device_count() == 2 && fa_cuda_driver_version() == 13000, "count, version");
    CHECK(fa_cuda_get_device(1, &device, &fault), "device 1: %s", fault.text);
    CHECK(device.ordinal == 1 && device.major == 9 && device.minor == 0, "capability");
    CHECK(device.multiprocessors == 132 && device.smem_per_block == 232448, "numbers");
    CHECK(device.smem_per_sm == 233472 && device.registers_per_sm == 65536, "numbers");
    CHECK(device.overlaps, "launches do not overlap");
    CHECK(device.l2_bytes == 62914560 && device.memory_bytes == (int64_t)141 << 30, "sizes");
    CHECK(strcmp(device.name, "NVIDIA H200 (fake 1)") == 0, "name %s", device.name);
    int read = record->attributes_read;
    fa_cuda_device again = {0};
    CHECK(fa_cuda_get_device(1, &again, &fault) && !memcmp(&device, &again, sizeof device),
          "the second description differs");
    CHECK(record->attributes_read == read, "a description is read twice");
    CHECK(!fa_cuda_get_device(2, &device, &fault) && fault.code == 101, "device 2 of 2");
    CHECK(!fa_cuda_get_device(-1, &device, &fault) && fault.code == 101, "device -1");
}

static void test_device_fails(void)
{
    setenv("FAKE_CUDA_FAIL", "cuDeviceTotalMem_v2=2", 1);
    fa_cuda_device device;
    fa_cuda_fault fault = {0};
    if (!open_fake()) return;
    for (int i = 0; i < 2; i++) /* a failure is not remembered as a description */
        CHECK(!fa_cuda_get_device(0, &device, &fault) && fault.code == 2 &&
                  !strcmp(fault.call, "cuDeviceTotalMem"),
              "a description without its memory");
}

static void test_current_device(void)
{
    setenv("FAKE_CUDA_DEVICES", "2", 1);
    fa_cuda_fault fault = {0};
    int ordinal = 7;
    if (!open_fake()) return;
    CHECK(fa_cuda_current_device(&ordinal, &fault) && ordinal == -1, "no context: %d", ordinal);
    CHECK(fa_cuda_use_device(1, &fault), "use: %s", fault.text);
    CHECK(fa_cuda_current_device(&ordinal, &fault) && ordinal == 1, "current: %d", ordinal);
    CHECK(!fa_cuda_use_device(2, &fault) && fault.code == 101, "device 2 of 2");
    setenv("FAKE_CUDA_FAIL", "cuCtxGetDevice=2", 1);
    CHECK(!fa_cuda_current_device(&ordinal, &fault) && ordinal == -1 && fault.code == 2, "failure");
}

/* ---- memory and time ------------------------------------------------------------------------- */

static void test_memory(void)
{
    setenv("FAKE_CUDA_DEVICES", "2", 1);
    fa_cuda_fault fault = {0};
    void *pointer;
    char in[8] = "abcdefg", out[8] = "";
    size_t left = 0;
    if (!use_fake(1)) return;
    CHECK(fa_cuda_allocate(&pointer, 100, &fault) && pointer, "allocate");
    CHECK(fa_cuda_device_of(pointer) == 1 && fa_cuda_device_of((char *)pointer + 99) == 1,
          "memory of device 1 is on device %d", fa_cuda_device_of(pointer));
    CHECK(fa_cuda_device_of(in) == -1, "host memory is on device %d", fa_cuda_device_of(in));
    uintptr_t first = 1;
    size_t bytes = 1;
    CHECK(fa_cuda_allocation_of((char *)pointer + 99, &first, &bytes) == 1 &&
              first == (uintptr_t)pointer && bytes == 100,
          "an allocation of %zu bytes", bytes);
    CHECK(fa_cuda_allocation_of(in, &first, &bytes) == -1 && bytes == 0, "host memory: %zu", bytes);
    CHECK(fa_cuda_fill(pointer, 0xff, 100, &fault) && fa_cuda_copy_in(pointer, in, 4, &fault) &&
              fa_cuda_copy_out(out, pointer, 8, &fault),
          "copies");
    CHECK(!memcmp(out, "abcd\xff\xff\xff\xff", 8), "what was copied");
    CHECK(fa_cuda_memory_left(&left, &fault) && left == (size_t)140 << 30, "left");
    fa_cuda_free(pointer);
    CHECK(fa_cuda_device_of(pointer) == -1, "freed memory is on a device");
    setenv("FAKE_CUDA_FAIL", "cuMemAlloc_v2=2", 1);
    CHECK(!fa_cuda_allocate(&pointer, 100, &fault) && !pointer, "allocation that fails");
    CHECK(!strcmp(fault.call, "cuMemAlloc") && !strcmp(fault.name, "CUDA_ERROR_OUT_OF_MEMORY") &&
              !strcmp(fault.text, "out of memory"),
          "its fault: %s %s %s", fault.call, fault.name, fault.text);
    setenv("FAKE_CUDA_FAIL", "cuPointerGetAttributes=201", 1);
    CHECK(fa_cuda_device_of(in) == -1, "a query that fails");
}

static void test_events(void)
{
    fa_cuda_fault fault = {0};
    void *begin = NULL, *end = NULL;
    double seconds = 0;
    if (!use_fake(0)) return;
    CHECK(fa_cuda_event_new(&begin, &fault) && fa_cuda_event_new(&end, &fault), "new events");
    record->milliseconds = 1000;
    CHECK(fa_cuda_event_record(begin, NULL, &fault), "record");
    record->milliseconds = 1002.5;
    CHECK(fa_cuda_event_record(end, NULL, &fault), "record");
    CHECK(fa_cuda_event_seconds(begin, end, &seconds, &fault) && seconds > 2.4e-3 &&
              seconds < 2.6e-3,
          "%g seconds", seconds);
    CHECK(fa_cuda_synchronize(&fault) && record->synchronizations == 1, "synchronize");
    fa_cuda_event_free(begin);
    fa_cuda_event_free(end);
}

/* ---- kernels --------------------------------------------------------------------------------- */

static fa_cuda_image image_a = {.name = "a", .data = (const unsigned char *)"image a"};
static fa_cuda_image image_b = {.name = "b", .data = (const unsigned char *)"image b"};

static void test_kernels(void)
{
    fa_cuda_fault fault = {0};
    void *first = NULL, *second = NULL, *again = NULL, *other = NULL;
    if (!use_fake(0)) return;
    CHECK(record->loads == 0, "an image is loaded before it is needed");
    CHECK(fa_cuda_find_kernel(&image_a, "first", &first, &fault) &&
              fa_cuda_find_kernel(&image_a, "second", &second, &fault) &&
              fa_cuda_find_kernel(&image_a, "first", &again, &fault) &&
              fa_cuda_find_kernel(&image_b, "first", &other, &fault),
          "find: %s", fault.text);
    CHECK(first == again && first != second && first != other,
          "one kernel for each name and image");
    CHECK(record->loads == 2 && record->kernels == 3, "%d loads, %d kernels", record->loads,
          record->kernels);
    CHECK(!fa_cuda_find_kernel(&image_a, "no_such", &again, &fault) && !again &&
              fault.code == 500 && !strcmp(fault.call, "cuLibraryGetKernel"),
          "a kernel that is not there");
    fa_cuda_kernel_facts facts;
    CHECK(fa_cuda_kernel_facts_of(first, 0, &facts, &fault) && facts.registers == 168 &&
              facts.local_bytes == 8 && facts.static_smem_bytes == 512,
          "facts");
}

static void test_load_fails(void)
{
    fa_cuda_fault fault = {0};
    void *kernel;
    if (!use_fake(0)) return;
    setenv("FAKE_CUDA_FAIL", "cuLibraryLoadData=2", 1);
    CHECK(!fa_cuda_find_kernel(&image_a, "first", &kernel, &fault) && !kernel && fault.code == 2,
          "an image that does not load");
    unsetenv("FAKE_CUDA_FAIL");
    CHECK(fa_cuda_find_kernel(&image_a, "first", &kernel, &fault), "the second attempt");
}

static void test_variables(void)
{
    fa_cuda_fault fault = {0};
    int values[5] = {0};
    if (!open_fake()) return;
    CHECK(!fa_cuda_read_variable(&image_a, "variable", values, 16, &fault) && fault.code == 201,
          "a variable without a context");
    if (!use_fake(0)) return;
    CHECK(fa_cuda_read_variable(&image_a, "variable", values, 12, &fault), "%s", fault.text);
    CHECK(values[0] == 1 && values[2] == 3 && values[3] == 0, "its value");
    CHECK(!fa_cuda_read_variable(&image_a, "variable", values, 20, &fault) &&
              strstr(fault.text, "variable has 16 bytes; 20"),
          "beyond its end: %s", fault.text);
    CHECK(!fa_cuda_read_variable(&image_a, "no_such", values, 4, &fault), "no such variable");
    CHECK(record->loads == 1, "%d loads", record->loads);
}

/* ---- launches -------------------------------------------------------------------------------- */

static bool launch_on(int device, void *kernel, uint32_t smem, fa_cuda_fault *fault)
{
    int value = 42;
    void *parameters[] = {&value};
    const fa_cuda_launch l = {
        .device = device, .grid = {5, 6, 7}, .threads = 128, .smem_bytes = smem, .stream = record};
    return fa_cuda_launch_kernel(kernel, &l, parameters, fault);
}

static bool launch(void *kernel, uint32_t smem, fa_cuda_fault *fault)
{
    return launch_on(0, kernel, smem, fault);
}

/* Before CUDA 12.3 a graph cannot contain launches that overlap: they begin one after another. */
static void test_no_overlap(void)
{
    fa_cuda_fault fault = {0};
    void *kernel;
    int value = 43;
    void *parameters[] = {&value};
    fa_cuda_device device = {.overlaps = true};
    setenv("FAKE_CUDA_VERSION", "12020", 1);
    if (!use_fake(0) || !fa_cuda_get_device(0, &device, &fault) ||
        !fa_cuda_find_kernel(&image_a, "first", &kernel, &fault))
        return;
    const fa_cuda_launch l = {.grid = {4, 1, 1}, .threads = 384, .overlaps = true};
    CHECK(fa_cuda_launch_kernel(kernel, &l, parameters, &fault) &&
              record->last.num_attributes == 0 && !record->last.overlaps,
          "a launch overlaps with CUDA 12.2");
    CHECK(!device.overlaps, "the planner believes that launches overlap");
}

static void test_launches(void)
{
    fa_cuda_fault fault = {0};
    void *kernel;
    int value = 43;
    void *parameters[] = {&value};
    if (!use_fake(0) || !fa_cuda_find_kernel(&image_a, "first", &kernel, &fault)) return;
    CHECK(launch(kernel, 0, &fault), "%s", fault.text);
    const fake_cuda_launch *l = &record->last;
    CHECK(!strcmp(l->name, "first") && l->first_parameter == 42 && l->stream == record, "what");
    CHECK(l->grid[0] == 5 && l->grid[1] == 6 && l->grid[2] == 7, "the grid");
    CHECK(l->block[0] == 128 && l->block[1] == 1 && l->block[2] == 1, "the block");
    CHECK(l->num_attributes == 0 && l->smem_bytes == 0, "no cluster, no memory");
    const fa_cuda_launch clustered = {.grid = {4, 1, 1}, .threads = 384, .cluster = 2};
    CHECK(fa_cuda_launch_kernel(kernel, &clustered, parameters, &fault), "%s", fault.text);
    CHECK(l->num_attributes == 1 && l->cluster[0] == 2 && l->cluster[1] == 1 && l->cluster[2] == 1,
          "a cluster of 2");
    CHECK(l->first_parameter == 43 && !l->stream, "the default stream");
    const fa_cuda_launch alone = {.grid = {4, 1, 1}, .threads = 384, .cluster = 1};
    CHECK(fa_cuda_launch_kernel(kernel, &alone, parameters, &fault) && l->num_attributes == 0,
          "a cluster of 1 is none");
    const fa_cuda_launch overlapping = {
        .grid = {4, 1, 1}, .threads = 384, .cluster = 2, .overlaps = true};
    CHECK(!l->overlaps && fa_cuda_launch_kernel(kernel, &overlapping, parameters, &fault) &&
              l->num_attributes == 2 && l->cluster[0] == 2 && l->overlaps == 1,
          "a launch that overlaps");
    const fa_cuda_launch empty = {.grid = {0, 1, 1}, .threads = 384};
    CHECK(!fa_cuda_launch_kernel(kernel, &empty, parameters, &fault) &&
              !strcmp(fault.call, "cuLaunchKernelEx"),
          "an empty grid");
    CHECK(record->synchronizations == 0 && record->allocations == 0,
          "a launch synchronizes or allocates");
}

/* Once for each kernel and device, and again only for more. */
static void test_shared_memory(void)
{
    setenv("FAKE_CUDA_DEVICES", "2", 1);
    fa_cuda_fault fault = {0};
    void *first, *second;
    if (!use_fake(0) || !fa_cuda_find_kernel(&image_a, "first", &first, &fault) ||
        !fa_cuda_find_kernel(&image_a, "second", &second, &fault))
        return;
    for (int i = 0; i < 3; i++) CHECK(launch(first, 100000, &fault), "%s", fault.text);
    CHECK(record->opt_ins == 1, "%d opt-ins for one size", record->opt_ins);
    CHECK(launch(first, 50000, &fault) && record->opt_ins == 1, "less asks again");
    CHECK(launch(first, 232448, &fault) && record->opt_ins == 2, "more does not ask");
    CHECK(record->last.smem_bytes == 232448, "bytes");
    CHECK(launch(second, 100000, &fault) && record->opt_ins == 3, "another kernel");
    CHECK(!launch(first, 232449, &fault) && !strcmp(fault.call, "cuKernelSetAttribute"),
          "more than there is");
    CHECK(launch(first, 232448, &fault), "after a failure: %s", fault.text);
    CHECK(fa_cuda_use_device(1, &fault), "use device 1");
    CHECK(launch_on(1, first, 100000, &fault) && record->opt_ins == 4, "another device");
    for (int i = 0; i < 3; i++) CHECK(launch_on(1, first, 100000, &fault), "%s", fault.text);
    CHECK(record->opt_ins == 4 && record->contexts_asked == 0, "the driver is asked again");
}

static void test_no_context(void)
{
    fa_cuda_fault fault = {0};
    void *kernel;
    if (!open_fake()) return;
    CHECK(fa_cuda_find_kernel(&image_a, "first", &kernel, &fault), "finding needs no context");
    CHECK(!launch(kernel, 0, &fault) && fault.code == 201, "launch without a context");
    CHECK(!launch(kernel, 50000, &fault) && fault.code == 201, "with shared memory");
}

/* The first use of a kernel may be in a stream's capture. */
static void test_capture(void)
{
    fa_cuda_fault fault = {0};
    void *kernel;
    if (!use_fake(0)) return;
    record->capturing = 1;
    CHECK(fa_cuda_find_kernel(&image_a, "first", &kernel, &fault), "loading: %d", fault.code);
    CHECK(launch(kernel, 100000, &fault), "opting in: %d", fault.code);
    CHECK(record->synchronizations == 0 && record->allocations == 0, "synchronizes or allocates");
    int mode = 1;
    void *library = dlopen(getenv("FA_CUDA_DRIVER"), RTLD_NOW);
    cu_result (*exchange)(int *);
    void *address = library ? dlsym(library, "cuThreadExchangeStreamCaptureMode") : NULL;
    if (!address) abort();
    memcpy(&exchange, &address, sizeof exchange);
    CHECK(exchange(&mode) == 0 && mode == 0, "the thread's capture mode is left at %d", mode);
}

/* ---- counters -------------------------------------------------------------------------------- */

enum { COUNTERS = FA_CUDA_STREAM_COUNTERS + 44 };

static void *stream_number(int number) { return (void *)(uintptr_t)(number * 64); }

/* The number of a launch on that stream, which has been queued when this returns. */
static int32_t counter_of(int stream)
{
    const fa_cuda_counter counter = fa_cuda_counter_take(stream_number(stream), COUNTERS);
    fa_cuda_counter_release(counter, stream_number(stream));
    return counter.number;
}

/* Launches that may run at the same time have different counters. */
static void test_counters(void)
{
    bool taken[COUNTERS] = {false};
    if (!use_fake(0)) return;
    for (int stream = 0; stream < FA_CUDA_STREAM_COUNTERS; stream++) {
        const int32_t number = counter_of(stream);
        CHECK(number == counter_of(stream), "it changes");
        CHECK(number >= 0 && number < FA_CUDA_STREAM_COUNTERS && !taken[number], "stream %d: %d",
              stream, number);
        if (number >= 0) taken[number] = true;
        CHECK(stream >= FA_CUDA_OWN_COUNTERS || record->events == 0, "an event for stream %d",
              stream);
    }
    setenv("FAKE_CUDA_FAIL", "cuStreamGetId=1", 1);
    CHECK(counter_of(0) == -1, "of a stream without an id");
    setenv("FAKE_CUDA_FAIL", "cuStreamIsCapturing=906", 1);
    CHECK(counter_of(0) == -1, "while another stream is captured");
    setenv("FAKE_CUDA_FAIL", "cuStreamGetCtx=801", 1);
    CHECK(counter_of(9999) == -1, "of a later stream without a context");
    unsetenv("FAKE_CUDA_FAIL");
    CHECK(fa_cuda_counter_take(stream_number(9999), 10).number == -1, "of too few counters");
}

/* A stream without a counter gets the counter of another stream whose launches are known to have
 * ended. */
static void test_shared_counters(void)
{
    enum { FIRST = FA_CUDA_OWN_COUNTERS, LAST = FA_CUDA_STREAM_COUNTERS };
    if (!use_fake(0)) return;
    for (int stream = 0; stream < LAST; stream++) counter_of(stream);
    /* Not of FIRST, because the next line uses that stream again. */
    const int32_t oldest = counter_of(FIRST + 1);
    CHECK(counter_of(FIRST) == FA_CUDA_OWN_COUNTERS, "the first shared number");
    counter_of(FIRST + 1);
    record->busy = (uintptr_t)stream_number(FIRST);
    CHECK(counter_of(LAST) == -1, "all streams are busy");
    CHECK(counter_of(FIRST + 5) == FA_CUDA_OWN_COUNTERS + 5, "a busy stream's own counter");
    CHECK(counter_of(0) == 0, "a stream that keeps its counter");
    record->busy = (uintptr_t)stream_number(FIRST + 2);
    CHECK(counter_of(LAST) == FA_CUDA_OWN_COUNTERS, "the least recently used stream that is done");
    CHECK(counter_of(LAST + 1) == oldest, "the next one");
    CHECK(counter_of(FIRST) == -1, "its counter is gone, and the others are busy");
    record->busy = 0;
    CHECK(counter_of(FIRST) == FA_CUDA_OWN_COUNTERS + 2, "then the oldest");

    /* A launch that is not queued yet counts as one that has not ended. */
    fa_cuda_counter open[FA_CUDA_SHARED_COUNTERS];
    for (int i = 0; i < FA_CUDA_SHARED_COUNTERS; i++)
        open[i] = fa_cuda_counter_take(stream_number(2000 + i), COUNTERS);
    CHECK(counter_of(3000) == -1, "all are being launched");
    setenv("FAKE_CUDA_FAIL", "cuEventRecord=1", 1);
    fa_cuda_counter_release(open[0], stream_number(2000));
    unsetenv("FAKE_CUDA_FAIL");
    CHECK(counter_of(3000) == -1, "a launch without an event behind it");
    fa_cuda_counter_release(open[1], stream_number(2001));
    CHECK(counter_of(3000) == open[1].number, "the one that is done");
    CHECK(counter_of(2000) == open[0].number, "the stream without an event");
    for (int i = 2; i < FA_CUDA_SHARED_COUNTERS; i++)
        fa_cuda_counter_release(open[i], stream_number(2000 + i));
    setenv("FAKE_CUDA_FAIL", "cuEventQuery=1", 1);
    CHECK(counter_of(4000) == -1, "nothing is known to be done");
    unsetenv("FAKE_CUDA_FAIL");
    for (int stream = 5000; stream < 50000; stream++)
        CHECK(counter_of(stream) >= FA_CUDA_OWN_COUNTERS, "stream %d", stream);
}

static void end_graph(void)
{
    for (int i = 0; i < record->num_kept; i++) record->kept[i].destroy(record->kept[i].data);
    record->num_kept = 0;
}

/* Each captured call has its own counter, as long as the graph exists. */
static void test_captured_counters(void)
{
    bool taken[COUNTERS] = {false};
    if (!use_fake(0)) return;
    counter_of(0);
    record->capturing = 1;
    for (int call = FA_CUDA_STREAM_COUNTERS; call < COUNTERS; call++) {
        const int32_t number = counter_of(0);
        CHECK(number >= FA_CUDA_STREAM_COUNTERS && number < COUNTERS && !taken[number],
              "captured call %d: %d", call, number);
        if (number >= 0) taken[number] = true;
    }
    CHECK(counter_of(0) == -1, "more captured calls than counters");
    end_graph();
    for (int graph = 0; graph < 100; graph++) {
        const int32_t number = counter_of(0), other = counter_of(0);
        CHECK(number >= FA_CUDA_STREAM_COUNTERS && other >= FA_CUDA_STREAM_COUNTERS &&
                  number != other,
              "graph %d: %d and %d", graph, number, other);
        end_graph();
    }
    setenv("FAKE_CUDA_FAIL", "cuUserObjectCreate=2", 1);
    for (int call = 0; call < 100; call++) CHECK(counter_of(0) == -1, "no object");
    setenv("FAKE_CUDA_FAIL", "cuGraphRetainUserObject=2", 1);
    for (int call = 0; call < 100; call++) CHECK(counter_of(0) == -1, "an object not kept");
    setenv("FAKE_CUDA_FAIL", "cuStreamGetCaptureInfo_v2=1", 1);
    for (int call = 0; call < 100; call++) CHECK(counter_of(0) == -1, "an unknown graph");
    unsetenv("FAKE_CUDA_FAIL");
    CHECK(counter_of(0) >= FA_CUDA_STREAM_COUNTERS, "a number has not come back");
    end_graph();
    record->capturing = 0;
    CHECK(counter_of(0) == 0, "the stream's own");
}

/* ---- decode ---------------------------------------------------------------------------------- */

/* The number of launches for a problem of a family whose keys are divided into parts; -1: it
 * fails. */
static int count_launches(const fa_problem *p, const fa_cuda_family *family, void *kernel,
                          int64_t parts)
{
    const fa_cuda_call call = {.problem = p, .stream = stream_number(1)};
    fa_cuda_plan plan;
    fa_cuda_fault fault;
    char why[200] = "";
    if (!fa_cuda_plan_make(p, &devices[H200], family, &plan, why, sizeof why) ||
        plan.family != family)
        return -1;
    fa_cuda_cut_decode(&plan.launches[0], 0, parts, 1);
    const int before = record->launches;
    void *const kernels[FA_CUDA_LAUNCHES] = {kernel, kernel};
    if (!fa_cuda_plan_queue(&plan, kernels, &call, &fault)) return -1;
    return record->launches - before;
}

/* The same for a decode call with this many sequences. */
static int count_decode_launches(void *kernel, int64_t batch, int64_t parts)
{
    static char memory[64];
    const fa_view view = {.data = memory, .dtype = FA_FLOAT16, .stride = {64, 64, 64, 1}};
    const fa_problem p = {.pass = FA_PASS_DECODE,
                          .batch = batch,
                          .heads_q = 8,
                          .heads_kv = 2,
                          .n_q = 1,
                          .n_k = 4096,
                          .rows_q = 1,
                          .rows_k = 4096,
                          .d = 64,
                          .d_v = 64,
                          .q = view,
                          .k = view,
                          .v = view,
                          .out = view,
                          .window_left = -1,
                          .window_right = -1,
                          .workspace = memory};
    const int count = count_launches(&p, &fa_cuda_decode, kernel, parts);
    if (count < 0) return count;
    const int64_t tiles = 2 * batch;
    CHECK(record->last.grid[0] == (count == 1 ? tiles * parts : tiles), "%u blocks",
          record->last.grid[0]);
    return count;
}

/* One launch, or two if a block cannot find out that it is the last one of its sequence. */
static void test_decode_launches(void)
{
    fa_cuda_fault fault;
    void *kernel;
    if (!use_fake(0) || !fa_cuda_find_kernel(&image_a, "first", &kernel, &fault)) return;
    CHECK(count_decode_launches(kernel, 4, 7) == 1, "the last block merges");
    CHECK(count_decode_launches(kernel, FA_DECODE_COUNTERS / 2, 7) == 1, "as many as are counted");
    CHECK(count_decode_launches(kernel, FA_DECODE_COUNTERS / 2 + 1, 7) == 2, "too many");
    CHECK(count_decode_launches(kernel, FA_DECODE_COUNTERS, 1) == 1, "keys are not cut");
    setenv("FAKE_CUDA_FAIL", "cuStreamIsCapturing=906", 1);
    CHECK(count_decode_launches(kernel, 4, 7) == 2, "without counters");
    setenv("FAKE_CUDA_FAIL", "cuLaunchKernelEx=1", 1);
    CHECK(count_decode_launches(kernel, 4, 7) == -1, "a launch that fails");
    unsetenv("FAKE_CUDA_FAIL");
}

/* For latent attention with many heads; -1: it fails. */
static int count_latent_launches(void *kernel, int64_t parts)
{
    static _Alignas(16) char memory[64];
    const fa_view keys = {.data = memory, .dtype = FA_FLOAT16, .stride = {4096 * 576, 576, 576, 1}};
    const fa_problem p = {.pass = FA_PASS_DECODE,
                          .batch = 4,
                          .heads_q = 128,
                          .heads_kv = 1,
                          .n_q = 1,
                          .n_k = 4096,
                          .rows_q = 1,
                          .rows_k = 4096,
                          .blocks_q = 4,
                          .blocks_k = 4,
                          .d = 576,
                          .d_v = 512,
                          .q = keys,
                          .k = keys,
                          .v = keys,
                          .out = keys,
                          .window_left = -1,
                          .window_right = -1,
                          .workspace = memory};
    const int count = count_launches(&p, &fa_cuda_decode_latent_sm90, kernel, parts);
    if (count < 0) return count;
    CHECK(record->last.grid[0] == 8 * (uint32_t)parts, "%u blocks", record->last.grid[0]);
    return count;
}

/* A second launch merges, with as many blocks as the first one, unless the later one of two blocks can. */
static void test_latent_launches(void)
{
    fa_cuda_fault fault;
    void *kernel;
    if (!use_fake(0) || !fa_cuda_find_kernel(&image_a, "first", &kernel, &fault)) return;
    setenv("FAKE_CUDA_FAIL", "cuTensorMapEncodeTiled=1", 1);
    CHECK(count_latent_launches(kernel, 16) == -1, "a map that fails");
    unsetenv("FAKE_CUDA_FAIL");
    CHECK(count_latent_launches(kernel, 1) == 1, "keys are not cut");
    CHECK(count_latent_launches(kernel, 16) == 2, "parts are merged");
    CHECK(count_latent_launches(kernel, 2) == 1, "the later block merges");
    setenv("FAKE_CUDA_FAIL", "cuStreamIsCapturing=906", 1);
    CHECK(count_latent_launches(kernel, 2) == 2, "without counters");
    setenv("FAKE_CUDA_FAIL", "cuLaunchKernelEx=1", 1);
    CHECK(count_latent_launches(kernel, 16) == -1, "a launch that fails");
    unsetenv("FAKE_CUDA_FAIL");
}

/* The same for decode_sm90, whose tensor maps are made before the launches; -1: it fails. */
static int count_sm90_launches(void *kernel, int64_t parts)
{
    static _Alignas(16) char memory[64];
    const fa_view view = {.data = memory, .dtype = FA_FLOAT16, .stride = {4096 * 128, 128, 64, 1}};
    const fa_problem p = {.pass = FA_PASS_DECODE,
                          .batch = 4,
                          .heads_q = 8,
                          .heads_kv = 2,
                          .n_q = 1,
                          .n_k = 4096,
                          .rows_q = 1,
                          .rows_k = 4096,
                          .blocks_q = 4,
                          .blocks_k = 4,
                          .d = 64,
                          .d_v = 64,
                          .q = view,
                          .k = view,
                          .v = view,
                          .out = view,
                          .window_left = -1,
                          .window_right = -1,
                          .workspace = memory};
    return count_launches(&p, &fa_cuda_decode_sm90, kernel, parts);
}

static void test_sm90_launches(void)
{
    fa_cuda_fault fault;
    void *kernel;
    if (!use_fake(0) || !fa_cuda_find_kernel(&image_a, "first", &kernel, &fault)) return;
    setenv("FAKE_CUDA_FAIL", "cuTensorMapEncodeTiled=1", 1);
    CHECK(count_sm90_launches(kernel, 7) == -1, "a map that fails");
    unsetenv("FAKE_CUDA_FAIL");
    CHECK(count_sm90_launches(kernel, 1) == 1, "keys are not cut");
    CHECK(count_sm90_launches(kernel, 7) == 1, "the last block merges");
    CHECK(record->last.overlaps == 1, "it does not overlap");
    setenv("FAKE_CUDA_FAIL", "cuStreamIsCapturing=906", 1);
    CHECK(count_sm90_launches(kernel, 7) == 2, "without counters");
    setenv("FAKE_CUDA_FAIL", "cuLaunchKernelEx=1", 1);
    CHECK(count_sm90_launches(kernel, 7) == -1, "a launch that fails");
    unsetenv("FAKE_CUDA_FAIL");
}

/* The number of launches for a mixed batch whose two launches run at the same time, with this many
 * parts for the few queries; -1: it fails. */
static int count_mixed_launches(void *kernel, int64_t parts)
{
    static _Alignas(16) char memory[64];
    static int32_t numbers[65];
    const fa_view view = {
        .data = memory, .dtype = FA_FLOAT16, .stride = {64 * 8 * 128, 8 * 128, 128, 1}};
    const fa_problem p = {.pass = FA_PASS_FORWARD,
                          .causal = true,
                          .batch = 64,
                          .heads_q = 8,
                          .heads_kv = 8,
                          .n_q = 60 + 4 * 2048,
                          .rows_q = 60 + 4 * 2048,
                          .max_q = 2048,
                          .n_k = 8192,
                          .rows_k = 64,
                          .blocks_q = 1,
                          .blocks_k = 8192,
                          .block_table = numbers,
                          .block_table_stride = 128,
                          .seqlens_k = numbers,
                          .cu_seqlens_q = numbers,
                          .d = 128,
                          .d_v = 128,
                          .scale = 0.1f,
                          .q = view,
                          .k = view,
                          .v = view,
                          .out = view,
                          .window_left = -1,
                          .window_right = -1,
                          .workspace = memory};
    const int count = count_launches(&p, &fa_cuda_forward_mixed_beside, kernel, parts);
    if (count < 0) return count;
    CHECK(record->last.overlaps == 1, "the second launch waits for the first one");
    return count;
}

static void test_mixed_launches(void)
{
    fa_cuda_fault fault;
    void *kernel;
    if (!use_fake(0) || !fa_cuda_find_kernel(&image_a, "first", &kernel, &fault)) return;
    CHECK(count_mixed_launches(kernel, 1) == 2, "keys are not cut");
    CHECK(count_mixed_launches(kernel, 7) == 2, "the last group merges");
    setenv("FAKE_CUDA_FAIL", "cuStreamIsCapturing=906", 1);
    CHECK(count_mixed_launches(kernel, 1) == 2, "one part, without counters");
    CHECK(count_mixed_launches(kernel, 7) == 3, "without counters");
    setenv("FAKE_CUDA_FAIL", "cuLaunchKernelEx=1", 1);
    CHECK(count_mixed_launches(kernel, 7) == -1, "a launch that fails");
    unsetenv("FAKE_CUDA_FAIL");
}

/* The kernel has fewer sets of counters than there are counters for captured calls. */
static void test_captured_decode(void)
{
    enum { SETS = FA_DECODE_COUNTER_SETS - FA_CUDA_STREAM_COUNTERS };
    fa_cuda_fault fault;
    void *kernel;
    int two = 0;
    if (!use_fake(0) || !fa_cuda_find_kernel(&image_a, "first", &kernel, &fault)) return;
    CHECK(count_decode_launches(kernel, 4, 7) == 1, "before");
    record->capturing = 1;
    for (int i = 0; i < SETS; i++) {
        two += count_decode_launches(kernel, 4, 7) != 1;
        if (record->num_kept < FAKE_CUDA_KEPT) continue;
        for (int kept = 0; kept < FAKE_CUDA_KEPT; kept++) free(record->kept[kept].data);
        record->num_kept = 0; /* graphs that remain */
    }
    CHECK(two == 0, "%d of %d captured calls have two launches", two, SETS);
    CHECK(count_decode_launches(kernel, 4, 7) == 2, "behind the last set of counters");
}

/* ---- tensor maps ----------------------------------------------------------------------------- */

/* Every element type is the driver's, and boxes are at most 128 bytes wide. */
static void check_elements(fa_tensor_map_shape shape)
{
    static const struct {
        fa_element element;
        int bytes, type;
    } cases[] = {{FA_ELEMENT_FLOAT32, 4, CU_MAP_FLOAT32},
                 {FA_ELEMENT_TF32, 4, CU_MAP_TF32},
                 {FA_ELEMENT_FLOAT16, 2, CU_MAP_FLOAT16},
                 {FA_ELEMENT_BFLOAT16, 2, CU_MAP_BFLOAT16},
                 {FA_ELEMENT_FLOAT8_E4M3, 1, CU_MAP_UINT8}};
    fa_cuda_fault fault = {0};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fa_tensor_map map = {{0}};
        fake_cuda_map seen;
        shape.element = cases[i].element;
        shape.box[0] = 128 / (uint32_t)cases[i].bytes;
        CHECK(fa_cuda_encode_map(&map, &shape, &fault), "%s", fault.text);
        memcpy(&seen, &map, sizeof seen);
        CHECK(seen.type == cases[i].type, "element %d: type %d", (int)cases[i].element,
              (int)seen.type);
        shape.box[0] *= 2;
        CHECK(!fa_cuda_encode_map(&map, &shape, &fault), "a box of 256 bytes");
    }
}

static void test_maps(void)
{
    static _Alignas(16) char base[64];
    fa_cuda_fault fault = {0};
    fa_tensor_map map = {{0}};
    fa_tensor_map_shape shape = {.base = base,
                                 .element = FA_ELEMENT_BFLOAT16,
                                 .axes = 3,
                                 .extent = {100, 1000, 7},
                                 .stride = {2, 256, 256000},
                                 .box = {64, 128, 1}};
    if (!open_fake()) return;
    CHECK(sizeof map == 128, "size %zu", sizeof map);
    CHECK(fa_cuda_encode_map(&map, &shape, &fault), "%s", fault.text);
    fake_cuda_map seen;
    memcpy(&seen, &map, sizeof seen);
    CHECK(seen.type == CU_MAP_BFLOAT16 && seen.axes == 3, "type, axes");
    CHECK(seen.swizzle == CU_MAP_SWIZZLE_128B && seen.promotion == CU_MAP_L2_128B, "swizzle");
    CHECK(seen.extent[0] == 100 && seen.extent[1] == 1000 && seen.extent[2] == 7, "extents");
    CHECK(seen.stride[0] == 256 && seen.stride[1] == 256000, "strides");
    CHECK(seen.box[0] == 64 && seen.box[1] == 128 && seen.box[2] == 1, "box");
    check_elements(shape);
    shape.base = base + 2;
    CHECK(!fa_cuda_encode_map(&map, &shape, &fault) &&
              !strcmp(fault.call, "cuTensorMapEncodeTiled") && strstr(fault.text, "address"),
          "a base that is not aligned: %s", fault.text);
    shape.base = base;
    shape.extent[2] = 1; /* its stride is ignored, and the driver gets a valid one */
    shape.stride[2] = (uint64_t)-6;
    CHECK(fa_cuda_encode_map(&map, &shape, &fault), "%s", fault.text);
    memcpy(&seen, &map, sizeof seen);
    CHECK(seen.stride[1] == 16, "the stride of an axis of one index is %u", seen.stride[1]);
}

static fa_tensor_map_shape numbered_shape(int i)
{
    static _Alignas(16) char base[16 * 64];
    return (fa_tensor_map_shape){.base = base + 16 * (i % 64),
                                 .element = i & 64 ? FA_ELEMENT_BFLOAT16 : FA_ELEMENT_FLOAT16,
                                 .axes = 2,
                                 .extent = {64, 1000 + (uint64_t)i / 128},
                                 .stride = {2, 128},
                                 .box = {64, 128}};
}

static void check_map(int i)
{
    fa_cuda_fault fault = {0};
    fa_tensor_map map = {{0}};
    fake_cuda_map seen;
    const fa_tensor_map_shape shape = numbered_shape(i);
    CHECK(fa_cuda_encode_map(&map, &shape, &fault), "map %d: %s", i, fault.text);
    memcpy(&seen, &map, sizeof seen);
    CHECK(seen.extent[1] == shape.extent[1] && seen.base == (uint64_t)(uintptr_t)shape.base &&
              seen.type == (i & 64 ? CU_MAP_BFLOAT16 : CU_MAP_FLOAT16),
          "map %d is that of another shape", i);
}

/* A stride only matters if its axis has several indices; otherwise the map is the same. */
static void test_known_strides(void)
{
    fa_cuda_fault fault;
    fa_tensor_map map;
    fake_cuda_map seen;
    fa_tensor_map_shape shape = numbered_shape(1);
    shape.axes = 3;
    shape.extent[2] = shape.box[2] = 1;
    shape.stride[2] = 4096;
    CHECK(fa_cuda_encode_map(&map, &shape, &fault), "%s", fault.text);
    const int made = record->maps;
    shape.stride[2] = 3;
    CHECK(fa_cuda_encode_map(&map, &shape, &fault) && record->maps == made,
          "a stride of one index");
    shape.stride[1] = 256;
    CHECK(fa_cuda_encode_map(&map, &shape, &fault) && record->maps == made + 1, "a stride");
    memcpy(&seen, &map, sizeof seen);
    CHECK(seen.stride[0] == 256, "the stride is %u", seen.stride[0]);
    shape.extent[2] = 2;
    CHECK(!fa_cuda_encode_map(&map, &shape, &fault), "a stride that does not fit");
    shape.stride[2] = 4096;
    CHECK(fa_cuda_encode_map(&map, &shape, &fault) && record->maps == made + 2, "two indices");
}

/* A map that is requested again is not made again, unless it has been evicted. None is mistaken for
 * another, also after a failure. */
static void test_map_memory(void)
{
    fa_cuda_fault fault;
    fa_tensor_map map;
    if (!open_fake()) return;
    check_map(0);
    for (int i = 0; i < 10; i++) check_map(0);
    CHECK(record->maps == 1, "the same map was made %d times", record->maps);
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < 512; i++) check_map(i);
    CHECK(record->maps > 512, "%d maps made for 512 one after another", record->maps);
    const fa_tensor_map_shape other = numbered_shape(600);
    setenv("FAKE_CUDA_FAIL", "cuTensorMapEncodeTiled=2", 1);
    for (int i = 0; i < 2; i++)
        CHECK(!fa_cuda_encode_map(&map, &other, &fault) && fault.code == 2, "it fails");
    setenv("FAKE_CUDA_FAIL", "", 1);
    for (int i = 511; i >= 0; i--) check_map(i); /* the latest first: they may still be cached */
    check_map(600);
    for (int i = 0; i < 512; i++) check_map(i);
    test_known_strides();
}

/* ---- many threads ---------------------------------------------------------------------------- */

enum { THREADS = 8 };
static pthread_barrier_t start;
static void *found[THREADS];
static bool went_well[THREADS];

static void *first_use(void *argument)
{
    int i = (int)(intptr_t)argument;
    fa_cuda_fault fault;
    fa_cuda_device device;
    pthread_barrier_wait(&start);
    went_well[i] = fa_cuda_use_device(0, &fault) && fa_cuda_get_device(0, &device, &fault) &&
                   device.multiprocessors == 132 &&
                   fa_cuda_find_kernel(&image_a, i % 2 ? "first" : "second", &found[i], &fault);
    return NULL;
}

static void test_threads(void)
{
    pthread_t threads[THREADS];
    pthread_barrier_init(&start, NULL, THREADS);
    for (int i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, first_use, (void *)(intptr_t)i) != 0) abort();
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    find_record();
    for (int i = 0; i < THREADS; i++)
        CHECK(went_well[i] && found[i] == found[i % 2], "thread %d", i);
    CHECK(record->inits == 1 && record->loads == 1 && record->kernels == 2,
          "%d inits, %d loads, %d kernels", record->inits, record->loads, record->kernels);
    CHECK(record->attributes_read == 7, "%d attributes read", record->attributes_read);
}

/* ---- images ---------------------------------------------------------------------------------- */

static void test_tables(void)
{
    char text[200];
    fa_cuda_explain_missing_image("three", text, sizeof text);
    CHECK(strstr(text, "CUDA=all"), "no word of how to build it: %s", text);
    for (int i = 0; i < FA_VARIANTS; i++) {
        const fa_cuda_image *image = fa_cuda_image_of(i);
        CHECK(!image || (image->data < image->end && (uintptr_t)image->data % 64 == 0 &&
                         strcmp(image->name, fa_variants[i].name) == 0),
              "image %s", fa_variants[i].name);
    }
}

/* ---- checks of lengths ----------------------------------------------------------------------- */

static void test_checks_wanted(void)
{
    setenv("FA_CHECK", "1", 1);
    CHECK(fa_cuda_checks_wanted(), "FA_CHECK=1 asks for nothing");
    unsetenv("FA_CHECK");
    CHECK(fa_cuda_checks_wanted(), "the environment is read once");
}

static bool run_check(fa_cuda_checks *checks, void *kernel, const fa_check_params *params,
                      void *stream, fa_check_report *found, fa_cuda_fault *fault)
{
    const fa_cuda_device device = {.major = 9, .smem_per_block = 65536};
    void *const kernels[FA_CUDA_LAUNCHES] = {kernel};
    fa_cuda_plan plan;
    char why[320];
    if (!fa_cuda_plan_check(&device, &plan, why, sizeof why)) CHECK(false, "%s", why);
    return fa_cuda_check(checks, &plan, kernels, params, stream, found, fault);
}

static const fa_check_report wrong_length = {FA_CHECK_LENGTH, 1, 3, 900, 0, 512, 0};
static fa_cuda_image check_image = {.name = "check", .data = (const unsigned char *)"check"};

static void *find_check_kernel(void)
{
    void *kernel = NULL;
    fa_cuda_fault fault;
    CHECK(fa_cuda_find_kernel(&check_image, "check_simt", &kernel, &fault), "no kernel");
    return kernel;
}

static bool same_report(const fa_check_report *a, const fa_check_report *b)
{
    return a->kind == b->kind && a->side == b->side && a->index == b->index &&
           a->value == b->value && a->high == b->high;
}

/* A call that may wait gets its own report; the buffer is allocated once per context. */
static void test_checks(void)
{
    fa_cuda_fault fault;
    const fa_check_params params = {.batch = 1};
    fa_check_report found;
    unsetenv("FA_CHECK");
    CHECK(use_fake(0) && !fa_cuda_checks_wanted(), "checks that nobody asked for");
    void *kernel = find_check_kernel();
    fa_cuda_checks *checks = fa_cuda_checks_here(&fault);
    CHECK(checks && checks == fa_cuda_checks_here(&fault) && record->pinned == 1, "%d buffers",
          record->pinned);
    for (int i = 0; i < 200; i++) {
        record->finds = i % 3 == 1 ? wrong_length : (fa_check_report){0};
        const bool fine = run_check(checks, kernel, &params, (void *)8, &found, &fault);
        CHECK(fine && record->waits == i + 1 && record->last.stream == (void *)8, "check %d", i);
        CHECK(same_report(&found, &record->finds), "check %d found %d", i, (int)found.kind);
    }
    CHECK(!fa_cuda_checks_take(checks, &found), "a report of a call that had it itself");
    CHECK(record->last.grid[0] == 1 && record->last.block[0] == FA_CHECK_THREADS &&
              record->last.smem_bytes == FA_CHECK_SMEM,
          "%u threads", record->last.block[0]);
    setenv("FAKE_CUDA_DEVICES", "2", 1);
    CHECK(fa_cuda_use_device(1, &fault) && fa_cuda_checks_here(&fault) != checks &&
              record->pinned == 2,
          "another context has the same buffer");
}

/* Nothing waits in a capture, not even for the first buffer; what a replay finds is reported
 * once. */
static void test_captured_checks(void)
{
    fa_cuda_fault fault;
    const fa_check_params params = {.batch = 1};
    fa_check_report found;
    fa_check_report *reports[300];
    CHECK(use_fake(0), "no driver");
    record->capturing = 1;
    void *kernel = find_check_kernel();
    fa_cuda_checks *checks = fa_cuda_checks_here(&fault);
    for (int i = 0; i < 300; i++) {
        CHECK(checks && run_check(checks, kernel, &params, NULL, &found, &fault) &&
                  found.kind == FA_CHECK_FINE,
              "captured check %d", i);
        reports[i] = record->reported;
        for (int j = 0; i < 190 && j < i; j++)
            CHECK(reports[j] != reports[i], "calls %d and %d report to one address", i, j);
    }
    CHECK(record->waits == 0 && record->synchronizations == 0, "a captured call waited");
    CHECK(!fa_cuda_checks_take(checks, &found), "a report before any launch of the graph");
    record->capturing = 0;
    *reports[1] = *reports[299] = wrong_length;
    for (int i = 0; i < 2; i++)
        CHECK(fa_cuda_checks_take(checks, &found) && same_report(&found, &wrong_length),
              "report %d of 2", i);
    CHECK(!fa_cuda_checks_take(checks, &found), "a report twice");
}

static void test_checks_fail(void)
{
    fa_cuda_fault fault;
    const fa_check_params params = {.batch = 1};
    fa_check_report found;
    CHECK(use_fake(0), "no driver");
    void *kernel = find_check_kernel();
    setenv("FAKE_CUDA_FAIL", "cuMemHostAlloc=2", 1);
    CHECK(!fa_cuda_checks_here(&fault) && fault.code == 2, "%s", fault.call);
    unsetenv("FAKE_CUDA_FAIL");
    fa_cuda_checks *checks = fa_cuda_checks_here(&fault);
    CHECK(checks, "a failed allocation is remembered");
    for (int i = 0; i < 100; i++) { /* more often than there are slots */
        setenv("FAKE_CUDA_FAIL", i % 2 ? "cuStreamSynchronize=2" : "cuLaunchKernelEx=2", 1);
        CHECK(!run_check(checks, kernel, &params, NULL, &found, &fault) && fault.code == 2,
              "a failure is not handed on");
    }
    unsetenv("FAKE_CUDA_FAIL");
    CHECK(run_check(checks, kernel, &params, NULL, &found, &fault), "%s", fault.call);
}

enum { CHECKERS = 8 };

static void *check_often(void *kernel)
{
    fa_cuda_fault fault;
    const fa_check_params params = {.batch = 1};
    fa_check_report found;
    long failed = !fa_cuda_use_device(0, &fault);
    for (int i = 0; i < 500 && !failed; i++) {
        fa_cuda_checks *checks = fa_cuda_checks_here(&fault);
        failed += !checks || !run_check(checks, kernel, &params, NULL, &found, &fault) ||
                  found.kind != FA_CHECK_FINE;
    }
    return (void *)(intptr_t)failed;
}

static void test_checks_in_threads(void)
{
    pthread_t threads[CHECKERS];
    CHECK(use_fake(0), "no driver");
    void *kernel = find_check_kernel();
    for (int i = 0; i < CHECKERS; i++)
        if (pthread_create(&threads[i], NULL, check_often, kernel) != 0) abort();
    for (int i = 0; i < CHECKERS; i++) {
        void *failed;
        pthread_join(threads[i], &failed);
        CHECK(!failed, "thread %d", i);
    }
    CHECK(record->pinned == 1, "%d buffers", record->pinned);
}

/* ---- running them ---------------------------------------------------------------------------- */

#define SCENARIO(name)                                                                             \
    {                                                                                              \
#name, name                                                                                \
    }
static const struct {
    const char *name;
    void (*function)(void);
} SCENARIOS[] = {
    SCENARIO(test_no_driver),
    SCENARIO(test_no_library),
    SCENARIO(test_foreign_library),
    SCENARIO(test_old_version),
    SCENARIO(test_missing_function),
    SCENARIO(test_no_gpu),
    SCENARIO(test_unknown_code),
    SCENARIO(test_version_fails),
    SCENARIO(test_no_fault_wanted),
    SCENARIO(test_devices),
    SCENARIO(test_device_fails),
    SCENARIO(test_current_device),
    SCENARIO(test_memory),
    SCENARIO(test_events),
    SCENARIO(test_kernels),
    SCENARIO(test_load_fails),
    SCENARIO(test_variables),
    SCENARIO(test_launches),
    SCENARIO(test_no_overlap),
    SCENARIO(test_mixed_launches),
    SCENARIO(test_shared_memory),
    SCENARIO(test_no_context),
    SCENARIO(test_capture),
    SCENARIO(test_counters),
    SCENARIO(test_shared_counters),
    SCENARIO(test_captured_counters),
    SCENARIO(test_decode_launches),
    SCENARIO(test_captured_decode),
    SCENARIO(test_latent_launches),
    SCENARIO(test_sm90_launches),
    SCENARIO(test_maps),
    SCENARIO(test_map_memory),
    SCENARIO(test_threads),
    SCENARIO(test_tables),
    SCENARIO(test_checks_wanted),
    SCENARIO(test_checks),
    SCENARIO(test_captured_checks),
    SCENARIO(test_checks_fail),
    SCENARIO(test_checks_in_threads),
};

enum { NUM_SCENARIOS = sizeof SCENARIOS / sizeof *SCENARIOS };

/* The scenario's exit status as waitpid gives it. */
static int run(int index)
{
    fflush(NULL);
    pid_t child = fork();
    if (child < 0) abort();
    if (child == 0) {
        setenv("FA_CUDA_DRIVER", FAKE_CUDA_PATH, 1);
        SCENARIOS[index].function();
        fflush(NULL);
        _exit(test_end());
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

/* The result is checked when all have run: a process inherits the count of failures so far. */
int main(void)
{
    int statuses[NUM_SCENARIOS];
    for (int i = 0; i < NUM_SCENARIOS; i++) statuses[i] = run(i);
    for (int i = 0; i < NUM_SCENARIOS; i++)
        CHECK(WIFEXITED(statuses[i]) && WEXITSTATUS(statuses[i]) == 0, "%s: status %d",
              SCENARIOS[i].name, statuses[i]);
    return test_end();
}
