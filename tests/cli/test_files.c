/* The .npy reader's error paths, and files that are written completely or not at all. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "harness.h"

#define GOOD_HEADER "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 3, 2, 2), }\n"

static float data[12];

#define RUN_INPUTS(q) "run", "--q", (q), "--k", "a.npy", "--v", "a.npy"

/* ---- reading --------------------------------------------------------------------------------- */

static void expect_header(const char *header, const char *message)
{
    char text[300];
    snprintf(text, sizeof text, "--q bad.npy: %s", message);
    harness_write_npy_parts("bad.npy", 1, header, data, sizeof data);
    EXPECT_ERROR(text, RUN_INPUTS("bad.npy"), "--out", "o.npy");
}

static void test_headers(void)
{
#define WITH_TYPE(type) "{'descr': " type ", 'fortran_order': False, 'shape': (3, 2, 2, 1)}"
#define WITH_SHAPE(shape) "{'descr': '<f4', 'fortran_order': False, 'shape': " shape "}"
#define WITH_ORDER(order) "{'descr': '<f4', 'fortran_order': " order ", 'shape': (12,)}"
    expect_header("", "the header is malformed at its byte 0; expected '{'");
    expect_header("  [1]", "the header is malformed at its byte 2; expected '{'");
    expect_header("{", "the header is malformed at its byte 1; expected a string in quotes");
    expect_header("{descr: '<f4'}", "the header is malformed at its byte 1; expected a string in");
    expect_header("{'descr", "the header is malformed at its byte 1; expected a string that ends");
    expect_header("{'descrdescrdescrdescrdescrdescrdescr': 1}",
                  "the header is malformed at its byte 1; expected a shorter string");
    expect_header("{'descr' '<f4'}", "the header is malformed at its byte 9; expected ':'");
    expect_header("{'descr': '<f4' 'shape': ()}",
                  "the header is malformed at its byte 16; expected ',' or '}'");
    expect_header("{'type': '<f4'}",
                  "the header has the key 'type'; expected descr, fortran_order");
    expect_header("{'descr': '<f4', 'descr': '<f4'}", "the header has the key 'descr' twice");
    expect_header("{}", "the header lacks the key 'descr'");
    expect_header("{'descr': '<f4'}", "the header lacks the key 'fortran_order'");
    expect_header("{'descr': '<f4', 'fortran_order': False}", "the header lacks the key 'shape'");
    expect_header(WITH_SHAPE("(12,)") " x",
                  "the header is malformed at its byte 57; expected nothing");
    expect_header(WITH_TYPE("'<c8'"), "holds elements of type '<c8'; expected float32 ('<f4')");
    expect_header(WITH_TYPE("'<V1'"),
                  "holds elements of type '<V1', bytes that do not say which 8-bit");
    expect_header(WITH_TYPE("'<V4'"), "holds elements of type '<V4'; expected float32");
    expect_header(WITH_TYPE("'f4'"), "holds elements of type 'f4'");
    expect_header(WITH_TYPE("'|f4'"), "holds elements of type '|f4'");
    expect_header(WITH_TYPE("''"), "holds elements of type ''");
    expect_header(WITH_TYPE("[('x', '<f4')]"), "holds records (a structured type)");
    expect_header(WITH_TYPE("4"), "the header is malformed at its byte 10; expected a string in");
    expect_header(WITH_ORDER("0"),
                  "the header is malformed at its byte 34; expected True or False");
    expect_header(WITH_SHAPE("12"), "the header is malformed at its byte 50; expected '(' (shape)");
    expect_header(WITH_SHAPE("(12)"),
                  "the header is malformed at its byte 53; expected ',' (shape)");
    expect_header(WITH_SHAPE("(3 4)"),
                  "the header is malformed at its byte 53; expected ',' (shape)");
    expect_header(WITH_SHAPE("(,)"), "the header is malformed at its byte 51; expected an extent");
    expect_header(WITH_SHAPE("(3, x)"),
                  "the header is malformed at its byte 54; expected an extent");
    expect_header(WITH_SHAPE("(3, -4)"), "the shape has a negative extent; expected extents >= 0");
    expect_header(WITH_SHAPE("(9223372036854775808,)"),
                  "the shape has an extent that does not fit");
    expect_header(WITH_SHAPE("(4294967296, 4294967296)"), "the shape has more bytes than fit");
    expect_header(WITH_SHAPE("(0, 4294967296, 4294967296)"), "the shape has more bytes than");
    expect_header(WITH_SHAPE("(1,1,1,1,1,1,1,1,1)"), "has more than 8 axes");
    expect_header(WITH_SHAPE("(1, 3, 2, 3)"), "holds 48 bytes of data; its shape and type need 72");
    expect_header(WITH_SHAPE("(4611686018427387904,)"), "the shape has more bytes than fit");
    expect_header(WITH_SHAPE("(1000000000000000000,)"),
                  "holds 48 bytes of data; its shape and type");
    expect_header(WITH_SHAPE("(1, 3, 2, 1)"), "has more bytes than its shape and type need (24)");
}

