/*
 * The calling thread's latest error, and the names of the statuses.
 */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[512];

fa_status fa_fail(fa_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}

const char *fa_last_error(void) { return last_error; }

const char *fa_status_name(fa_status status)
{
    switch (status) {
    case FA_OK: return "FA_OK";
    case FA_ERROR_ARGUMENT: return "FA_ERROR_ARGUMENT";
    case FA_ERROR_UNSUPPORTED: return "FA_ERROR_UNSUPPORTED";
    case FA_ERROR_MEMORY: return "FA_ERROR_MEMORY";
    case FA_ERROR_DEVICE: return "FA_ERROR_DEVICE";
    case FA_ERROR_WORKSPACE: return "FA_ERROR_WORKSPACE";
    }
    return "unknown status";
}
