/*
 * Chooses the CPU engine: the widest instruction set that this build has and this processor supports,
 * or the one that FA_CPU_ISA names.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "amx.h"
#include "dispatch.h"
#include "team.h"

#ifdef _OPENMP
#include <omp.h>
#endif

extern const fa_cpu_engine fa_cpu_engine_portable;
static bool runs_portable(void) { return true; }

#ifdef FA_HAVE_AVX2
extern const fa_cpu_engine fa_cpu_engine_avx2;
static bool runs_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#endif
/* A wider set does not need the build to have the narrower one (FA_ISAS). */
#if defined FA_HAVE_AVX512 || defined FA_HAVE_AVX512_BF16 || defined FA_HAVE_AMX
extern const fa_cpu_engine fa_cpu_engine_avx512;
static bool runs_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif
#if defined FA_HAVE_AVX512_BF16 || defined FA_HAVE_AMX
extern const fa_cpu_engine fa_cpu_engine_avx512_bf16;
static bool runs_avx512_bf16(void) { return runs_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif
#ifdef FA_HAVE_AMX
extern const fa_cpu_engine fa_cpu_engine_amx;
static bool runs_amx(void) { return runs_avx512_bf16() && fa_amx_is_there(); }
#endif
#ifdef FA_HAVE_AMX_EMULATED /* tests only */
extern const fa_cpu_engine fa_cpu_engine_amx_emulated;
#endif

static bool nothing_to_ask(void) { return true; }

/* Narrowest first. Every processor with AVX2 also converts half precision (F16C, 2012). */
static const struct {
    const fa_cpu_engine *engine;
    bool (*runs)(void);
    bool (*request)(void); /* asks the system for what the engine needs, when it is first taken */
    bool by_default;       /* also without FA_CPU_ISA */
} engines[] = {
    {&fa_cpu_engine_portable, runs_portable, nothing_to_ask, true},
#ifdef FA_HAVE_AVX2
    {&fa_cpu_engine_avx2, runs_avx2, nothing_to_ask, true},
#endif
#ifdef FA_HAVE_AVX512
    {&fa_cpu_engine_avx512, runs_avx512, nothing_to_ask, true},
#endif
#ifdef FA_HAVE_AVX512_BF16
    {&fa_cpu_engine_avx512_bf16, runs_avx512_bf16, nothing_to_ask, true},
#endif
#ifdef FA_HAVE_AMX
    {&fa_cpu_engine_amx, runs_amx, fa_amx_request, true},
#endif
#ifdef FA_HAVE_AMX_EMULATED
    {&fa_cpu_engine_amx_emulated, runs_avx512_bf16, nothing_to_ask, false},
#endif
};

enum { NUM_ENGINES = sizeof engines / sizeof *engines };

const fa_cpu_engine *fa_cpu_engine_get(char *why, size_t size)
{
    const char *wanted = getenv("FA_CPU_ISA");
    for (int i = NUM_ENGINES - 1; i >= 0; i--) {
        const bool named = wanted && *wanted;
        if (named ? strcmp(wanted, engines[i].engine->name) != 0 : !engines[i].by_default) continue;
        if (engines[i].runs() && engines[i].request()) return engines[i].engine;
    }
    char names[128];
    fa_cpu_engine_names(names, sizeof names);
    snprintf(why, size,
             "FA_CPU_ISA is \"%.40s\"; expected one that this build has and this processor "
             "runs: %s",
             wanted, names);
    return NULL;
}

void fa_cpu_engine_names(char *text, size_t size)
{
    size_t used = 0;
    if (size) text[0] = 0;
    for (int i = 0; i < NUM_ENGINES && used < size; i++) {
        if (!engines[i].runs()) continue;
        used += (size_t)snprintf(text + used, size - used, "%s%s", used ? " " : "",
                                 engines[i].engine->name);
    }
}

/* Waking a thread takes some 5 us. In that time a running thread does about this many operations. */
#define OPERATIONS_PER_THREAD 250e3

/* How many threads a parallel region would get here: one inside of another region, unless regions
 * nest. */
static int default_threads(void)
{
#ifdef _OPENMP
    const bool nested = omp_in_parallel() && omp_get_active_level() >= omp_get_max_active_levels();
    return nested ? 1 : omp_get_max_threads();
#else
    return 1;
#endif
}

int fa_cpu_threads(int asked, double operations)
{
    if (asked > 0) return asked < FA_TEAM_MAX ? asked : FA_TEAM_MAX;
    const int max = default_threads();
    const double useful = 1.0 + operations / OPERATIONS_PER_THREAD;
    return useful < max ? (int)useful : max;
}
