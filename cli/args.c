/*
 * Argument parsing: "--name value" and "--name=value". Every error names the option, its value and
 * the expected values, and the exit code is CLI_BAD.
 */
#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "output.h"

/* ---- help ------------------------------------------------------------------------------------ */

enum { HELP_COLUMN = 26 };

static void print_indented(const char *text, int column)
{
    for (const char *line = text;;) {
        const char *end = strchr(line, '\n');
        printf("%.*s\n", end ? (int)(end - line) : (int)strlen(line), line);
        if (!end) return;
        printf("%*s", column, "");
        line = end + 1;
    }
}

static void print_option(const char *name, const char *meta, const char *help)
{
    int width = printf("  %s%s%s", name, meta ? " " : "", meta ? meta : "");
    if (width >= HELP_COLUMN) {
        putchar('\n');
        width = 0;
    }
    printf("%*s", HELP_COLUMN - width, "");
    print_indented(help, HELP_COLUMN);
}

static void print_help(const cli_command *c)
{
    printf("Usage: flashattn %s %s\n\n%s\n\nOptions:\n", c->name, c->usage, c->about);
    for (int i = 0; i < c->num_options; i++)
        print_option(c->options[i].name, c->options[i].meta, c->options[i].help);
    print_option("--help", NULL, "this text");
    if (c->notes) printf("\n%s\n", c->notes);
    puts("\nExit codes: 0 success, 1 wrong result, 2 bad usage or input.");
}

/* ---- values ---------------------------------------------------------------------------------- */

/* Parses one integer at *text, which must start with a digit or a minus. Moves the cursor past
 * it. */
static bool scan_integer(const char **text, int64_t min, int64_t max, int64_t *value)
{
    const char *s = *text;
    if (!(s[0] >= '0' && s[0] <= '9') && !(s[0] == '-' && s[1] >= '0' && s[1] <= '9')) return false;
    char *end;
    errno = 0;
    intmax_t n = strtoimax(s, &end, 10);
    if (errno != 0 || n < min || n > max) return false;
    *text = end;
    *value = (int64_t)n;
    return true;
}

static void say_range(const cli_option *o, char *text, size_t size)
{
    if (o->max == INT64_MAX && o->min == INT64_MIN) snprintf(text, size, "fitting 64 bits");
    else if (o->max == INT64_MAX) snprintf(text, size, ">= %" PRId64, o->min);
    else snprintf(text, size, "from %" PRId64 " to %" PRId64, o->min, o->max);
}

static bool parse_integer(const cli_option *o, const char *text)
{
    const char *end = text;
    int64_t value;
    if (scan_integer(&end, o->min, o->max, &value) && *end == '\0') {
        *(int64_t *)o->value = value;
        return true;
    }
    char range[80];
    say_range(o, range, sizeof range);
    cli_error("%s is \"%s\"; expected an integer %s", o->name, text, range);
    return false;
}

static bool parse_seed(const cli_option *o, const char *text)
{
    char *end;
    errno = 0;
    bool digit = text[0] >= '0' && text[0] <= '9';
    bool hex = text[0] == '0' && (text[1] == 'x' || text[1] == 'X');
    uintmax_t value = digit ? strtoumax(text, &end, hex ? 16 : 10) : 0;
    if (digit && errno == 0 && *end == '\0' && value <= UINT64_MAX) {
        *(uint64_t *)o->value = (uint64_t)value;
        return true;
    }
    cli_error("%s is \"%s\"; expected an integer from 0 to 18446744073709551615, decimal or 0x...",
              o->name, text);
    return false;
}

/* Values are used as float32, so a number that overflows float32 is refused. */
static bool parse_real(const cli_option *o, const char *text)
{
    char *end;
    bool begins = text[0] != '\0' && strchr("0123456789.-+", text[0]) != NULL;
    double value = begins ? strtod(text, &end) : 0;
    if (begins && end != text && *end == '\0' && fabs(value) <= FLT_MAX &&
        (!o->accept || o->accept(value))) {
        *(double *)o->value = value;
        return true;
    }
    cli_error("%s is \"%s\"; expected %s", o->name, text, o->expected);
    return false;
}

static bool parse_choice(const cli_option *o, const char *text)
{
    int count = 0;
    for (; o->choices[count]; count++)
        if (strcmp(text, o->choices[count]) == 0) {
            *(int *)o->value = count;
            return true;
        }
    char names[256] = "";
    for (int i = 0; i < count; i++) {
        const char *between = i == 0 ? "" : i == count - 1 ? " or " : ", ";
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", between, o->choices[i]);
    }
    cli_error("%s is \"%s\"; expected %s", o->name, text, names);
    return false;
}

/* Parses between 1 and capacity integers separated by commas; returns their number, 0 if
 * malformed. */
static int scan_integers(const cli_option *o, const char *text, int64_t *items, int capacity)
{
    for (int count = 0; count < capacity;) {
        if (!scan_integer(&text, o->min, o->max, &items[count++])) return 0;
        if (*text == '\0') return count;
        if (*text++ != ',') return 0;
    }
    return 0;
}

