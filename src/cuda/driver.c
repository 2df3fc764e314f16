/*
 * The CUDA driver by dlopen.
 *
 * The driver, images, kernels and their opt-ins are kept until the process ends. Each is written once
 * under `loading` and published with release order, so that a launch of a known kernel takes no lock.
 */
#include "cuda/driver.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/cuda_abi.h"

enum {
    OLDEST_DRIVER = 12000,      /* cuLibraryLoadData, tensor maps */
    OVERLAPPING_DRIVER = 12030, /* the first that captures launches that overlap into graphs */
    DEVICES = 64                /* those whose descriptions and opt-ins are remembered */
};

static cu_api cu;
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

/* ---- faults ---------------------------------------------------------------------------------- */

static bool fault_in_words(fa_cuda_fault *fault, const char *call, int code, const char *name,
                           const char *text)
{
    if (!fault) return false;
    fault->call = call;
    fault->code = code;
    snprintf(fault->name, sizeof fault->name, "%s", name);
    snprintf(fault->text, sizeof fault->text, "%s", text);
    return false;
}

/* True if the driver's function succeeded; otherwise fills in the fault. */
static bool succeeded(cu_result code, const char *call, fa_cuda_fault *fault)
{
    if (code == CU_SUCCESS) return true;
    const char *name = NULL, *text = NULL;
    if (cu.cuGetErrorName(code, &name) != CU_SUCCESS || !name) name = "unknown error";
    if (cu.cuGetErrorString(code, &text) != CU_SUCCESS || !text) text = "the driver has no text";
    return fault_in_words(fault, call, code, name, text);
}

#define CALL(function, fault, ...) succeeded(cu.function(__VA_ARGS__), #function, fault)

/* ---- opening --------------------------------------------------------------------------------- */

static struct {
    pthread_once_t once;
    atomic_bool fine;
    int version, devices;
    fa_cuda_fault fault; /* if not fine */
} driver = {.once = PTHREAD_ONCE_INIT};

typedef struct symbol {
    const char *name;
    size_t offset; /* of its pointer in cu_api */
} symbol;

#define SYMBOL(function, symbol, parameters) {symbol, offsetof(cu_api, function)},
static const symbol OLD_SYMBOLS[] = {CU_OLD_FUNCTIONS(SYMBOL)};
static const symbol SYMBOLS[] = {CU_FUNCTIONS(SYMBOL)};
#undef SYMBOL

static bool find_symbols(void *library, const symbol *symbols, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        void *address = dlsym(library, symbols[i].name);
        if (!address)
            return fault_in_words(&driver.fault, "dlsym", 0, "missing function", symbols[i].name);
        memcpy((char *)&cu + symbols[i].offset, &address, sizeof address);
    }
    return true;
}

static bool check_version(void)
{
    if (!CALL(cuDriverGetVersion, &driver.fault, &driver.version)) return false;
    if (driver.version >= OLDEST_DRIVER) return true;
    char text[sizeof driver.fault.text];
    snprintf(text, sizeof text, "the driver is for CUDA %d.%d; CUDA %d.%d or newer is needed",
             driver.version / 1000, driver.version % 1000 / 10, OLDEST_DRIVER / 1000,
             OLDEST_DRIVER % 1000 / 10);
    return fault_in_words(&driver.fault, "cuDriverGetVersion", driver.version, "driver too old",
                          text);
}

#define USUAL_LIBRARY "libcuda.so.1"

/* A program with more privileges than its user must not load a library named by the user's environment. */
static const char *library_path(void)
{
    const char *path = secure_getenv("FA_CUDA_DRIVER");
    return path && *path ? path : USUAL_LIBRARY;
}

