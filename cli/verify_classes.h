/*
 * The classes of faults that `flashattn verify` looks for first.
 */
#ifndef FA_CLI_VERIFY_CLASSES_H
#define FA_CLI_VERIFY_CLASSES_H

#include <stdbool.h>
#include <stdint.h>

#include "random_problem.h"

/* Problems that reveal one class of faults. */
typedef struct verify_class {
    const char *name; /* --class NAME */
    random_focus focus;
    int64_t problems;
    bool in_order;     /* problem i is number i; else numbers are random */
    const char *about; /* the faults, for the table */
} verify_class;

/* All of them; verify_class_names: their names as choices: "all", "none", the names, NULL. */
extern const verify_class verify_classes[];
extern const int verify_num_classes;
extern const char *const verify_class_names[];
enum { VERIFY_ALL = 0, VERIFY_NONE = 1, VERIFY_FIRST_CLASS = 2 };

#endif
