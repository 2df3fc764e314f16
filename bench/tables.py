#!/usr/bin/env python3
"""Rewrites the measured figures in the documents and in the ladder's headers.

A table is between two lines of a document,
    <!-- table: bench/results/cpu-avx512.json forward -->
    <!-- end of table -->
The last word selects the table. For a result of peers_cpu.py it is the beginning of the names of
its cases. For a result of ladder.py, peers.py, seed.py, decode_step.py, packed_pages.py or train.py it is the name
of a table (ladder_tables.py, peers_tables.py, peers_peaked_tables.py, and so on). For
kernels/resources.txt it is a list of entry functions (resource_tables.py). All surveys together have
one table. The main table of peers.py has a column from peers-<device>-peaked.json. Each rung's header has a line ` * Measured`, from
bench/results/ladder-h200.json.

Without arguments, tables and lines are rewritten. With --check nothing is written, and the exit code
is 1 if one differs from its file. In both cases the script names results that are older than the
sources. If there is no result yet, the table says so, except for those of the CPU.
"""

import argparse
import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from decode_step_tables import decode_step_table  # noqa: E402
from ladder_tables import headers, ladder_table  # noqa: E402
from pages_tables import pages_table  # noqa: E402
from peers_peaked_tables import peaked_table  # noqa: E402
from peers_tables import peers_table, surveys_table  # noqa: E402
from resource_tables import resources_table  # noqa: E402
from seed_tables import seed_table  # noqa: E402
from source_hash import ROOT, cuda_hash, ladder_hash, source_hash  # noqa: E402
from train_tables import train_table  # noqa: E402

DOCUMENTS = ("README.md", "docs/**/*.md", "CHANGELOG.md", "CONTRIBUTING.md", "ladder/README.md")
TABLE = re.compile(r"(<!-- table: (\S+) (\S+) -->\n)(.*?)(<!-- end of table -->)", re.S)
LADDER = re.compile(r"bench/results/ladder-\S+\.json")
SURVEYS = "bench/results/peers-h200-survey-*.json"
PEERS = re.compile(r"bench/results/peers-\S+\.json")
PEAKED = re.compile(r"bench/results/peers-\S+-peaked\.json")
MAIN = re.compile(r"(bench/results/peers-\w+)\.json")
TRAIN = re.compile(r"bench/results/train-\S+\.json")
DECODE_STEP = re.compile(r"bench/results/decode-step-\S+\.json")
PAGES = re.compile(r"bench/results/pages-\S+\.json")
SEED = re.compile(r"bench/results/seed-\S+\.json")
RESOURCES = "kernels/resources.txt"
LADDER_RESULT = "bench/results/ladder-h200.json"  # of the bars and of the rungs' headers


def load(name):
    """A result; None: there is none."""
    path = ROOT / name
    return json.loads(path.read_text()) if path.is_file() else None


def table_row(case):
    bar = "" if case["bar"] is None else f"{case['bar']:.1f}x"
    return "| {} | {:.2f} | {:.2f} | {:.0f} {} | {:.0%} | **{:.2f}x** | {} |\n".format(
        case["name"], case["median_ms"]["flashattn"], case["median_ms"]["torch"],
        case["rate"]["flashattn"], case["unit"], case["share_of_peak"], case["ratio"], bar)


def cpu_table(result, prefix):
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


def table(name, which):
    if name == RESOURCES:
        return resources_table((ROOT / name).read_text(), which)
    if name == SURVEYS:
        return surveys_table([json.loads(path.read_text()) for path in ROOT.glob(SURVEYS)])
    result = load(name)
    if LADDER.fullmatch(name):
        return ladder_table(result, which)
    if TRAIN.fullmatch(name):
        return train_table(result, which)
    if DECODE_STEP.fullmatch(name):
        return decode_step_table(result, which)
    if PAGES.fullmatch(name):
        return pages_table(result, which)
    if SEED.fullmatch(name):
        return seed_table(result, which)
    if PEAKED.fullmatch(name):
        return peaked_table(result, which)
    if PEERS.fullmatch(name):
        main = MAIN.fullmatch(name)
        return peers_table(result, which, main and load(f"{main[1]}-peaked.json"))
    if result is None:
        raise SystemExit(f"tables: {name}, which a table names, is not there")
    return cpu_table(result, which)


def rewritten(text):
    return TABLE.sub(lambda match: match[1] + table(match[2], match[3]) + match[5], text)


def documents():
    """(path, new text) of every document."""
    for path in sorted(path for pattern in DOCUMENTS for path in ROOT.glob(pattern)):
        yield path, rewritten(path.read_text())


def warn_of_old_results():
    current = {"ladder_sha256": ladder_hash(), "cuda_sha256": cuda_hash(),
               "source_sha256": source_hash()}
    for path in sorted((ROOT / "bench/results").glob("*.json")):
        result = json.loads(path.read_text())
        key = next((key for key in current if key in result), None)
        if key is None or result[key] != current[key]:
            print(f"warning: {path.relative_to(ROOT)} is older than the sources", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description="measured figures from bench/results")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if one differs")
    args = parser.parse_args()
    warn_of_old_results()
    different = 0
    for path, new in (*documents(), *headers(load(LADDER_RESULT))):
        if new == path.read_text():
            continue
        different += 1
        if args.check:
            print(f"{path.relative_to(ROOT)}: a figure differs from its file; run bench/tables.py",
                  file=sys.stderr)
        else:
            path.write_text(new)
            print(f"rewrote the figures of {path.relative_to(ROOT)}")
    return 1 if args.check and different else 0


if __name__ == "__main__":
    sys.exit(main())