static void expect_bytes(const char *bytes, size_t size, const char *message)
{
    harness_write_file("bad.npy", bytes, size);
    EXPECT_ERROR(message, RUN_INPUTS("bad.npy"), "--out", "o.npy");
}

static void test_prefixes(void)
{
    expect_bytes("", 0, "--q bad.npy: is not a .npy file");
    expect_bytes("\x93NUMP", 5, "--q bad.npy: is not a .npy file");
    expect_bytes("PK\x03\x04\0\0\0\0\0\0\0\0", 12, "--q bad.npy: is not a .npy file");
    expect_bytes("\x93NUMPY", 6, "--q bad.npy: ends within the header");
    expect_bytes("\x93NUMPY\x01\0\x40", 9, "--q bad.npy: ends within the header");
    expect_bytes("\x93NUMPY\x02\0\x40\0\0", 11, "--q bad.npy: ends within the header");
    expect_bytes("\x93NUMPY\x01\0\x40\0{'descr'", 18, "--q bad.npy: ends within the header");
    expect_bytes("\x93NUMPY\x04\0\x40\0\0\0", 12, "has .npy version 4.0; expected 1.0, 2.0 or 3.0");
    expect_bytes("\x93NUMPY\x01\x01\x40\0\0\0", 12, "has .npy version 1.1; expected 1.0, 2.0 or");
    expect_bytes("\x93NUMPY\x02\0\xff\xff\xff\xff", 12,
                 "has a header of 4294967295 bytes; expected at most 65536");
    expect_bytes("\x93NUMPY\x01\0\x04\0{\0 }", 14, "--q bad.npy: has a zero byte in its header");
    EXPECT_ERROR("--q none.npy: cannot be opened: No such file", RUN_INPUTS("none.npy"), "--out",
                 "o.npy");
    EXPECT_ERROR("--q .: is a directory; expected a .npy file", RUN_INPUTS("."), "--out", "o.npy");
    EXPECT_ERROR("--lse", RUN_INPUTS("a.npy"), "--out", "o.npy", "--lse");
    CHECK(access("o.npy", F_OK) != 0, "o.npy exists");
}

/* The size of a pipe is not known in advance; a header that requests much gets no memory for it. */
static void test_pipe(void)
{
    const char *write_pipe[] = {"run", "--q",   "pipe",  "--k",   "a.npy",
                                "--v", "a.npy", "--out", "o.npy", NULL};
    if (mkfifo("pipe", 0600) != 0) exit(1);
    for (int good = 0; good < 2; good++) {
        harness_write_npy_parts(
            "bad.npy", 2,
            good ? GOOD_HEADER
                 : "{'descr':'<f4','fortran_order':False,'shape':(1,99999999,99999,1)}",
            data, sizeof data);
        int process = harness_start(write_pipe);
        size_t size;
        char *bytes = harness_read_file("bad.npy", &size);
        harness_write_file("pipe", bytes, size);
        free(bytes);
        CHECK(harness_wait(process) == (good ? 0 : 2), "pipe, good %d", good);
    }
    unlink("o.npy");
    unlink("pipe");
}

