/*
 * The format of .npy: 6 bytes of magic, 2 of version, the header's length in 2 bytes (version 1) or
 * 4 (versions 2 and 3), little endian; the header, a Python dict literal with the keys descr,
 * fortran_order and shape; then the elements.
 */
#include "npy.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct {
    const char *name, *code;
    size_t size;
} TYPES[NPY_NUM_TYPES] = {
    {"float32", "f4", 4}, {"float16", "f2", 2}, {"bfloat16", "V2", 2}, {"float64", "f8", 8},
    {"bool", "b1", 1},    {"uint8", "u1", 1},   {"int32", "i4", 4},    {"int64", "i8", 8},
};

const char *npy_type_name(npy_type type) { return TYPES[type].name; }

size_t npy_type_size(npy_type type) { return TYPES[type].size; }

static bool native_is_little(void)
{
    const uint16_t one = 1;
    return *(const unsigned char *)&one == 1;
}

/* Returns false, so that a failure is a single statement. */
#define FAIL(...) (snprintf(error, NPY_ERROR_SIZE, __VA_ARGS__), false)

/* ------------------------------------------------------------------------------------------------
 * The header's dict
 * ---------------------------------------------------------------------------------------------- */

typedef struct header {
    const char *name;   /* the file, for messages */
    const char *cursor; /* the remaining text, which ends with a 0 */
    const char *begin;
    bool has_type, has_order, has_shape;
    bool swapped; /* the elements' bytes are in the other order */
    bool fortran; /* first axis fastest */
    npy_array *array;
    char *error;
} header;

static bool malformed(const header *h, const char *expected)
{
    char *error = h->error;
    return FAIL("%s: the header is malformed at its byte %td; expected %s", h->name,
                h->cursor - h->begin, expected);
}

static void skip_space(header *h)
{
    while (*h->cursor == ' ' || *h->cursor == '\n' || *h->cursor == '\t') h->cursor++;
}

/* Skips space and takes c if it comes next. */
static bool take(header *h, char c)
{
    skip_space(h);
    if (*h->cursor != c) return false;
    h->cursor++;
    return true;
}

/* A string in single or double quotes, without escapes, of fewer than size bytes. */
static bool parse_string(header *h, char *text, size_t size)
{
    skip_space(h);
    char quote = *h->cursor;
    if (quote != '\'' && quote != '"') return malformed(h, "a string in quotes");
    const char *end = strchr(h->cursor + 1, quote);
    if (!end) return malformed(h, "a string that ends");
    size_t length = (size_t)(end - h->cursor) - 1;
    if (length >= size) return malformed(h, "a shorter string");
    memcpy(text, h->cursor + 1, length);
    text[length] = '\0';
    h->cursor = end + 1;
    return true;
}

/*
 * descr: a byte order and a type, for example '<f4'. One-byte types have no order: '|'. A bfloat16
 * of ml_dtypes becomes '<V2' in a file, and '|V2' if NumPy has read that file and saved it again.
 * The 8-bit floats of ml_dtypes all become '<V1', so a file does not tell which one it holds.
 */
static bool parse_type(header *h)
{
    char text[32], *error = h->error;
    skip_space(h);
    if (*h->cursor == '[')
        return FAIL("%s: holds records (a structured type); expected float32, float16, bfloat16, "
                    "float64, bool, uint8, int32 or int64",
                    h->name);
    if (!parse_string(h, text, sizeof text)) return false;
    if (strcmp(text, "bfloat16") == 0) {
        h->array->type = NPY_BFLOAT16;
        return true;
    }
    if (text[0] != '\0' && strcmp(text + 1, "V1") == 0)
        return FAIL("%s: holds elements of type '%s', bytes that do not say which 8-bit type of "
                    "ml_dtypes they are; expected float32, float16, bfloat16 or float64",
                    h->name, text);
    for (int t = 0; t < NPY_NUM_TYPES && text[0] != '\0'; t++) {
        if (strcmp(text + 1, TYPES[t].code) != 0) continue;
        bool one_byte = TYPES[t].size == 1, no_order = one_byte || t == NPY_BFLOAT16;
        if (!strchr("<>=", text[0]) && !(no_order && text[0] == '|')) break;
        h->array->type = (npy_type)t;
        h->swapped = !one_byte && strchr("<>", text[0]) && (text[0] == '<') != native_is_little();
        return true;
    }
    return FAIL(
        "%s: holds elements of type '%s'; expected float32 ('<f4'), float16 ('<f2'), bfloat16 "
        "('<V2'), float64 ('<f8'), bool ('|b1'), uint8 ('|u1'), int32 ('<i4') or int64 ('<i8')",
        h->name, text);
}

