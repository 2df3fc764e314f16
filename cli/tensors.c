/* Converts .npy arrays to tensors and back. */
#include "tensors.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "output.h"
#include "convert.h"

const char *const CLI_LAYOUT_NAMES[] = {"bshd", "bhsd", NULL};
const char *const CLI_PRECISION_NAMES[] = {"float32", "tf32", "ieee", NULL};
const char *const CLI_DTYPE_NAMES[] = {"f32", "f16", "bf16", NULL};
const char *const CLI_DEVICE_NAMES[] = {"auto", "cpu", "cuda", NULL};

/* ---- elements -------------------------------------------------------------------------------- */

static double load_element(npy_type type, const char *data, int64_t i)
{
    const char *p = data + (size_t)i * npy_type_size(type);
    float f4;
    uint16_t f2;
    double f8;
    int32_t i4;
    int64_t i8;
    switch (type) {
    case NPY_FLOAT32: memcpy(&f4, p, 4); return (double)f4;
    case NPY_FLOAT16: memcpy(&f2, p, 2); return (double)fa_half_to_float(f2);
    case NPY_BFLOAT16: memcpy(&f2, p, 2); return (double)fa_bfloat_to_float(f2);
    case NPY_FLOAT64: memcpy(&f8, p, 8); return f8;
    case NPY_INT32: memcpy(&i4, p, 4); return (double)i4;
    case NPY_INT64: memcpy(&i8, p, 8); return (double)i8;
    default: return (double)*(const unsigned char *)p;
    }
}

/* Rounds to float32, but if that is inexact, to the neighbour whose last bit is odd. Then another
 * rounding to 16 bits gives the same result as rounding x itself. */
static float round_to_odd(double x)
{
    float f = (float)x;
    if (!(fabs(x) <= FLT_MAX) || (double)f == x) return f;
    uint32_t bits = fa_float_bits(f);
    if (bits & 1u) return f;
    bool away = fabs((double)f) > fabs(x);
    return fa_bits_float(away ? bits - 1 : bits + 1);
}

static void store_element(fa_dtype dtype, char *data, int64_t i, double x)
{
    float f4 = (float)x;
    uint16_t half = dtype == FA_FLOAT16 ? fa_float_to_half(round_to_odd(x))
                                        : fa_float_to_bfloat(round_to_odd(x));
    if (dtype == FA_FLOAT32) memcpy(data + 4 * (size_t)i, &f4, 4);
    else if (dtype == FA_BOOL) data[i] = x != 0;
    else memcpy(data + 2 * (size_t)i, &half, 2);
}

static bool same_format(npy_type type, fa_dtype dtype)
{
    return (type == NPY_FLOAT32 && dtype == FA_FLOAT32) ||
           (type == NPY_FLOAT16 && dtype == FA_FLOAT16) ||
           (type == NPY_BFLOAT16 && dtype == FA_BFLOAT16);
}

fa_dtype cli_dtype_of(npy_type type)
{
    if (type == NPY_FLOAT16) return FA_FLOAT16;
    return type == NPY_BFLOAT16 ? FA_BFLOAT16 : FA_FLOAT32;
}

/* Converts the array's elements to dtype and consumes the array. NULL after a message. */
static void *take_elements(npy_array *array, fa_dtype dtype)
{
    void *data = array->data;
    array->data = NULL;
    if (same_format(array->type, dtype)) return data;
    size_t bytes = (size_t)array->count * fa_dtype_size(dtype);
    char *to = malloc(bytes ? bytes : 1);
    if (!to) cli_error("out of memory for %zu bytes", bytes);
    for (int64_t i = 0; to && i < array->count; i++)
        store_element(dtype, to, i, load_element(array->type, data, i));
    free(data);
    return to;
}

bool cli_read_array(const char *option, const char *path, npy_array *array)
{
    char error[NPY_ERROR_SIZE];
    cli_progress("reading %s", path);
    if (npy_read(path, array, error)) return true;
    cli_error("%s %s", option, error);
    return false;
}

/* ---- tensors --------------------------------------------------------------------------------- */

static fa_tensor make_view(void *data, cli_layout layout, fa_dtype dtype, int64_t batch,
                           int64_t sequence, int64_t heads, int64_t dim)
{
    return layout == CLI_BHSD ? fa_bhsd(data, dtype, batch, sequence, heads, dim)
                              : fa_bshd(data, dtype, batch, sequence, heads, dim);
}

/* The extents in the file's order. */
static void file_shape(const cli_tensor *t, int64_t shape[4])
{
    memcpy(shape, t->view.shape, 4 * sizeof shape[0]);
    if (t->layout != CLI_BHSD) return;
    shape[1] = t->view.shape[2];
    shape[2] = t->view.shape[1];
}

bool cli_tensor_new(cli_tensor *t, int axes, cli_layout layout, fa_dtype dtype, int64_t batch,
                    int64_t sequence, int64_t heads, int64_t dim)
{
    double bytes = (double)batch * (double)sequence * (double)heads * (double)dim *
                   (double)fa_dtype_size(dtype);
    void *data = NULL;
    if (bytes < (double)(SIZE_MAX / 2)) {
        size_t size = (size_t)(batch * sequence * heads * dim) * fa_dtype_size(dtype);
        data = malloc(size ? size : 1);
    }
    if (!data) {
        cli_error("out of memory for %.0f bytes", bytes);
        return false;
    }
    t->axes = axes;
    t->layout = layout;
    t->view = make_view(data, layout, dtype, batch, sequence, heads, dim);
    return true;
}

