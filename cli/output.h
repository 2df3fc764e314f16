/*
 * Messages, progress, time, JSON.
 */
#ifndef FA_CLI_OUTPUT_H
#define FA_CLI_OUTPUT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#if defined(__GNUC__) || defined(__clang__)
#define CLI_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define CLI_PRINTF(text, first)
#endif

/* Sets the command's name in all later messages: "flashattn NAME: ..."; NULL: "flashattn: ...". */
void cli_set_command(const char *name);

/* Clears the progress line, then writes "flashattn NAME: " and the message to stderr. */
void cli_error(const char *format, ...) CLI_PRINTF(1, 2);

/* Replaces the progress line; does nothing if stderr is not a terminal. */
void cli_progress(const char *format, ...) CLI_PRINTF(1, 2);
void cli_progress_clear(void);

/* Seconds of a clock that never goes back. */
double cli_seconds(void);

/* ---- JSON: objects and arrays, written as they come, always valid -------------------------------
 *
 * key is NULL inside arrays and at the top. Text that is not UTF-8 gets U+FFFD for each wrong byte;
 * numbers that are not finite become null. */

typedef struct cli_json {
    FILE *file;
    bool comma; /* there is a value before the next one */
} cli_json;

void cli_json_open(cli_json *json, const char *key, char bracket);     /* '{' or '[' */
void cli_json_close(cli_json *json, char bracket);                     /* '}' or ']' */
void cli_json_text(cli_json *json, const char *key, const char *text); /* NULL: null */
void cli_json_integer(cli_json *json, const char *key, int64_t value);
void cli_json_real(cli_json *json, const char *key, double value);
void cli_json_bool(cli_json *json, const char *key, bool value);
void cli_json_end_line(cli_json *json); /* a line break after a top-level value */

#endif