static bool open_library(void)
{
    void *library = dlopen(library_path(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *text = dlerror();
        return fault_in_words(&driver.fault, "dlopen", 0, "no driver",
                              text ? text : "the library could not be loaded");
    }
    return find_symbols(library, OLD_SYMBOLS, sizeof OLD_SYMBOLS / sizeof *OLD_SYMBOLS) &&
           check_version() && find_symbols(library, SYMBOLS, sizeof SYMBOLS / sizeof *SYMBOLS);
}

static void open_once(void)
{
    const bool fine = open_library() && CALL(cuInit, &driver.fault, 0) &&
                      CALL(cuDeviceGetCount, &driver.fault, &driver.devices);
    atomic_store_explicit(&driver.fine, fine, memory_order_release);
}

static bool is_open(void) { return atomic_load_explicit(&driver.fine, memory_order_acquire); }

bool fa_cuda_open(fa_cuda_fault *fault)
{
    if (is_open()) return true;
    pthread_once(&driver.once, open_once);
    if (is_open()) return true;
    if (fault) *fault = driver.fault;
    return false;
}

int fa_cuda_driver_version(void)
{
    fa_cuda_open(NULL);
    return driver.version;
}

int fa_cuda_device_count(void) { return fa_cuda_open(NULL) ? driver.devices : 0; }

/* ---- devices --------------------------------------------------------------------------------- */

static bool read_device(int ordinal, fa_cuda_device *device, fa_cuda_fault *fault)
{
    int l2 = 0;
    size_t memory = 0;
    const struct {
        int attribute;
        int32_t *value;
    } numbers[] = {{CU_DEVICE_MAJOR, &device->major},
                   {CU_DEVICE_MINOR, &device->minor},
                   {CU_DEVICE_MULTIPROCESSORS, &device->multiprocessors},
                   {CU_DEVICE_SMEM_PER_BLOCK, &device->smem_per_block},
                   {CU_DEVICE_SMEM_PER_SM, &device->smem_per_sm},
                   {CU_DEVICE_REGISTERS_PER_SM, &device->registers_per_sm},
                   {CU_DEVICE_L2_BYTES, &l2}};
    memset(device->name, 0, sizeof device->name);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!CALL(cuDeviceGetAttribute, fault, numbers[i].value, numbers[i].attribute, ordinal))
            return false;
    if (!CALL(cuDeviceTotalMem, fault, &memory, ordinal) ||
        !CALL(cuDeviceGetName, fault, device->name, (int)sizeof device->name - 1, ordinal))
        return false;
    device->ordinal = ordinal;
    device->overlaps = driver.version >= OVERLAPPING_DRIVER;
    device->l2_bytes = l2;
    device->memory_bytes = (int64_t)memory;
    return true;
}

bool fa_cuda_get_device(int ordinal, fa_cuda_device *device, fa_cuda_fault *fault)
{
    static fa_cuda_device known[DEVICES];
    static atomic_bool is_known[DEVICES];
    if (!fa_cuda_open(fault)) return false;
    if (ordinal < 0 || ordinal >= driver.devices)
        return succeeded(CU_INVALID_DEVICE, "cuDeviceGet", fault);
    if (ordinal >= DEVICES) return read_device(ordinal, device, fault);
    if (!atomic_load_explicit(&is_known[ordinal], memory_order_acquire)) {
        pthread_mutex_lock(&loading);
        bool fine = is_known[ordinal] || read_device(ordinal, &known[ordinal], fault);
        if (fine) atomic_store_explicit(&is_known[ordinal], true, memory_order_release);
        pthread_mutex_unlock(&loading);
        if (!fine) return false;
    }
    *device = known[ordinal];
    return true;
}

bool fa_cuda_current_device(int *ordinal, fa_cuda_fault *fault)
{
    *ordinal = -1;
    if (!fa_cuda_open(fault)) return false;
    cu_device device;
    cu_result code = cu.cuCtxGetDevice(&device);
    if (code == CU_INVALID_CONTEXT) return true;
    if (!succeeded(code, "cuCtxGetDevice", fault)) return false;
    *ordinal = device;
    return true;
}

/* Is this the driver's file? "libcuda.so" and "libcuda.so.1" are the same one. */
static bool is_driver_file(const char *path)
{
    const char *slash = strrchr(path, '/'), *wanted = library_path();
    const char *name = slash ? slash + 1 : path;
    if (strcmp(wanted, USUAL_LIBRARY) != 0) return strcmp(path, wanted) == 0;
    return strncmp(name, "libcuda.so", strlen("libcuda.so")) == 0;
}

typedef struct search {
    unsigned long long loads; /* that the process has done so far */
    bool found;
} search;

/* The process's loads when the driver was last searched for without success. */
static atomic_ullong loads_without_driver;

