"""Small calls of every GPU kernel, for compute-sanitizer: each family, tile and split form, both caches, merges,
writers and readers of caches."""

import sys
from pathlib import Path

import numpy as np
import sparse_mla
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
import oracle
from backends import CudaBackend

# Family, format, format of a secondary cache.
CACHES = (
    ("dsv3_2", "fp8", None),
    ("glm53_nope", "fp8", None),
    ("dsv4", "fp8", "fp8"),
    ("dots3_swa", "fp8", None),
    ("dsv4_1", "fp8", "fp8"),
    ("dsv4_1", "fp8", "fp4"),
    ("dsv4_1_inline", "fp8", "fp4"),
    ("dsv4", "nvfp4", "nvfp4"),
    ("glm_nsa", "nvfp4", None),
)


def write_and_read(rng: np.random.Generator) -> None:
    """Pack, append (few and many rows, rotated where there are RoPE lanes) and unpack of every record."""
    for record in oracle.ALL:
        words = {"family": record.family, "kv_cache_format": record.fmt}
        for rows in (150, 9000) if record.fmt == "nvfp4" else (150,):
            latent = torch.from_numpy(oracle.latents(rng, rows, record, np.float32)).cuda()
            cache = sparse_mla.pack_kv_cache(latent, page_block_size=7, **words)
            slots = torch.from_numpy(rng.integers(-1, 100, rows)).cuda()
            sparse_mla.append_kv_cache(latent, slots, cache, **words)
            if record.rope:
                rope = {"rope_cos_sin": torch.randn(100, record.rope, device="cuda"), "rope_positions": slots}
                sparse_mla.append_kv_cache(latent.bfloat16(), slots, cache, **rope, **words)
            sparse_mla.unpack_kv_cache(cache, **words)


def main() -> None:
    backend = CudaBackend()
    rng = np.random.default_rng(0)
    for family, kv_cache_format, extra_format in CACHES:
        record = oracle.RECORDS[family, kv_cache_format]
        extra = {"extra": extra_format, "extra_k": 40} if extra_format else {}
        for tokens, heads, k, words in ((1, 11, 600, {}), (2, 40, 530, {"batch_invariant": True}), (140, 40, 520, {})):
            problem = oracle.problem(rng, record, tokens, heads, k, **extra)
            out, _ = backend.run(problem, **words)
            if tokens < 3:
                oracle.check(out, problem.reference()[0], _, problem.reference()[1])
    for shape in ((3, 5, 512), (7, 3)):
        out, lse = torch.randn(shape, device="cuda"), torch.randn(shape[:-1], device="cuda")
        sparse_mla.merge_states(out, lse, out, lse)
    write_and_read(rng)
    torch.cuda.synchronize()
    print("small set done:", sparse_mla.show_config()["build_id"])


if __name__ == "__main__":
    main()