static bool parse_order(header *h)
{
    skip_space(h);
    h->fortran = strncmp(h->cursor, "True", 4) == 0;
    if (!h->fortran && strncmp(h->cursor, "False", 5) != 0)
        return malformed(h, "True or False (fortran_order)");
    h->cursor += h->fortran ? 4 : 5;
    return true;
}

static bool parse_extent(header *h)
{
    char *end, *error = h->error;
    skip_space(h);
    if (*h->cursor == '-')
        return FAIL("%s: the shape has a negative extent; expected extents >= 0", h->name);
    if (*h->cursor < '0' || *h->cursor > '9') return malformed(h, "an extent (shape)");
    errno = 0;
    intmax_t extent = strtoimax(h->cursor, &end, 10);
    if (errno != 0 || extent > INT64_MAX)
        return FAIL("%s: the shape has an extent that does not fit 64 bits", h->name);
    if (h->array->axes == NPY_MAX_AXES)
        return FAIL("%s: has more than %d axes; expected at most 4", h->name, (int)NPY_MAX_AXES);
    h->array->shape[h->array->axes++] = (int64_t)extent;
    h->cursor = end;
    return true;
}

/* shape: (), (n,), (n, m) or (n, m,). */
static bool parse_shape(header *h)
{
    h->array->axes = 0;
    if (!take(h, '(')) return malformed(h, "'(' (shape)");
    while (!take(h, ')')) {
        if (!parse_extent(h)) return false;
        bool comma = take(h, ',');
        skip_space(h);
        if (!comma && (*h->cursor != ')' || h->array->axes < 2)) return malformed(h, "',' (shape)");
    }
    return true;
}

static bool parse_entry(header *h)
{
    char key[32], *error = h->error;
    if (!parse_string(h, key, sizeof key)) return false;
    bool *seen = strcmp(key, "descr") == 0           ? &h->has_type
                 : strcmp(key, "fortran_order") == 0 ? &h->has_order
                 : strcmp(key, "shape") == 0         ? &h->has_shape
                                                     : NULL;
    if (!seen)
        return FAIL("%s: the header has the key '%s'; expected descr, fortran_order and shape",
                    h->name, key);
    if (*seen) return FAIL("%s: the header has the key '%s' twice", h->name, key);
    *seen = true;
    if (!take(h, ':')) return malformed(h, "':'");
    if (seen == &h->has_type) return parse_type(h);
    return seen == &h->has_order ? parse_order(h) : parse_shape(h);
}

static bool parse_dict(header *h)
{
    char *error = h->error;
    if (!take(h, '{')) return malformed(h, "'{'");
    while (!take(h, '}')) {
        if (!parse_entry(h)) return false;
        bool comma = take(h, ',');
        skip_space(h);
        if (!comma && *h->cursor != '}') return malformed(h, "',' or '}'");
    }
    skip_space(h);
    if (*h->cursor != '\0') return malformed(h, "nothing after '}'");
    if (h->has_type && h->has_order && h->has_shape) return true;
    return FAIL("%s: the header lacks the key '%s'", h->name,
                !h->has_type    ? "descr"
                : !h->has_order ? "fortran_order"
                                : "shape");
}

/* Sets array->count. The product of the nonzero extents must fit too, because strides are computed
 * from it. */