/* Stops at the driver, or at once if nothing has been loaded since. */
static int look_for_driver(struct dl_phdr_info *info, size_t size, void *data)
{
    search *s = data;
    (void)size;
    if (info->dlpi_adds == atomic_load_explicit(&loads_without_driver, memory_order_relaxed))
        return 1;
    s->loads = info->dlpi_adds;
    s->found = is_driver_file(info->dlpi_name);
    return s->found;
}

bool fa_cuda_is_loaded(void)
{
    static atomic_bool known;
    if (atomic_load_explicit(&known, memory_order_relaxed)) return true;
    search s = {0, false};
    dl_iterate_phdr(look_for_driver, &s);
    if (s.found) atomic_store_explicit(&known, true, memory_order_relaxed);
    else if (s.loads > 0)
        atomic_store_explicit(&loads_without_driver, s.loads, memory_order_relaxed);
    return s.found;
}

/* The device on which memory lies; -1: memory that the driver does not know, which is not an error here
 * (its type is 0). The driver is asked each time, because a freed address may be reused for other
 * memory. `count` more attributes, at most two, are queried at the same time; their values go to
 * answers. */
static int ordinal_of(const void *pointer, unsigned count, const int *more, void *const *answers)
{
    unsigned type = 0;
    int ordinal = -1;
    int attributes[4] = {CU_POINTER_MEMORY_TYPE, CU_POINTER_DEVICE_ORDINAL};
    void *values[4] = {&type, &ordinal};
    if (!fa_cuda_is_loaded() || !fa_cuda_open(NULL)) return -1;
    for (unsigned i = 0; i < count; i++) attributes[2 + i] = more[i], values[2 + i] = answers[i];
    cu_result code =
        cu.cuPointerGetAttributes(2 + count, attributes, values, (cu_address)(uintptr_t)pointer);
    return code == CU_SUCCESS && type == CU_MEMORY_DEVICE ? ordinal : -1;
}

int fa_cuda_device_of(const void *pointer) { return ordinal_of(pointer, 0, NULL, NULL); }

int fa_cuda_allocation_of(const void *pointer, uintptr_t *first, size_t *bytes)
{
    static const int range[] = {CU_POINTER_RANGE_START, CU_POINTER_RANGE_SIZE};
    cu_address start = 0;
    size_t size = 0;
    const int ordinal = ordinal_of(pointer, 2, range, (void *[]){&start, &size});
    *first = ordinal < 0 ? 0 : (uintptr_t)start;
    *bytes = ordinal < 0 ? 0 : size;
    return ordinal;
}

int fa_cuda_out_of_reach(const void *pointer)
{
    static const int is_managed = CU_POINTER_IS_MANAGED;
    unsigned managed = 0;
    const int ordinal = ordinal_of(pointer, 1, &is_managed, (void *[]){&managed});
    return managed ? -1 : ordinal;
}

/* ---- images and kernels ---------------------------------------------------------------------- */

/* What fa_cuda_find_kernel returns. */
typedef struct known_kernel {
    cu_kernel handle;
    struct known_kernel *next;
    atomic_uint opted[DEVICES]; /* bytes of dynamic shared memory that it may be launched with */
    char entry[];
} known_kernel;

/* What fa_cuda_image.loaded points to. */
typedef struct loaded_image {
    cu_library library;
    _Atomic(known_kernel *) kernels; /* newest first */
} loaded_image;

/* While a stream is being captured, the driver lets a thread load images or query events only in the relaxed mode. This
 * is safe because nothing here uses the stream. Returns the mode to be restored. */
static int allow_loading(void)
{
    int mode = CU_CAPTURE_RELAXED;
    return cu.cuThreadExchangeStreamCaptureMode(&mode) == CU_SUCCESS ? mode : -1;
}

static void restore_capture_mode(int mode)
{
    if (mode >= 0) cu.cuThreadExchangeStreamCaptureMode(&mode);
}

static bool no_memory(fa_cuda_fault *fault)
{
    return fault_in_words(fault, "malloc", CU_OUT_OF_MEMORY, "out of memory",
                          "no host memory for the table of kernels");
}

