/*
 * Runs the command and checks its output. Every test works in a new directory, which is its current
 * directory and is removed at the end.
 */
#ifndef FA_TESTS_CLI_HARNESS_H
#define FA_TESTS_CLI_HARNESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "flashattn.h"

/* argv[1] is the command to test. Ends the program if the directory cannot be made. */
void harness_begin(int argc, char **argv);

/* Removes the directory, prints the count of checks; returns the exit code. */
int harness_end(void);

/* Counts a check; prints the file, the line and the text if it failed. */
void harness_check(bool fine, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
#define CHECK(condition, ...) harness_check((condition), __FILE__, __LINE__, __VA_ARGS__)

/* The result of a run of the command; the texts are cut at their size. */
typedef struct outcome {
    int code; /* exit code, or 128 + the signal that ended it */
    char out[65536], err[16384];
} outcome;

/* Runs the command with these arguments (the last one NULL), with standard output and error written
 * to files. The result is valid until the next run. */
const outcome *harness_run(const char *const *arguments);
#define RUN(...) harness_run((const char *const[]){__VA_ARGS__, NULL})

/* The same, with a device that is always full as standard output. */
const outcome *harness_run_to_full_disk(const char *const *arguments);

/* The same, with this file, or a terminal, as standard output. */
const outcome *harness_run_to(const char *path, const char *const *arguments);
const outcome *harness_run_to_terminal(const char *const *arguments);

/* The same, with a terminal as standard error. */
const outcome *harness_run_on_terminal(const char *const *arguments);

/* Starts the command and returns its process id. */
int harness_start(const char *const *arguments);

/* Waits for it; the exit code as in outcome. */
int harness_wait(int process);

/* The command must end with code 2, print nothing on standard output and one line on standard error
 * that begins with "flashattn" and contains text. */
void harness_expect_error(const char *file, int line, const char *text,
                          const char *const *arguments);
#define EXPECT_ERROR(text, ...)                                                                    \
    harness_expect_error(__FILE__, __LINE__, text, (const char *const[]){__VA_ARGS__, NULL})

/* The command must end with code 0 and print nothing on standard error. */
const outcome *harness_expect_fine(const char *file, int line, const char *const *arguments);
#define EXPECT_FINE(...)                                                                           \
    harness_expect_fine(__FILE__, __LINE__, (const char *const[]){__VA_ARGS__, NULL})

/* ---- files ----------------------------------------------------------------------------------- */

/* Writes bytes; ends the program if that fails. */
void harness_write_file(const char *path, const void *bytes, size_t size);

/* The file's bytes, malloc'd, followed by a 0; NULL if there is no file. */
char *harness_read_file(const char *path, size_t *size);

/* Entries of a directory other than . and .. */
int harness_count_entries(const char *directory);

/* Writes a .npy file of this version from its header text and data. */
void harness_write_npy_parts(const char *path, int version, const char *header, const void *data,
                             size_t size);

/* Writes a version 1.0 file with the type (for example "<f4") and shape (for example "(2, 3)"). */
void harness_write_npy(const char *path, const char *type, const char *shape, const void *data,
                       size_t size);

/* The data of a file that must have exactly this type and shape and size bytes of data; malloc'd.
 * NULL, with a failed check, otherwise. */
void *harness_read_npy(const char *path, const char *type, const char *shape, size_t size);

/* ---- data ------------------------------------------------------------------------------------ */

/* Numbers in [-range, range), the same for the same seed. */
void harness_fill(float *data, int64_t count, float range, uint32_t seed);

/* Whether the whole text is one JSON value per line. */
bool harness_is_json_lines(const char *text);

#endif
