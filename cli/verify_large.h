/*
 * `flashattn verify --large`.
 */
#ifndef FA_CLI_VERIFY_LARGE_H
#define FA_CLI_VERIFY_LARGE_H

#include <stdbool.h>

/* Calls on the GPU with more than 2^31 elements, or offsets beyond them, or a million keys. Some of
 * their rows are compared with float64. Returns the exit code. */
int verify_large(bool json);

#endif
