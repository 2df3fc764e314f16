/*
 * The arguments of the subcommands: one table parses them and prints the help.
 */
#ifndef FA_CLI_ARGS_H
#define FA_CLI_ARGS_H

#include <stdbool.h>
#include <stdint.h>

/* The number of entries of an array. */
#define CLI_COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

typedef enum cli_kind {
    CLI_FLAG,    /* value: bool; takes no argument                                                */
    CLI_TEXT,    /* value: const char *                                                           */
    CLI_INTEGER, /* value: int64_t within [min, max]                                              */
    CLI_SEED,    /* value: uint64_t, decimal or 0x...                                             */
    CLI_REAL,    /* value: double that is a finite float and passes accept                        */
    CLI_CHOICE,  /* value: int, the index into choices                                            */
    CLI_LIST,    /* value: cli_list of integers within [min, max]                                 */
    CLI_PAIR     /* value: int64_t[2], each within [min, max]                                     */
} cli_kind;

enum { CLI_LIST_MAX = 64 };

typedef struct cli_list {
    int count;
    int64_t items[CLI_LIST_MAX];
} cli_list;

/* One option. The same table parses the arguments and prints the help. */
typedef struct cli_option {
    const char *name; /* with its dashes: "--window"                                              */
    cli_kind kind;
    void *value;      /* where the parsed value goes; untouched if the option is not given        */
    const char *meta; /* what usage and help call the argument: "FILE"; NULL for a flag           */
    const char *help; /* what it means and its default; lines separated by \n                     */
    int64_t min, max; /* CLI_INTEGER, CLI_LIST, CLI_PAIR                                */
    const char *const *choices; /* CLI_CHOICE: names, then NULL                                   */
    bool (*accept)(double);     /* CLI_REAL: the values allowed; NULL: all                        */
    const char *expected;       /* CLI_REAL: those values in words                                */
    bool required;
    bool *given; /* set to true if the option is given; may be NULL                               */
} cli_option;

typedef struct cli_command {
    const char *name;
    const char *usage; /* what follows the name in the usage line                                 */
    const char *about; /* paragraphs before the options                                           */
    const cli_option *options;
    int num_options;
    const char **operand;     /* where the one operand goes; NULL: the command takes none         */
    const char *operand_name; /* what messages call it                                            */
    const char *notes;        /* paragraphs after the options; may be NULL                        */
} cli_command;

enum { CLI_CONTINUE = -1 };

/* Parses argv[1..]. Returns CLI_CONTINUE, or the exit code to return at once: CLI_FINE after
 * --help, CLI_BAD after a message on stderr. */
int cli_parse(const cli_command *command, int argc, char **argv);

#endif
