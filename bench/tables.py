#!/usr/bin/env python3
"""Rewrites the tables of measured figures in the documents from bench/results/*.json.

A table stands between two lines of a document,
    <!-- table: bench/results/cpu-avx512.json forward -->
    <!-- end of table -->
and holds the cases of that file whose name begins with the last word. Without arguments the tables
are rewritten; with --check nothing is written and the exit code is 1 if one differs from its file.
Results that are older than the sources are named either way.
"""

import argparse
import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from source_hash import ROOT, source_hash  # noqa: E402

DOCUMENTS = ("README.md", "docs/*.md", "CHANGELOG.md", "CONTRIBUTING.md")
TABLE = re.compile(r"(<!-- table: (\S+) (\S+) -->\n)(.*?)(<!-- end of table -->)", re.S)


def table_row(case):
    bar = "" if case["bar"] is None else f"{case['bar']:.1f}x"
    return "| {} | {:.2f} | {:.2f} | {:.0f} {} | {:.0%} | **{:.2f}x** | {} |\n".format(
        case["name"], case["median_ms"]["flashattn"], case["median_ms"]["torch"],
        case["rate"]["flashattn"], case["unit"], case["share_of_peak"], case["ratio"], bar)


def table(result, prefix):
    machine = result["machine"]
    cases = [case for case in result["cases"] if case["name"].startswith(prefix)]
    if not cases:
        raise SystemExit(f'tables: no case begins with "{prefix}"')
    text = (f"{machine['cpu']}, {machine['isa']}, {machine['threads']} threads, PyTorch "
            f"{result['versions']['torch']}, {result['date']}. Peak: this machine's rate of fused "
            f"multiply-adds, {machine['fma_gflop_s_fp32']:.0f} GFLOP/s in float32 and "
            f"{machine['fma_gflop_s_bf16']:.0f} in bfloat16; for decode the "
            f"{machine['read_gb_s']:.1f} GB/s at which it reads memory.\n\n")
    text += "| case | ms | PyTorch ms | rate | of peak | ratio | bar |\n"
    text += "|---|---:|---:|---:|---:|---:|---:|\n"
    return text + "".join(table_row(case) for case in cases)


def rewritten(text):
    def replace(match):
        if not (ROOT / match[2]).is_file():
            raise SystemExit(f"tables: {match[2]}, which a table names, is not there")
        result = json.loads((ROOT / match[2]).read_text())
        return match[1] + table(result, match[3]) + match[5]

    return TABLE.sub(replace, text)


def documents():
    return sorted(path for pattern in DOCUMENTS for path in ROOT.glob(pattern))


def warn_of_old_results():
    current = source_hash()
    for path in sorted((ROOT / "bench/results").glob("*.json")):
        if json.loads(path.read_text()).get("source_sha256") != current:
            print(f"warning: {path.relative_to(ROOT)} is older than the sources", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description="tables of the documents from bench/results")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if one differs")
    args = parser.parse_args()
    warn_of_old_results()
    different = 0
    for path in documents():
        text = path.read_text()
        new = rewritten(text)
        if new == text:
            continue
        different += 1
        if args.check:
            print(f"{path.relative_to(ROOT)}: a table differs from its file; run bench/tables.py",
                  file=sys.stderr)
        else:
            path.write_text(new)
            print(f"rewrote the tables of {path.relative_to(ROOT)}")
    return 1 if args.check and different else 0


if __name__ == "__main__":
    sys.exit(main())