static bool parse_list(const cli_option *o, const char *text)
{
    cli_list list;
    list.count = scan_integers(o, text, list.items, CLI_LIST_MAX);
    if (list.count > 0) {
        *(cli_list *)o->value = list;
        return true;
    }
    char range[80];
    say_range(o, range, sizeof range);
    cli_error("%s is \"%s\"; expected 1 to %d integers %s, separated by commas", o->name, text,
              (int)CLI_LIST_MAX, range);
    return false;
}

static bool parse_pair(const cli_option *o, const char *text)
{
    int64_t pair[2];
    if (scan_integers(o, text, pair, 2) == 2) {
        memcpy(o->value, pair, sizeof pair);
        return true;
    }
    char range[80];
    say_range(o, range, sizeof range);
    cli_error("%s is \"%s\"; expected two integers %s, separated by a comma", o->name, text, range);
    return false;
}

static bool parse_value(const cli_option *o, const char *text)
{
    switch (o->kind) {
    case CLI_INTEGER: return parse_integer(o, text);
    case CLI_SEED: return parse_seed(o, text);
    case CLI_REAL: return parse_real(o, text);
    case CLI_CHOICE: return parse_choice(o, text);
    case CLI_LIST: return parse_list(o, text);
    case CLI_PAIR: return parse_pair(o, text);
    case CLI_FLAG: *(bool *)o->value = true; return true;
    case CLI_TEXT: break;
    }
    if (text[0] == '\0') {
        cli_error("%s is \"\"; expected %s", o->name, o->meta);
        return false;
    }
    *(const char **)o->value = text;
    return true;
}

/* ---- the arguments --------------------------------------------------------------------------- */

enum { MAX_OPTIONS = 64 };

/* The option whose name is the first length bytes of text; -1: none. */
static int find_option(const cli_command *c, const char *text, size_t length)
{
    for (int i = 0; i < c->num_options; i++) {
        const char *name = c->options[i].name;
        if (strlen(name) == length && strncmp(name, text, length) == 0) return i;
    }
    return -1;
}

/* The option's argument: after '=', or the next word. NULL after an error message. */
static const char *take_value(const cli_option *o, const char *equals, int argc, char **argv,
                              int *i)
{
    if (o->kind == CLI_FLAG) {
        if (!equals) return "";
        cli_error("%s is \"%s\"; expected no value", o->name, equals + 1);
        return NULL;
    }
    if (equals) return equals + 1;
    if (*i + 1 < argc && strncmp(argv[*i + 1], "--", 2) != 0) return argv[++*i];
    cli_error("%s has no value; expected %s %s", o->name, o->name, o->meta);
    return NULL;
}

static bool parse_option(const cli_command *c, int argc, char **argv, int *i, bool *seen)
{
    const char *equals = strchr(argv[*i], '=');
    size_t length = equals ? (size_t)(equals - argv[*i]) : strlen(argv[*i]);
    int index = find_option(c, argv[*i], length);
    if (index < 0) {
        cli_error("\"%.*s\" is not an option of this command; flashattn %s --help lists them",
                  (int)length, argv[*i], c->name);
        return false;
    }
    const cli_option *o = &c->options[index];
    const char *value = take_value(o, equals, argc, argv, i);
    if (!value) return false;
    if (seen[index]) {
        cli_error("%s is given twice (the second time%s%s); expected once", o->name,
                  *value ? " as " : "", value);
        return false;
    }
    seen[index] = true;
    if (o->given) *o->given = true;
    return parse_value(o, value);
}

static bool parse_operand(const cli_command *c, const char *text, bool *seen)
{
    if (!c->operand) {
        cli_error("\"%s\" is not expected: this command takes only options", text);
        return false;
    }
    if (*seen) {
        cli_error("\"%s\" is not expected: %s is \"%s\" already", text, c->operand_name,
                  *c->operand);
        return false;
    }
    *seen = true;
    *c->operand = text;
    return true;
}

static bool check_required(const cli_command *c, const bool *seen)
{
    for (int i = 0; i < c->num_options; i++)
        if (c->options[i].required && !seen[i]) {
            cli_error("%s is missing; expected %s %s", c->options[i].name, c->options[i].name,
                      c->options[i].meta);
            return false;
        }
    return true;
}

int cli_parse(const cli_command *c, int argc, char **argv)
{
    bool seen[MAX_OPTIONS] = {false}, operand_seen = false;
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            print_help(c);
            return CLI_FINE;
        }
    for (int i = 1; i < argc; i++) {
        bool fine = argv[i][0] == '-' && argv[i][1] != '\0'
                        ? parse_option(c, argc, argv, &i, seen)
                        : parse_operand(c, argv[i], &operand_seen);
        if (!fine) return CLI_BAD;
    }
    return check_required(c, seen) ? CLI_CONTINUE : CLI_BAD;
}