void cli_tensor_free(cli_tensor *t)
{
    free(t->view.data);
    t->view.data = NULL;
}

static bool check_axes(const npy_array *array, const char *option, const char *path)
{
    if (array->axes >= 2 && array->axes <= 4) return true;
    cli_error("%s %s has %d %s; expected 2, 3 or 4", option, path, array->axes,
              array->axes == 1 ? "axis" : "axes");
    return false;
}

static bool check_float(const npy_array *array, const char *option, const char *path)
{
    if (array->type <= NPY_FLOAT64) return true;
    cli_error("%s %s holds %s; expected float32, float16, bfloat16 or float64", option, path,
              npy_type_name(array->type));
    return false;
}

bool cli_tensor_take(cli_tensor *t, npy_array *array, const char *option, const char *path,
                     cli_layout layout, fa_dtype dtype)
{
    if (!check_float(array, option, path) || !check_axes(array, option, path)) return false;
    int missing = 4 - array->axes;
    int64_t s[4] = {1, 1, 1, 1};
    memcpy(s + missing, array->shape, (size_t)array->axes * sizeof s[0]);
    if (array->axes == 2 && layout == CLI_BSHD) { /* (sequence, dim): the head is in between */
        s[1] = array->shape[0];
        s[2] = 1;
    }
    void *data = take_elements(array, dtype);
    if (!data) return false;
    t->axes = array->axes;
    t->layout = layout;
    t->view = layout == CLI_BSHD ? make_view(data, layout, dtype, s[0], s[1], s[2], s[3])
                                 : make_view(data, layout, dtype, s[0], s[2], s[1], s[3]);
    return true;
}

bool cli_tensor_take_scores(cli_tensor *t, npy_array *array, const char *option, const char *path,
                            bool mask)
{
    if (mask && array->type <= NPY_FLOAT64) {
        cli_error("%s %s holds %s; expected bool or integers (--bias takes numbers to be added)",
                  option, path, npy_type_name(array->type));
        return false;
    }
    if ((!mask && !check_float(array, option, path)) || !check_axes(array, option, path))
        return false;
    fa_dtype dtype = mask ? FA_BOOL : cli_dtype_of(array->type);
    int64_t s[4] = {1, 1, 1, 1};
    memcpy(s + 4 - array->axes, array->shape, (size_t)array->axes * sizeof s[0]);
    void *data = take_elements(array, dtype);
    if (!data) return false;
    t->axes = array->axes;
    t->layout = CLI_SCORES;
    t->view = make_view(data, CLI_SCORES, dtype, s[0], s[1], s[2], s[3]);
    return true;
}

float *cli_floats_take(npy_array *array, const char *option, const char *path, int64_t heads)
{
    if (!check_float(array, option, path)) return NULL;
    if (array->axes >= 1 && array->shape[array->axes - 1] == heads)
        return take_elements(array, FA_FLOAT32);
    int64_t found = array->axes ? array->shape[array->axes - 1] : 0;
    cli_error("%s %s has a last axis of %" PRId64 "; expected one value for each of the %" PRId64
              " query heads",
              option, path, found, heads);
    return NULL;
}

int32_t *cli_integers_take(const npy_array *array, const char *option, const char *path)
{
    if (array->type != NPY_INT32 && array->type != NPY_INT64) {
        cli_error("%s %s holds %s; expected int32 or int64", option, path,
                  npy_type_name(array->type));
        return NULL;
    }
    int32_t *data = malloc(array->count ? (size_t)array->count * sizeof *data : 1);
    if (!data) cli_error("out of memory for %" PRId64 " integers", array->count);
    for (int64_t i = 0; data && i < array->count; i++) {
        const int64_t x = array->type == NPY_INT32 ? ((const int32_t *)array->data)[i]
                                                   : ((const int64_t *)array->data)[i];
        data[i] = (int32_t)x;
        if (x >= INT32_MIN && x <= INT32_MAX) continue;
        cli_error("%s %s: element %" PRId64 " is %" PRId64 "; expected an integer of 32 bits",
                  option, path, i, x);
        free(data);
        return NULL;
    }
    return data;
}

bool cli_tensor_to_array(cli_tensor *t, npy_array *array)
{
    int64_t shape[4];
    file_shape(t, shape);
    if (t->axes == 2 && t->layout == CLI_BSHD) shape[2] = shape[1]; /* the head in between is 1 */
    array->axes = t->axes;
    memcpy(array->shape, shape + 4 - t->axes, (size_t)t->axes * sizeof shape[0]);
    array->count = t->view.shape[0] * t->view.shape[1] * t->view.shape[2] * t->view.shape[3];
    array->type = t->view.dtype == FA_FLOAT16 ? NPY_FLOAT16 : NPY_FLOAT32;
    array->data = NULL;
    float *wide = NULL;
    if (t->view.dtype == FA_BFLOAT16) {
        wide = malloc(array->count ? (size_t)array->count * sizeof *wide : 1);
        if (!wide) {
            cli_error("out of memory for %" PRId64 " elements", array->count);
            return false;
        }
        for (int64_t i = 0; i < array->count; i++)
            wide[i] = fa_bfloat_to_float(((uint16_t *)t->view.data)[i]);
        free(t->view.data);
    }
    array->data = wide ? (void *)wide : t->view.data;
    t->view.data = NULL;
    return true;
}
