/*
 * kernels/ptx/cp_async.cuh in C.
 */
#ifndef TEST_PTX_ON_CPU_CP_ASYNC_H
#define TEST_PTX_ON_CPU_CP_ASYNC_H

#include "cuda_on_cpu.h"

FA_DEVICE void ptx_cp_async_16(uint32_t to, const void *from, bool wanted)
{
    cuda_copy_async(to, from, 16, wanted);
}
FA_DEVICE void ptx_cp_async_16_once(uint32_t to, const void *from, bool wanted)
{
    cuda_copy_async(to, from, 16, wanted);
}
FA_DEVICE void ptx_cp_async_4(uint32_t to, const void *from, bool wanted)
{
    cuda_copy_async(to, from, 4, wanted);
}
FA_DEVICE void ptx_cp_async_commit(void) { cuda_commit_copies(); }
#define ptx_cp_async_wait(pending) cuda_wait_for_groups(pending)
FA_DEVICE void ptx_cp_async_wait_all(void) { cuda_wait_for_copies(); }

#endif
