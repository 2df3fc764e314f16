/* Runs the command; files, and a JSON checker. */
#include "harness.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

/* Captured output is next to the directory, so that it is not counted among its entries. */
static char command[4096], directory[] = "/tmp/flashattn-test-XXXXXX";
static char capture_out[sizeof directory + 4], capture_err[sizeof directory + 4];
static int checks, failures;

static void give_up(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

void harness_begin(int argc, char **argv)
{
    if (argc != 2 || !realpath(argv[1], command)) give_up("the command to test");
    if (!mkdtemp(directory) || chdir(directory) != 0) give_up(directory);
    /* So that all machines behave the same. */
    setenv("FA_CUDA_DRIVER", "/nonexistent/libcuda.so.1", 1);
    snprintf(capture_out, sizeof capture_out, "%s.out", directory);
    snprintf(capture_err, sizeof capture_err, "%s.err", directory);
}

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *walk)
{
    (void)status, (void)type, (void)walk;
    return remove(path);
}

int harness_end(void)
{
    if (chdir("/") != 0 || nftw(directory, remove_entry, 8, FTW_DEPTH | FTW_PHYS) != 0)
        give_up(directory);
    printf("%d checks, %d failed\n", checks, failures);
    return failures || !checks ? 1 : 0;
}

void harness_check(bool fine, const char *file, int line, const char *format, ...)
{
    checks++;
    if (fine) return;
    failures++;
    printf("%s:%d: ", file, line);
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    putchar('\n');
}

/* ---- the command ----------------------------------------------------------------------------- */

enum { MAX_ARGUMENTS = 64 };

static int start(const char *const *arguments, posix_spawn_file_actions_t *actions)
{
    char *argv[MAX_ARGUMENTS + 2] = {command};
    for (int i = 0; arguments[i] && i < MAX_ARGUMENTS; i++)
        argv[i + 1] = (char *)(uintptr_t)arguments[i];
    pid_t process;
    errno = posix_spawn(&process, command, actions, NULL, argv, environ);
    if (errno != 0) give_up(command);
    return (int)process;
}

int harness_start(const char *const *arguments) { return start(arguments, NULL); }

int harness_wait(int process)
{
    int status;
    while (waitpid(process, &status, 0) < 0)
        if (errno != EINTR) give_up("waitpid");
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void take_capture(const char *path, char *text, size_t size)
{
    size_t length;
    char *bytes = harness_read_file(path, &length);
    snprintf(text, size, "%s", bytes ? bytes : "");
    free(bytes);
    unlink(path);
}

static outcome result;

/* Standard output is written to this file; standard error is captured. */
static const outcome *run_to(const char *output, const char *const *arguments)
{
    posix_spawn_file_actions_t actions;
    int flags = O_WRONLY | O_CREAT | O_TRUNC;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, output, flags, 0600);
    posix_spawn_file_actions_addopen(&actions, 2, capture_err, flags, 0600);
    result.code = harness_wait(start(arguments, &actions));
    posix_spawn_file_actions_destroy(&actions);
    take_capture(capture_err, result.err, sizeof result.err);
    return &result;
}

const outcome *harness_run(const char *const *arguments)
{
    run_to(capture_out, arguments);
    take_capture(capture_out, result.out, sizeof result.out);
    return &result;
}

const outcome *harness_run_to_full_disk(const char *const *arguments)
{
    result.out[0] = '\0';
    return run_to("/dev/full", arguments);
}

const outcome *harness_run_to(const char *path, const char *const *arguments)
{
    result.out[0] = '\0';
    return run_to(path, arguments);
}

static int open_terminal(void)
{
    int terminal = posix_openpt(O_RDWR | O_NOCTTY);
    if (terminal < 0 || grantpt(terminal) != 0 || unlockpt(terminal) != 0) give_up("a terminal");
    return terminal;
}

const outcome *harness_run_to_terminal(const char *const *arguments)
{
    int terminal = open_terminal();
    const outcome *o = harness_run_to(ptsname(terminal), arguments);
    close(terminal);
    return o;
}

/* Reads until the last writer has closed the terminal, for which Linux returns EIO. */
static void drain_terminal(int terminal)
{
    size_t used = 0;
    ssize_t n;
    while (used + 1 < sizeof result.err &&
           (n = read(terminal, result.err + used, sizeof result.err - 1 - used)) > 0)
        used += (size_t)n;
    result.err[used] = '\0';
}

const outcome *harness_run_on_terminal(const char *const *arguments)
{
    int terminal = open_terminal();
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 2, ptsname(terminal), O_WRONLY | O_NOCTTY, 0);
    int process = start(arguments, &actions);
    posix_spawn_file_actions_destroy(&actions);
    drain_terminal(terminal);
    result.code = harness_wait(process);
    result.out[0] = '\0';
    close(terminal);
    return &result;
}

void harness_expect_error(const char *file, int line, const char *text,
                          const char *const *arguments)
{
    const outcome *o = harness_run(arguments);
    const char *end = strchr(o->err, '\n');
    harness_check(o->code == 2, file, line, "exit code %d, expected 2 (%s)", o->code, text);
    harness_check(strncmp(o->err, "flashattn", 9) == 0 && end && end[1] == '\0', file, line,
                  "expected one line from flashattn, found \"%s\"", o->err);
    harness_check(strstr(o->err, text) != NULL, file, line, "expected \"%s\", found \"%s\"", text,
                  o->err);
    harness_check(o->out[0] == '\0', file, line, "expected no output, found \"%s\"", o->out);
}

const outcome *harness_expect_fine(const char *file, int line, const char *const *arguments)
{
    const outcome *o = harness_run(arguments);
    harness_check(o->code == 0, file, line, "exit code %d: %s", o->code, o->err);
    harness_check(o->err[0] == '\0', file, line, "expected silence, found \"%s\"", o->err);
    return o;
}