/* "-": standard input and output. If one file does not fit, none of the others is written. */
static void test_streams(void)
{
    const char *to_stdout[] = {"run",   "--q",   "-", "--k",   "a.npy",     "--v",
                               "a.npy", "--out", "-", "--lse", "dir/l.npy", NULL};
    size_t piped_size, size;
    int keyboard = dup(0), file = open("a.npy", O_RDONLY);
    EXPECT_FINE(RUN_INPUTS("a.npy"), "--out", "o.npy");
    dup2(file, 0);
    const outcome *o = harness_run_to("piped.npy", to_stdout);
    CHECK(o->code == 0 && o->err[0] == '\0', "--out -: %d %s", o->code, o->err);
    char *piped = harness_read_file("piped.npy", &piped_size);
    char *bytes = harness_read_file("o.npy", &size);
    CHECK(piped && bytes && piped_size == size && memcmp(piped, bytes, size) == 0,
          "standard output and the file differ");
    CHECK(access("-", F_OK) != 0, "a file called - was written");
    CHECK(access("dir/l.npy", F_OK) == 0, "--lse was not written beside");
    unlink("dir/l.npy");
    lseek(0, 0, SEEK_SET);
    o = harness_run_to("/dev/full", to_stdout);
    CHECK(o->code == 2 && strstr(o->err, "-: cannot be written: No space left"), "full: %s",
          o->err);
    CHECK(harness_count_entries("dir") == 0, "something was left in dir");
    lseek(0, 0, SEEK_END);
    EXPECT_ERROR("--q standard input: is not a .npy file", RUN_INPUTS("-"), "--out", "o.npy");
    close(0);
    EXPECT_ERROR("--q standard input: cannot be read: Bad file descriptor", RUN_INPUTS("-"),
                 "--out", "o.npy");
    dup2(keyboard, 0);
    close(keyboard);
    close(file);
    free(piped);
    free(bytes);
    unlink("piped.npy");
    unlink("o.npy");
}

/* ---- writing --------------------------------------------------------------------------------- */

static void test_unwritable(void)
{
    EXPECT_ERROR("no/o.npy: cannot be written: No such file or directory", RUN_INPUTS("a.npy"),
                 "--out", "no/o.npy");
    EXPECT_ERROR("a.npy/o.npy: cannot be written: Not a directory", RUN_INPUTS("a.npy"), "--out",
                 "a.npy/o.npy");
    EXPECT_ERROR("dir: is a directory; expected a file name", RUN_INPUTS("a.npy"), "--out", "dir");
    EXPECT_ERROR("dir/new/: is a directory; expected", RUN_INPUTS("a.npy"), "--out", "dir/new/");
    EXPECT_ERROR("/dev/full: cannot be written: No space left", RUN_INPUTS("a.npy"), "--out",
                 "/dev/full");
    EXPECT_ERROR("./dir/o.npy: is named for two outputs", RUN_INPUTS("a.npy"), "--lse", "dir/o.npy",
                 "--out", "./dir/o.npy");
    EXPECT_ERROR("/dev/full: cannot be written", RUN_INPUTS("a.npy"), "--lse", "dir/l.npy", "--out",
                 "/dev/full");
    CHECK(harness_count_entries("dir") == 0, "something was left in dir");
    struct stat status;
    CHECK(stat("/dev/full", &status) == 0 && S_ISCHR(status.st_mode), "/dev/full was replaced");
}

