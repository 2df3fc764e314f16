#include "ladder_rungs.h"

#include <string.h>

#include "cuda/images.h"
#include "output.h"

bool rungs_say(const char *error)
{
    cli_error("%s", error);
    return false;
}

bool rungs_say_fault(const char *doing, const fa_cuda_fault *fault)
{
    char error[LADDER_ERROR];
    ladder_fault(error, doing, fault);
    return rungs_say(error);
}

bool rungs_open_device(fa_cuda_device *device)
{
    fa_cuda_fault fault;
    if (!fa_cuda_open(&fault)) return rungs_say_fault("no CUDA device", &fault);
    if (fa_cuda_device_count() < 1) return rungs_say("no CUDA device: the driver counts none");
    if (!fa_cuda_get_device(0, device, &fault) || !fa_cuda_use_device(0, &fault))
        return rungs_say_fault("device 0", &fault);
    if (fa_cuda_architectures[0]) return true;
    char why[LADDER_ERROR];
    fa_cuda_explain_missing_image("", why, sizeof why);
    return rungs_say(why);
}

bool rungs_run_here(const ladder_rung *rung, const fa_cuda_device *device)
{
    return rung->architecture == 90 ? device->major == 9 : device->major >= 8;
}

const char *rungs_types(const ladder_rung *rung)
{
    switch (rung->types) {
    case LADDER_FLOAT32: return "f32";
    case LADDER_TF32: return "tf32";
    default: return "bf16, f16";
    }
}

static bool choose_named(const char *name, bool *wanted)
{
    const ladder_rung *rung = ladder_find_rung(name);
    if (rung) wanted[rung - ladder_rung_at(0)] = true;
    else cli_error("\"%s\" is not a rung; flashattn ladder list shows them", name);
    return rung != NULL;
}

bool rungs_choose(int *argc, char **argv, rungs_chosen *chosen)
{
    bool wanted[RUNGS_MAX] = {false};
    int names = 0;
    while (names + 1 < *argc && argv[names + 1][0] != '-')
        if (!choose_named(argv[++names], wanted)) return false;
    *argc -= names;
    memmove(&argv[1], &argv[1 + names], (size_t)(*argc - 1) * sizeof *argv);
    chosen->count = 0;
    for (int i = 0; i < ladder_num_rungs(); i++)
        if (wanted[i] || names == 0) chosen->rungs[chosen->count++] = ladder_rung_at(i);
    return true;
}
