/* `flashattn info`: shows this machine, and what is supported on it. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "output.h"
#include "flashattn.h"

#ifdef FA_HAVE_CUDA
#include "cuda/driver.h"
#endif

static const fa_dtype DTYPES[] = {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16, FA_FLOAT8_E4M3};
static const fa_pass PASSES[] = {FA_PASS_FORWARD, FA_PASS_BACKWARD, FA_PASS_DECODE,
                                 FA_PASS_WEIGHTS};
static const char *const PASS_NAMES[] = {"forward", "backward", "decode", "weights"};
static const fa_device DEVICES[] = {FA_DEVICE_CPU, FA_DEVICE_CUDA};
static const char *const DEVICE_NAMES[] = {"cpu", "cuda"};

/* The processor's name from Linux; "unknown" on other systems. */
static void read_cpu_model(char *model, size_t size)
{
    char line[512];
    FILE *file = fopen("/proc/cpuinfo", "r");
    snprintf(model, size, "unknown");
    while (file && fgets(line, sizeof line, file)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon) continue;
        line[strcspn(line, "\n")] = '\0';
        snprintf(model, size, "%s", colon[1] == ' ' ? colon + 2 : colon + 1);
        break;
    }
    if (file) fclose(file);
}

/* ---- GPUs ------------------------------------------------------------------------------------ */

#ifdef FA_HAVE_CUDA

static bool find_gpu(int ordinal, fa_cuda_device *device)
{
    return fa_cuda_get_device(ordinal, device, &(fa_cuda_fault){0});
}

/* Makes dry runs use an existing GPU. */
static void use_gpu(void)
{
    if (fa_cuda_device_count() > 0) (void)fa_cuda_use_device(0, &(fa_cuda_fault){0});
}

static void print_gpus(int count)
{
    fa_cuda_device d;
    if (count > 0)
        printf("\n%-6s %-28s %5s %5s %11s %9s %11s\n", "device", "name", "arch", "SMs",
               "memory GiB", "L2 MiB", "shared KiB");
    for (int i = 0; i < count; i++)
        if (find_gpu(i, &d))
            printf("%-6d %-28s %3d.%d %5d %11.1f %9.1f %11.1f\n", i, d.name, (int)d.major,
                   (int)d.minor, (int)d.multiprocessors, (double)d.memory_bytes / 0x1p30,
                   (double)d.l2_bytes / 0x1p20, (double)d.smem_per_block / 0x1p10);
}

static void json_gpus(cli_json *j, int count)
{
    fa_cuda_device d;
    cli_json_open(j, "gpus", '[');
    for (int i = 0; i < count; i++) {
        if (!find_gpu(i, &d)) continue;
        cli_json_open(j, NULL, '{');
        cli_json_integer(j, "device", i);
        cli_json_text(j, "name", d.name);
        cli_json_integer(j, "major", d.major);
        cli_json_integer(j, "minor", d.minor);
        cli_json_integer(j, "multiprocessors", d.multiprocessors);
        cli_json_integer(j, "memory_bytes", d.memory_bytes);
        cli_json_integer(j, "l2_bytes", d.l2_bytes);
        cli_json_integer(j, "smem_per_block", d.smem_per_block);
        cli_json_close(j, '}');
    }
    cli_json_close(j, ']');
}

#else

static void use_gpu(void) {}
static void print_gpus(int count) { (void)count; }

static void json_gpus(cli_json *j, int count)
{
    (void)count;
    cli_json_open(j, "gpus", '[');
    cli_json_close(j, ']');
}

#endif

/* ---- what is supported ----------------------------------------------------------------------- */

/* A typical problem of each kind represents all: 128 queries (decode: 1), 8 heads of dim 64. With
 * fp8, the result is float32. */
static fa_status ask(fa_pass pass, fa_dtype dtype, fa_device device)
{
    fa_dtype out_dtype = dtype == FA_FLOAT8_E4M3 ? FA_FLOAT32 : dtype;
    int64_t n_q = pass == FA_PASS_DECODE ? 1 : 128;
    fa_tensor q = fa_bshd(NULL, dtype, 1, n_q, 8, 64), k = fa_bshd(NULL, dtype, 1, 128, 8, 64);
    fa_tensor out = fa_bshd(NULL, out_dtype, 1, n_q, 8, 64);
    fa_options o = {.size = sizeof o, .device = device};
    return fa_supported(pass, &q, &k, &k, &out, &o);
}

typedef struct machine {
    char model[256];
    fa_cpu_info cpu;
    bool cpu_fine;
    char cpu_error[512];
    fa_cuda_info cuda;
} machine;

static void ask_machine(machine *m)
{
    memset(m, 0, sizeof *m);
    read_cpu_model(m->model, sizeof m->model);
    m->cpu_fine = fa_get_cpu_info(&m->cpu) == FA_OK;
    if (!m->cpu_fine) snprintf(m->cpu_error, sizeof m->cpu_error, "%s", fa_last_error());
    (void)fa_get_cuda_info(&m->cuda);
    use_gpu();
}

