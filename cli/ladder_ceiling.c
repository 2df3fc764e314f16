/* The best rates of the device, measured by ladder/ceiling.cu; and random inputs that are generated
 * on the device. */
#include "output.h"
#include "measure.h"
#include "ladder_ceiling.h"
#include "ladder_rungs.h"

enum {
    THREADS = 256, /* as in ceiling.cu */
    SAMPLES = 5,
    COPY_BYTES = 1 << 30
};

/* One kernel of the probe: how often it is launched, its grid, and the work of a launch. */
typedef struct probe {
    const char *entry;
    bool hopper;
    int blocks_per_multiprocessor;
    uint32_t smem_bytes;
    double per_round; /* operations of a block in a round */
} probe;

/* FFMA: 16 per thread; mma.sync: 16 products per warp of 16 x 8 x (8 or 16); wgmma: 4 products of
 * 64 x 256 x 16 for each of two warpgroups, whose operands take 2 * 8 + 32 KiB. */
static const probe FFMA = {"rate_ffma", false, 8, 0, THREADS * 16 * 2.0};
static const probe MMA_TF32 = {"rate_mma_tf32", false, 2, 0, 8 * 16 * (2.0 * 16 * 8 * 8)};
static const probe MMA_BF16 = {"rate_mma_bf16", false, 2, 0, 8 * 16 * (2.0 * 16 * 8 * 16)};
static const probe WGMMA_BF16 = {"rate_wgmma_bf16", true, 1, 49152 + 1024,
                                 2 * 4 * (2.0 * 64 * 256 * 16)};

static bool load(const probe *p, void **kernel)
{
    char error[LADDER_ERROR];
    return ladder_load_probe(p->hopper, p->entry, kernel, error) || rungs_say(error);
}

/* The median time of launches, after one to warm up. */
static bool time_launches(void *kernel, const fa_cuda_launch *launch, void **parameters,
                          double *seconds)
{
    void *begin = NULL, *end = NULL;
    double samples[SAMPLES];
    fa_cuda_fault fault;
    bool fine = fa_cuda_event_new(&begin, &fault) && fa_cuda_event_new(&end, &fault) &&
                fa_cuda_launch_kernel(kernel, launch, parameters, &fault);
    for (int i = 0; fine && i < SAMPLES; i++)
        fine = fa_cuda_event_record(begin, NULL, &fault) &&
               fa_cuda_launch_kernel(kernel, launch, parameters, &fault) &&
               fa_cuda_event_record(end, NULL, &fault) &&
               fa_cuda_event_seconds(begin, end, &samples[i], &fault);
    fa_cuda_event_free(begin);
    fa_cuda_event_free(end);
    if (!fine) return rungs_say_fault("the probe", &fault);
    *seconds = measure_summary(samples, SAMPLES).median;
    return true;
}

/* Rounds are doubled until a launch takes 20 ms: then the start no longer matters, and clock rates
 * are those of continuous work. */
static bool measure_rate(const fa_cuda_device *device, const probe *p, double *rate)
{
    void *kernel, *out = NULL;
    int rounds = 1024;
    void *parameters[] = {&out, &rounds};
    const uint32_t blocks = (uint32_t)(device->multiprocessors * p->blocks_per_multiprocessor);
    const fa_cuda_launch launch = {.device = device->ordinal,
                                   .grid = {blocks, 1, 1},
                                   .threads = THREADS,
                                   .smem_bytes = p->smem_bytes};
    if (!load(p, &kernel)) return false;
    for (double seconds = 0; seconds < 20e-3 && rounds < 1 << 28; rounds *= 2) {
        if (!time_launches(kernel, &launch, parameters, &seconds)) return false;
        *rate = seconds > 0 ? p->per_round * blocks * rounds / seconds : 0;
    }
    return true;
}

/* Copies one GiB, which is larger than every cache. */
static bool measure_copy(const fa_cuda_device *device, double *rate)
{
    static const probe COPY = {"copy", false, 16, 0, 0};
    void *kernel, *from = NULL, *to = NULL;
    uint64_t count = COPY_BYTES / 16;
    double seconds = 0;
    fa_cuda_fault fault;
    void *parameters[] = {&to, &from, &count};
    const fa_cuda_launch launch = {
        .grid = {(uint32_t)(device->multiprocessors * COPY.blocks_per_multiprocessor), 1, 1},
        .threads = THREADS};
    if (!load(&COPY, &kernel)) return false;
    bool fine =
        fa_cuda_allocate(&from, COPY_BYTES, &fault) && fa_cuda_allocate(&to, COPY_BYTES, &fault);
    if (!fine) rungs_say_fault("memory for the probe", &fault);
    fine = fine && rungs_fill_normal(from, FA_FLOAT32, COPY_BYTES / 4, 1) &&
           time_launches(kernel, &launch, parameters, &seconds);
    fa_cuda_free(from);
    fa_cuda_free(to);
    if (fine) *rate = 2.0 * COPY_BYTES / seconds;
    return fine;
}

bool rungs_measure_rates(const fa_cuda_device *device, rungs_ceiling *ceiling)
{
    *ceiling = (rungs_ceiling){0};
    cli_progress("measuring what %s can do", device->name);
    bool fine = measure_rate(device, &FFMA, &ceiling->ffma) &&
                measure_rate(device, &MMA_TF32, &ceiling->mma_tf32) &&
                measure_rate(device, &MMA_BF16, &ceiling->mma_bf16) &&
                (device->major != 9 || measure_rate(device, &WGMMA_BF16, &ceiling->wgmma_bf16));
    cli_progress_clear();
    return fine;
}

bool rungs_measure_ceiling(const fa_cuda_device *device, rungs_ceiling *ceiling)
{
    double copy;
    bool fine = measure_copy(device, &copy) && rungs_measure_rates(device, ceiling);
    if (fine) ceiling->copy = copy;
    return fine;
}

double rungs_ceiling_of(const rungs_ceiling *ceiling, ladder_types types)
{
    if (types == LADDER_FLOAT32) return ceiling->ffma;
    if (types == LADDER_TF32) return ceiling->mma_tf32;
    return ceiling->wgmma_bf16 > ceiling->mma_bf16 ? ceiling->wgmma_bf16 : ceiling->mma_bf16;
}

bool rungs_fill_normal(void *data, fa_dtype dtype, int64_t count, uint32_t seed)
{
    void *kernel;
    char error[LADDER_ERROR];
    fa_cuda_fault fault;
    uint64_t fours = (uint64_t)count / 4;
    int kind = dtype == FA_FLOAT32 ? 0 : dtype == FA_BFLOAT16 ? 1 : 2; /* as in ceiling.cu */
    void *parameters[] = {&data, &fours, &seed, &kind};
    const fa_cuda_launch launch = {.grid = {2048, 1, 1}, .threads = THREADS};
    if (!ladder_load_probe(false, "fill_normal", &kernel, error)) return rungs_say(error);
    return fa_cuda_launch_kernel(kernel, &launch, parameters, &fault) ||
           rungs_say_fault("filling memory", &fault);
}
