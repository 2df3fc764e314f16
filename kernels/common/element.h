/*
 * The types of elements that kernels multiply and that tensor maps describe. Numbers, so that the preprocessor can
 * compare them; shared by the kernels and the host.
 */
#ifndef FA_KERNELS_COMMON_ELEMENT_H
#define FA_KERNELS_COMMON_ELEMENT_H

#include <stdint.h>

/* One of FA_ELEMENT_... */
typedef int32_t fa_element;

/* Where fa_dtype has the same type, the number is the same. Its 4 is the boolean, which nobody multiplies, and its 5
 * int8. */
#define FA_ELEMENT_FLOAT32 0
#define FA_ELEMENT_FLOAT16 1
#define FA_ELEMENT_BFLOAT16 2
#define FA_ELEMENT_FLOAT8_E4M3 3
#define FA_ELEMENT_TF32 6 /* float32 in memory; products see 10 bits of the fraction */

/* The size in memory. */
#define FA_ELEMENT_BYTES(element)                                                                  \
    ((element) == FA_ELEMENT_FLOAT8_E4M3                                   ? 1                     \
     : (element) == FA_ELEMENT_FLOAT16 || (element) == FA_ELEMENT_BFLOAT16 ? 2                     \
                                                                           : 4)

#endif