static bool count_elements(header *h)
{
    char *error = h->error;
    int64_t limit = (int64_t)(SIZE_MAX / 2 < INT64_MAX ? SIZE_MAX / 2 : INT64_MAX) /
                    (int64_t)TYPES[h->array->type].size;
    int64_t product = 1;
    bool empty = false;
    for (int a = 0; a < h->array->axes; a++) {
        int64_t extent = h->array->shape[a];
        if (extent == 0) {
            empty = true;
            continue;
        }
        if (product > limit / extent)
            return FAIL("%s: the shape has more bytes than fit in 63 bits", h->name);
        product *= extent;
    }
    h->array->count = empty ? 0 : product;
    return true;
}

/* ------------------------------------------------------------------------------------------------
 * Reading
 * ---------------------------------------------------------------------------------------------- */

static uint32_t little_endian(const unsigned char *bytes, int count)
{
    uint32_t value = 0;
    for (int i = count - 1; i >= 0; i--) value = value << 8 | bytes[i];
    return value;
}

/* Reads magic, version and length; leaves the file position at the header's text. */
static bool read_prefix(FILE *file, const char *name, size_t *length, char *error)
{
    unsigned char prefix[12];
    size_t got = fread(prefix, 1, 8, file);
    if (ferror(file)) return FAIL("%s: cannot be read: %s", name, strerror(errno));
    if (got < 6 || memcmp(prefix, "\x93NUMPY", 6) != 0)
        return FAIL("%s: is not a .npy file (it does not begin with \\x93NUMPY)", name);
    if (got < 8) return FAIL("%s: ends within the header", name);
    if (prefix[6] < 1 || prefix[6] > 3 || prefix[7] != 0)
        return FAIL("%s: has .npy version %d.%d; expected 1.0, 2.0 or 3.0", name, prefix[6],
                    prefix[7]);
    size_t bytes = prefix[6] == 1 ? 2 : 4;
    if (fread(prefix + 8, 1, bytes, file) < bytes) return FAIL("%s: ends within the header", name);
    *length = little_endian(prefix + 8, (int)bytes);
    if (*length > NPY_MAX_HEADER)
        return FAIL("%s: has a header of %zu bytes; expected at most %d", name, *length,
                    (int)NPY_MAX_HEADER);
    return true;
}

static bool read_header(FILE *file, const char *name, header *h)
{
    char *error = h->error;
    size_t length;
    if (!read_prefix(file, name, &length, error)) return false;
    char *text = malloc(length + 1);
    if (!text) return FAIL("%s: out of memory", name);
    size_t got = fread(text, 1, length, file);
    text[got] = '\0';
    h->name = name;
    h->begin = h->cursor = text;
    bool fine;
    if (got < length) fine = FAIL("%s: ends within the header", name);
    else if (strlen(text) < length) fine = FAIL("%s: has a zero byte in its header", name);
    else fine = parse_dict(h) && count_elements(h);
    free(text);
    return fine;
}

static bool too_short(const npy_array *a, const char *name, uint64_t got, char *error)
{
    return FAIL("%s: holds %" PRIu64 " bytes of data; its shape and type need %" PRIu64, name, got,
                (uint64_t)a->count * TYPES[a->type].size);
}

/* The number of bytes left in a file whose size is known; -1 for pipes and similar files. */
static int64_t bytes_left(FILE *file)
{
    struct stat status;
    int descriptor = fileno(file);
    if (descriptor < 0 || fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) return -1;
    return (int64_t)status.st_size - (int64_t)ftello(file);
}

/* Memory grows with the bytes that are read, so that a header cannot request more. */
static bool read_data(FILE *file, npy_array *a, const char *name, char *error)
{
    size_t need = (size_t)a->count * TYPES[a->type].size, got = 0, capacity = 0;
    int64_t left = bytes_left(file);
    if (left >= 0 && (uint64_t)left < need) return too_short(a, name, (uint64_t)left, error);
    do {
        size_t grown = left >= 0 ? need : capacity < 65536 ? 65536 : 2 * capacity;
        if (grown > need) grown = need;
        char *bytes = realloc(a->data, grown ? grown : 1);
        if (!bytes) return FAIL("%s: out of memory for %zu bytes of data", name, grown);
        a->data = bytes;
        capacity = grown;
        got += fread(bytes + got, 1, capacity - got, file);
        if (got < capacity) {
            if (ferror(file)) return FAIL("%s: cannot be read: %s", name, strerror(errno));
            return too_short(a, name, got, error);
        }
    } while (capacity < need);
    if (fgetc(file) != EOF)
        return FAIL("%s: has more bytes than its shape and type need (%zu)", name, need);
    return true;
}