/* With `loading` held. */
static loaded_image *load_image(fa_cuda_image *image, fa_cuda_fault *fault)
{
    loaded_image *loaded = atomic_load_explicit(&image->loaded, memory_order_relaxed);
    if (loaded) return loaded;
    loaded = calloc(1, sizeof *loaded);
    if (!loaded) {
        no_memory(fault);
        return NULL;
    }
    if (!CALL(cuLibraryLoadData, fault, &loaded->library, image->data, NULL, NULL, 0, NULL, NULL,
              0)) {
        free(loaded);
        return NULL;
    }
    atomic_store_explicit(&image->loaded, loaded, memory_order_release);
    return loaded;
}

static known_kernel *look_up(fa_cuda_image *image, const char *entry)
{
    loaded_image *loaded = atomic_load_explicit(&image->loaded, memory_order_acquire);
    if (!loaded) return NULL;
    known_kernel *kernel = atomic_load_explicit(&loaded->kernels, memory_order_acquire);
    while (kernel && strcmp(kernel->entry, entry) != 0) kernel = kernel->next;
    return kernel;
}

/* With `loading` held. */
static known_kernel *add_kernel(loaded_image *loaded, const char *entry, fa_cuda_fault *fault)
{
    size_t length = strlen(entry) + 1;
    known_kernel *kernel = calloc(1, sizeof *kernel + length);
    if (!kernel) {
        no_memory(fault);
        return NULL;
    }
    if (!CALL(cuLibraryGetKernel, fault, &kernel->handle, loaded->library, entry)) {
        free(kernel);
        return NULL;
    }
    memcpy(kernel->entry, entry, length);
    kernel->next = atomic_load_explicit(&loaded->kernels, memory_order_relaxed);
    atomic_store_explicit(&loaded->kernels, kernel, memory_order_release);
    return kernel;
}

bool fa_cuda_find_kernel(fa_cuda_image *image, const char *entry, void **kernel,
                         fa_cuda_fault *fault)
{
    known_kernel *found = look_up(image, entry);
    if (!found) {
        if (!fa_cuda_open(fault)) return false;
        pthread_mutex_lock(&loading);
        int mode = allow_loading();
        loaded_image *loaded = load_image(image, fault);
        if (loaded) found = look_up(image, entry);
        if (loaded && !found) found = add_kernel(loaded, entry, fault);
        restore_capture_mode(mode);
        pthread_mutex_unlock(&loading);
    }
    *kernel = found;
    return found != NULL;
}

static bool read_loaded(loaded_image *loaded, const char *variable, void *value, size_t size,
                        fa_cuda_fault *fault)
{
    cu_address address;
    size_t bytes = 0;
    if (!CALL(cuLibraryGetGlobal, fault, &address, &bytes, loaded->library, variable)) return false;
    if (size > bytes) {
        char text[sizeof fault->text];
        snprintf(text, sizeof text, "%s has %zu bytes; %zu were asked for", variable, bytes, size);
        return fault_in_words(fault, "cuLibraryGetGlobal", 0, "wrong size", text);
    }
    return CALL(cuMemcpyDtoH, fault, value, address, size);
}

bool fa_cuda_read_variable(fa_cuda_image *image, const char *variable, void *value, size_t size,
                           fa_cuda_fault *fault)
{
    if (!fa_cuda_open(fault)) return false;
    pthread_mutex_lock(&loading);
    int mode = allow_loading();
    loaded_image *loaded = load_image(image, fault);
    bool fine = loaded && read_loaded(loaded, variable, value, size, fault);
    restore_capture_mode(mode);
    pthread_mutex_unlock(&loading);
    return fine;
}

bool fa_cuda_kernel_facts_of(void *kernel, int device, fa_cuda_kernel_facts *facts,
                             fa_cuda_fault *fault)
{
    cu_kernel handle = ((known_kernel *)kernel)->handle;
    return CALL(cuKernelGetAttribute, fault, &facts->registers, CU_KERNEL_REGISTERS, handle,
                device) &&
           CALL(cuKernelGetAttribute, fault, &facts->local_bytes, CU_KERNEL_LOCAL_BYTES, handle,
                device) &&
           CALL(cuKernelGetAttribute, fault, &facts->static_smem_bytes, CU_KERNEL_STATIC_SMEM,
                handle, device);
}

/* ---- launches -------------------------------------------------------------------------------- */

