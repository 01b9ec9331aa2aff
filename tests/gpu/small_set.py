"""Small calls of every GPU kernel, for compute-sanitizer: each family, tile and split form, both caches, merges."""

import sys
from pathlib import Path

import numpy as np
import sparse_mla
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
import oracle
from backends import CudaBackend

FAMILIES = ("dsv3_2", "glm53_nope", "dsv4", "dots3_swa", "dsv4_1", "dsv4_1_inline")


def main() -> None:
    backend = CudaBackend()
    rng = np.random.default_rng(0)
    for family in FAMILIES:
        record = oracle.RECORDS[family, "fp8"]
        extra = {"extra": "fp8", "extra_k": 40} if family.startswith("dsv4") else {}
        for tokens, heads, k, words in ((1, 11, 600, {}), (2, 40, 530, {"batch_invariant": True}), (140, 40, 520, {})):
            problem = oracle.problem(rng, record, tokens, heads, k, **extra)
            out, _ = backend.run(problem, **words)
            if tokens < 3:
                oracle.check(out, problem.reference()[0], _, problem.reference()[1])
    for shape in ((3, 5, 512), (7, 3)):
        out, lse = torch.randn(shape, device="cuda"), torch.randn(shape[:-1], device="cuda")
        sparse_mla.merge_states(out, lse, out, lse)
    torch.cuda.synchronize()
    print("small set done:", sparse_mla.show_config()["build_id"])


if __name__ == "__main__":
    main()
