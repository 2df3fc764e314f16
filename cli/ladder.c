/* `flashattn ladder`: the teaching ladder of CUDA kernels: list, run, bench, ceiling. */
#include <string.h>

#include "args.h"
#include "commands.h"
#include "output.h"

#ifndef FA_HAVE_CUDA

int cmd_ladder(int argc, char **argv)
{
    const cli_command command = {
        .name = "ladder",
        .usage = "list | run | bench | ceiling",
        .about = "The CUDA kernels from naive to Hopper, one optimization a "
                 "rung. This command was built\nwithout CUDA: use make CUDA=all "
                 "to include it."};
    if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0))
        return cli_parse(&command, argc, argv);
    cli_error("this command was built without CUDA (make CUDA=all builds it in)");
    return CLI_BAD;
}

#else

#include <stdio.h>

#include "ladder_bench.h"
#include "ladder_ceiling.h"
#include "ladder_run.h"
#include "ladder_rungs.h"

/* ---- list ------------------------------------------------------------------------------------ */

/* A line for each compiled head dim: the rung's kernels on this device. */
static void print_kernels(const ladder_rung *rung)
{
    fa_dtype dtype = rung->types == LADDER_HALVES ? FA_BFLOAT16 : FA_FLOAT32;
    for (int64_t d = 64; d <= rung->largest_d; d *= 2) {
        ladder_kernel k;
        char error[LADDER_ERROR];
        if (!ladder_load(rung, dtype, d, &k, error)) {
            printf("     %s\n", error);
            return;
        }
        for (int i = 0; i < k.about.steps; i++) {
            const rung_step *s = &k.about.step[i];
            fa_cuda_kernel_facts facts = {0};
            fa_cuda_fault fault;
            if (!fa_cuda_kernel_facts_of(k.steps[i], 0, &facts, &fault)) {
                printf("     %s: %s\n", s->kernel, fault.text);
                return;
            }
            printf("     d <= %-3d  %-28s %4d threads %4d registers %5d bytes local %7d bytes "
                   "shared\n",
                   k.head_dim, s->kernel, s->threads, facts.registers, facts.local_bytes,
                   facts.static_smem_bytes + s->smem_bytes);
        }
    }
}

#define LIST_ABOUT                                                                                 \
    "Lists the rungs from the bottom up: number, name, types (f32: float32 arithmetic; tf32:\n"    \
    "float32 in and out, products rounded to tf32), the architecture that they need, the "         \
    "largest\n"                                                                                    \
    "head dim, the idea; and registers and shared memory, if there is a device."

static int list(int argc, char **argv)
{
    const cli_command command = {.name = "ladder list", .usage = "", .about = LIST_ABOUT};
    int code = cli_parse(&command, argc, argv);
    if (code != CLI_CONTINUE) return code;
    fa_cuda_device device;
    fa_cuda_fault fault;
    bool have = fa_cuda_device_count() > 0 && fa_cuda_get_device(0, &device, &fault) &&
                fa_cuda_use_device(0, &fault);
    for (int i = 0; i < ladder_num_rungs(); i++) {
        const ladder_rung *r = ladder_rung_at(i);
        printf("%02d  %-26s %-9s sm_%d%s  d <= %d  %s\n", r->number, r->name, rungs_types(r),
               r->architecture, r->architecture == 90 ? "a" : "+", r->largest_d, r->idea);
        if (have && rungs_run_here(r, &device)) print_kernels(r);
    }
    return CLI_FINE;
}

/* ---- ceiling --------------------------------------------------------------------------------- */

#define CEILING_ABOUT                                                                              \
    "Measures the highest rates of the device: copying memory (bytes read and written), and\n"     \
    "products in float32 (FFMA) and on the tensor cores (mma.sync in tf32 and bf16; wgmma on\n"    \
    "Hopper), on random data."

static void print_rate(const char *name, double rate)
{
    if (rate > 0) printf("%-22s %8.1f TFLOP/s\n", name, 1e-12 * rate);
}

static int ceiling(int argc, char **argv)
{
    const cli_command command = {.name = "ladder ceiling", .usage = "", .about = CEILING_ABOUT};
    int code = cli_parse(&command, argc, argv);
    if (code != CLI_CONTINUE) return code;
    fa_cuda_device device;
    rungs_ceiling c;
    if (!rungs_open_device(&device) || !rungs_measure_ceiling(&device, &c)) return CLI_BAD;
    printf("%s, %d multiprocessors\n", device.name, device.multiprocessors);
    printf("%-22s %8.1f GB/s\n", "copy", 1e-9 * c.copy);
    print_rate("FFMA", c.ffma);
    print_rate("mma.sync tf32", c.mma_tf32);
    print_rate("mma.sync bf16", c.mma_bf16);
    print_rate("wgmma bf16", c.wgmma_bf16);
    return CLI_FINE;
}

/* ---- the command ----------------------------------------------------------------------------- */

static const struct {
    const char *name, *shown; /* the subcommand in messages: "ladder run" */
    int (*function)(int argc, char **argv);
    const char *help;
} PARTS[] = {{"list", "ladder list", list, "the rungs, and what the compiler made of them"},
             {"run", "ladder run", rungs_verify, "compare the rungs with float64"},
             {"bench", "ladder bench", rungs_bench, "time the rungs, side by side"},
             {"ceiling", "ladder ceiling", ceiling, "what the device can do at best"}};

static int print_help(void)
{
    puts("Usage: flashattn ladder COMMAND [OPTIONS]\n\n"
         "The ladder: attention on CUDA from naive to Hopper, one optimization a rung.\n\n"
         "Commands:");
    for (int i = 0; i < CLI_COUNT(PARTS); i++) printf("  %-8s %s\n", PARTS[i].name, PARTS[i].help);
    puts("\nflashattn ladder COMMAND --help describes a command.\n"
         "Exit codes: 0 success, 1 wrong result, 2 bad usage or no device.");
    return CLI_FINE;
}

int cmd_ladder(int argc, char **argv)
{
    if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0))
        return print_help();
    for (int i = 0; argc > 1 && i < CLI_COUNT(PARTS); i++) {
        if (strcmp(argv[1], PARTS[i].name) != 0) continue;
        cli_set_command(PARTS[i].shown);
        return PARTS[i].function(argc - 1, argv + 1);
    }
    if (argc > 1)
        cli_error("\"%s\" is not a command; expected list, run, bench or ceiling", argv[1]);
    else cli_error("a command is missing; expected list, run, bench or ceiling");
    return CLI_BAD;
}

#endif