static bool raise_limit(known_kernel *kernel, int device, unsigned bytes, fa_cuda_fault *fault)
{
    const bool kept = device >= 0 && device < DEVICES;
    pthread_mutex_lock(&loading);
    bool known = kept && kernel->opted[device] >= bytes;
    int mode = allow_loading();
    bool fine = known || CALL(cuKernelSetAttribute, fault, CU_KERNEL_MAX_DYNAMIC_SMEM, (int)bytes,
                              kernel->handle, device);
    restore_capture_mode(mode);
    if (fine && !known && kept)
        atomic_store_explicit(&kernel->opted[device], bytes, memory_order_release);
    pthread_mutex_unlock(&loading);
    return fine;
}

/* Opts in to dynamic shared memory. This is done for any amount, because static memory also counts
 * towards the 48 KiB that need no opt-in. The driver keeps it for each device. */
static bool opt_in(known_kernel *kernel, int device, unsigned bytes, fa_cuda_fault *fault)
{
    if (bytes == 0) return true;
    if (device >= 0 && device < DEVICES &&
        atomic_load_explicit(&kernel->opted[device], memory_order_acquire) >= bytes)
        return true;
    return raise_limit(kernel, device, bytes, fault);
}

bool fa_cuda_launch_kernel(void *kernel, const fa_cuda_launch *launch, void **parameters,
                           fa_cuda_fault *fault)
{
    known_kernel *known = kernel;
    if (!opt_in(known, launch->device, launch->smem_bytes, fault)) return false;
    cu_launch_attribute attributes[2];
    unsigned count = 0;
    if (launch->cluster > 1)
        attributes[count++] = (cu_launch_attribute){.id = CU_LAUNCH_CLUSTER,
                                                    .value.cluster = {launch->cluster, 1, 1}};
    if (launch->overlaps && driver.version >= OVERLAPPING_DRIVER)
        attributes[count++] = (cu_launch_attribute){.id = CU_LAUNCH_OVERLAPS, .value.overlaps = 1};
    cu_launch_config config = {.grid = {launch->grid[0], launch->grid[1], launch->grid[2]},
                               .block = {launch->threads, 1, 1},
                               .smem_bytes = launch->smem_bytes,
                               .stream = launch->stream,
                               .attributes = attributes,
                               .num_attributes = count};
    return CALL(cuLaunchKernelEx, fault, &config, known->handle, parameters, NULL);
}

/* ---- streams and contexts -------------------------------------------------------------------- */

bool fa_cuda_capture_status(void *stream, bool *capturing)
{
    int status = CU_NOT_CAPTURING;
    if (cu.cuStreamIsCapturing(stream, &status) != CU_SUCCESS) return false;
    *capturing = status != CU_NOT_CAPTURING;
    return true;
}

bool fa_cuda_stream_id(void *stream, unsigned long long *id)
{
    return cu.cuStreamGetId(stream, id) == CU_SUCCESS;
}

bool fa_cuda_stream_context(void *stream, unsigned long long *number)
{
    cu_context context;
    return cu.cuStreamGetCtx(stream, &context) == CU_SUCCESS &&
           cu.cuCtxGetId(context, number) == CU_SUCCESS;
}

bool fa_cuda_graph_keep(void *stream, void (*release)(void *data), void *data)
{
    int status = CU_NOT_CAPTURING;
    cu_graph graph = NULL;
    cu_user_object object = NULL;
    if (cu.cuUserObjectCreate(&object, data, release, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) !=
        CU_SUCCESS) {
        release(data);
        return false;
    }
    if (cu.cuStreamGetCaptureInfo(stream, &status, NULL, &graph, NULL, NULL) == CU_SUCCESS &&
        graph &&
        cu.cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE) == CU_SUCCESS)
        return true;
    cu.cuUserObjectRelease(object, 1);
    return false;
}

bool fa_cuda_context_number(unsigned long long *number, fa_cuda_fault *fault)
{
    return fa_cuda_open(fault) && CALL(cuCtxGetId, fault, NULL, number);
}

bool fa_cuda_allocate_pinned(void **memory, size_t bytes, fa_cuda_fault *fault)
{
    if (!fa_cuda_open(fault)) return false;
    const int mode = allow_loading();
    const bool fine = CALL(cuMemHostAlloc, fault, memory, bytes, CU_HOST_PORTABLE | CU_HOST_MAPPED);
    restore_capture_mode(mode);
    return fine;
}

/* ---- tensor maps ----------------------------------------------------------------------------- */

