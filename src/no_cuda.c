/*
 * Replaces the CUDA backend in a build without CUDA. It reports all memory as the host's, and open
 * fails, so the other functions are never called.
 */
#include <stdio.h>

#include "backend.h"
#include "error.h"

static const char no_cuda[] = "this build of the library has no CUDA backend";

static fa_status refuse(void)
{
    return fa_fail(FA_ERROR_DEVICE,
                   "options.device is FA_DEVICE_CUDA, but %s: expected "
                   "FA_DEVICE_AUTO or FA_DEVICE_CPU",
                   no_cuda);
}

static bool is_in_use(void) { return false; }

static int find_memory(const void *pointer, uintptr_t *first, size_t *bytes)
{
    (void)pointer, (void)first, (void)bytes;
    return FA_HOST_MEMORY;
}

static fa_status get_info(void *filled)
{
    fa_cuda_info *info = filled;
    (void)snprintf(info->detail, sizeof info->detail, "%s", no_cuda);
    return FA_OK;
}

const fa_backend fa_cuda_backend = {
    .open = refuse, .in_use = is_in_use, .find_memory = find_memory, .get_info = get_info};
