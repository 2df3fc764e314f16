/*
 * What the subcommands of the command `flashattn` share: argument parsing, messages, progress and
 * JSON. A subcommand is a function cmd_<name>(argc, argv) that returns the exit code; argv[0] is
 * the subcommand's name.
 */
#ifndef FA_CLI_H
#define FA_CLI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* Exit codes. */
enum {
    CLI_FINE = 0,
    CLI_WRONG = 1, /* the command worked, and a result was wrong                                  */
    CLI_BAD = 2    /* bad usage or input, or this machine cannot do what was asked                */
};

int cmd_run(int argc, char **argv);
int cmd_grad(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_verify(int argc, char **argv);
int cmd_job(int argc, char **argv);
int cmd_ladder(int argc, char **argv);
int cmd_info(int argc, char **argv);

/* ------------------------------------------------------------------------------------------------
 * Arguments (args.c)
 * ---------------------------------------------------------------------------------------------- */

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
    const char *about; /* paragraphs in front of the options                                      */
    const cli_option *options;
    int num_options;
    const char **operand;     /* where the one operand goes; NULL: the command takes none         */
    const char *operand_name; /* what messages call it                                            */
    const char *notes;        /* paragraphs behind the options; may be NULL                       */
} cli_command;

enum { CLI_CONTINUE = -1 };

/* Parses argv[1..]. Returns CLI_CONTINUE, or the exit code to return at once: CLI_FINE after
 * --help, CLI_BAD after a message on stderr. */
int cli_parse(const cli_command *command, int argc, char **argv);

/* The number of entries of an array. */
#define CLI_COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

/* ------------------------------------------------------------------------------------------------
 * Messages, progress, time (output.c)
 * ---------------------------------------------------------------------------------------------- */

#if defined(__GNUC__) || defined(__clang__)
#define CLI_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define CLI_PRINTF(text, first)
#endif

/* Names the command in all messages that follow: "flashattn NAME: ..."; NULL: "flashattn: ...". */
void cli_set_command(const char *name);

/* Clears the progress line, then writes "flashattn NAME: " and the message to stderr. */
void cli_error(const char *format, ...) CLI_PRINTF(1, 2);

/* Replaces the progress line; does nothing unless stderr is a terminal. */
void cli_progress(const char *format, ...) CLI_PRINTF(1, 2);
void cli_progress_clear(void);

/* Seconds on a clock that never goes back. */
double cli_seconds(void);

/* ------------------------------------------------------------------------------------------------
 * JSON (output.c): objects and arrays written as they come, always valid. key is NULL inside arrays
 * and at the top. Text that is not UTF-8 gets U+FFFD for each wrong byte; numbers that are not
 * finite become null.
 * ---------------------------------------------------------------------------------------------- */

typedef struct cli_json {
    FILE *file;
    bool comma; /* a value stands in front of the next one */
} cli_json;

void cli_json_open(cli_json *json, const char *key, char bracket);     /* '{' or '[' */
void cli_json_close(cli_json *json, char bracket);                     /* '}' or ']' */
void cli_json_text(cli_json *json, const char *key, const char *text); /* NULL: null */
void cli_json_integer(cli_json *json, const char *key, int64_t value);
void cli_json_real(cli_json *json, const char *key, double value);
void cli_json_bool(cli_json *json, const char *key, bool value);
void cli_json_end_line(cli_json *json); /* a line break behind a top-level value */

#endif
