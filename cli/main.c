/* The command `flashattn`: chooses the subcommand. */
#include <signal.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "output.h"
#include "flashattn.h"

typedef struct subcommand {
    const char *name;
    int (*function)(int argc, char **argv);
    const char *help;
} subcommand;

static const subcommand SUBCOMMANDS[] = {
    {"run", cmd_run, "compute attention of .npy files"},
    {"grad", cmd_grad, "compute its gradients"},
    {"bench", cmd_bench, "measure speed: forward, backward or decode"},
    {"verify", cmd_verify, "compare random problems with float64"},
    {"job", cmd_job, "check a real model's attention, then time a range of sequence lengths"},
    {"ladder", cmd_ladder, "CUDA kernels from naive to Hopper, one optimization in each"},
    {"info", cmd_info, "describe this machine and what it supports"},
};

static void print_help(void)
{
    puts("Usage: flashattn COMMAND [OPTIONS]\n\n"
         "Exact attention, softmax(scale * Q K^T + ...) V, block by block.\n\n"
         "Commands:");
    for (int i = 0; i < CLI_COUNT(SUBCOMMANDS); i++)
        printf("  %-8s %s\n", SUBCOMMANDS[i].name, SUBCOMMANDS[i].help);
    puts("\n  --help     this text; flashattn COMMAND --help describes a command\n"
         "  --version  the version\n\n"
         "Exit codes: 0 success, 1 wrong result, 2 bad usage or input.");
}

static const subcommand *find_subcommand(const char *name)
{
    for (int i = 0; i < CLI_COUNT(SUBCOMMANDS); i++)
        if (strcmp(name, SUBCOMMANDS[i].name) == 0) return &SUBCOMMANDS[i];
    return NULL;
}

static int dispatch(int argc, char **argv)
{
    if (argc < 2) {
        cli_error("a command is missing; expected run, grad, bench, verify, job, ladder or info "
                  "(flashattn --help)");
        return CLI_BAD;
    }
    const subcommand *s = find_subcommand(argv[1]);
    if (s) {
        cli_set_command(s->name);
        return s->function(argc - 1, argv + 1);
    }
    bool help = strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0;
    bool version = strcmp(argv[1], "--version") == 0;
    if (!help && !version) {
        cli_error("\"%s\" is not a command; expected run, grad, bench, verify, job, ladder or info "
                  "(flashattn --help)",
                  argv[1]);
        return CLI_BAD;
    }
    if (argc > 2) {
        cli_error("%s takes no arguments; found \"%s\" after it", argv[1], argv[2]);
        return CLI_BAD;
    }
    if (help) print_help();
    else printf("flashattn %s\n", fa_version_string());
    return CLI_FINE;
}

extern char **environ; /* NOLINT(readability-redundant-declaration): POSIX leaves it to programs */

/* A misspelled variable would have no effect, and nobody would know. */
static void warn_of_unknown_variables(void)
{
    static const char *const read[] = {"FA_CPU_ISA", "FA_CUDA_KERNEL", "FA_CUDA_BACKWARD_KERNEL",
                                       "FA_CUDA_DRIVER"};
    for (char **entry = environ; entry && *entry; entry++) {
        if (strncmp(*entry, "FA_CPU_", 7) != 0 && strncmp(*entry, "FA_CUDA_", 8) != 0) continue;
        const int length = (int)strcspn(*entry, "=");
        bool known = false;
        for (int i = 0; i < CLI_COUNT(read); i++)
            known = known || (strlen(read[i]) == (size_t)length &&
                              strncmp(*entry, read[i], (size_t)length) == 0);
        if (!known)
            fprintf(stderr,
                    "flashattn: warning: the environment variable %.*s is not read; expected "
                    "FA_CPU_ISA, FA_CUDA_KERNEL, FA_CUDA_BACKWARD_KERNEL or FA_CUDA_DRIVER\n",
                    length, *entry);
    }
}

/* If output could not be written (for example because a disk is full), the command must fail.
 * Beyond the limit of a file's size (ulimit -f), writing must fail in the same way, and not end the
 * command by a signal. */
int main(int argc, char **argv)
{
    signal(SIGXFSZ, SIG_IGN);
    warn_of_unknown_variables();
    int code = dispatch(argc, argv);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        cli_error("standard output could not be written in full");
        if (code == CLI_FINE) code = CLI_BAD;
    }
    return code;
}
