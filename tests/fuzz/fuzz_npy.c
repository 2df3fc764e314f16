/* The .npy reader with arbitrary bytes: it refuses them with a message, or the array is
 * complete. */
#include <stdlib.h>
#include <string.h>

#include "npy.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static void check_array(const npy_array *array)
{
    if (array->axes < 0 || array->axes > NPY_MAX_AXES || !array->data) abort();
    int64_t count = 1;
    for (int axis = 0; axis < array->axes; axis++) count *= array->shape[axis];
    if (count != array->count) abort();
    /* Reads every byte, so that the sanitizer detects missing ones. */
    unsigned char sum = 0;
    const unsigned char *data = array->data;
    for (size_t n = 0; n < (size_t)count * npy_type_size(array->type); n++) sum ^= data[n];
    volatile unsigned char keep = sum;
    (void)keep;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    char error[NPY_ERROR_SIZE] = "";
    npy_array array;
    memset(&array, 0, sizeof array);
    if (npy_parse("input", bytes, size, &array, error)) {
        check_array(&array);
        free(array.data);
    } else if (!memchr(error, 0, sizeof error) || !error[0]) {
        abort();
    }
    return 0;
}
