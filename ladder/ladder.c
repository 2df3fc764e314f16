/* Runs the rungs of the ladder; see ladder.h. */
#include "ladder.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "cuda/images.h"

extern fa_cuda_image ladder_images[];

enum {
    GRID_YZ = 65535, /* the largest grid along y and z */
    SMALLEST_HEAD_DIM = 64,
    MAP_BOX_COLUMNS = 64, /* of 2 bytes: 128 bytes, the width of the swizzle */
    MAP_BOX_ROWS = 256    /* the largest that TMA takes */
};

/* ---- the table ------------------------------------------------------------------------------- */

/* 1##number - 100: 08 would be a wrong octal number. */
#define RUNG(number, name, architecture, types, largest, idea)                                     \
    {1##number - 100, #name, architecture, LADDER_##types, largest, idea},
static const ladder_rung RUNGS[] = {
#include "rungs.h"
};
#undef RUNG

enum { NUM_RUNGS = sizeof RUNGS / sizeof *RUNGS };

int ladder_num_rungs(void) { return NUM_RUNGS; }

const ladder_rung *ladder_rung_at(int index) { return &RUNGS[index]; }

const ladder_rung *ladder_find_rung(const char *name)
{
    for (int i = 0; i < NUM_RUNGS; i++)
        if (strcmp(RUNGS[i].name, name) == 0) return &RUNGS[i];
    return NULL;
}

bool ladder_takes(const ladder_rung *rung, fa_dtype dtype)
{
    if (rung->types == LADDER_HALVES) return dtype == FA_BFLOAT16 || dtype == FA_FLOAT16;
    return dtype == FA_FLOAT32;
}

static int compiled_head_dim(int64_t d)
{
    int dim = SMALLEST_HEAD_DIM;
    while (dim < d) dim *= 2;
    return dim;
}

void ladder_image_name(const ladder_rung *rung, fa_dtype dtype, int64_t d, char name[LADDER_NAME])
{
    const char *type = dtype == FA_BFLOAT16 ? "_bf16" : dtype == FA_FLOAT16 ? "_f16" : "";
    snprintf(name, LADDER_NAME, "%s_d%d%s", rung->name, compiled_head_dim(d), type);
}

static int64_t element_size(fa_dtype dtype) { return dtype == FA_FLOAT32 ? 4 : 2; }

int64_t ladder_pitch(fa_dtype dtype, int64_t d)
{
    int64_t vector = 16 / element_size(dtype);
    return (d + vector - 1) / vector * vector;
}

/* ---- errors ---------------------------------------------------------------------------------- */

static bool fail(char error[LADDER_ERROR], const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static bool fail(char error[LADDER_ERROR], const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error, LADDER_ERROR, format, arguments);
    va_end(arguments);
    return false;
}

bool ladder_fault(char error[LADDER_ERROR], const char *doing, const fa_cuda_fault *fault)
{
    return fail(error, "%s: %s: %s (%s)", doing, fault->call, fault->text, fault->name);
}

/* ---- loading --------------------------------------------------------------------------------- */

static bool check_device(const ladder_rung *rung, char error[LADDER_ERROR])
{
    int ordinal;
    fa_cuda_device device;
    fa_cuda_fault fault;
    if (!fa_cuda_current_device(&ordinal, &fault) ||
        (ordinal >= 0 && !fa_cuda_get_device(ordinal, &device, &fault)))
        return ladder_fault(error, "asking for the current device", &fault);
    if (ordinal < 0) return fail(error, "no CUDA device is current in this thread");
    bool hopper_only = rung->architecture == 90;
    if (hopper_only ? device.major != 9 : device.major * 10 + device.minor < rung->architecture)
        return fail(error, "rung %s runs on %s; device %d (%s) has compute capability %d.%d",
                    rung->name, hopper_only ? "compute capability 9.0 only" : "8.0 or later",
                    ordinal, device.name, device.major, device.minor);
    return true;
}

static fa_cuda_image *find_image(const char *name, char error[LADDER_ERROR])
{
    for (fa_cuda_image *image = ladder_images; image->name; image++)
        if (strcmp(image->name, name) == 0) return image;
    fa_cuda_explain_missing_image(name, error, LADDER_ERROR);
    return NULL;
}

/* A kernel's own description must make sense, or the launch would not. */
static bool check_about(const char *image, const rung_about *about, char error[LADDER_ERROR])
{
    if (about->steps < 1 || about->steps > RUNG_STEPS)
        return fail(error, "%s: rung.steps is %" PRId32 "; expected 1 to %d", image, about->steps,
                    (int)RUNG_STEPS);
    const int32_t boxes[] = {about->map_rows_q, about->map_rows_kv, about->map_rows_out};
    for (int i = 0; i < 3; i++)
        if (boxes[i] < 0 || boxes[i] > MAP_BOX_ROWS)
            return fail(error, "%s: a map's box has %" PRId32 " rows; expected 0 to %d", image,
                        boxes[i], (int)MAP_BOX_ROWS);
    for (int i = 0; i < about->steps; i++) {
        const rung_step *s = &about->step[i];
        if (s->threads < 1 || s->threads > 1024 || s->rows < 0 || s->columns < 0 ||
            s->persistent < 0 || s->smem_bytes < 0 || !memchr(s->kernel, 0, sizeof s->kernel))
            return fail(error, "%s: rung.step[%d] is no launch", image, i);
    }
    return true;
}

/* Copied from the device once for each image. */
static bool read_about(fa_cuda_image *image, rung_about *about, char error[LADDER_ERROR])
{
    enum { MAX_IMAGES = NUM_RUNGS * 3 * 2 + 2 };
    static rung_about known[MAX_IMAGES];
    static bool is_known[MAX_IMAGES];
    static pthread_mutex_t reading = PTHREAD_MUTEX_INITIALIZER;
    const ptrdiff_t index = image - ladder_images;
    fa_cuda_fault fault;
    pthread_mutex_lock(&reading);
    if (!is_known[index]) {
        is_known[index] =
            fa_cuda_read_variable(image, "rung", &known[index], sizeof *known, &fault);
        if (!is_known[index]) ladder_fault(error, image->name, &fault);
    }
    bool fine = is_known[index] && check_about(image->name, &known[index], error);
    if (fine) *about = known[index];
    pthread_mutex_unlock(&reading);
    return fine;
}

bool ladder_load(const ladder_rung *rung, fa_dtype dtype, int64_t d, ladder_kernel *kernel,
                 char error[LADDER_ERROR])
{
    char name[LADDER_NAME];
    fa_cuda_fault fault;
    if (!ladder_takes(rung, dtype))
        return fail(error, "rung %s takes %s", rung->name,
                    rung->types == LADDER_HALVES ? "bf16 and f16 only" : "f32 only");
    if (d < 1 || d > rung->largest_d)
        return fail(error, "d is %" PRId64 "; rung %s takes 1 to %d", d, rung->name,
                    rung->largest_d);
    ladder_image_name(rung, dtype, d, name);
    fa_cuda_image *image = find_image(name, error);
    if (!image || !check_device(rung, error) || !read_about(image, &kernel->about, error))
        return false;
    for (int i = 0; i < kernel->about.steps; i++)
        if (!fa_cuda_find_kernel(image, kernel->about.step[i].kernel, &kernel->steps[i], &fault))
            return ladder_fault(error, kernel->about.step[i].kernel, &fault);
    kernel->rung = rung;
    kernel->dtype = dtype;
    kernel->head_dim = compiled_head_dim(d);
    return true;
}

bool ladder_load_probe(bool hopper, const char *entry, void **kernel, char error[LADDER_ERROR])
{
    fa_cuda_fault fault;
    fa_cuda_image *image = find_image(hopper ? "ceiling_hopper" : "ceiling", error);
    if (!image) return false;
    if (!fa_cuda_find_kernel(image, entry, kernel, &fault))
        return ladder_fault(error, entry, &fault);
    return true;
}

/* ---- the plan of a launch -------------------------------------------------------------------- */

static int64_t tiles(int64_t n, int32_t size) { return size > 0 ? (n + size - 1) / size : 1; }

static bool is_aligned(const void *pointer) { return (uintptr_t)pointer % 256 == 0; }

static bool check_problem(const ladder_kernel *kernel, const ladder_problem *p,
                          char error[LADDER_ERROR])
{
    int64_t vector = 16 / element_size(kernel->dtype);
    if (p->heads < 1) return fail(error, "heads is %" PRId64 "; expected 1 or more", p->heads);
    if (p->n < 1 || p->n > INT32_MAX)
        return fail(error, "n is %" PRId64 "; expected 1 to %" PRId32, p->n, INT32_MAX);
    if (p->d < 1 || p->d > kernel->head_dim)
        return fail(error, "d is %" PRId64 "; this kernel of rung %s takes 1 to %d", p->d,
                    kernel->rung->name, kernel->head_dim);
    if (p->pitch < p->d || p->pitch > INT32_MAX || p->pitch % vector != 0)
        return fail(error,
                    "pitch is %" PRId64 "; expected a multiple of %" PRId64
                    " elements (16 bytes) that is at least d, %" PRId64,
                    p->pitch, vector, p->d);
    if (!is_aligned(p->q) || !is_aligned(p->k) || !is_aligned(p->v) || !is_aligned(p->out))
        return fail(error, "q, k, v and out must be aligned to 256 bytes");
    return true;
}

/* How many heads' scores fit into the scratch memory: at least one must. */
static bool fit_scratch(const ladder_kernel *kernel, const ladder_problem *p, int64_t *heads,
                        char error[LADDER_ERROR])
{
    if (!kernel->about.needs_scores) return true;
    double bytes = 4.0 * (double)p->n * (double)p->n, given = (double)p->scratch_bytes;
    if (!p->scratch || given < bytes)
        return fail(error, "scratch has %zu bytes; rung %s needs %.0f for the scores of one head",
                    p->scratch ? p->scratch_bytes : (size_t)0, kernel->rung->name, bytes);
    int64_t fitting = (int64_t)(given / bytes);
    if (fitting < *heads) *heads = fitting;
    return true;
}

bool ladder_make_plan(const ladder_kernel *kernel, const ladder_problem *p,
                      const fa_cuda_device *device, ladder_plan *plan, char error[LADDER_ERROR])
{
    /* The kernels count heads in 32 bits. */
    *plan = (ladder_plan){.device = device->ordinal,
                          .heads = p->heads < INT32_MAX ? p->heads : INT32_MAX};
    if (!check_problem(kernel, p, error) || !fit_scratch(kernel, p, &plan->heads, error))
        return false;
    for (int i = 0; i < kernel->about.steps; i++) {
        const rung_step *s = &kernel->about.step[i];
        bool persistent = s->persistent > 0;
        plan->grid_x[i] =
            persistent ? (int64_t)s->persistent * device->multiprocessors : tiles(p->n, s->rows);
        plan->grid_y[i] = persistent ? 1 : tiles(p->n, s->columns);
        if (!persistent && plan->heads > GRID_YZ) plan->heads = GRID_YZ;
        if (plan->grid_y[i] > GRID_YZ)
            return fail(error, "n is %" PRId64 "; rung %s takes at most %" PRId64, p->n,
                        kernel->rung->name, (int64_t)GRID_YZ * s->columns);
        if (s->smem_bytes > device->smem_per_block)
            return fail(error,
                        "d is %" PRId64 "; rung %s then needs %" PRId32
                        " bytes of shared memory a block, and %s has %" PRId32,
                        p->d, kernel->rung->name, s->smem_bytes, device->name,
                        device->smem_per_block);
    }
    return true;
}

/* ---- launching ------------------------------------------------------------------------------- */

static bool encode_map(const ladder_kernel *kernel, const rung_problem *p, const void *base,
                       int32_t rows, rung_map *map, char error[LADDER_ERROR])
{
    fa_cuda_fault fault;
    fa_tensor_map encoded;
    if (rows == 0) return true;
    uint64_t row_bytes = (uint64_t)p->pitch * 2;
    const fa_tensor_map_shape shape = {
        .base = (void *)(uintptr_t)base,
        .element = (fa_element)kernel->dtype,
        .axes = 3,
        .extent = {(uint64_t)p->d, (uint64_t)p->n, (uint64_t)p->heads},
        .stride = {2, row_bytes, row_bytes * (uint64_t)p->n},
        .box = {MAP_BOX_COLUMNS, (uint32_t)rows, 1}};
    if (!fa_cuda_encode_map(&encoded, &shape, &fault))
        return ladder_fault(error, "making a tensor map", &fault);
    memcpy(map, &encoded, sizeof encoded);
    return true;
}
_Static_assert(sizeof(rung_map) == sizeof(fa_tensor_map), "a map as the kernels see it");

static bool encode_maps(const ladder_kernel *kernel, const rung_problem *p, rung_maps *maps,
                        char error[LADDER_ERROR])
{
    const rung_about *about = &kernel->about;
    return encode_map(kernel, p, p->q, about->map_rows_q, &maps->q, error) &&
           encode_map(kernel, p, p->k, about->map_rows_kv, &maps->k, error) &&
           encode_map(kernel, p, p->v, about->map_rows_kv, &maps->v, error) &&
           encode_map(kernel, p, p->out, about->map_rows_out, &maps->out, error);
}

/* All steps of the heads in `part`. Kernels without maps ignore the second parameter. */
static bool launch_part(const ladder_kernel *kernel, const ladder_plan *plan, rung_problem *part,
                        void *stream, char error[LADDER_ERROR])
{
    fa_cuda_fault fault;
    rung_maps maps;
    memset(&maps, 0, sizeof maps);
    if (!encode_maps(kernel, part, &maps, error)) return false;
    void *parameters[] = {part, &maps};
    for (int i = 0; i < kernel->about.steps; i++) {
        const rung_step *s = &kernel->about.step[i];
        const fa_cuda_launch launch = {.device = plan->device,
                                       .grid = {(uint32_t)plan->grid_x[i],
                                                (uint32_t)plan->grid_y[i],
                                                s->persistent > 0 ? 1u : (uint32_t)part->heads},
                                       .threads = (uint32_t)s->threads,
                                       .smem_bytes = (uint32_t)s->smem_bytes,
                                       .stream = stream};
        if (!fa_cuda_launch_kernel(kernel->steps[i], &launch, parameters, &fault))
            return ladder_fault(error, s->kernel, &fault);
    }
    return true;
}

/* The rows of heads [first, first + heads). */
static rung_problem part_of(const ladder_kernel *kernel, const ladder_problem *p, int64_t first,
                            int64_t heads)
{
    int64_t offset = first * p->n * p->pitch * element_size(kernel->dtype);
    return (rung_problem){.q = (const char *)p->q + offset,
                          .k = (const char *)p->k + offset,
                          .v = (const char *)p->v + offset,
                          .out = (char *)p->out + offset,
                          .scratch = kernel->about.needs_scores ? p->scratch : NULL,
                          .heads = (int32_t)heads,
                          .n = (int32_t)p->n,
                          .d = (int32_t)p->d,
                          .pitch = (int32_t)p->pitch,
                          .scale = p->scale,
                          .causal = p->causal};
}

bool ladder_run(const ladder_kernel *kernel, const ladder_problem *problem,
                char error[LADDER_ERROR])
{
    int ordinal;
    fa_cuda_device device;
    fa_cuda_fault fault;
    ladder_plan plan;
    if (!fa_cuda_current_device(&ordinal, &fault) || !fa_cuda_get_device(ordinal, &device, &fault))
        return ladder_fault(error, "asking for the current device", &fault);
    if (!ladder_make_plan(kernel, problem, &device, &plan, error)) return false;
    for (int64_t first = 0; first < problem->heads; first += plan.heads) {
        int64_t left = problem->heads - first;
        rung_problem part = part_of(kernel, problem, first, left < plan.heads ? left : plan.heads);
        if (!launch_part(kernel, &plan, &part, problem->stream, error)) return false;
    }
    return true;
}
