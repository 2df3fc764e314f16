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
    CLI_FLAG,    /* value: bool; takes no argument */
    CLI_TEXT,    /* value: const char * */
    CLI_INTEGER, /* value: int64_t within [min, max] */
    CLI_SEED,    /* value: uint64_t, decimal or 0x... */
    CLI_REAL,    /* value: double that is a finite float and passes accept */
    CLI_CHOICE,  /* value: int, the index into choices */
    CLI_LIST,    /* value: cli_list of integers within [min, max] */
    CLI_PAIR     /* value: int64_t[2], each within [min, max] */
} cli_kind;

enum { CLI_LIST_MAX = 64 };

typedef struct cli_list {
    int count;
    int64_t items[CLI_LIST_MAX];
} cli_list;

/* One option. The same table parses the arguments and prints the help. */
typedef struct cli_option {
    const char *name; /* with its dashes: "--window" */
    cli_kind kind;
    void *value;      /* the parsed value is stored here; unchanged if the option is not given */
    const char *meta; /* how usage and help name the argument: "FILE"; NULL for a flag */
    const char *help; /* the meaning and the default; lines separated by \n */
    int64_t min, max; /* CLI_INTEGER, CLI_LIST, CLI_PAIR */
    const char *const *choices; /* CLI_CHOICE: names, then NULL */
    bool (*accept)(double);     /* CLI_REAL: whether a value is allowed; NULL: all are */
    const char *expected;       /* CLI_REAL: the allowed values in words */
    bool required;
    bool *given; /* set to true if the option is given; may be NULL */
} cli_option;

typedef struct cli_command {
    const char *name;
    const char *usage; /* the usage line after the name */
    const char *about; /* paragraphs before the options */
    const cli_option *options;
    int num_options;
    /* The only operand is stored here; NULL: the command takes none. */
    const char **operand;
    const char *operand_name; /* how messages name it */
    const char *notes;        /* paragraphs after the options; may be NULL */
} cli_command;

enum { CLI_CONTINUE = -1 };

/* Parses argv[1..]. Returns CLI_CONTINUE, or the exit code to return at once: CLI_FINE after
 * --help, CLI_BAD after a message on stderr. */
int cli_parse(const cli_command *command, int argc, char **argv);

#endif