static void swap_bytes(npy_array *a)
{
    size_t size = TYPES[a->type].size;
    unsigned char *bytes = a->data;
    for (int64_t i = 0; i < a->count; i++, bytes += size)
        for (size_t b = 0; b < size / 2; b++) {
            unsigned char other = bytes[size - 1 - b];
            bytes[size - 1 - b] = bytes[b];
            bytes[b] = other;
        }
}

/* Goes through the elements in C order and updates the offset of each in Fortran order. */
static bool transpose(npy_array *a)
{
    size_t size = TYPES[a->type].size;
    int64_t stride[NPY_MAX_AXES], index[NPY_MAX_AXES] = {0}, offset = 0;
    char *to = malloc((size_t)a->count * size + 1);
    if (!to) return false;
    for (int64_t axis = 0, step = 1; axis < a->axes; axis++) {
        stride[axis] = step;
        step *= a->shape[axis];
    }
    for (int64_t i = 0; i < a->count; i++) {
        memcpy(to + (size_t)i * size, (char *)a->data + (size_t)offset * size, size);
        for (int axis = a->axes - 1; axis >= 0; axis--) {
            offset += stride[axis];
            if (++index[axis] < a->shape[axis]) break;
            offset -= stride[axis] * a->shape[axis];
            index[axis] = 0;
        }
    }
    free(a->data);
    a->data = to;
    return true;
}

static bool read_stream(FILE *file, const char *name, npy_array *array, char *error)
{
    header h = {.array = array, .error = error};
    memset(array, 0, sizeof *array);
    bool fine = read_header(file, name, &h) && read_data(file, array, name, error);
    if (fine && h.swapped) swap_bytes(array);
    if (fine && h.fortran && array->axes > 1 && !transpose(array))
        fine = FAIL("%s: out of memory", name);
    if (!fine) {
        free(array->data);
        array->data = NULL;
    }
    return fine;
}

bool npy_read(const char *path, npy_array *array, char *error)
{
    array->data = NULL;
    if (strcmp(path, "-") == 0) return read_stream(stdin, "standard input", array, error);
    FILE *file = fopen(path, "rb");
    if (!file) return FAIL("%s: cannot be opened: %s", path, strerror(errno));
    struct stat status;
    bool directory = fstat(fileno(file), &status) == 0 && S_ISDIR(status.st_mode);
    bool fine = directory ? FAIL("%s: is a directory; expected a .npy file", path)
                          : read_stream(file, path, array, error);
    fclose(file);
    return fine;
}

bool npy_parse(const char *name, const void *bytes, size_t size, npy_array *array, char *error)
{
    array->data = NULL;
    if (size == 0) return FAIL("%s: is not a .npy file (it does not begin with \\x93NUMPY)", name);
    /* Opened for reading only, so that the bytes are never written to. */
    FILE *file = fmemopen((void *)(uintptr_t)bytes, size, "rb");
    if (!file) return FAIL("%s: out of memory", name);
    bool fine = read_stream(file, name, array, error);
    fclose(file);
    return fine;
}

/* ------------------------------------------------------------------------------------------------
 * Writing
 * ---------------------------------------------------------------------------------------------- */

enum { MAX_OUTPUTS = 16, HEADER_ALIGNMENT = 64 };

/* A temporary file, or a device that is written to directly; target and temporary are malloc'd. */
typedef struct pending {
    char *target;    /* NULL: standard output */
    char *temporary; /* NULL: written to target directly */
    bool direct;
    mode_t mode;
} pending;

/* The paths that a signal must remove: written before the file exists, cleared after it is gone. */
static char *volatile leftovers[MAX_OUTPUTS];
static const int SIGNALS[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGXCPU};