/* ---- files ----------------------------------------------------------------------------------- */

void harness_write_file(const char *path, const void *bytes, size_t size)
{
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(bytes, 1, size, file) != size || fclose(file) != 0) give_up(path);
}

char *harness_read_file(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    if (!file) return NULL;
    size_t capacity = 1 << 16;
    char *bytes = malloc(capacity + 1);
    *size = 0;
    for (size_t n; bytes && (n = fread(bytes + *size, 1, capacity - *size, file)) > 0;) {
        *size += n;
        if (*size == capacity) bytes = realloc(bytes, 1 + (capacity *= 2));
    }
    if (!bytes) give_up("memory");
    fclose(file);
    bytes[*size] = '\0';
    return bytes;
}

int harness_count_entries(const char *path)
{
    int count = -2; /* . and .. */
    DIR *d = opendir(path);
    if (!d) give_up(path);
    while (readdir(d)) count++;
    closedir(d);
    return count;
}

void harness_write_npy_parts(const char *path, int version, const char *header, const void *data,
                             size_t size)
{
    size_t length = strlen(header), prefix = version == 1 ? 10 : 12;
    char *bytes = malloc(prefix + length + size);
    if (!bytes) give_up("memory");
    memcpy(bytes, "\x93NUMPY\0\0\0\0\0\0", prefix);
    bytes[6] = (char)version;
    bytes[8] = (char)(length & 0xff);
    bytes[9] = (char)(length >> 8);
    memcpy(bytes + prefix, header, length);
    if (size) memcpy(bytes + prefix + length, data, size);
    harness_write_file(path, bytes, prefix + length + size);
    free(bytes);
}

void harness_write_npy(const char *path, const char *type, const char *shape, const void *data,
                       size_t size)
{
    char header[256];
    snprintf(header, sizeof header, "{'descr': '%s', 'fortran_order': False, 'shape': %s, }\n",
             type, shape);
    harness_write_npy_parts(path, 1, header, data, size);
}

void *harness_read_npy(const char *path, const char *type, const char *shape, size_t size)
{
    char expected[256];
    size_t total;
    char *bytes = harness_read_file(path, &total), *data = NULL;
    CHECK(bytes != NULL, "%s: is missing", path);
    if (!bytes) return NULL;
    int length = snprintf(expected, sizeof expected,
                          "{'descr': '%s', 'fortran_order': False, 'shape': %s, }", type, shape);
    size_t begin = total < 10 ? 0 : 10 + (unsigned char)bytes[8] + 256u * (unsigned char)bytes[9];
    bool fine = begin > 10 && begin % 64 == 0 && memcmp(bytes, "\x93NUMPY\x01\0", 8) == 0 &&
                strncmp(bytes + 10, expected, (size_t)length) == 0 && total == begin + size;
    CHECK(fine, "%s: expected %s and %zu bytes of data, found %.100s and %zu", path, expected, size,
          total > 10 ? bytes + 10 : "", total - begin);
    if (fine && (data = malloc(size + 1)) != NULL) memcpy(data, bytes + begin, size);
    free(bytes);
    return data;
}

/* ---- data ------------------------------------------------------------------------------------ */

void harness_fill(float *data, int64_t count, float range, uint32_t seed)
{
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        data[i] = range * ((float)(seed >> 8) * 0x1p-23f - 1.0f);
    }
}

/* ---- JSON: each function returns the rest of the text, NULL if it is malformed --------------- */

static const char *json_value(const char *s);

static const char *json_string(const char *s)
{
    if (*s++ != '"') return NULL;
    while (*s != '"') {
        if ((unsigned char)*s < 0x20) return NULL;
        if (*s == '\\') {
            s++;
            if (*s == 'u') {
                if (strspn(s + 1, "0123456789abcdefABCDEF") < 4) return NULL;
                s += 4;
            } else if (*s == '\0' || !strchr("\"\\/bfnrt", *s)) {
                return NULL;
            }
        }
        s++;
    }
    return s + 1;
}

static const char *json_number(const char *s)
{
    if (*s == '-') s++;
    size_t digits = strspn(s, "0123456789");
    if (digits == 0 || (*s == '0' && digits > 1)) return NULL;
    s += digits;
    if (*s == '.') {
        digits = strspn(++s, "0123456789");
        if (digits == 0) return NULL;
        s += digits;
    }
    if (*s == 'e' || *s == 'E') {
        s++;
        if (*s == '+' || *s == '-') s++;
        digits = strspn(s, "0123456789");
        if (digits == 0) return NULL;
        s += digits;
    }
    return s;
}

static const char *json_members(const char *s, char close, bool keys)
{
    s += 1 + strspn(s + 1, " ");
    if (*s == close) return s + 1;
    for (;;) {
        if (keys) {
            s = json_string(s);
            if (!s || *s != ':') return NULL;
            s += 1 + strspn(s + 1, " ");
        }
        s = json_value(s);
        if (!s) return NULL;
        if (*s == close) return s + 1;
        if (*s != ',') return NULL;
        s += 1 + strspn(s + 1, " ");
    }
}

static const char *json_value(const char *s)
{
    if (*s == '"') return json_string(s);
    if (*s == '{') return json_members(s, '}', true);
    if (*s == '[') return json_members(s, ']', false);
    if (strncmp(s, "true", 4) == 0 || strncmp(s, "null", 4) == 0) return s + 4;
    if (strncmp(s, "false", 5) == 0) return s + 5;
    return json_number(s);
}

bool harness_is_json_lines(const char *text)
{
    if (!*text) return false;
    while (*text) {
        text = json_value(text);
        if (!text || *text++ != '\n') return false;
    }
    return true;
}
