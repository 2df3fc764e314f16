#include "check.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "flashattn.h"

enum { SHOWN = 20 };

static long checks, failures;

void test_check(bool holds, const char *file, int line, const char *format, ...)
{
    checks++;
    if (holds) return;
    failures++;
    if (failures > SHOWN) return;
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "%s:%d: ", file, line);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}

void test_begin(void)
{
    fa_cpu_info info;
    if (fa_get_cpu_info(&info) == FA_OK) return;
    printf("skipped: %s\n", fa_last_error());
    exit(TEST_SKIPPED);
}

int test_end(void)
{
    if (failures) fprintf(stderr, "%ld of %ld checks failed\n", failures, checks);
    else printf("%ld checks\n", checks);
    return failures == 0 && checks > 0 ? 0 : 1;
}
