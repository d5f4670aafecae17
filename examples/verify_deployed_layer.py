"""Find out whether the layer behind an endpoint is the one it should be.

    python examples/verify_deployed_layer.py

Serves a layer of twelve heads on this machine, over the Open Inference Protocol, and checks it against the parameters
its owner has, by at most 64 queries. Then somebody fine-tunes one head by a millionth. Needs the extras `http` and
`serve`.
"""

from __future__ import annotations

import numpy as np

import keyhole as kh
from keyhole.serve import ServedOracle, Server
from keyhole.targets import random_multi_head

WIDTH, HEADS, OUTPUTS = 32, 12, 16


def deployed(params: kh.MultiHead, expected: kh.MultiHead) -> kh.Verdict:
    """Serve parameters, and verify what is served over HTTP."""
    box = ServedOracle(kh.FunctionOracle(params, width=WIDTH), "encoder")
    with Server(box, port=0) as server:  # 127.0.0.1, any free port
        oracle = kh.HttpOracle(server.url)
        try:
            return kh.verify(oracle, expected)
        finally:
            oracle.close()


def fine_tuned(params: kh.MultiHead, number: int, by: float) -> kh.MultiHead:
    """The same heads, but for the score matrix of one, changed by so much of its norm."""
    heads = list(params.heads)
    head = heads[number]
    step = np.random.default_rng(1).standard_normal(head.score.shape)
    score = head.score + by * np.linalg.norm(head.score) / np.linalg.norm(step) * step
    heads[number] = kh.SingleHead(score, head.value, head.score_bias)
    return kh.MultiHead(heads, params.output_bias)


def main() -> None:
    """Verify the layer as it should be, and as it should not."""
    expected = random_multi_head(heads=HEADS, width=WIDTH, outputs=OUTPUTS, seed=0, score_bias=0.2, output_bias=0.1)
    verdict = deployed(expected, expected)
    print(f"as deployed: {verdict.conclusion}, {verdict.queries} queries")
    verdict = deployed(fine_tuned(expected, number=7, by=1e-6), expected)
    print(f"fine-tuned by a millionth: {verdict.conclusion}, {verdict.queries} queries")
    for difference in verdict.differing:
        print(f"  what differs: {difference.part} of head {difference.head}")


if __name__ == "__main__":
    main()
