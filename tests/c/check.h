/*
 * The smallest test framework that does: checks that count failures and go on, and an end that turns
 * the count into an exit code.
 */
#ifndef TEST_CHECK_H
#define TEST_CHECK_H

#include <stdbool.h>

enum { TEST_SKIPPED = 77 }; /* CTest's SKIP_RETURN_CODE */

/* Counts a check; if it does not hold, prints where and what. */
void test_check(bool holds, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* CHECK(condition, "format that tells the values", ...) */
#define CHECK(condition, ...) test_check((condition), __FILE__, __LINE__, __VA_ARGS__)

/* Ends the program with TEST_SKIPPED and a sentence if FA_CPU_ISA asks for what this processor cannot
 * run. Every test of the engine starts with it. */
void test_begin(void);

/* Prints how many checks there were. The exit code: 0 if all of them held and there was one. */
int test_end(void);

#endif