/* float8 has no type of its own: a copy moves bytes. */
static int map_type(fa_element element)
{
    switch (element) {
    case FA_ELEMENT_FLOAT32: return CU_MAP_FLOAT32;
    case FA_ELEMENT_TF32: return CU_MAP_TF32;
    case FA_ELEMENT_FLOAT16: return CU_MAP_FLOAT16;
    case FA_ELEMENT_BFLOAT16: return CU_MAP_BFLOAT16;
    default: return CU_MAP_UINT8;
    }
}

/* The stride of an axis with one index has no meaning, but the driver must accept it. The
 * second-level cache fetches only the 128 bytes of a box's row: 256 would fetch the next head as
 * well at head dim 64 (4% slower on an H200, with rows of 128). */
static bool encode(fa_tensor_map *map, const fa_tensor_map_shape *shape, fa_cuda_fault *fault)
{
    static const uint32_t every[FA_TENSOR_MAP_AXES] = {1, 1, 1, 1, 1};
    uint64_t stride[FA_TENSOR_MAP_AXES] = {0};
    for (int i = 1; i < shape->axes; i++) stride[i] = shape->extent[i] > 1 ? shape->stride[i] : 16;
    return CALL(cuTensorMapEncodeTiled, fault, map, map_type(shape->element), (uint32_t)shape->axes,
                shape->base, shape->extent, stride + 1, shape->box, every, CU_MAP_NO_INTERLEAVE,
                CU_MAP_SWIZZLE_128B, CU_MAP_L2_128B, CU_MAP_FILL_ZERO);
}

/* A map that this thread has made. */
typedef struct known_map {
    fa_tensor_map map;
    fa_tensor_map_shape shape; /* axes 0: none yet */
} known_map;

enum { KNOWN_MAPS = 16 };

/* Where a map of this shape is kept; it depends on the address, in which q, k, v and out of a layer differ. */
__attribute__((noinline)) static known_map *slot_of_map(const fa_tensor_map_shape *shape)
{
    static _Thread_local known_map known[KNOWN_MAPS];
    uint64_t mix = (uint64_t)(uintptr_t)shape->base >> 4;
    mix += shape->extent[1] * 31 + shape->box[1] * 7;
    return &known[mix * 0x9E3779B97F4A7C15u >> 60];
}

/* Whether a known shape equals this one in everything on which the map depends. */
static bool is_known(const fa_tensor_map_shape *known, const fa_tensor_map_shape *shape)
{
    if (known->axes == 0 || known->axes != shape->axes) return false;
    bool same = known->base == shape->base && known->element == shape->element;
    for (int i = 0; i < known->axes; i++) {
        const bool stepped = i > 0 && shape->extent[i] > 1;
        same &= known->extent[i] == shape->extent[i] && known->box[i] == shape->box[i] &&
                (!stepped || known->stride[i] == shape->stride[i]);
    }
    return same;
}

static bool make_map(known_map *known, const fa_tensor_map_shape *shape, fa_cuda_fault *fault)
{
    const char *why;
    if (!fa_cuda_open(fault)) return false;
    if (!fa_tensor_map_fits(shape, &why))
        return fault_in_words(fault, "cuTensorMapEncodeTiled", CU_INVALID_VALUE,
                              "CUDA_ERROR_INVALID_VALUE", why);
    known->shape.axes = 0; /* until the map is there */
    if (!encode(&known->map, shape, fault)) return false;
    known->shape = *shape;
    return true;
}

bool fa_cuda_encode_map(fa_tensor_map *map, const fa_tensor_map_shape *shape, fa_cuda_fault *fault)
{
    known_map *known = slot_of_map(shape);
    if (!is_known(&known->shape, shape) && !make_map(known, shape, fault)) return false;
    *map = known->map;
    return true;
}

/* ---- memory, time ---------------------------------------------------------------------------- */

static cu_address address_of(const void *pointer) { return (cu_address)(uintptr_t)pointer; }

/* The primary context stays retained: the command uses one device until it ends. */
bool fa_cuda_use_device(int ordinal, fa_cuda_fault *fault)
{
    cu_context context;
    return fa_cuda_open(fault) && CALL(cuDevicePrimaryCtxRetain, fault, &context, ordinal) &&
           CALL(cuCtxSetCurrent, fault, context);
}

