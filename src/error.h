/*
 * Errors of the library: a status, and for each thread a sentence for fa_last_error.
 */
#ifndef FA_ERROR_H
#define FA_ERROR_H

#include "flashattn.h"

/* Keeps the sentence for fa_last_error and returns the status, so that an error path is just
 * "return fa_fail(...)". A sentence that is longer than the buffer is cut. */
__attribute__((format(printf, 2, 3))) fa_status fa_fail(fa_status status, const char *format, ...);

/* Returns a failure to the caller. */
#define FA_TRY(call)                                                                               \
    do {                                                                                           \
        fa_status fa_try_status = (call);                                                          \
        if (fa_try_status != FA_OK) return fa_try_status;                                          \
    } while (0)

/* Returns FA_ERROR_ARGUMENT with the sentence unless the condition holds. */
#define FA_REQUIRE(condition, ...)                                                                 \
    do {                                                                                           \
        if (!(condition)) return fa_fail(FA_ERROR_ARGUMENT, __VA_ARGS__);                          \
    } while (0)

#endif
