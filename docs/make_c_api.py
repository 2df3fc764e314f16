#!/usr/bin/env python3
"""Generates docs/c-api.md from include/flashattn.h: the header's text by section, with an index.

    python3 docs/make_c_api.py            writes docs/c-api.md
    python3 docs/make_c_api.py --check    fails if it would differ
"""

import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADER = ROOT / "include/flashattn.h"
DOCUMENT = ROOT / "docs/c-api.md"

BANNER = re.compile(r"/\* -{20,}\n(.*?)-{20,} \*/\n", re.S)


def plain(comment):
    """A comment's text without its stars."""
    lines = comment.strip().split("\n")
    return "\n".join(re.sub(r"^ ?\* ?", "", line).rstrip() for line in lines).strip()


def anchor(title):
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def for_c(code):
    """Without what only C++ reads, and without the end of the include guard."""
    code = re.sub(r"^#ifdef __cplusplus\n.*?^#endif\n", "", code, flags=re.S | re.M)
    return re.sub(r"\n#endif\s*\Z", "\n", code)


def sections(text):
    """(title, introduction, code) of each numbered section of the header."""
    parts = BANNER.split(text)
    for banner, code in zip(parts[1::2], parts[2::2]):
        title, _, introduction = plain(banner).partition("\n")
        yield title, introduction.strip(), for_c(code).strip()


def functions(code):
    return re.findall(r"^FA_API [^(;]*?\b(fa_\w+)\(", code, re.M)


def document(text):
    preamble = plain(re.match(r"/\*(.*?)\*/", text, re.S)[1])
    found = list(sections(text))
    out = ["# The C API", "",
           "Generated from [include/flashattn.h](../include/flashattn.h) by `docs/make_c_api.py`: do not edit.",
           "The header is the manual; this page is its text with an index. [usage.md](usage.md) is the overview.", ""]
    out += ["| function | section |", "|---|---|"]
    out += [f"| `{name}` | [{title}](#{anchor(title)}) |"
            for title, _, code in found for name in functions(code)]
    out += ["", "## Overview", "", "```text", preamble, "```", ""]
    for title, introduction, code in found:
        out += [f"## {title}", ""]
        if introduction:
            out += ["```text", introduction, "```", ""]
        out += ["```c", code.replace("FA_API ", ""), "```", ""]
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description="docs/c-api.md from include/flashattn.h")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it differs")
    args = parser.parse_args()
    new = document(HEADER.read_text())
    if not args.check:
        DOCUMENT.write_text(new)
    elif not DOCUMENT.exists() or DOCUMENT.read_text() != new:
        print("docs/c-api.md differs from the header; run docs/make_c_api.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