bool fa_cuda_allocate(void **pointer, size_t bytes, fa_cuda_fault *fault)
{
    cu_address address = 0;
    *pointer = NULL;
    if (!fa_cuda_open(fault) || !CALL(cuMemAlloc, fault, &address, bytes)) return false;
    *pointer = (void *)(uintptr_t)address;
    return true;
}

void fa_cuda_free(void *pointer)
{
    if (pointer) cu.cuMemFree(address_of(pointer));
}

bool fa_cuda_copy_in(void *device, const void *host, size_t bytes, fa_cuda_fault *fault)
{
    return fa_cuda_open(fault) && CALL(cuMemcpyHtoD, fault, address_of(device), host, bytes);
}

bool fa_cuda_copy_out(void *host, const void *device, size_t bytes, fa_cuda_fault *fault)
{
    return fa_cuda_open(fault) && CALL(cuMemcpyDtoH, fault, host, address_of(device), bytes);
}

bool fa_cuda_fill(void *device, unsigned char byte, size_t bytes, fa_cuda_fault *fault)
{
    return fa_cuda_open(fault) && CALL(cuMemsetD8, fault, address_of(device), byte, bytes);
}

bool fa_cuda_memory_left(size_t *bytes, fa_cuda_fault *fault)
{
    size_t total;
    return fa_cuda_open(fault) && CALL(cuMemGetInfo, fault, bytes, &total);
}

bool fa_cuda_synchronize(fa_cuda_fault *fault)
{
    return fa_cuda_open(fault) && succeeded(cu.cuCtxSynchronize(), "cuCtxSynchronize", fault);
}

bool fa_cuda_stream_new(void **stream, fa_cuda_fault *fault)
{
    *stream = NULL;
    return fa_cuda_open(fault) && CALL(cuStreamCreate, fault, stream, CU_STREAM_NON_BLOCKING);
}

void fa_cuda_stream_free(void *stream)
{
    if (stream) cu.cuStreamDestroy(stream);
}

bool fa_cuda_stream_wait(void *stream, fa_cuda_fault *fault)
{
    return fa_cuda_open(fault) && CALL(cuStreamSynchronize, fault, stream);
}

bool fa_cuda_queue_copy_in(void *device, const void *host, size_t bytes, void *stream,
                           fa_cuda_fault *fault)
{
    return fa_cuda_open(fault) &&
           CALL(cuMemcpyHtoDAsync, fault, address_of(device), host, bytes, stream);
}

bool fa_cuda_queue_copy_out(void *host, const void *device, size_t bytes, void *stream,
                            fa_cuda_fault *fault)
{
    return fa_cuda_open(fault) &&
           CALL(cuMemcpyDtoHAsync, fault, host, address_of(device), bytes, stream);
}

bool fa_cuda_marker_new(void **event)
{
    cu_event created = NULL;
    const int mode = allow_loading();
    const bool fine = cu.cuEventCreate(&created, CU_EVENT_DISABLE_TIMING) == CU_SUCCESS;
    restore_capture_mode(mode);
    *event = created;
    return fine;
}

bool fa_cuda_event_is_done(void *event)
{
    const int mode = allow_loading();
    const bool done = cu.cuEventQuery(event) == CU_SUCCESS;
    restore_capture_mode(mode);
    return done;
}

bool fa_cuda_event_new(void **event, fa_cuda_fault *fault)
{
    cu_event created = NULL;
    bool fine = fa_cuda_open(fault) && CALL(cuEventCreate, fault, &created, 0);
    *event = created;
    return fine;
}

void fa_cuda_event_free(void *event)
{
    if (event) cu.cuEventDestroy(event);
}

bool fa_cuda_event_record(void *event, void *stream, fa_cuda_fault *fault)
{
    return fa_cuda_open(fault) && CALL(cuEventRecord, fault, event, stream);
}

bool fa_cuda_event_seconds(void *begin, void *end, double *seconds, fa_cuda_fault *fault)
{
    float milliseconds = 0;
    if (!fa_cuda_open(fault) || !CALL(cuEventSynchronize, fault, begin) ||
        !CALL(cuEventSynchronize, fault, end) ||
        !CALL(cuEventElapsedTime, fault, &milliseconds, begin, end))
        return false;
    *seconds = 1e-3 * (double)milliseconds;
    return true;
}
