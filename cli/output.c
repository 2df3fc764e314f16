/* Messages, progress, the clock, and JSON. */
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "output.h"

static const char *command_name;
static bool progress_shown;

void cli_set_command(const char *name) { command_name = name; }

void cli_error(const char *format, ...)
{
    cli_progress_clear();
    fflush(stdout);
    if (command_name) fprintf(stderr, "flashattn %s: ", command_name);
    else fputs("flashattn: ", stderr);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
}

/* "\r" and "ESC [ K" return to the start of the line and clear it. */
void cli_progress(const char *format, ...)
{
    if (!isatty(STDERR_FILENO)) return;
    fflush(stdout);
    fputs("\r\033[K", stderr);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fflush(stderr);
    progress_shown = true;
}

void cli_progress_clear(void)
{
    if (!progress_shown) return;
    fputs("\r\033[K", stderr);
    fflush(stderr);
    progress_shown = false;
}

double cli_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The length of the UTF-8 sequence at s, 0 if it is malformed (also overlong, surrogate). */
static int utf8_length(const unsigned char *s)
{
    if (s[0] < 0x80) return 1;
    int length = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4) return 0;
    for (int i = 1; i < length; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f)) return 0;
    if ((s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] > 0x8f)) return 0;
    return length;
}

static void write_string(FILE *file, const char *text)
{
    const unsigned char *s = (const unsigned char *)text;
    fputc('"', file);
    while (*s) {
        int length = utf8_length(s);
        if (length == 0) {
            fputs("\\ufffd", file);
            s++;
            continue;
        }
        if (*s < 0x20 || *s == 0x7f) fprintf(file, "\\u%04x", (unsigned)*s);
        else if (*s == '"' || *s == '\\') fprintf(file, "\\%c", *s);
        else fwrite(s, 1, (size_t)length, file);
        s += length;
    }
    fputc('"', file);
}

static void write_key(cli_json *json, const char *key)
{
    if (json->comma) fputs(", ", json->file);
    json->comma = true;
    if (!key) return;
    write_string(json->file, key);
    fputs(": ", json->file);
}

void cli_json_open(cli_json *json, const char *key, char bracket)
{
    write_key(json, key);
    fputc(bracket, json->file);
    json->comma = false;
}

void cli_json_close(cli_json *json, char bracket)
{
    fputc(bracket, json->file);
    json->comma = true;
}

void cli_json_text(cli_json *json, const char *key, const char *text)
{
    write_key(json, key);
    if (text) write_string(json->file, text);
    else fputs("null", json->file);
}

void cli_json_integer(cli_json *json, const char *key, int64_t value)
{
    write_key(json, key);
    fprintf(json->file, "%" PRId64, value);
}

void cli_json_real(cli_json *json, const char *key, double value)
{
    write_key(json, key);
    if (isfinite(value)) fprintf(json->file, "%.9g", value);
    else fputs("null", json->file);
}

void cli_json_bool(cli_json *json, const char *key, bool value)
{
    write_key(json, key);
    fputs(value ? "true" : "false", json->file);
}

void cli_json_end_line(cli_json *json)
{
    fputc('\n', json->file);
    json->comma = false;
}