static void remove_leftovers(int number)
{
    for (int i = 0; i < MAX_OUTPUTS; i++)
        if (leftovers[i]) unlink(leftovers[i]);
    signal(number, SIG_DFL);
    raise(number);
}

/* A signal that the caller has ignored (nohup) stays ignored. */
static void watch_signals(bool on)
{
    for (size_t i = 0; i < sizeof SIGNALS / sizeof SIGNALS[0]; i++) {
        struct sigaction now;
        if (sigaction(SIGNALS[i], NULL, &now) == 0 && now.sa_handler != SIG_IGN)
            signal(SIGNALS[i], on ? remove_leftovers : SIG_DFL);
    }
}

/* Makes the whole prefix and header, padded so that the data begin at a multiple of 64 bytes. */
static size_t make_header(const npy_array *a, char *text, size_t size)
{
    const char *order = TYPES[a->type].size == 1 ? "|" : native_is_little() ? "<" : ">";
    int n =
        10 + snprintf(text + 10, size - 10, "{'descr': '%s%s', 'fortran_order': False, 'shape': (",
                      order, TYPES[a->type].code);
    for (int i = 0; i < a->axes; i++)
        n += snprintf(text + n, size - (size_t)n, "%s%" PRId64, i ? ", " : "", a->shape[i]);
    n += snprintf(text + n, size - (size_t)n, "%s), }", a->axes == 1 ? "," : "");
    while ((n + 1) % HEADER_ALIGNMENT != 0) text[n++] = ' ';
    text[n++] = '\n';
    memcpy(text, "\x93NUMPY\x01\x00", 8);
    text[8] = (char)((n - 10) & 0xff);
    text[9] = (char)((n - 10) >> 8);
    return (size_t)n;
}

static bool write_fully(int file, const void *data, size_t size)
{
    for (const char *bytes = data; size > 0;) {
        ssize_t n = write(file, bytes, size < SSIZE_MAX ? size : SSIZE_MAX);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        bytes += n;
        size -= (size_t)n;
    }
    return true;
}

/* Writes and closes the file. fsync returns EINVAL for pipes and devices, which have nothing to
 * sync. */
static bool write_array(int file, const npy_array *a)
{
    char text[512];
    size_t length = make_header(a, text, sizeof text);
    bool fine = write_fully(file, text, length) &&
                write_fully(file, a->data, (size_t)a->count * TYPES[a->type].size) &&
                (fsync(file) == 0 || errno == EINVAL || errno == EROFS);
    int reason = errno;
    if (close(file) != 0 && fine) return false;
    errno = reason;
    return fine;
}

static mode_t new_file_mode(void)
{
    mode_t mask = umask(0);
    umask(mask);
    return 0666 & ~mask;
}

/* The absolute path of a file that does not exist yet, so that different spellings compare
 * equal. */
static char *resolve_new(const char *path)
{
    const char *slash = strrchr(path, '/');
    const char *base = slash ? slash + 1 : path;
    char *directory = slash ? strndup(path, (size_t)(base - path)) : strdup(".");
    char *real = directory ? realpath(directory, NULL) : NULL;
    free(directory);
    if (!real) return NULL;
    size_t size = strlen(real) + strlen(base) + 2;
    char *target = malloc(size);
    if (target) snprintf(target, size, "%s/%s", real, base);
    free(real);
    return target;
}

/* Chooses the file to write: a symbolic link is followed, and its target is replaced. */
static bool resolve_target(const char *path, pending *p, char *error)
{
    struct stat status;
    p->direct = strcmp(path, "-") == 0;
    if (p->direct) return true;
    bool exists = stat(path, &status) == 0;
    if (!exists && lstat(path, &status) == 0)
        return FAIL("%s: is a symbolic link that leads to no file; expected a file name", path);
    p->direct = exists && !S_ISREG(status.st_mode);
    p->mode = exists ? status.st_mode & 07777 : new_file_mode();
    if ((exists && S_ISDIR(status.st_mode)) || (*path && path[strlen(path) - 1] == '/'))
        return FAIL("%s: is a directory; expected a file name", path);
    if (!exists || access(path, W_OK) == 0)
        p->target = p->direct ? strdup(path) : exists ? realpath(path, NULL) : resolve_new(path);
    return p->target ? true : FAIL("%s: cannot be written: %s", path, strerror(errno));
}

