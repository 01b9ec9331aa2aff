"""Small calls of every GPU kernel, for compute-sanitizer: each family, tile and split form, both caches, merges,
writers, readers and conversions of caches."""

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


def convert(rng: np.random.Generator) -> None:
    """Every conversion, into padded pages of another size, with slots left over."""
    for old in oracle.ALL:
        latent = torch.from_numpy(oracle.latents(rng, 100, old, np.float32)).cuda()
        words = {"from_family": old.family, "from_format": old.fmt}
        cache = sparse_mla.pack_kv_cache(latent, family=old.family, kv_cache_format=old.fmt, page_block_size=7)
        for new in oracle.ALL:
            if (old.dims, old.rope) != (new.dims, new.rope):
                continue
            row = new.bpt + 16 if new.inline else None
            strides = {"page_block_size": 5, "row_stride": row, "page_stride": -(-5 * (row or new.bpt) // 16) * 16 + 32}
            into = {"to_family": new.family, "to_format": new.fmt}
            sparse_mla.convert_kv_cache(cache, **words, **into, **strides, num_slots=97)


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
    convert(rng)
    torch.cuda.synchronize()
    print("small set done:", sparse_mla.show_config()["build_id"])


if __name__ == "__main__":
    main()