/* The second file does not fit the limit: the first, which does, must not appear either. */
static void test_file_too_large(void)
{
    enum { N = 300 };
    static float big[N * 64];
    harness_fill(big, N * 64, 1, 3);
    harness_write_npy("big.npy", "<f4", "(1, 300, 1, 64)", big, sizeof big);
    harness_write_file("dir/o.npy", "before", 6);
    struct rlimit before, small;
    getrlimit(RLIMIT_FSIZE, &before);
    small = before;
    small.rlim_cur = 16384;
    setrlimit(RLIMIT_FSIZE, &small);
    EXPECT_ERROR("dir/o.npy: cannot be written: File too large", "run", "--q", "big.npy", "--k",
                 "big.npy", "--v", "big.npy", "--lse", "dir/l.npy", "--out", "dir/o.npy");
    setrlimit(RLIMIT_FSIZE, &before);
    size_t size;
    char *bytes = harness_read_file("dir/o.npy", &size);
    CHECK(bytes && strcmp(bytes, "before") == 0, "the old file is gone");
    CHECK(harness_count_entries("dir") == 1, "something was left in dir");
    free(bytes);
    unlink("dir/o.npy");
}

/* The last output is a pipe that nobody reads: the command waits while it is writing. */
static void test_signal(void)
{
    const char *arguments[] = {RUN_INPUTS("a.npy"), "--lse", "dir/l.npy", "--out", "pipe", NULL};
    const struct timespec pause = {0, 1000000};
    if (mkfifo("pipe", 0600) != 0) exit(1);
    int process = harness_start(arguments);
    for (int i = 0; i < 60000 && harness_count_entries("dir") == 0; i++) nanosleep(&pause, NULL);
    CHECK(harness_count_entries("dir") == 1, "no temporary file was seen");
    kill(process, SIGTERM);
    CHECK(harness_wait(process) == 128 + SIGTERM, "the command did not end by the signal");
    CHECK(harness_count_entries("dir") == 0, "something was left in dir");
    unlink("pipe");
}

/* A new file gets the usual permissions, an old one keeps its own; a link stays one. */
static void test_replace(void)
{
    struct stat status;
    mode_t mask = umask(027);
    EXPECT_FINE(RUN_INPUTS("a.npy"), "--out", "dir/o.npy", "--json");
    CHECK(stat("dir/o.npy", &status) == 0 && (status.st_mode & 0777) == 0640, "mode %o",
          (unsigned)status.st_mode);
    umask(mask);
    chmod("dir/o.npy", 0604);
    if (symlink("dir/o.npy", "link.npy") != 0) exit(1);
    EXPECT_FINE(RUN_INPUTS("a.npy"), "--out", "link.npy");
    CHECK(lstat("link.npy", &status) == 0 && S_ISLNK(status.st_mode), "the link was replaced");
    CHECK(stat("dir/o.npy", &status) == 0 && (status.st_mode & 0777) == 0604, "mode %o",
          (unsigned)status.st_mode);
    if (symlink("dir/nowhere.npy", "broken.npy") != 0 || symlink("loop", "loop") != 0) exit(1);
    EXPECT_ERROR("broken.npy: is a symbolic link that leads to no file", RUN_INPUTS("a.npy"),
                 "--out", "broken.npy");
    EXPECT_ERROR("loop: is a symbolic link that leads to no file", RUN_INPUTS("a.npy"), "--out",
                 "loop");
    CHECK(lstat("broken.npy", &status) == 0 && S_ISLNK(status.st_mode), "the link was replaced");
    EXPECT_FINE(RUN_INPUTS("a.npy"), "--out", "/dev/null");
    CHECK(stat("/dev/null", &status) == 0 && S_ISCHR(status.st_mode), "/dev/null was replaced");
    CHECK(harness_count_entries("dir") == 1, "something was left in dir");
}

int main(int argc, char **argv)
{
    harness_begin(argc, argv);
    if (mkdir("dir", 0700) != 0) return 1;
    harness_fill(data, 12, 1, 1);
    harness_write_npy_parts("a.npy", 1, GOOD_HEADER, data, sizeof data);
    test_headers();
    test_prefixes();
    test_pipe();
    test_streams();
    test_unwritable();
    test_file_too_large();
    test_signal();
    test_replace();
    return harness_end();
}