/* ---- text ------------------------------------------------------------------------------------ */

static void print_support(fa_device device, const char *name)
{
    printf("\n%-9s", name);
    for (int d = 0; d < CLI_COUNT(DTYPES); d++) printf(" %-14s", fa_dtype_name(DTYPES[d]));
    putchar('\n');
    char reason[512] = "";
    for (int p = 0; p < CLI_COUNT(PASSES); p++) {
        printf("%-9s", PASS_NAMES[p]);
        for (int d = 0; d < CLI_COUNT(DTYPES); d++) {
            bool fine = ask(PASSES[p], DTYPES[d], device) == FA_OK;
            if (!fine && !reason[0]) snprintf(reason, sizeof reason, "%s", fa_last_error());
            printf(" %-14s", fine ? "yes" : "no");
        }
        putchar('\n');
    }
    if (reason[0]) printf("the first no: %s\n", reason);
}

static void print_text(const machine *m)
{
    printf("flashattn     %s\ncpu           %s\n", fa_version_string(), m->model);
    if (m->cpu_fine)
        printf("instructions  %s in use, of: %s\nvector        %" PRId32
               " bits\nthreads       %" PRId32 "\n",
               m->cpu.isa, m->cpu.isas, m->cpu.vector_bits, m->cpu.threads);
    else printf("instructions  %s\n", m->cpu_error);
    printf("gpu           %s\n", m->cuda.detail);
    if (m->cuda.driver_version > 0)
        printf("driver        CUDA %" PRId32 ".%" PRId32 ", %" PRId32 " device%s\n",
               m->cuda.driver_version / 1000, m->cuda.driver_version % 1000 / 10,
               m->cuda.device_count, m->cuda.device_count == 1 ? "" : "s");
    print_gpus((int)m->cuda.device_count);
    for (int i = 0; i < CLI_COUNT(DEVICES); i++) print_support(DEVICES[i], DEVICE_NAMES[i]);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static void json_support(cli_json *j)
{
    cli_json_open(j, "supported", '[');
    for (int i = 0; i < CLI_COUNT(DEVICES); i++)
        for (int p = 0; p < CLI_COUNT(PASSES); p++)
            for (int d = 0; d < CLI_COUNT(DTYPES); d++) {
                bool fine = ask(PASSES[p], DTYPES[d], DEVICES[i]) == FA_OK;
                cli_json_open(j, NULL, '{');
                cli_json_text(j, "pass", PASS_NAMES[p]);
                cli_json_text(j, "dtype", fa_dtype_name(DTYPES[d]));
                cli_json_text(j, "device", DEVICE_NAMES[i]);
                cli_json_bool(j, "supported", fine);
                cli_json_text(j, "why_not", fine ? NULL : fa_last_error());
                cli_json_close(j, '}');
            }
    cli_json_close(j, ']');
}

static void print_json(const machine *m)
{
    cli_json j = {stdout, false};
    cli_json_open(&j, NULL, '{');
    cli_json_text(&j, "version", fa_version_string());
    cli_json_open(&j, "cpu", '{');
    cli_json_text(&j, "model", m->model);
    cli_json_text(&j, "isa", m->cpu_fine ? m->cpu.isa : NULL);
    cli_json_text(&j, "isas", m->cpu_fine ? m->cpu.isas : NULL);
    cli_json_integer(&j, "vector_bits", m->cpu.vector_bits);
    cli_json_integer(&j, "threads", m->cpu.threads);
    cli_json_text(&j, "error", m->cpu_fine ? NULL : m->cpu_error);
    cli_json_close(&j, '}');
    cli_json_open(&j, "cuda", '{');
    cli_json_integer(&j, "devices", m->cuda.device_count);
    cli_json_integer(&j, "driver_version", m->cuda.driver_version);
    cli_json_text(&j, "detail", m->cuda.detail);
    json_gpus(&j, (int)m->cuda.device_count);
    cli_json_close(&j, '}');
    json_support(&j);
    cli_json_close(&j, '}');
    cli_json_end_line(&j);
}

int cmd_info(int argc, char **argv)
{
    bool json = false;
    const cli_option options[] = {
        {.name = "--json", .kind = CLI_FLAG, .value = &json, .help = "one JSON object"},
    };
    const cli_command command = {
        .name = "info",
        .usage = "[OPTIONS]",
        .about =
            "Shows the CPU, the instruction sets and threads in use, the GPU, the version, and\n"
            "which pass is supported in which dtype on which device.",
        .options = options,
        .num_options = CLI_COUNT(options),
        .notes = "The environment variable FA_CPU_ISA forces an instruction set.",
    };
    int code = cli_parse(&command, argc, argv);
    if (code != CLI_CONTINUE) return code;
    machine m;
    ask_machine(&m);
    if (json) print_json(&m);
    else print_text(&m);
    return CLI_FINE;
}
