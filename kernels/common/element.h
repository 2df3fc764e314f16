/*
 * The types of elements that kernels multiply and that tensor maps describe. Numbers, so that the preprocessor can
 * compare them; shared by the kernels and the host.
 */
#ifndef FA_KERNELS_COMMON_ELEMENT_H
#define FA_KERNELS_COMMON_ELEMENT_H

#include <stdint.h>

/* One of FA_ELEMENT_... */
typedef int32_t fa_element;

/* Types that are also in fa_dtype have the same number. 4 is fa_dtype's boolean, which is never
 * multiplied. */
#define FA_ELEMENT_FLOAT32 0
#define FA_ELEMENT_FLOAT16 1
#define FA_ELEMENT_BFLOAT16 2
#define FA_ELEMENT_FLOAT8_E4M3 3
#define FA_ELEMENT_INT8 5
#define FA_ELEMENT_TF32                                                                            \
    6 /* float32 in memory; products see 10 bits of the fraction (backward_sm80: float16) */
#define FA_ELEMENT_TF32X3                                                                          \
    7 /* float32 in memory, as the sum of two tf32 numbers (backward_sm80: float16); three products of these for one */
#define FA_ELEMENT_FLOAT16X3 8 /* the same of two float16 numbers */

/* The size in memory. */
#define FA_ELEMENT_BYTES(element)                                                                  \
    ((element) == FA_ELEMENT_FLOAT8_E4M3 || (element) == FA_ELEMENT_INT8   ? 1                     \
     : (element) == FA_ELEMENT_FLOAT16 || (element) == FA_ELEMENT_BFLOAT16 ? 2                     \
                                                                           : 4)

#endif
