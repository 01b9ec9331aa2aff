"""Sparse-MLA decode for DeepSeek-V3.2/V4, GLM-5.x and dots models.

* What is supported, and why not: `SparseMLASm120DecodeConfig`, `supported_sparse_mla_sm120_configs`, `explain_decode`.
* How a GPU decode would be launched: `plan_decode`, `known_devices`.
* Packed KV caches: `pack_kv_cache`, `append_kv_cache`, `unpack_kv_cache`; `convert_kv_cache`, `repage_kv_cache`.
* Attention: `decode`, `merge_states`.

Importing opens no driver and starts no thread.
"""

from sparse_mla._config import SparseMLASm120DecodeConfig, supported_sparse_mla_sm120_configs
from sparse_mla._core import (
    DecodeSupport,
    DeviceArray,
    DeviceError,
    UnsupportedError,
    __version__,
    append_kv_cache,
    convert_kv_cache,
    decode,
    explain_decode,
    families,
    known_devices,
    merge_states,
    pack_kv_cache,
    plan_decode,
    repage_kv_cache,
    show_config,
    unpack_kv_cache,
    warmup,
)

__all__ = [
    "DecodeSupport",
    "DeviceArray",
    "DeviceError",
    "SparseMLASm120DecodeConfig",
    "UnsupportedError",
    "__version__",
    "append_kv_cache",
    "convert_kv_cache",
    "decode",
    "explain_decode",
    "families",
    "known_devices",
    "merge_states",
    "pack_kv_cache",
    "plan_decode",
    "repage_kv_cache",
    "show_config",
    "supported_sparse_mla_sm120_configs",
    "unpack_kv_cache",
    "warmup",
]