/* Opens a temporary file next to the target. */
static int open_temporary(pending *p, int slot)
{
    size_t size = strlen(p->target) + sizeof ".XXXXXX";
    p->temporary = malloc(size);
    if (!p->temporary) return -1;
    snprintf(p->temporary, size, "%s.XXXXXX", p->target);
    sigset_t all, before;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before);
    int file = mkstemp(p->temporary);
    if (file >= 0) leftovers[slot] = p->temporary;
    sigprocmask(SIG_SETMASK, &before, NULL);
    if (file < 0) {
        int reason = errno;
        free(p->temporary);
        p->temporary = NULL;
        errno = reason;
    }
    return file;
}

static bool write_pending(const npy_output *o, pending *p, int slot, char *error)
{
    int file = !p->direct  ? open_temporary(p, slot)
               : p->target ? open(p->target, O_WRONLY)
                           : dup(STDOUT_FILENO);
    if (file < 0) return FAIL("%s: cannot be written: %s", o->path, strerror(errno));
    if (!p->direct && fchmod(file, p->mode) != 0) {
        int reason = errno;
        close(file);
        return FAIL("%s: cannot be written: %s", o->path, strerror(reason));
    }
    if (!write_array(file, &o->array))
        return FAIL("%s: cannot be written: %s", o->path, strerror(errno));
    return true;
}

static void remove_pending(pending *p, int slot)
{
    if (p->temporary) unlink(p->temporary);
    leftovers[slot] = NULL;
    free(p->temporary);
    free(p->target);
    p->temporary = p->target = NULL;
}

/* Makes the new name durable. If a directory cannot be opened or synced, that is not an error: the
 * file itself is complete. */
static void sync_directory(const char *path)
{
    char *directory = strdup(path);
    if (!directory) return;
    char *slash = strrchr(directory, '/');
    if (slash) slash[slash == directory ? 1 : 0] = '\0';
    int file = open(slash ? directory : ".", O_RDONLY);
    if (file >= 0) {
        (void)fsync(file);
        close(file);
    }
    free(directory);
}

static bool rename_pending(const npy_output *o, pending *p, int slot, char *error)
{
    if (!p->temporary) return true;
    if (rename(p->temporary, p->target) != 0)
        return FAIL("%s: cannot be written: %s", o->path, strerror(errno));
    leftovers[slot] = NULL;
    free(p->temporary);
    p->temporary = NULL;
    sync_directory(p->target);
    return true;
}

/* If two outputs were the same file, only the later one would remain. */
static bool check_distinct(const npy_output *outputs, const pending *p, int count, char *error)
{
    for (int i = 0; i < count; i++)
        for (int j = 0; j < i; j++)
            if ((!p[i].target && !p[j].target) ||
                (!p[i].direct && !p[j].direct && strcmp(p[i].target, p[j].target) == 0))
                return FAIL("%s: is named for two outputs; expected different files",
                            outputs[i].path);
    return true;
}

bool npy_write(const npy_output *outputs, int count, char *error)
{
    pending files[MAX_OUTPUTS] = {{0}};
    if (count > MAX_OUTPUTS) return FAIL("more than %d outputs", (int)MAX_OUTPUTS);
    watch_signals(true);
    bool fine = true;
    for (int i = 0; i < count && fine; i++)
        fine = resolve_target(outputs[i].path, &files[i], error);
    fine = fine && check_distinct(outputs, files, count, error);
    for (int direct = 0; direct < 2; direct++) /* what cannot be undone comes last */
        for (int i = 0; i < count && fine; i++)
            if (files[i].direct == (direct == 1))
                fine = write_pending(&outputs[i], &files[i], i, error);
    for (int i = 0; i < count && fine; i++) fine = rename_pending(&outputs[i], &files[i], i, error);
    for (int i = 0; i < count; i++) remove_pending(&files[i], i);
    watch_signals(false);
    return fine;
}
