/*
 * A minimal test framework: checks count failures and continue, and test_end turns the count into
 * an exit code.
 */
#ifndef TEST_CHECK_H
#define TEST_CHECK_H

#include <stdbool.h>

enum { TEST_SKIPPED = 77 }; /* CTest's SKIP_RETURN_CODE */

/* Counts a check; if it does not hold, prints its place and the message. */
void test_check(bool holds, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* CHECK(condition, "format of the message, with values", ...) */
#define CHECK(condition, ...) test_check((condition), __FILE__, __LINE__, __VA_ARGS__)

/* Ends the program with TEST_SKIPPED and a message if FA_CPU_ISA requests what this processor
 * cannot run. Every test of the engine starts with it. */
void test_begin(void);

/* Prints the number of checks. The exit code is 0 if all of them held and there was at least
 * one. */
int test_end(void);

#endif
